"""The sampling loop on a clock of its own: hours pass in milliseconds."""

import gc
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from wattune.errors import TelemetryError
from wattune.telemetry.backend import AVAILABLE, DeviceInfo, Row
from wattune.telemetry.files.segments import SegmentStore, read_manifest, read_tables
from wattune.telemetry.sampler.loop import MANIFEST_EVERY, SPREAD_TIERS, Sampler

WALL_NS = 10**18


class World:
    """A clock that only moves when somebody waits or a sensor takes its time."""

    def __init__(self, end_s: float) -> None:
        self.now_ns, self.end_ns = 0, round(end_s * 1e9)

    def clock_ns(self) -> int:
        return self.now_ns

    def wall_ns(self) -> int:
        return WALL_NS + self.now_ns

    def wait(self, timeout_s: float) -> str | None:
        self.now_ns += round(timeout_s * 1e9)
        return "SIGTERM" if self.now_ns > self.end_ns else None


class ScriptedBackend:
    """Some devices with some tiers, whose reads take a scripted time and give a scripted row."""

    simulated = False

    def __init__(self, world: World, devices: Sequence[str], tiers: Mapping[str, int], **script: Any) -> None:
        self.world, self.names, self.tiers, self.script = world, devices, tiers, script
        self.calls: list[tuple[int, str, str]] = []
        self.closed = 0

    def devices(self) -> Sequence[DeviceInfo]:
        return [DeviceInfo(device=name, name="NVIDIA H200", power_limit_w=700.0) for name in self.names]

    def capabilities(self, device: str) -> Mapping[str, Mapping[str, str]]:
        return {tier: {"gpu_temp_c": AVAILABLE} for tier in self.tiers}

    def read(self, device: str, tier: str) -> Sequence[Row]:
        self.calls.append((self.world.now_ns, device, tier))
        self.world.now_ns += self.tiers[tier]
        if stall := self.script.get("stall", {}).pop(len(self.calls), None):
            self.world.now_ns += stall
        if tier == "ring":
            return [{"sensor_ns": WALL_NS + self.world.now_ns - age, "power_w": 650.0} for age in (40, 20)]
        if self.script.get("fail_after", 10**9) < len(self.calls):
            return [{"gpu_temp_c": None, "gpu_temp_c_error": "GPU_IS_LOST"}]
        return [{"gpu_temp_c": 40.0}] if tier == "fast" else [{"energy_j": 1.0}] if tier == "slow" else [{}]

    def close(self) -> None:
        self.closed += 1


def sampler(folder: Path, world: World, backends: Mapping[str, Any], **options: Any) -> Sampler:
    options = {"expired": lambda: False, "wait": world.wait} | options
    return Sampler(folder, backends, node="n0", clock_ns=world.clock_ns, wall_ns=world.wall_ns, **options)


def test_every_tier_is_read_at_its_rate_and_stored(tmp_path: Path) -> None:
    world = World(end_s=9.99)
    backend = ScriptedBackend(
        world, ["gpu0", "gpu1"], {"ring": 400_000, "fast": 20_000, "counter": 1, "slow": 3_000_000}
    )
    assert sampler(tmp_path, world, {"nvml": backend}).run() == "SIGTERM"
    tables, notes = read_tables(tmp_path)
    assert notes == []
    assert tables["fast"].num_rows == 2 * 200
    assert tables["counter"].num_rows == 2 * 50
    assert tables["slow"].num_rows == 2 * (10 + 1)  # and once more at the end
    assert tables["ring"].num_rows == 2 * (10 + 1) * 2  # two samples a drain
    found = read_manifest(tmp_path)
    assert {tier: facts["rows"] for tier, facts in found["tiers"].items()} == {
        tier: table.num_rows for tier, table in tables.items()
    }
    assert all(facts["missed_ticks"] == 0 for facts in found["tiers"].values())
    assert found["tiers"]["slow"]["requested_hz"] == found["tiers"]["slow"]["achieved_hz"] == 1
    assert found["tiers"]["slow"]["read"]["max_s"] == pytest.approx(0.003)
    assert found["tiers"]["slow"]["longest_gap_s"] == pytest.approx(1.0, abs=0.01)
    assert found["closed"] is True and found["ended"] == "SIGTERM" and found["simulated"] is False
    assert found["devices"]["gpu1"]["backend"] == "nvml" and found["devices"]["gpu1"]["power_limit_w"] == 700.0
    assert backend.closed == 1 and gc.isenabled()


def test_each_tick_begins_with_another_device_and_slow_reads_are_spread(tmp_path: Path) -> None:
    world = World(end_s=1)
    backend = ScriptedBackend(world, ["gpu0", "gpu1", "gpu2"], {"fast": 0, "slow": 0})
    sampler(tmp_path, world, {"nvml": backend}).run()
    fast = [device for _, device, tier in backend.calls if tier == "fast"]
    assert fast[:9] == ["gpu0", "gpu1", "gpu2", "gpu1", "gpu2", "gpu0", "gpu2", "gpu0", "gpu1"]
    slow = [(now_ns, device) for now_ns, device, tier in backend.calls if tier == "slow"]
    last = slow[4:]
    assert [device for _, device in slow[:4]] == ["gpu0", "gpu1", "gpu2", "gpu0"]
    assert [now_ns for now_ns, _ in slow[:4]] == pytest.approx([0, 1e9 / 3, 2e9 / 3, 1e9], abs=1e3)
    assert [device for _, device in last] == ["gpu0", "gpu1", "gpu2"] and all(now_ns > 1e9 for now_ns, _ in last)


@pytest.mark.parametrize("tier", ["ring", "slow", "counter"])
def test_reads_that_are_too_slow_for_their_rate_come_to_every_device_in_turn(tmp_path: Path, tier: str) -> None:
    """Each read takes a tick and a half: every other tick is missed, always of the same two devices."""
    world = World(end_s=60)
    names = ["gpu0", "gpu1", "gpu2", "gpu3"]
    took_ns = {"ring": 375_000_000, "slow": 375_000_000, "counter": 75_000_000}[tier]
    backend = ScriptedBackend(world, names, {tier: took_ns})
    sampler(tmp_path, world, {"nvml": backend}).run()
    each = 1 if tier in SPREAD_TIERS else len(names)
    first = [device for _, device, _ in backend.calls[::each]]
    assert read_manifest(tmp_path)["tiers"][tier]["missed_ticks"] > 20
    assert first[:12] == names * 3, "the device that a tick begins with"


def test_a_manifest_is_written_where_batches_come_too_late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A read delays every second batch until the next one is due, so that all numbers of deadlines are odd."""
    put, given = SegmentStore.put, []

    def noted(self: SegmentStore, rows: Any, manifest: Any = None) -> None:
        given.append(manifest is not None)
        put(self, rows, manifest)

    monkeypatch.setattr(SegmentStore, "put", noted)
    world = World(end_s=60)
    sampler(
        tmp_path, world, {"nvml": ScriptedBackend(world, ["gpu0"], {"slow": 900_000_000})}, rates_hz={"slow": 0.625}
    ).run()
    assert given[0], "at the start"
    assert [at for at, manifest in enumerate(given[1:-1]) if manifest] == list(range(0, len(given) - 2, MANIFEST_EVERY))


@pytest.mark.parametrize("how", ["stopped", "lease expired"])
def test_the_last_second_of_the_driver_s_history_is_read_before_the_end(tmp_path: Path, how: str) -> None:
    class Ring(ScriptedBackend):
        """A sample every 20 ms, each handed out once."""

        drained_ns = 0

        def read(self, device: str, tier: str) -> Sequence[Row]:
            since_ns, self.drained_ns = self.drained_ns, self.world.now_ns
            period_ns = 20_000_000
            ticks = range(since_ns // period_ns + 1, self.world.now_ns // period_ns + 1)
            return [{"sensor_ns": WALL_NS + tick * period_ns, "power_w": 650.0} for tick in ticks]

    # Just before a drain is due, where the most would be lost.
    world = World(end_s=4.9 if how == "stopped" else 1000)
    ring = Ring(world, ["gpu0"], {"ring": 0})
    ended = sampler(tmp_path, world, {"nvml": ring}, expired=lambda: how != "stopped" and world.now_ns > 4.7e9).run()
    assert ended == (how if how != "stopped" else "SIGTERM")
    found = read_tables(tmp_path)[0]["ring"]["sensor_ns"].to_pylist()
    assert found == list(range(WALL_NS + 20_000_000, max(found) + 1, 20_000_000))
    assert WALL_NS + world.now_ns - max(found) < 20_000_000


def test_failed_reads_are_null_with_their_code_and_counted(tmp_path: Path) -> None:
    world = World(end_s=1)
    sampler(tmp_path, world, {"nvml": ScriptedBackend(world, ["gpu0"], {"fast": 0}, fail_after=15)}).run()
    table = read_tables(tmp_path)[0]["fast"]
    assert table["gpu_temp_c"].null_count == 6
    assert table["gpu_temp_c_error"].to_pylist()[-6:] == ["GPU_IS_LOST"] * 6
    assert read_manifest(tmp_path)["tiers"]["fast"]["errors"] == {"gpu_temp_c": {"GPU_IS_LOST": 6}}


class WitnessBackend(ScriptedBackend):
    """Knows who else uses a device; asking takes longer than a tick."""

    def facts(self, device: str) -> Mapping[str, Any]:
        assert self.closed == 0
        self.world.now_ns += 200_000_000
        self.calls.append((self.world.now_ns, device, "facts"))
        return {"other_processes": [{"pid": 7}] if device == "gpu1" else []}


def test_who_uses_the_devices_is_looked_up_one_a_batch_where_somebody_asks(tmp_path: Path) -> None:
    world = World(end_s=4)
    backend = WitnessBackend(world, ["gpu0", "gpu1"], {"fast": 0})
    looking = sampler(tmp_path, world, {"nvml": backend})
    looking.looks_for_users = True
    looking.run()
    asked = [device for _, device, what in backend.calls if what == "facts"][2:-2]
    assert len(asked) >= 3 and all(one != other for one, other in itertools.pairwise(asked))
    found = read_manifest(tmp_path)["devices"]
    assert found["gpu1"]["users"] == {"7": Path("/proc/7").exists()} and "users" not in found["gpu0"]


def test_what_no_column_holds_is_asked_before_and_after(tmp_path: Path) -> None:
    world = World(end_s=3)
    backend = WitnessBackend(world, ["gpu0", "gpu1"], {"fast": 0})
    sampler(tmp_path, world, {"nvml": backend}).run()
    asked = [index for index, (_, _, what) in enumerate(backend.calls) if what == "facts"]
    assert asked == [0, 1, len(backend.calls) - 2, len(backend.calls) - 1]
    found = read_manifest(tmp_path)
    assert (
        found["devices"]["gpu1"]["at_start"] == found["devices"]["gpu1"]["at_end"] == {"other_processes": [{"pid": 7}]}
    )
    assert found["devices"]["gpu0"]["at_end"] == {"other_processes": []}
    assert found["tiers"]["fast"]["missed_ticks"] == 0 and found["tiers"]["fast"]["longest_gap_s"] < 0.06


def test_a_set_wall_clock_is_noticed_and_slewing_is_not(tmp_path: Path) -> None:
    world = World(end_s=20)

    def wall_ns() -> int:
        slewed_ns = world.now_ns // 2000  # 500 ppm, as fast as NTP goes
        return WALL_NS + world.now_ns + slewed_ns - (3_600_000_000_000 if world.now_ns > 10e9 else 0)

    backends = {"nvml": ScriptedBackend(world, ["gpu0"], {"fast": 20_000})}
    options = {"node": "n0", "expired": lambda: False, "wait": world.wait}
    Sampler(tmp_path, backends, clock_ns=world.clock_ns, wall_ns=wall_ns, **options).run()
    (step,) = read_manifest(tmp_path)["clock"]["steps"]
    assert step["step_ns"] == pytest.approx(-3_600e9, abs=1e6) and 10e9 < step["mono_ns"] < 11e9
    mono_ns = read_tables(tmp_path)[0]["fast"]["mono_ns"].to_pylist()
    assert mono_ns == sorted(mono_ns) and max(b - a for a, b in itertools.pairwise(mono_ns)) < 0.06e9


def test_an_expired_lease_closes_the_files(tmp_path: Path) -> None:
    world = World(end_s=1000)
    backend = ScriptedBackend(world, ["gpu0"], {"fast": 0})
    assert sampler(tmp_path, world, {"nvml": backend}, expired=lambda: world.now_ns > 3e9).run() == "lease expired"
    assert world.now_ns < 4e9 and backend.closed == 1
    assert read_manifest(tmp_path)["ended"] == "lease expired" and read_tables(tmp_path)[1] == []


def test_a_broken_backend_ends_the_recording_but_keeps_it(tmp_path: Path) -> None:
    world = World(end_s=10)
    backend = ScriptedBackend(world, ["gpu0"], {"fast": 0}, stall={30: "no number"})
    with pytest.raises(TypeError):
        sampler(tmp_path, world, {"nvml": backend}).run()
    found = read_manifest(tmp_path)
    assert found["closed"] is True and found["ended"].startswith("failed: TypeError")
    assert read_tables(tmp_path)[0]["fast"].num_rows == 29 and gc.isenabled()


def test_a_backend_that_cannot_be_closed_costs_no_file_its_end(tmp_path: Path) -> None:
    class Stuck(ScriptedBackend):
        def close(self) -> None:
            super().close()
            raise RuntimeError("GPU is lost")

    world = World(end_s=3)
    backends = {"amd_smi": ScriptedBackend(world, ["gpu1"], {"slow": 0}), "nvml": Stuck(world, ["gpu0"], {"fast": 0})}
    with pytest.raises(RuntimeError, match="GPU is lost"):
        sampler(tmp_path, world, backends).run()
    tables, notes = read_tables(tmp_path)
    assert notes == [] and tables["fast"].num_rows == 61
    assert read_manifest(tmp_path)["closed"] is True and read_manifest(tmp_path)["ended"] == "SIGTERM"
    assert [backend.closed for backend in backends.values()] == [1, 1]


@pytest.mark.parametrize(
    ("second", "message"),
    [((["gpu0"], {"slow": 0}), "both name a device gpu0"), ((["gpu1"], {"fast": 0}), "both fill the table fast")],
)
def test_backends_with_something_in_common_are_refused(tmp_path: Path, second: Any, message: str) -> None:
    world = World(end_s=1)
    backends = {"nvml": ScriptedBackend(world, ["gpu0"], {"fast": 0}), "replay": ScriptedBackend(world, *second)}
    with pytest.raises(TelemetryError, match=message):
        sampler(tmp_path, world, backends)


def test_nothing_to_read_is_said(tmp_path: Path) -> None:
    world = World(end_s=1)
    with pytest.raises(TelemetryError, match="nothing to read"):
        sampler(tmp_path, world, {"nvml": ScriptedBackend(world, [], {})})
