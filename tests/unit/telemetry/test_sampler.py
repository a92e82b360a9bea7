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
from wattune.telemetry.sampler import SamplerProcess, parse_rate
from wattune.telemetry.store import read_tables

pytestmark = pytest.mark.timeout(60)

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


def wait_for(condition: Callable[[], bool]) -> None:
    while not condition():
        time.sleep(0.02)


def test_a_recording_from_start_to_stop(start: Callable[..., SamplerProcess]) -> None:
    sampler = start(cpus=[min(os.sched_getaffinity(0))])
    assert sampler.alive() and sampler.manifest()["closed"] is False
    maps = Path(f"/proc/{pid_of(sampler)}/maps").read_text()
    assert "libarrow" in maps and "libtorch" not in maps and "_raylet" not in maps
    assert os.getsid(pid_of(sampler)) != os.getsid(0)
    with pytest.raises(TelemetryError, match="holds a recording already"):
        start()
    again = SamplerProcess.attach(sampler.folder)
    begun_s = time.monotonic()
    time.sleep(1.0)
    manifest = again.stop()
    assert again.stop() == manifest and not sampler.alive()
    with pytest.raises(TelemetryError, match="no sampler runs in"):
        SamplerProcess.attach(sampler.folder)

    tables, notes = read_tables(sampler.folder)
    assert notes == []
    assert manifest["closed"] is True and manifest["ended"] == "SIGTERM"
    facts = manifest["tiers"]["host"]
    assert facts["rows"] == facts["ticks"] == tables["host"].num_rows >= RATE_HZ * 0.5
    # Ticks missed after the last one taken are not known yet when the signal comes: a busy machine hides some.
    assert facts["ticks"] + facts["missed_ticks"] >= RATE_HZ * 0.7
    assert facts["requested_hz"] == RATE_HZ and 0 < facts["achieved_hz"] <= RATE_HZ
    assert manifest["node"] == "n0" and manifest["sampler"]["cpu_s"] > 0
    assert manifest["sampler"]["cpus"] == [min(os.sched_getaffinity(0))]
    start_clock, end_clock = manifest["clock"]["start"], manifest["clock"]["end"]
    assert 1.0 <= (end_clock["mono_ns"] - start_clock["mono_ns"]) / 1e9 < time.monotonic() - begun_s + 5
    assert set(tables["host"]["node"].to_pylist()) == {"n0"}
    mono_ns = tables["host"]["mono_ns"].to_pylist()
    assert mono_ns == sorted(mono_ns)


def test_after_kill_9_all_but_the_last_second_is_read_back(start: Callable[..., SamplerProcess]) -> None:
    sampler = start()
    time.sleep(2.0)
    killed_ns = time.monotonic_ns()
    os.kill(pid_of(sampler), signal.SIGKILL)
    wait_for(lambda: not sampler.alive())
    tables, (note,) = read_tables(sampler.folder)
    mono_ns = tables["host"]["mono_ns"].to_pylist()
    assert killed_ns - mono_ns[-1] < 1e9
    begun_ns = sampler.manifest()["clock"]["start"]["mono_ns"]
    assert mono_ns[0] - begun_ns < 0.5e9
    assert len(mono_ns) > 0.5 * RATE_HZ * (mono_ns[-1] - mono_ns[0]) / 1e9  # half the ticks even on a busy machine
    assert "host-0000.arrows" in note
    assert sampler.manifest()["closed"] is False
    assert sampler.stop()["closed"] is False


def test_it_outlives_its_owner_by_the_lease(start: Callable[..., SamplerProcess], tmp_path: Path) -> None:
    folder = tmp_path / "orphan"
    code = (
        "import os, pathlib, signal\n"
        "from wattune.telemetry.sampler import SamplerProcess\n"
        f"SamplerProcess.start(pathlib.Path({str(folder)!r}), node='n0', lease_s=1.5)\n"
        "os.killpg(0, signal.SIGKILL)"
    )
    owner = subprocess.run([sys.executable, "-c", code], start_new_session=True, timeout=30, env=os.environ)
    assert owner.returncode == -signal.SIGKILL
    orphan = SamplerProcess(folder)
    assert orphan.alive()
    # The kernel's own counters may be read by any number of samplers (DeviceLocks has tests of its own).
    assert start("beside", lock_wait_s=0).alive()
    wait_for(lambda: not orphan.alive())
    assert orphan.manifest()["ended"] == "lease expired" and orphan.manifest()["closed"] is True
    assert read_tables(folder)[1] == []


def test_what_the_sampler_says_last_is_in_the_error(start: Callable[..., SamplerProcess]) -> None:
    with pytest.raises(TelemetryError, match=r'ended while starting:\n.*"hosts" is not built; did you mean "host"'):
        start("a", backends=["hosts"])
    with pytest.raises(TelemetryError, match=r'"hosts" in rate "hosts=5.0" is no tier; did you mean "host"'):
        start("b", rates_hz={"hosts": 5.0})
    with pytest.raises(TelemetryError, match=r"cannot run on processors \[99999\]; choose among \[\d"):
        start("c", cpus=[99999])


def test_a_sampler_held_by_a_driver_call_is_ended() -> None:
    code = (
        "import time; from wattune.telemetry import sampler\n"
        "sampler._STUCK_S = 1\n"
        "sampler.wait_for_signal(0)\n"
        "time.sleep(20)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=15).returncode == -signal.SIGALRM


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
    code = "import sys, wattune.telemetry.sampler; print([m for m in ('ray', 'torch', 'mlflow') if m in sys.modules])"
    seen = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=30)
    assert seen.stdout.strip() == "[]"
