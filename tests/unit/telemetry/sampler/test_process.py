"""Real sampler processes: started, killed, orphaned, attached to, stopped."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from wattune.errors import TelemetryError
from wattune.telemetry.files.segments import read_tables
from wattune.telemetry.sampler.process import SamplerProcess, parse_rate

RATE_HZ = 50.0


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., SamplerProcess]]:
    # Locks of its own: other recordings on this machine are none of this test's business.
    monkeypatch.setenv("WATTUNE_RUNTIME", str(tmp_path / "runtime"))
    started: list[Path] = []

    def start_one(name: str = "recording", **options: Any) -> SamplerProcess:
        started.append(tmp_path / name)
        return SamplerProcess.start(tmp_path / name, node="n0", **{"rates_hz": {"host": RATE_HZ}, **options})

    yield start_one
    for folder in started:
        if (folder / "manifest.json").exists():
            SamplerProcess(folder).stop()


def pid_of(sampler: SamplerProcess) -> int:
    return int(sampler.manifest()["sampler"]["pid"])


def rows_of(sampler: SamplerProcess) -> int:
    tables, _ = read_tables(sampler.folder)
    return tables["host"].num_rows if "host" in tables else 0


def wait_for(condition: Callable[[], bool]) -> None:
    while not condition():
        time.sleep(0.02)


def test_a_recording_from_start_to_stop(start: Callable[..., SamplerProcess]) -> None:
    sampler = start(cpus=[min(os.sched_getaffinity(0))])
    assert sampler.alive() and sampler.manifest()["closed"] is False
    maps = Path(f"/proc/{pid_of(sampler)}/maps").read_text()
    assert "libarrow" in maps and "libtorch" not in maps and "_raylet" not in maps
    assert os.getsid(pid_of(sampler)) != os.getsid(0)
    assert (sampler.folder / "lease").read_text().split()[0] == str(os.getpid()), "it knows its owner"
    with pytest.raises(TelemetryError, match="holds a recording already"):
        start()
    again = SamplerProcess.attach(sampler.folder)
    wait_for(lambda: rows_of(sampler) >= RATE_HZ * 0.5)
    manifest = again.stop()
    assert again.stop() == manifest and not sampler.alive()
    with pytest.raises(TelemetryError, match="no sampler runs in"):
        SamplerProcess.attach(sampler.folder)

    tables, notes = read_tables(sampler.folder)
    assert notes == []
    assert manifest["closed"] is True and manifest["ended"] == "SIGTERM"
    facts = manifest["tiers"]["host"]
    assert facts["rows"] == facts["ticks"] == tables["host"].num_rows
    mono_ns = tables["host"]["mono_ns"].to_pylist()
    start_ns, end_ns = (manifest["clock"][edge]["mono_ns"] for edge in ("start", "end"))
    assert [start_ns, *mono_ns, end_ns] == sorted([start_ns, *mono_ns, end_ns])
    # However busy the machine: what was due until the last tick was taken or is counted as missed.
    due = RATE_HZ * (mono_ns[-1] - start_ns) / 1e9
    assert 0.7 * due <= facts["ticks"] + facts["missed_ticks"] <= due + 1
    assert facts["requested_hz"] == RATE_HZ and 0 < facts["achieved_hz"] <= RATE_HZ
    assert manifest["node"] == "n0" and manifest["sampler"]["cpu_s"] > 0
    assert manifest["sampler"]["cpus"] == [min(os.sched_getaffinity(0))]
    assert set(tables["host"]["node"].to_pylist()) == {"n0"}


def test_what_the_sampler_says_last_is_in_the_error(start: Callable[..., SamplerProcess]) -> None:
    with pytest.raises(TelemetryError, match=r'ended while starting:\n.*"hosts" is not built; did you mean "host"'):
        start("a", backends=["hosts"])
    with pytest.raises(TelemetryError, match=r'"hosts" in rate "hosts=5.0" is not a tier; did you mean "host"'):
        start("b", rates_hz={"hosts": 5.0})
    with pytest.raises(TelemetryError, match=r"cannot run on processors \[99999\]; choose among \[\d"):
        start("c", cpus=[99999])


@pytest.mark.parametrize("stands_still", [False, True])
def test_a_loop_that_a_driver_call_holds_is_ended_and_one_that_stood_still_is_not(stands_still: bool) -> None:
    code = (
        "import sys, time; from wattune.telemetry.sampler.process import Watchdog\n"
        "watchdog = Watchdog(stuck_s=3)\n"
        "watchdog.beat()\n"
        "print('begun', flush=True)\n"
        "time.sleep(100) if sys.argv[1] == 'held' else None\n"
        "for _ in range(60): watchdog.beat(); time.sleep(0.05)"
    )
    command = [sys.executable, "-c", code, "loops" if stands_still else "held"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "begun\n"
        if stands_still:
            process.send_signal(signal.SIGSTOP)
            time.sleep(5)
            process.send_signal(signal.SIGCONT)
        _, said = process.communicate(timeout=90)
    assert process.returncode == (0 if stands_still else -signal.SIGKILL), said
    assert ("a driver call held the sampler for 3 s" in said) is not stands_still


def test_a_sampler_that_stood_still_with_its_owner_goes_on_and_the_gap_is_counted(
    start: Callable[..., SamplerProcess],
) -> None:
    sampler = start(lease_s=5.0)
    wait_for(lambda: rows_of(sampler) > 0)
    os.kill(pid_of(sampler), signal.SIGSTOP)
    time.sleep(6.0)  # nobody renews: whatever would, stands still too
    before = rows_of(sampler)
    os.kill(pid_of(sampler), signal.SIGCONT)
    wait_for(lambda: rows_of(sampler) > before or not sampler.alive())
    sampler.renew()  # only after the sampler looked
    before = rows_of(sampler)
    wait_for(lambda: rows_of(sampler) > before or not sampler.alive())
    facts = sampler.stop()
    assert facts["ended"] == "SIGTERM"
    assert facts["tiers"]["host"]["longest_gap_s"] > 5.0
    assert facts["tiers"]["host"]["missed_ticks"] > 5.0 * RATE_HZ


def test_what_is_no_recording_cannot_be_renewed_or_attached_to(tmp_path: Path) -> None:
    with pytest.raises(TelemetryError, match="has no sampler's lease"):
        SamplerProcess(tmp_path).renew()
    with pytest.raises(TelemetryError, match="no sampler runs in"):
        SamplerProcess.attach(tmp_path)


@pytest.mark.parametrize("text", ["host=0", "host=-1", "host=fast", "host", "host=nan", "host=2000"])
def test_rates_out_of_range_are_refused(text: str) -> None:
    with pytest.raises(TelemetryError, match=r"not in \(0, 1000\] Hz"):
        parse_rate(text)
    assert parse_rate("ring=0.5") == ("ring", 0.5)


def test_the_sampler_module_loads_neither_ray_nor_torch() -> None:
    code = "import sys, wattune.telemetry.sampler.process\n"
    code += "print([m for m in ('ray', 'torch', 'mlflow') if m in sys.modules])"
    seen = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=100)
    assert seen.stdout.strip() == "[]"
