"""The replay backend on a small recording whose every value is known, played by a clock the test moves."""

import itertools
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wattune.clock import ClockAnchor
from wattune.errors import TelemetryError
from wattune.schema import table_schema
from wattune.storage.measured import MeasuredFolder
from wattune.telemetry.registry import load_backend
from wattune.telemetry.replay import ENDED, HISTORY_S, ReplayBackend, parse_playback

SECONDS = 12
POWER_W = {"gpu0": 100.0, "gpu1": 300.0}
WALL_MINUS_MONO_NS = 1_795_000_000_000_000_000
FIRST_NS = 50_000_000_000
OPENED_NS = 7_000_000_000_000
S = 1_000_000_000


def table(tier: str, rows: list[dict], *, simulated: bool = False) -> pa.Table:
    keyed = [{"node": "n0", "wall_ns": row["mono_ns"] + WALL_MINUS_MONO_NS, **row} for row in rows]
    return pa.Table.from_pylist(keyed, schema=table_schema(tier, backend="nvml", simulated=simulated))


def write_recording(path: Path, *, simulated: bool = False) -> Path:
    """Two devices for 12 s: the ring in drains that overlap, instant power that says which reading it is."""
    ring, fast, slow = [], [], []
    for device, power_w in POWER_W.items():
        for drain in range(1, SECONDS + 1):
            drained_ns = FIRST_NS + drain * S
            samples = range((drain - 1) * 50 - 5, drain * 50)  # five samples again that the last drain gave
            ring += [
                {"device": device, "mono_ns": drained_ns, "power_w": float(index + 5)}
                | {"sensor_ns": FIRST_NS + index * S // 50 + WALL_MINUS_MONO_NS}
                for index in samples
            ]
        fast += [
            {"device": device, "mono_ns": FIRST_NS + index * S // 20, "power_instant_w": float(index)}
            for index in range(SECONDS * 20 + 1)
        ]
        slow += [
            {"device": device, "mono_ns": FIRST_NS + index * S, "energy_j": 5000.0 + power_w * index}
            | {"throttle_power_ns": 3 * S + index * S // 2, "power_limit_w": 700.0 if index else None}
            for index in range(SECONDS + 1)
        ]
    tables = {
        "ring": table("ring", ring, simulated=simulated),
        "fast": table("fast", fast),
        "slow": table("slow", slow),
    }
    devices = {
        name: {"name": "NVIDIA H200", "backend": "nvml", "uuid": f"GPU-{name}", "slot": slot, "power_limit_w": 700.0}
        for slot, name in enumerate(POWER_W)
    }
    MeasuredFolder(path).write_telemetry("n0", tables, {"node": "n0", "devices": devices})
    return path


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_recording(tmp_path_factory.mktemp("replay") / "recording")


class Player:
    """A backend and the clock it plays by."""

    def __init__(self, recording: Path, options: str = "") -> None:
        self.now_ns = OPENED_NS
        anchor = ClockAnchor(mono_ns=OPENED_NS, wall_ns=OPENED_NS + WALL_MINUS_MONO_NS)
        self.backend = ReplayBackend(f"{recording}{options}", clock_ns=lambda: self.now_ns, anchor=lambda: anchor)

    def at(self, seconds: float) -> "Player":
        self.now_ns = OPENED_NS + round(seconds * S)
        return self

    def one(self, tier: str, device: str = "gpu0"):
        (row,) = self.backend.read(device, tier)
        return row


def test_devices_are_those_recorded_with_an_identity_of_their_own(recording: Path) -> None:
    first, second = Player(recording).backend.devices()
    assert (first.device, first.name, first.slot, first.power_limit_w) == ("gpu0", "NVIDIA H200", 0, 700.0)
    # A lock on the real device's name would keep two replays, or the real device, from being sampled together.
    assert first.uuid is not None and first.uuid.startswith("replay-") and first.uuid != second.uuid


def test_a_column_nobody_recorded_is_not_offered(recording: Path) -> None:
    capabilities = Player(recording).backend.capabilities("gpu1")
    assert capabilities.keys() == {"ring", "fast", "slow"}
    assert capabilities["fast"]["power_instant_w"] == "available"
    assert capabilities["fast"]["gpu_temp_c"] == "unavailable: not recorded"


def test_gauges_hold_their_last_reading(recording: Path) -> None:
    player = Player(recording)
    # Play begins where every tier has begun; the ring began 0.1 s earlier.
    assert [player.at(seconds).one("fast")["power_instant_w"] for seconds in (0, 0.049, 0.05, 1.0)] == [0, 0, 1, 20]


def test_a_recorded_failure_is_a_failure(recording: Path) -> None:
    player = Player(recording)
    assert player.at(0.5).one("slow")["power_limit_w"] is None
    assert player.at(1.5).one("slow")["power_limit_w"] == 700.0


@given(moments=st.lists(st.integers(0, 40_000), min_size=2, max_size=20), speed=st.sampled_from([0.5, 1.0, 3.0]))
@settings(max_examples=30, deadline=None)
def test_counters_rise_at_the_recorded_rate_whatever_the_speed_and_the_lap(recording, moments, speed) -> None:
    player = Player(recording, f"?loop&speed={speed}")
    for device, power_w in POWER_W.items():
        for earlier, later in itertools.pairwise(sorted(moments)):
            before = player.at(earlier / 1000).one("slow", device)
            after = player.at(later / 1000).one("slow", device)
            assert after["energy_j"] - before["energy_j"] == pytest.approx(power_w * (later - earlier) / 1000, abs=1e-3)
            assert after["throttle_power_ns"] - before["throttle_power_ns"] == pytest.approx(
                (later - earlier) * 500_000, abs=2
            )


@given(waits=st.lists(st.integers(0, 2300), min_size=1, max_size=25), loop=st.booleans())
@settings(max_examples=50, deadline=None)
def test_drains_give_every_sample_once_and_in_order(recording, waits, loop) -> None:
    player = Player(recording, "?loop" if loop else "")
    player.backend.read("gpu0", "ring")
    now, powers, times = 0.0, [], []
    for wait in waits:
        now += wait / 1000
        for row in player.at(now).backend.read("gpu0", "ring"):
            powers.append(row["power_w"])
            times.append(row["sensor_ns"])
    assert all(earlier < later for earlier, later in itertools.pairwise(times))
    span = SECONDS * 50 - 1  # samples 0 to 599; the last of them is where the recording is over
    last = int(now * 50 + 1e-6)
    expected = [index % span for index in range(1, last + 1)] if loop else list(range(1, min(last, span) + 1))
    assert powers == [float(index + 5) for index in expected]
    if times:
        assert times[0] == OPENED_NS + WALL_MINUS_MONO_NS + S // 50


def test_the_ring_forgets_as_the_drivers_does(recording: Path) -> None:
    player = Player(recording, "?start_s=1")
    before = player.at(0).backend.read("gpu0", "ring")
    # What was recorded before play begins is the driver's past.
    assert [row["power_w"] for row in before] == [float(index + 5) for index in range(-5, 51)]
    rows = player.at(8).backend.read("gpu0", "ring")
    assert len(rows) == round(HISTORY_S * 50)
    assert rows[-1]["power_w"] == 455.0


def test_after_the_end_reads_fail_and_the_ring_is_silent(recording: Path) -> None:
    player = Player(recording).at(SECONDS + 1)
    assert player.one("fast") == {"power_instant_w": None, "power_instant_w_error": ENDED}
    player.backend.read("gpu0", "ring")
    assert player.at(SECONDS + 2).backend.read("gpu0", "ring") == []


def test_what_was_simulated_stays_simulated(tmp_path: Path, recording: Path) -> None:
    assert Player(write_recording(tmp_path / "made", simulated=True)).backend.simulated is True
    assert Player(recording).backend.simulated is False


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x?sped=2", 'did you mean "speed"'),
        ("x?speed=0", "speed=0"),
        ("x?speed=fast", "speed=fast"),
        ("x?start_s=-1", "start_s=-1"),
        ("x?speed=nan", "speed=nan"),
        ("x?loop=no", "takes no value"),
    ],
)
def test_options_out_of_range_are_refused(text: str, message: str) -> None:
    with pytest.raises(TelemetryError, match=message):
        parse_playback(text)


def test_options_are_read() -> None:
    assert parse_playback("a/b?speed=2&start_s=3.5&loop") == (Path("a/b"), 2.0, 3.5, True)


def test_what_cannot_be_played_is_refused(recording: Path, tmp_path: Path) -> None:
    with pytest.raises(TelemetryError, match=r"is over before start_s=20; begin 8\.\d s earlier"):
        Player(recording, "?start_s=20")
    with pytest.raises(TelemetryError, match="holds telemetry of no device"):
        ReplayBackend(str(tmp_path))
    folder = write_recording(tmp_path / "two")
    other = table("fast", [{"device": "gpu0", "mono_ns": FIRST_NS, "node": "n1"}])
    MeasuredFolder(folder).write_telemetry("n1", {"fast": other}, {})
    with pytest.raises(TelemetryError, match="of nodes n0, n1"):
        ReplayBackend(str(folder))


def test_it_is_named_with_its_folder(recording: Path) -> None:
    assert isinstance(load_backend(f"replay:{recording}?loop"), ReplayBackend)
    for text in ("replay", "replay:", "host:x"):
        with pytest.raises(TelemetryError, match="cannot be used as written"):
            load_backend(text)


def test_the_ring_keeps_recorded_intervals_at_any_speed(recording: Path) -> None:
    player = Player(recording, "?speed=4")
    rows = player.at(1).backend.read("gpu0", "ring")
    assert np.diff([row["sensor_ns"] for row in rows]) == pytest.approx(S / 50 / 4, abs=2)
