"""Last words of processes that end in different ways, and the kernel's counter of those it ended for memory."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from wattune.workers.last_words import forget_dead, kept, last_words, num_oom_kills

DIES = """
import os, signal, sys
from wattune.workers.last_words import kept
with kept():
    print("ready", flush=True)
    exec(sys.argv[1])
"""


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    return tmp_path / f"wattune-{os.getuid()}" / "last_words"


def dies(code: str) -> int:
    process = subprocess.Popen([sys.executable, "-c", DIES, code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    process.communicate(timeout=60)
    return process.pid


@pytest.mark.parametrize(("number", "said"), [("SIGSEGV", "Segmentation fault"), ("SIGABRT", "Aborted")])
def test_a_signal_of_its_own_leaves_words_once(own_folder: Path, number: str, said: str) -> None:
    pid = dies(f"os.kill(os.getpid(), signal.{number})")
    words = last_words(pid)
    assert words.splitlines()[0] == f"Fatal Python error: {said}" and "<string>" in words
    assert last_words(pid) == "" and not list(own_folder.iterdir())


@pytest.mark.parametrize("number", ["SIGKILL", "SIGTERM"])
def test_a_signal_from_outside_leaves_none(own_folder: Path, number: str) -> None:
    assert last_words(dies(f"os.kill(os.getpid(), signal.{number})")) == ""
    forget_dead()
    assert not list(own_folder.iterdir())


def test_a_process_that_ends_in_order_leaves_nothing(own_folder: Path) -> None:
    dies("pass")
    assert not list(own_folder.iterdir())


def test_files_of_the_living_stay_and_links_are_not_followed(own_folder: Path, tmp_path: Path) -> None:
    assert last_words(os.getpid()) == "", "there is no folder yet"
    own_folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    secret = tmp_path / "secret"
    secret.write_text("words of somebody else")
    (own_folder / str(os.getpid())).symlink_to(secret)
    assert last_words(os.getpid()) == ""
    forget_dead()
    assert (own_folder / str(os.getpid())).is_symlink()
    with pytest.raises(OSError), kept():
        pass
    assert secret.read_text() == "words of somebody else"


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/b/memory.events": "oom 3\noom_kill 2\n"}, 2),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.events": "oom_kill 5\noom_group_kill 1\n"}, 5),
        ({"sys/fs/cgroup/memory/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 4\n"}, 4),
        ({"proc/vmstat": "nr_free_pages 7\noom_kill 9\n"}, 9),
        ({}, 0),
    ],
)
def test_the_nearest_counter_of_the_kernel_counts(tmp_path: Path, files: dict[str, str], expected: int) -> None:
    for name, text in {"proc/vmstat": "oom_kill 1\n", **files}.items() if files else ():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert num_oom_kills(tmp_path) == expected


def test_this_machine_has_such_a_counter() -> None:
    assert num_oom_kills() >= 0
