"""Following a recording: its figures become those of the whole recording, on real H200 readings."""

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from living_sampler import NODE, LivingSampler

from wattune.analysis.metrics.throttle import Throttle
from wattune.analysis.run_data import RunData
from wattune.analysis.summary import metrics_by_device, summarize
from wattune.recording.recording import LAG_S
from wattune.recording.serving import follower
from wattune.recording.serving.follower import ClockLost, Follower, Peaks, Snapshot
from wattune.storage.files import write_calibration
from wattune.storage.measured import RecordingFolder
from wattune.telemetry.sampler.loop import HAND_OVER_S
from wattune.telemetry.sampler.process import SamplerProcess

START_S = 20.0
"""The load of the recording begins before this."""


@pytest.fixture
def living(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LivingSampler:
    monkeypatch.setattr(SamplerProcess, "alive", lambda _: True)
    return LivingSampler(tmp_path)


@pytest.fixture
def look_at(living: LivingSampler, monkeypatch: pytest.MonkeyPatch) -> Callable[[float], Snapshot]:
    """Looks at a moment, with one follower."""
    followed = Follower(living.folder, living.at_ns(START_S))

    def look(after_s: float) -> Snapshot:
        living.write_until(after_s)
        clock = SimpleNamespace(monotonic_ns=lambda: living.at_ns(after_s), thread_time=time.thread_time)
        monkeypatch.setattr(follower, "time", clock)
        return followed.look()

    return look


def test_pieces_add_up_to_the_figures_of_the_whole_recording(
    living: LivingSampler, look_at: Callable[[float], Snapshot]
) -> None:
    for after_s in (20.5, 21.3, 22.9, 27.0, 27.4, 33.0, 38.5):
        seen = look_at(after_s)
    assert list(seen.devices) == ["gpu0", "gpu1", "gpu2", "gpu3"] and seen.recording == "live"
    shift_ns = living.measured.tables["fast"]["wall_ns"][0].as_py() - living.first_ns
    assessed_s = seen.devices["gpu0"].clock_lost.assessed_s
    assert assessed_s == pytest.approx(38.5 - START_S - 1.1, abs=0.15)
    window = (living.at_ns(START_S) + shift_ns, living.at_ns(START_S + assessed_s) + shift_ns)
    whole = replace(living.measured, spans=None, window=window)
    each = metrics_by_device(whole)
    for name, view in seen.devices.items():
        own = each[NODE, name]
        lost = view.clock_lost
        assert lost.lost_s == pytest.approx(own["throttle_loss_frac"] * assessed_s, rel=1e-3)
        assert lost.throttled_s == pytest.approx(own["throttle_time_s"], rel=1e-3)
        assert lost.lost_by_cause_s["power"] == pytest.approx(own["throttle_power_loss_frac"] * assessed_s, rel=1e-3)
        assert lost.lost_by_cause_s["thermal"] == 0.0
        for window_name in ("20ms", "100ms", "1s"):
            expected = own[f"device_power_peak_{window_name}_w"]
            assert view.peaks.since_start_w[window_name] == pytest.approx(expected, rel=1e-3)
    node = summarize(whole).metrics
    assert seen.peaks.since_start_w["1s"] == pytest.approx(node["node_device_power_peak_1s_w"], rel=1e-3)
    # The power cap took more than a tenth of the clock of this load.
    assert 0.1 < seen.devices["gpu0"].clock_lost.lost_s / assessed_s < 0.25


def test_the_last_reading_is_the_last_row(living: LivingSampler, look_at: Callable[[float], Snapshot]) -> None:
    seen = look_at(30.0)
    rows = [row for row in living.measured.tables["fast"].to_pylist() if row["mono_ns"] < living.at_ns(30.0)]
    last = [row for row in rows if row["device"] == "gpu2"][-1]
    assert seen.devices["gpu2"].latest["fast"]["mono_ns"] == last["mono_ns"]
    assert seen.devices["gpu2"].latest["fast"]["power_instant_w"] == last["power_instant_w"]
    assert seen.cpu_s == 0.0 and look_at(30.1).cpu_s > 0.0


def test_peaks_of_the_node_forget_devices_that_do_not_count(
    living: LivingSampler, look_at: Callable[[float], Snapshot]
) -> None:
    before = look_at(26.0)
    assert not before.others and before.peaks.since_start_w["1s"] > 2500
    recording = RecordingFolder(living.folder.parents[1])
    recording.write_facts({"kind": "recording", "devices": {"counted": ["gpu1"], "why": "--devices 1"}})
    after = look_at(33.0)
    assert list(after.others) == ["gpu0", "gpu2", "gpu3"] and list(after.devices) == ["gpu1"]
    assert after.peaks.since_start_w["1s"] == after.devices["gpu1"].peaks.since_start_w["1s"]


def test_a_snapshot_does_not_change_later(look_at: Callable[[float], Snapshot]) -> None:
    early = look_at(24.0)
    lost_s, peak_w = early.devices["gpu0"].clock_lost.lost_s, dict(early.devices["gpu0"].peaks.since_start_w)
    node_w = dict(early.peaks.since_start_w)
    look_at(38.0)
    assert early.devices["gpu0"].clock_lost.lost_s == lost_s
    assert early.devices["gpu0"].peaks.since_start_w == peak_w and early.peaks.since_start_w == node_w


def test_after_a_pause_only_what_was_read_counts_as_assessed(
    living: LivingSampler, look_at: Callable[[float], Snapshot], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(follower, "LOOK_BACK_S", 8.0)
    first = look_at(23.0).devices["gpu0"].clock_lost.assessed_s
    later = look_at(38.0).devices["gpu0"].clock_lost.assessed_s
    # Of the fifteen seconds the last eight were looked at, less the ring's lag.
    assert later - first == pytest.approx(8.0 - 1.1, abs=0.15)


def test_a_scrape_a_minute_misses_no_peak(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scrapers are late, sensors lag, batches take a while, and peaks are new only every five seconds."""
    now_ns, looked, covered = [0], [(0, 0)], [(0, 0)]
    late_ns = round((LAG_S + HAND_OVER_S) * 1e9)

    def looking(_folder: Path, since_ns: int) -> RunData:
        looked.append((since_ns, now_ns[0] - late_ns))
        return RunData(tables={}, manifests={"n0": {"node": "n0"}}, window=looked[-1])

    monkeypatch.setattr(follower, "look", looking)
    monkeypatch.setattr(Peaks, "observe", lambda *_: covered.append(looked[-1]))
    monkeypatch.setattr(SamplerProcess, "alive", lambda _: True)
    clock = SimpleNamespace(monotonic_ns=lambda: now_ns[0], thread_time=time.thread_time)
    monkeypatch.setattr(follower, "time", clock)
    followed = Follower(tmp_path / "recordings" / "a" / "telemetry" / "n0", 0)
    scraped = []
    for at_s, scrapes in ((20, 0), (35.5, 0), (55.5, 0), (60, 1), (75.5, 0), (95.5, 0), (115.5, 0), (121.5, 1)):
        now_ns[0] = round(at_s * 1e9)
        followed.look()
        scraped += [covered[-1]] if scrapes else []
    (_, first_end_ns), (second_start_ns, _) = scraped
    assert first_end_ns < 60 * 10**9 and second_start_ns <= first_end_ns


def test_a_window_that_a_calibration_excludes_has_no_peak(tmp_path: Path, look_at: Callable[[float], Snapshot]) -> None:
    coarse = {"ring": {"finest_window_s": 0.5}, "fast": {"finest_window_s": 0.5}}
    write_calibration(tmp_path, {"uuid": "GPU-gpu0", "limits": coarse})
    devices = look_at(30.0).devices
    assert set(devices["gpu0"].peaks.since_start_w) == {"1s"}
    assert set(devices["gpu1"].peaks.since_start_w) == {"20ms", "100ms", "1s"}


def test_of_a_sampler_that_has_ended_nothing_is_shown(
    look_at: Callable[[float], Snapshot], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert look_at(30.0).devices
    monkeypatch.setattr(SamplerProcess, "alive", lambda _: False)
    ended = look_at(30.1)
    assert not ended.sampler_alive and ended.devices == {} and ended.host is None and ended.peaks.since_start_w == {}


def test_a_peak_stays_and_a_recent_one_goes() -> None:
    peaks, names = Peaks(), {"1s": "w", "20ms": "fine"}
    peaks.observe({"w": 700.0, "fine": 900.0}, names)
    peaks.observe({"w": 300.0}, names)
    assert peaks.since_start_w == {"1s": 700.0, "20ms": 900.0} and peaks.recent_w == {"1s": 300.0}


def test_time_with_an_unknown_cause_is_not_assessed_and_no_counter_falls() -> None:
    lost = ClockLost()
    unknown = Throttle(
        by_cause_frac={"thermal": 0.0},
        loss_by_cause_frac={"thermal": 0.0},
        any_frac=None,
        loss_frac=None,
        computing_loss_frac=None,
        deficit_frac=0.1,
    )
    assert ClockLost.of(unknown, 5.0) is None and ClockLost.of(None, 5.0) is None
    whole = ClockLost.of(replace(unknown, any_frac=0.5, loss_frac=0.25, loss_by_cause_frac={"power": 0.25}), 4.0)
    assert whole is not None
    lost.add(whole, ClockLost())
    assert (lost.assessed_s, lost.throttled_s, lost.lost_s, lost.lost_by_cause_s) == (4.0, 2.0, 1.0, {"power": 1.0})
    less = ClockLost.of(replace(unknown, any_frac=0.2, loss_frac=0.1, loss_by_cause_frac={"power": 0.1}), 5.0)
    assert less is not None
    lost.add(less, whole)
    assert (lost.assessed_s, lost.throttled_s, lost.lost_s, lost.lost_by_cause_s) == (5.0, 2.0, 1.0, {"power": 1.0})
