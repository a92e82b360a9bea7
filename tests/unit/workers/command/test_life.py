"""Signs of life of a command: what slow starts show, and hangs do not."""

import os
import time

import pytest

from wattune.workers.command import measured_run
from wattune.workers.command.measured_run import SignsOfLife

MIB = 2**20


@pytest.fixture
def look(monkeypatch):
    """Looks at the given processes and lines at a time; returns the quiet seconds."""
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    signs = SignsOfLife()

    def look(at_s, used, num_lines=0):
        now[0] = at_s
        monkeypatch.setattr(measured_run, "_used", used.__getitem__)
        return signs.quiet_s(used, num_lines)

    return look


def test_threads_that_only_look_are_no_sign_of_life(look):
    look(0, {1: (3.0, 50 * MIB)}, 7)
    looks = [look(at_s, {1: (3.0 + 0.01 * at_s, 50 * MIB), 2 + at_s: (0.02, 0)}, 7) for at_s in range(2, 400, 2)]
    assert looks[-1] == 398, "one that polls, and a shell that starts `sleep` again and again"


@pytest.mark.parametrize(
    ("each_s", "why"),
    [
        (lambda at_s: ({1: (0.2 * at_s, 0)}, 0), "an import from a slow disk"),
        (lambda at_s: ({1: (0.0, 0), 9: (1.0 * at_s, 0)}, 0), "a compiler in a process of its own"),
        (lambda at_s: ({1: (0.0, at_s * MIB)}, 0), "a download, a model that is read"),
        (lambda at_s: ({1: (0.0, 0)}, at_s // 60), "a line a minute"),
        (lambda at_s: ({}, at_s // 60), "a container's output, whose processes nobody sees"),
    ],
    ids=lambda one: one if isinstance(one, str) else "",
)
def test_slow_starts_show_signs_of_life(look, each_s, why):
    assert max(look(at_s, *each_s(at_s)) for at_s in range(2, 1000, 2)) < 100, why


def test_a_process_is_read_from_proc_and_one_that_has_ended_is_not():
    cpu_s, num_bytes = measured_run._used(os.getpid())
    assert cpu_s > 0 and num_bytes > MIB
    assert measured_run._used(2**22 + 1) == (0.0, 0)
