"""The suite itself: it works in a shell's background, and a run that leaves a process behind fails."""

import os
import re
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

TESTS = Path(__file__).parent

LEAVES_ONE = """
import subprocess, sys
import conftest

conftest.GONE_WITHIN_S = 0.5

def test_passes():
    left = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    print("left", left.pid, flush=True)
"""

WORKER_OF = """
import os, pathlib, pytest

{mark}
@pytest.mark.parametrize("number", range(4))
def test_says_where_it_runs(number):
    with open(pathlib.Path(__file__).with_name("{name}.workers"), "a") as file:
        print(os.environ["PYTEST_XDIST_WORKER"], os.nice(0), file=file)
"""


def _pytest_here(folder: Path, *options: str) -> "subprocess.CompletedProcess[str]":
    """Runs the tests of a folder by the suite's own rules."""
    command = [sys.executable, "-m", "pytest", "-p", "conftest", "-p", "no:cacheprovider", *options, str(folder)]
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment = kept | {"PYTHONPATH": os.pathsep.join([str(TESTS), *sys.path]), "TMPDIR": str(folder)}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=100)


@pytest.mark.slow
def test_tests_that_interrupt_pass_where_a_shell_ignores_interrupts() -> None:
    """As in `make test &`. Two of them; `.ci/run` has all quick tests run so, each time."""
    chosen = [
        "unit/recording/test_recorder.py::test_an_interrupt_ends_a_recording_of_the_machine",
        "e2e/test_record.py::test_a_signal_to_the_recorder_reaches_the_command_once",
    ]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *(str(TESTS / each) for each in chosen)]
    done = subprocess.run(
        ["sh", "-c", "trap '' INT; exec \"$@\"", "sh", *command],
        cwd=TESTS.parent, capture_output=True, text=True, timeout=110,
    )  # fmt: skip
    assert done.returncode == 0 and "2 passed" in done.stdout, done.stdout + done.stderr


def test_all_that_starts_ray_runs_in_one_process_that_goes_first_and_files_stay_together(tmp_path: Path) -> None:
    for number in range(3):
        (tmp_path / f"test_plain{number}.py").write_text(WORKER_OF.format(mark="", name=f"plain{number}"))
        (tmp_path / f"test_ray{number}.py").write_text(WORKER_OF.format(mark="@pytest.mark.ray", name=f"ray{number}"))
    done = _pytest_here(tmp_path, "-n", "2", "--dist", "loadgroup")
    assert "24 passed" in done.stdout, done.stdout + done.stderr
    said = {path.name: [line.split() for line in path.read_text().splitlines()] for path in tmp_path.glob("*.workers")}
    workers = {name: {worker for worker, _ in lines} for name, lines in said.items()}
    levels = {name: {int(nice) for _, nice in lines} for name, lines in said.items()}
    assert all(levels[f"ray{number}.workers"] == {os.nice(0)} for number in range(3))
    assert all(min(levels[f"plain{number}.workers"]) > os.nice(0) for number in range(3))
    assert all(len(workers[f"plain{number}.workers"]) == 1 for number in range(3))
    assert len(set.union(*(workers[f"ray{number}.workers"] for number in range(3)))) == 1
    assert len(set.union(*workers.values())) == 2


BURNS = "import time\nwhile time.process_time() < 1: pass"


def test_the_cpu_time_of_what_a_command_detaches_is_said_with_its_own() -> None:
    """One second is used by a child, one by a process that nobody of ours has started and that outlives it."""
    detached = [sys.executable, "-c", BURNS]
    program = f"import subprocess\nsubprocess.Popen({detached!r}, start_new_session=True)\n{BURNS}\nraise SystemExit(7)"
    command = [
        sys.executable,
        str(TESTS / "cpu_seconds.py"),
        "sh",
        "-c",
        '"$@"; exit $?',
        "sh",
        sys.executable,
        "-c",
        program,
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    said = re.fullmatch(r"CPU seconds, children included: (\d+) \(yardstick (\d+) ms\)", done.stdout.splitlines()[-1])
    assert said is not None and done.returncode == 7, done.stdout + done.stderr
    assert 2 <= int(said[1]) <= 4 and int(said[2]) > 0, done.stdout


def test_a_run_that_leaves_a_process_behind_fails_and_ends_it(tmp_path: Path) -> None:
    (tmp_path / "test_leaves.py").write_text(LEAVES_ONE)
    done = _pytest_here(tmp_path, "-s")
    assert "1 passed" in done.stdout and done.returncode == 1, done.stdout + done.stderr
    pid = next(line.split()[-1] for line in done.stdout.splitlines() if "left" in line)
    assert "processes left behind" in done.stdout and f"\n{pid}: " in done.stdout, done.stdout
    assert not psutil.pid_exists(int(pid))
    assert list(tmp_path.glob("wt-*")) == []
