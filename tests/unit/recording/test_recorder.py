"""Recording from a library call: names, windows, watchers, and commands that outlive what fails beside them."""

import contextlib
import json
import os
import re
import signal
import socket
import sys
import threading
from pathlib import Path

import pytest
from recorded import record

from wattune.analysis.summary import summarize
from wattune.errors import PlanError, TelemetryError
from wattune.recording import recorder
from wattune.recording.recorder import default_name
from wattune.recording.recording import load, look, measured_run, run_of
from wattune.storage import files
from wattune.storage.digests import with_digest
from wattune.storage.files import write_calibration
from wattune.storage.measured import RecordingFolder


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("WATTUNE_RUNTIME", str(tmp_path / "runtime"))
    monkeypatch.setattr(recorder, "LEAD_S", 0.3)
    monkeypatch.setattr(recorder, "TAIL_S", 0.1)


@pytest.mark.parametrize(
    ("command", "ending"),
    [(["/usr/bin/python3", "-c", ""], "-python3"), ([], "-machine"), (["./träin my.sh"], r"-tr-in-my\.sh")],
)
def test_names_are_time_and_program(command: list[str], ending: str) -> None:
    assert re.fullmatch(rf"\d{{8}}-\d{{6}}{ending}", default_name(command))
    assert len(default_name(["x" * 300])) == 100


def test_a_recording_reads_back(tmp_path: Path) -> None:
    path = record([sys.executable, "-c", "print('said')"], storage=tmp_path, backends=["host"], name="a", output="log")
    assert (path / "command.log").read_text() == "said\n"
    assert path == tmp_path / "recordings" / "a"
    run = run_of(path)
    recording = run.recorded
    assert recording is not None and recording.place == str(path) and recording.exit_code == 0
    assert recording.window_s is not None and 0 < recording.window_s < 10
    assert recording.command == (sys.executable, "-c", "print('said')")
    assert recording.energy_j is None and recording.devices == {}
    assert run.quality_reasons == ("no_device_power",)
    stored = json.loads((path / "run.json").read_text())
    assert "place" not in stored["recorded"] and "manifest.json" in stored["files"]
    assert run.metrics == stored["metrics"] == measured_run(path).metrics


def test_what_keeps_a_command_line_is_its_owner_s_alone_and_has_no_secret(tmp_path: Path) -> None:
    script = "import os; os.write(1, b'said')"
    command = [sys.executable, "-c", script, "--password", "s3cr3t0", "-H", "Authorization: Bearer s3cr3t0"]
    path = record(command, storage=tmp_path, backends=["host"], name="a", output="log")
    kept = {each.name: each.stat().st_mode & 0o777 for each in path.iterdir() if each.is_file()}
    assert kept == {"manifest.json": 0o600, "run.json": 0o600, "command.log": 0o600}
    assert path.stat().st_mode & 0o777 == 0o700
    assert not [each for each in path.rglob("*") if each.is_file() and b"s3cr3t0" in each.read_bytes()]
    recorded = run_of(path).recorded
    assert recorded is not None and recorded.command[3:] == ("--password", "***", "-H", "Authorization: Bearer ***")


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (["NCCL_DEBUG=INFO", "no_such_program"], "no_such_program cannot be executed; check the name"),
        (["sleep 1 | cat"], r"record -- bash -c 'sleep 1 \| cat'"),
        (["sleep 1 && ls"], r"record -- bash -c 'sleep 1 && ls'"),
        (["sleep 1"], r"write its words apart, as in: record -- sleep 1"),
        (["no_such_program"], "check the name"),
    ],
)
def test_a_command_that_cannot_run_says_what_to_write(tmp_path: Path, command: list[str], said: str) -> None:
    with pytest.raises(PlanError, match=rf"cannot be executed; .*{said}|^{said}"):
        record(command, storage=tmp_path, backends=["host"])


def test_variables_before_the_program_and_beside_it_reach_it(tmp_path: Path) -> None:
    path = record(
        ["A=0", "C=3", "API_TOKEN=s3cr3t0", "A=1", "B=x y", "sh", "-c", 'echo "$A,$B,$C"'],
        storage=tmp_path,
        backends=["host"],
        name="a",
        output="log",
    )
    assert (path / "command.log").read_text() == "1,x y,3\n"
    facts = load(path).facts
    assert facts["command"] == ["sh", "-c", 'echo "$A,$B,$C"']
    assert facts["environment"] == {"A": "1", "B": "x y", "C": "3", "API_TOKEN": "***"}
    with pytest.raises(PlanError, match="variables and no program"):
        record(["A=1"], storage=tmp_path, backends=["host"], seconds=1)


def test_handlers_are_put_back_and_other_threads_keep_theirs(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGINT)
    record(["true"], storage=tmp_path, backends=["host"], name="a")
    assert signal.getsignal(signal.SIGINT) is before
    thread = threading.Thread(target=record, args=(["true"],), kwargs={"storage": tmp_path, "name": "b"})
    thread.start()
    thread.join(30)
    assert load(tmp_path / "recordings" / "b").facts["exit_code"] == 0


@pytest.mark.usefixtures("in_foreground")
def test_an_interrupt_ends_a_recording_of_the_machine(tmp_path: Path) -> None:
    def interrupt(_folder: Path, _start_mono_ns: int) -> None:
        signal.raise_signal(signal.SIGINT)

    path = record(storage=tmp_path, seconds=3600, backends=["host"], watcher=interrupt)
    facts = json.loads((path / "manifest.json").read_text())
    assert facts["exit_code"] == 130 and facts["closed"] is True


def test_a_watcher_sees_what_was_written_and_its_failure_ends_neither_command_nor_recording(tmp_path: Path) -> None:
    failures = []
    failed, marker = tmp_path / "failed", tmp_path / "ended"

    def watch(folder: Path, start_mono_ns: int) -> None:
        seen = look(folder, start_mono_ns).tables
        if "host" in seen and seen["host"].num_rows:
            failures.append(failed.touch())
            raise ZeroDivisionError

    # It goes on for two ticks of the watcher that has failed.
    script = 'for _ in $(seq 400); do [ -e "$1" ] && break; sleep 0.1; done; sleep 1.2; touch "$2"'
    with pytest.raises(ZeroDivisionError):
        record(
            ["sh", "-c", script, "sh", str(failed), str(marker)],
            storage=tmp_path,
            backends=["host"],
            name="a",
            watcher=watch,
        )
    assert marker.exists() and len(failures) == 1
    # Raised only when all was recorded: the command's end too.
    facts = load(tmp_path / "recordings" / "a").facts
    assert facts["closed"] is True and facts["exit_code"] == 0
    assert facts["window"]["end_mono_ns"] - facts["window"]["start_mono_ns"] > 1.2e9


def test_a_watcher_whose_terminal_is_stopped_costs_no_sampler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-S holds whoever writes to a terminal: the live view, and with it the thread that it runs in."""
    renewed, held, seen = threading.Semaphore(0), tmp_path / "held", []

    class Counted(recorder.SamplerProcess):
        def renew(self) -> None:
            super().renew()
            renewed.release()

    monkeypatch.setattr(recorder, "SamplerProcess", Counted)

    def stopped(_folder: Path, _start_mono_ns: int) -> None:
        if not seen:
            while renewed.acquire(blocking=False):  # those before
                pass
            seen.append(all(renewed.acquire(timeout=60) for _ in range(3)))
            held.touch()

    script = 'for _ in $(seq 2000); do [ -e "$1" ] && break; sleep 0.1; done'
    record(["sh", "-c", script, "sh", str(held)], storage=tmp_path, backends=["host"], watcher=stopped)
    assert seen == [True]


def test_a_lease_that_cannot_be_renewed_ends_the_recording_with_a_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Cleared(recorder.SamplerProcess):
        def renew(self) -> None:
            if (self.folder / "manifest.json").exists():
                raise TelemetryError("the folder was cleared")
            super().renew()

    monkeypatch.setattr(recorder, "SamplerProcess", Cleared)
    with pytest.raises(TelemetryError, match="the folder was cleared"):
        record(["sleep", "1"], storage=tmp_path, backends=["host"])


def test_lines_that_cannot_be_read_end_neither_command_nor_recording(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("wattune.steps.reader.StepReader.feed", fails)
    asked = "pattern/ms:took ([0-9.]+) ms"
    with pytest.raises(ZeroDivisionError):
        record(["sh", "-c", "echo took 5 ms; exit 3"], storage=tmp_path, backends=["host"], name="a", steps=asked)
    facts = load(tmp_path / "recordings" / "a").facts
    assert facts["closed"] is True and facts["exit_code"] == 3


def test_two_recordings_never_share_a_folder(tmp_path: Path) -> None:
    record(["true"], storage=tmp_path, backends=["host"], name="a")
    with pytest.raises(PlanError, match="is there already"):
        record(["true"], storage=tmp_path, backends=["host"], name="a")
    with pytest.raises(TelemetryError, match="given twice"):
        record(["true"], storage=tmp_path, backends=["host", "host"], name="b")
    assert not (tmp_path / "recordings" / "b").exists()


def test_names_that_nobody_chose_are_numbered_where_they_meet(tmp_path: Path) -> None:
    names = [RecordingFolder.create(tmp_path, "20261126-one-2", 1).path.name for _ in range(4)]
    assert names == ["20261126-one-2", "20261126-one-2-2", "20261126-one-2-3", "20261126-one-2-4"]


def test_a_program_the_kernel_refuses_leaves_nothing(tmp_path: Path) -> None:
    program = tmp_path / "program"
    program.write_text("no interpreter is named here")
    program.chmod(0o700)
    with pytest.raises(PlanError, match="program cannot be started"):
        record([str(program)], storage=tmp_path, backends=["host"], name="a")
    assert not (tmp_path / "recordings" / "a").exists()


def test_a_sampler_that_is_killed_ends_no_command_and_leaves_its_log(tmp_path: Path) -> None:
    killed = tmp_path / "killed"

    def kill(folder: Path, _start_mono_ns: int) -> None:
        if not killed.exists():
            os.kill(int((folder / "sampler.lock").read_text().split()[0]), signal.SIGKILL)
            killed.touch()

    script = 'until [ -e "$1" ]; do sleep 0.1; done; exit 4'
    command = ["sh", "-c", script, "sh", str(killed)]
    path = record(command, storage=tmp_path, backends=["host"], name="a", watcher=kill)
    measured = load(path)
    assert measured.facts["exit_code"] == 4 and measured.facts["closed"] is True
    (manifest,) = measured.manifests.values()
    assert manifest["closed"] is False and manifest["losses"]
    assert len(list(path.glob("telemetry/*/sampler.log"))) == 1


RECORDING = Path(__file__).parents[2] / "golden" / "h200x4" / "dp4"
COARSE = {"ring": {"finest_window_s": 0.5}, "fast": {"finest_window_s": 0.5}}


@pytest.mark.parametrize("killed", [False, True])
def test_windows_a_calibration_excludes_give_no_peak(
    tmp_path: Path, killed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_calibration(tmp_path, {"uuid": f"simulated-{socket.gethostname()}-gpu0", "limits": COARSE})
    if killed:  # as if the recorder had died before its last file

        def die(*_: object) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr(recorder, "_close", die)
    with contextlib.suppress(KeyboardInterrupt):
        record(["sleep", "2.5"], storage=tmp_path, backends=["simulated"], name="a")
    measured = load(tmp_path / "recordings" / "a")
    assert measured.facts["closed"] is not killed
    (manifest,) = measured.manifests.values()
    assert manifest["devices"]["gpu0"]["sensor_limits"] == COARSE
    peaks = [name for name in summarize(measured).metrics if name.startswith("device_power_peak_")]
    assert peaks == ["device_power_peak_1s_w"]


def test_a_calibration_that_is_none_is_said_before_anything_runs(tmp_path: Path) -> None:
    backend = f"replay:{RECORDING}"
    (tmp_path / "calibration").mkdir()
    marker = tmp_path / "ran"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "_calibration_path", lambda *_: tmp_path / "calibration" / "broken.json")
        (tmp_path / "calibration" / "broken.json").write_bytes(with_digest({}))
        with pytest.raises(TelemetryError, match="is not a calibration"):
            record(["touch", str(marker)], storage=tmp_path, backends=[backend], name="a")
    assert not marker.exists() and not (tmp_path / "recordings" / "a").exists()
