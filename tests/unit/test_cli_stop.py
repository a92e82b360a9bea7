"""Ctrl-C on a terminal of its own: answered at once, with how long it takes, and exit code 130."""

import fcntl
import os
import pty
import select
import signal
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest

SPACE = """
study: tiny
model: {name: llama3_8b, num_layers: 2, hidden_size: 64, ffn_hidden_size: 128, num_heads: 4, num_kv_heads: 2}
cluster: {device: cpu, devices_per_node: 2, simulate_sensors_of: h200_sxm}
engine: torch
workload: {seq_len: 32, global_batch_size: 8}
space: {tp: [1, 2]}
objective: maximize tokens_per_s
constraints: [node_device_power_peak_1s_w <= 1200]
"""

# The real command line in a process of its own. Only the study itself is replaced: it runs until it is interrupted and
# then takes a moment to end, as lanes and Ray do.
STUDY = """
import sys, time
from wattune import api

def run_study(*_, **__):
    try:
        print("RUNS", flush=True)  # inside: the key may come before the next line runs
        for _ in range(600):  # short waits, as a study's: a signal just before one long sleep would wait for its end
            time.sleep(0.1)
    except KeyboardInterrupt:
        time.sleep(0.3)
        print("ENDED", flush=True)
        raise

api.run_study = run_study
from wattune.cli import main
sys.argv = ["wattune", "run", sys.argv[1], "--storage", sys.argv[2]]
main()
"""


def on_terminal(study: str, folder: Path) -> tuple["subprocess.Popen[bytes]", int]:
    """Starts a study on a terminal of its own; returns it, and the terminal's other end."""
    space = folder / "space.yaml"
    space.write_text(SPACE)
    ours, theirs = pty.openpty()
    running = subprocess.Popen(
        [sys.executable, "-c", study, str(space), str(folder / "storage")],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
        env=os.environ | {"TERM": "xterm", "COLUMNS": "80"},
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # its signals reach who has the terminal
    )
    os.close(theirs)
    return running, ours


@pytest.mark.timeout(90)
@pytest.mark.usefixtures("in_foreground")
def test_ctrl_c_is_answered_at_once(tmp_path: Path) -> None:
    running, ours = on_terminal(STUDY, tmp_path)
    shown, deadline_s = "", time.monotonic() + 60

    def until(text: str) -> None:
        nonlocal shown
        while text not in shown:
            assert time.monotonic() < deadline_s, shown
            if select.select([ours], [], [], 0.5)[0]:
                try:
                    shown += os.read(ours, 65536).decode(errors="replace")
                except OSError as error:  # EIO: nobody has the other end any more
                    raise AssertionError(f"it ended before {text!r}: {shown}") from error

    try:
        until("RUNS")
        os.write(ours, b"\x03")  # what the key sends
        until("stopped before the end")
        code = running.wait(30)
        assert code == 130, shown
    finally:
        running.kill()
        running.wait(30)
        os.close(ours)
    shown = " ".join(shown.split())
    assert 0 < shown.index("stopping: running trials end") < shown.index("ENDED")
    assert "about 15 s" in shown and "Traceback" not in shown and shown.count("stopping: running") == 1


@pytest.mark.timeout(90)
@pytest.mark.usefixtures("in_foreground")
def test_a_closed_terminal_ends_it_as_any_other_stop(tmp_path: Path) -> None:
    told = tmp_path / "told"
    study = STUDY.replace('print("ENDED"', f'open({str(told)!r}, "w").write("ENDED"); print("ENDED"')
    running, ours = on_terminal(study, tmp_path)
    shown = b""
    try:
        while b"RUNS\r\n" not in shown:  # not before the line's end: its write would be the error
            shown += os.read(ours, 65536)
        os.close(ours)
        time.sleep(0.15)
        running.send_signal(signal.SIGHUP)  # the kernel may send two: that is no second wish to end
        # What is printed from then on goes nowhere. It was an error once, and the exit code was 1.
        assert running.wait(60) == 128 + signal.SIGHUP
    finally:
        running.kill()
        running.wait(30)
    assert told.read_text() == "ENDED"
