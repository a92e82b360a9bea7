"""A command's process: its lines, its end, and nothing of it left, however it or its owner ends."""

import fcntl
import os
import signal
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest

from wattune.workers.command.process import SupervisedProcess, TerminalProcess, marked_pids
from wattune.workers.command.supervisor import descendants

pytestmark = pytest.mark.timeout(60)
WAIT_S = 20.0


@pytest.fixture
def mark(tmp_path):
    mark = f"WATTUNE_STEPS={tmp_path}"
    yield mark
    for pid in marked_pids(mark.encode()):  # of a test that failed
        os.kill(pid, signal.SIGKILL)


@pytest.fixture
def start(mark):
    """Starts a Python program; returns its process and the lines it writes."""
    begun = []

    def begin(code, *arguments, grace_s=1.0, program=(sys.executable, "-u", "-c")):
        lines: list[str] = []
        name, _, value = mark.partition("=")
        process = SupervisedProcess(
            [*program, code, *arguments],
            environment={**os.environ, name: value},
            on_line=lambda line, _: lines.append(line),
            mark=mark,
            grace_s=grace_s,
        )
        begun.append(process)
        return process, lines

    yield begin
    for process in begun:
        process.close()


def until(condition, timeout_s=WAIT_S):
    end_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end_s, "it did not happen in time"
        time.sleep(0.01)


def gone(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def test_lines_of_both_streams_arrive_and_the_exit_code_is_the_commands(start):
    process, lines = start("import sys; print('out'); print('err', file=sys.stderr); print('end', end=''); sys.exit(7)")
    until(lambda: process.has_ended)
    assert process.close() == 0
    assert lines == ["out", "err", "end"]
    assert process.exit_code == 7
    assert process.end_mono_ns >= process.start_mono_ns


def test_arguments_are_not_for_a_shell(start):
    process, lines = start("import sys; print(sys.argv[1:])", "a b", "$(id)", "*")
    until(lambda: process.has_ended)
    process.close()
    assert lines == ["['a b', '$(id)', '*']"]


def test_a_program_that_is_not_there_is_told(start):
    process, _ = start("x", program=("no-such-program-here",))
    until(lambda: process.has_ended)
    process.close()
    assert process.failed_to_start == 2


def test_a_command_that_ends_at_sigterm_gets_the_time_for_it(start):
    code = "import signal,time,sys\nsignal.signal(15, lambda *_: (print('saved'), sys.exit(0)))\n"
    code += "print('up')\ntime.sleep(99)"
    process, lines = start(code, grace_s=15.0)
    until(lambda: "up" in lines)
    process.stop()
    until(lambda: process.has_ended)
    assert process.close() == 0
    assert "saved" in lines and process.exit_code == 0


def test_one_that_ignores_it_is_killed(start):
    process, lines = start(
        "import signal,time\nsignal.signal(15, signal.SIG_IGN)\nprint('up')\ntime.sleep(99)", grace_s=0.3
    )
    until(lambda: "up" in lines)
    assert process.close() == 0
    assert process.exit_code == -signal.SIGKILL


LEAVES_A_DAEMON = (
    "import subprocess, sys\n"
    "daemon = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(99)'], start_new_session=True)\n"
    "print(daemon.pid)\n"
)


def test_a_daemon_that_a_command_leaves_is_ended_with_it(start):
    process, lines = start(LEAVES_A_DAEMON)
    until(lambda: process.has_ended)
    assert process.close() == 0
    assert gone(int(lines[0]))


def test_nothing_is_left_where_the_supervisor_itself_is_killed(start, mark):
    process, lines = start(LEAVES_A_DAEMON + "import time; time.sleep(99)")
    until(lambda: lines)
    os.kill(process._process.pid, signal.SIGKILL)
    process.close()
    assert gone(int(lines[0])) and marked_pids(mark.encode()) == []


def test_nothing_is_left_where_the_owner_is_killed(tmp_path, mark):
    code = (
        "import os, sys, time\n"
        "from wattune.workers.command.process import SupervisedProcess\n"
        f"mark = {mark!r}\n"
        "name, _, value = mark.partition('=')\n"
        f"SupervisedProcess([sys.executable, '-u', '-c', {LEAVES_A_DAEMON + 'import time; time.sleep(99)'!r}],\n"
        "    environment={**os.environ, name: value}, on_line=lambda line, _: print(line, flush=True), mark=mark)\n"
        "time.sleep(99)\n"
    )
    owner = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    daemon = int(owner.stdout.readline())
    whole = descendants(owner.pid)
    assert daemon in whole and len(whole) >= 3  # supervisor, command, daemon
    owner.kill()
    owner.wait(WAIT_S)
    owner.stdout.close()
    until(lambda: all(map(gone, whole)))


@pytest.mark.parametrize(
    ("script", "code"), [("exit 0", 0), ("exit 4", 4), ("kill -9 $$", 137), ("kill -TERM $$", 143)]
)
def test_exit_codes_are_a_shells(script: str, code: int) -> None:
    command = TerminalProcess(["sh", "-c", script])
    assert command.ended_within(None)
    assert command.exit_code == code


def test_its_end_is_seen_at_once() -> None:
    ran_s = []
    while len(ran_s) < 5 and min(ran_s, default=1.0) >= 1.0:  # a busy machine wakes one late, not each of five
        command = TerminalProcess(["sleep", "0.3"])
        assert command.ended_within(20)
        ran_s.append((command.end_mono_ns - command.start_mono_ns) / 1e9)
    assert 0.3 <= min(ran_s) < 1.0
    command.send(signal.SIGTERM)  # too late, and no error
    assert command.exit_code == 0


def test_each_line_of_a_progress_bar_is_heard_with_its_own_time(tmp_path: Path) -> None:
    heard: list[tuple[str, int]] = []
    script = r"for at in 1 2 3; do printf '\r%s/3 [00:01<' $at; sleep 0.2; done; echo; echo end"
    with (tmp_path / "out").open("wb") as out:
        command = TerminalProcess(["sh", "-c", script], stdout=out.fileno(), on_line=lambda *line: heard.append(line))
        assert command.ended_within(20)
    lines = [(text.strip("\r"), at_ns) for text, at_ns in heard if text.strip("\r")]
    assert [text for text, _ in lines] == ["1/3 [00:01<", "2/3 [00:01<", "3/3 [00:01<", "end"]
    assert lines[2][1] - lines[0][1] > 0.1e9  # a busy machine reads one late, not all three
    assert (tmp_path / "out").read_bytes().endswith(b"\r3/3 [00:01<\nend\n")


def test_a_listener_that_fails_holds_up_no_command(tmp_path: Path) -> None:
    """Output that nobody reads any more would stop it once the pipe is full."""
    heard: list[str] = []

    def fails(line: str, _mono_ns: int) -> None:
        heard.append(line)
        raise OverflowError(line)

    with (tmp_path / "out").open("wb") as out:
        command = TerminalProcess(["sh", "-c", "seq 100000"], stdout=out.fileno(), on_line=fails)
        assert command.ended_within(60) and command.exit_code == 0
    assert (tmp_path / "out").read_text().splitlines()[-1] == "100000"
    assert heard == ["1"] and isinstance(command.unheard, OverflowError)


def test_a_command_in_a_terminal_keeps_one_and_is_heard(tmp_path: Path) -> None:
    """Its output goes through a terminal of its own, unchanged and of the same size."""
    ours, theirs = os.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 33, 111, 0, 0))
    script = "import os, sys; print(*os.get_terminal_size(), sys.stdout.isatty(), sys.stderr.isatty())"
    heard: list[str] = []
    with (tmp_path / "err").open("wb") as err:
        command = TerminalProcess(
            [sys.executable, "-c", script],
            stdout=theirs,
            stderr=err.fileno(),
            on_line=lambda line, _: heard.append(line),
        )
        assert command.ended_within(20) and command.exit_code == 0
    assert heard == ["111 33 True False"]
    assert os.read(ours, 100) == b"111 33 True False\r\n"
    os.close(ours)
    os.close(theirs)


def test_two_streams_to_one_place_keep_their_order(tmp_path: Path) -> None:
    heard: list[str] = []
    script = "for at in 1 2 3 4 5 6 7 8 9; do echo out $at; echo err $at >&2; done"
    with (tmp_path / "out").open("wb") as out:
        command = TerminalProcess(
            ["sh", "-c", script],
            stdout=out.fileno(),
            stderr=out.fileno(),
            on_line=lambda line, _: heard.append(line),
        )
        assert command.ended_within(20)
    assert heard == [f"{stream} {at}" for at in range(1, 10) for stream in ("out", "err")]
    assert (tmp_path / "out").read_text().splitlines() == heard
