"""`wattune record` as a user runs it: beside commands that end well, badly, by signals, or not at all."""

import json
import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from wattune.telemetry.files.segments import read_tables
from wattune.telemetry.sampler.process import SamplerProcess

pytestmark = pytest.mark.timeout(60)

Run = Callable[..., "subprocess.CompletedProcess[str]"]

COUNTS_INTERRUPTS = """
import signal, sys, time
received = []
signal.signal(signal.SIGINT, lambda *_: received.append(1))
signal.signal(signal.SIGTERM, lambda *_: received.append(1))
print("ready", flush=True)
while not received:
    time.sleep(0.01)
time.sleep(0.5)
print(f"signals {len(received)}", flush=True)
sys.exit(7)
"""


@pytest.fixture
def environment(environment: dict[str, str], tmp_path: Path) -> dict[str, str]:
    # Locks of its own: whoever else samples this machine is none of this test's business.
    return environment | {"WATTUNE_RUNTIME": str(tmp_path / "runtime"), "PYTHONPATH": os.pathsep.join(sys.path)}


def wait_for(condition: Callable[[], object]) -> None:
    while not condition():
        time.sleep(0.05)


def rows_of(folder: Path, tier: str) -> int:
    """Returns the number of rows of a tier that a recording's sampler has written so far."""
    (node,) = (folder / "telemetry").iterdir()
    tables, _ = read_tables(node)
    return tables[tier].num_rows if tier in tables else 0


def test_the_commands_output_and_exit_code_are_its_own(wattune: Run, wattune_here: Run, storage: Path) -> None:
    done = wattune("record", "--name", "mine", "sh", "-c", "echo out; sleep 1; exit 3")
    assert done.returncode == 3, done.stderr
    assert done.stdout == "out\n"
    assert "exit code 3" in done.stderr and "quality" in done.stderr
    folder = storage / "recordings" / "mine"
    facts = json.loads((folder / "manifest.json").read_text())
    assert facts["kind"] == "recording" and facts["closed"] is True and facts["exit_code"] == 3
    assert facts["command"] == ["sh", "-c", "echo out; sleep 1; exit 3"]
    node = facts["node"]
    assert {path.name for path in (folder / "telemetry" / node).iterdir()} == {"host.parquet", "manifest.json"}
    # Sampling began before and ended after the command.
    read_ns = pq.read_table(folder / "telemetry" / node / "host.parquet")["mono_ns"].to_pylist()
    assert read_ns[0] < facts["window"]["start_mono_ns"] < facts["window"]["end_mono_ns"] < read_ns[-1] + 1e9

    again = wattune_here("record", "--name", "mine", "--", "true")
    assert again.returncode == 2 and "is there already" in again.stderr
    assert json.loads((folder / "manifest.json").read_text()) == facts


def test_json_is_one_object_and_analyze_gives_the_same_figures(wattune: Run, wattune_here: Run) -> None:
    done = wattune("record", "--json", "--backend", "simulated", "--", "sh", "-c", "echo out; sleep 2; kill -SEGV $$")
    assert done.returncode == 128 + signal.SIGSEGV, done.stderr
    recorded = json.loads(done.stdout)
    assert done.stderr == "out\n"
    assert recorded["exit_code"] == 139 and 2.0 <= recorded["window_s"] < 4.0
    assert recorded["simulated"] is True and "simulated" in recorded["quality_reasons"]
    assert recorded["energy_j"] == pytest.approx(
        recorded["metrics"]["node_device_power_mean_w"] * recorded["window_s"], rel=1e-6
    )
    assert 0.0 <= recorded["host"]["cpu_busy_frac"] <= 1.0
    (device,) = recorded["devices"].values()
    assert device["device_power_mean_w"] == recorded["metrics"]["device_power_mean_w"]
    assert not [name for name in device if name.startswith("node_")]
    analyzed = json.loads(wattune_here("analyze", "--json", recorded["folder"]).stdout)
    for key in ("metrics", "quality", "quality_reasons"):
        assert analyzed[key] == recorded[key], key
    for path in Path(recorded["folder"]).glob("telemetry/*/*.parquet"):
        simulated = pq.read_schema(path).metadata[b"wattune.simulated"]
        assert simulated == (b"false" if path.stem == "host" else b"true"), path


def test_the_machine_is_recorded_for_some_seconds_and_a_command_told_to_end_after_them(wattune: Run) -> None:
    done = wattune("record", "--seconds", "1")
    assert done.returncode == 0, done.stderr
    assert "CPU busy" in done.stdout and "exit code 0" in done.stdout
    done = wattune("record", "--seconds", "0.5", "--live", "--", "sleep", "50")
    assert done.returncode == 128 + signal.SIGTERM, done.stderr


@pytest.mark.usefixtures("in_foreground")
def test_a_signal_to_the_recorder_reaches_the_command_once(tmp_path: Path, environment: dict[str, str]) -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        arguments = [sys.executable, "-m", "wattune", "record", sys.executable, "-u", "-c", COUNTS_INTERRUPTS]
        process = subprocess.Popen(
            arguments, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        process.send_signal(number)
        assert process.stdout.read() == "signals 1\n"
        assert process.wait(30) == 7


@pytest.mark.usefixtures("in_foreground")
@pytest.mark.parametrize("live", [False, True])
def test_ctrl_c_on_a_terminal_reaches_the_command_once_and_the_recording_is_closed(
    tmp_path: Path, storage: Path, environment: dict[str, str], live: bool
) -> None:
    arguments = [sys.executable, "-m", "wattune", "record", "--name", "mine", *(["--live"] if live else [])]
    arguments += ["--", sys.executable, "-u", "-c", COUNTS_INTERRUPTS]
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(tmp_path)
        os.execve(sys.executable, arguments, environment | {"TERM": "xterm", "COLUMNS": "160"})
    shown = b""
    pressed = False
    while True:
        try:
            shown += os.read(terminal, 4096)
        except OSError:  # the other end is closed
            break
        if b"ready" in shown and not pressed:
            pressed = True
            os.write(terminal, b"\x03")
    _, status = os.waitpid(pid, 0)
    os.close(terminal)
    text = shown.decode()
    assert os.waitstatus_to_exitcode(status) == 7, text
    assert "quality" in text and "Traceback" not in text
    folder = storage / "recordings" / "mine"
    said = (folder / "command.log").read_text() if live else text
    assert "signals 1" in said
    assert json.loads((folder / "manifest.json").read_text())["closed"] is True


def test_after_kill_9_of_the_recorder_everything_is_readable(
    wattune_here: Run, tmp_path: Path, storage: Path, environment: dict[str, str]
) -> None:
    arguments = [sys.executable, "-m", "wattune", "record", "--name", "mine", "--backend", "simulated", "sleep", "30"]
    process = subprocess.Popen(arguments, cwd=tmp_path, env=environment, start_new_session=True)
    folder = storage / "recordings" / "mine"
    manifest = folder / "manifest.json"
    wait_for(lambda: manifest.exists() and "start_mono_ns" in manifest.read_text())
    wait_for(lambda: rows_of(folder, "host") >= 12)  # five a second, six of them before the command
    os.killpg(process.pid, signal.SIGKILL)  # the command too; the sampler has a session of its own
    process.wait()
    facts = json.loads((folder / "manifest.json").read_text())
    sampler = SamplerProcess.attach(folder / "telemetry" / facts["node"])
    try:
        first = json.loads(wattune_here("analyze", "--json", folder).stdout)
    finally:
        sampler.stop()
    assert facts["closed"] is False and "exit_code" not in facts
    assert first["metrics"]["device_power_mean_w"] > 0 and "simulated" in first["quality_reasons"]
    # Once the sampler has ended the answer no longer changes.
    second, third = (json.loads(wattune_here("analyze", "--json", folder).stdout) for _ in range(2))
    assert second == third and second["quality"] == "indicative"
