"""Real H200 readings through backend, sampler process, store and analysis, held against the recording they are from."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from recorded import record
from runs import run_data

from wattune.analysis.run_data import RunData
from wattune.analysis.summary import Summary, metrics_by_device, summarize
from wattune.recording.recording import load
from wattune.storage.measured import MeasuredFolder

DP4 = Path(__file__).parent / "h200x4" / "dp4"
SECONDS = 7
START_S = 18.6
"""The load runs from 18.5 to 33.5 s."""


def samples(table: pa.Table, device: str) -> tuple[np.ndarray, np.ndarray]:
    """A device's ring: when the sensor took each sample on the monotonic clock, and watts."""
    own = table.filter(pc.equal(table["device"].cast(pa.string()), device))
    sensor_ns = own["sensor_ns"].to_numpy() - (own["wall_ns"].to_numpy() - own["mono_ns"].to_numpy())
    sensor_ns, first = np.unique(sensor_ns, return_index=True)
    return sensor_ns, own["power_w"].to_numpy()[first]


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> RunData:
    folder = tmp_path_factory.mktemp("replayed")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WATTUNE_RUNTIME", str(folder / "runtime"))
        path = record(
            ["sleep", str(SECONDS)], storage=folder, backends=[f"replay:{DP4}?start_s={START_S}"], name="dp4-again"
        )
    return replace(load(path), tables=MeasuredFolder(path).telemetry())


@pytest.fixture(scope="module")
def own(played: RunData) -> Summary:
    """The recording's own summary of the stretch that was played while the command ran."""
    golden = MeasuredFolder(DP4).telemetry()
    played_ns, played_w = samples(played.tables["ring"], "gpu0")
    recorded_ns, recorded_w = samples(golden["ring"], "gpu0")
    (found,) = np.flatnonzero(np.all(np.lib.stride_tricks.sliding_window_view(recorded_w, 50) == played_w[:50], axis=1))
    assert played.window is not None
    wall = golden["slow"]
    wall_ns = wall["wall_ns"][0].as_py() - wall["mono_ns"][0].as_py()
    here_ns = played.tables["ring"]["wall_ns"][0].as_py() - played.tables["ring"]["mono_ns"][0].as_py()
    shift_ns = int(recorded_ns[found] - played_ns[0]) + wall_ns - here_ns
    window = played.window[0] + shift_ns, played.window[1] + shift_ns
    return summarize(run_data(None, None, golden, MeasuredFolder(DP4).manifests(), window=window))


@pytest.mark.parametrize("device", ["gpu0", "gpu1", "gpu2", "gpu3"])
def test_no_sample_is_lost_doubled_or_moved(played: RunData, device: str) -> None:
    played_ns, played_w = samples(played.tables["ring"], device)
    recorded_ns, recorded_w = samples(MeasuredFolder(DP4).telemetry()["ring"], device)
    assert len(played_w) > 50 * 0.9 * SECONDS
    windows = np.lib.stride_tricks.sliding_window_view(recorded_w, len(played_w))
    (found,) = np.flatnonzero(np.all(windows == played_w, axis=1))
    moved_ns = played_ns - recorded_ns[found : found + len(played_ns)]
    assert np.ptp(moved_ns) < 1_000_000  # the two clock reads of each drain stand some microseconds apart


@pytest.mark.parametrize(
    ("metric", "tolerance_frac"),
    [
        ("device_power_mean_w", 0.001),
        ("device_power_peak_20ms_w", 0.0001),
        ("device_power_peak_100ms_w", 0.001),
        ("device_power_peak_1s_w", 0.001),
        ("node_device_power_peak_100ms_w", 0.002),
        ("node_device_power_peak_1s_w", 0.001),
        ("device_temp_max_c", 0.03),
        ("nvlink_bytes_per_s", 0.02),
        ("tensor_active_frac", 0.05),
        ("throttle_loss_frac", 0.05),
        ("device_power_limit_w", 0.0),
    ],
)
def test_the_figures_are_the_recordings_own(played: RunData, own: Summary, metric: str, tolerance_frac: float) -> None:
    assert summarize(played).metrics[metric] == pytest.approx(own.metrics[metric], rel=tolerance_frac)


def test_it_is_right_and_no_new_measurement(played: RunData) -> None:
    summary = summarize(played)
    assert summary.quality == "indicative" and "replayed" in summary.quality_reasons
    assert summary.tags["simulated"] == "false"
    for tier, table in played.tables.items():
        assert table.schema.metadata[b"wattune.backend"] == b"replay", tier
    energy_j = played.examined.energy_j
    assert energy_j == pytest.approx(4 * summary.metrics["device_power_mean_w"] * played.window_s, rel=1e-6)


def test_every_device_has_its_own_figures(played: RunData) -> None:
    devices = played.devices
    assert [name for _, name in devices] == ["gpu0", "gpu1", "gpu2", "gpu3"]
    each = list(metrics_by_device(played).values())
    whole = summarize(played).metrics
    assert max(one["device_power_peak_100ms_w"] for one in each) == pytest.approx(whole["device_power_peak_100ms_w"])
    assert np.mean([one["device_power_mean_w"] for one in each]) == pytest.approx(whole["device_power_mean_w"])
