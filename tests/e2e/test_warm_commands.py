"""Commands that are forks of a process which has loaded the libraries behave as the command itself does."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

COMMAND = [sys.executable, "-m", "wattune"]
SAYS_WHERE_IT_IS = "import json, os, time; print('in', json.dumps([os.getcwd(), dict(os.environ)])); time.sleep(100)"

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("on_standing_cluster")]


@pytest.mark.parametrize(
    ("arguments", "code"),
    [pytest.param(["--version"], 0, marks=pytest.mark.slow), (["run", "no_such_space.yaml", "--json"], 2)],
)
def test_exit_code_and_both_streams_are_those_of_the_command(
    wattune, environment: dict[str, str], tmp_path: Path, arguments: list[str], code: int
) -> None:
    real = subprocess.run([*COMMAND, *arguments], cwd=tmp_path, env=environment, capture_output=True, text=True)
    fork = wattune(*arguments)
    assert fork.returncode == real.returncode == code, fork.stderr
    assert (fork.stdout, fork.stderr) == (real.stdout, real.stderr)


@pytest.mark.slow
@pytest.mark.usefixtures("in_foreground")
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGKILL, -signal.SIGKILL)])
def test_folder_and_environment_are_the_tests_and_a_signal_ends_it(
    start_wattune, environment: dict[str, str], tmp_path: Path, number: int, code: int
) -> None:
    environment |= {"WATTUNE_RUNTIME": str(tmp_path / "runtime"), "ADDED": "by this test"}
    running = start_wattune("record", "--", sys.executable, "-c", SAYS_WHERE_IT_IS)
    running.says("^in ")
    assert running.process.poll() is None and os.getpgid(running.process.pid) == os.getpgid(0)
    (line,) = (line for line in running.text.splitlines() if line.startswith("in "))
    folder, has = json.loads(line.removeprefix("in "))
    of_record = {name for name in has if name.startswith(("WATTUNE_SPANS", "WATTUNE_STEPS"))} | {"PYTHONPATH"}
    assert folder == str(tmp_path)
    assert {name: has[name] for name in has.keys() - of_record} == {
        name: value for name, value in environment.items() if name not in of_record
    }

    children = psutil.Process(running.process.pid).children(recursive=True)
    running.process.send_signal(number)
    if number == signal.SIGKILL:
        for child in children:
            child.kill()
    assert running.ends(30) == code, running.text
    assert not psutil.pid_exists(running.process.pid)
