"""Peaks, coincidence, ramps and swing of waves whose answers are known."""

import numpy as np
import pytest

from wattune.analysis.metrics.power import power_metrics, powers_together
from wattune.analysis.signals.align import align

GPU = ("n0", "gpu0")
TWIN = ("n0", "gpu1")
FAR = ("n1", "gpu0")
PERIOD_S = 4.0


def square(phase_s=0.0, low=100.0, high=900.0, period_s=PERIOD_S):
    """Half of each period high; edges stand between samples, and last one interval of 20 ms."""
    return lambda time_s: np.where(np.mod(time_s - phase_s + 0.01, period_s) < period_s / 2, high, low)


def metrics_of(bench, tables, devices, manifests=None):
    aligned = align(tables, bench.steps(devices), manifests or {})
    return power_metrics(aligned, powers_together(aligned))


def test_a_square_wave_has_its_high_level_as_peak_half_way_as_mean_and_its_edge_as_ramp(bench):
    metrics = metrics_of(bench, {"ring": bench.ring({GPU: square()})}, [GPU])
    for window in ("20ms", "100ms", "1s"):
        assert metrics[f"device_power_peak_{window}_w"] == pytest.approx(900.0)
    assert metrics["device_power_mean_w"] == pytest.approx(500.0, rel=1e-3)
    assert metrics["power_coincidence_frac"] == pytest.approx(1.0)
    # Between neighbouring 100 ms means 800 W less 20 W on either side, as the edge takes one interval of 20 ms.
    assert metrics["power_ramp_max_w_per_s"] == pytest.approx(760.0 / 0.1)


def test_the_mean_is_over_devices_and_the_peak_the_worst_ones(bench):
    waves = {GPU: square(high=900.0), TWIN: square(high=300.0)}
    metrics = metrics_of(bench, {"ring": bench.ring(waves)}, list(waves))
    assert metrics["device_power_mean_w"] == pytest.approx((500.0 + 200.0) / 2, rel=1e-3)
    assert metrics["device_power_peak_1s_w"] == pytest.approx(900.0)
    assert metrics["node_device_power_mean_w"] == pytest.approx(700.0, rel=1e-3)


@pytest.mark.parametrize(
    ("phase_s", "peak_w", "coincidence"), [(0.0, 1800.0, 1.0), (PERIOD_S / 2, 1000.0, 1000 / 1800)]
)
def test_two_nodes_in_and_out_of_phase(make_bench, phase_s, peak_w, coincidence):
    bench = make_bench(mono_0_s={"n0": 10, "n1": 999}, wall_ahead_s={"n1": -3.0})
    waves = {GPU: square(), FAR: square(phase_s)}
    manifests = {"n0": {"clock_offset_ns": 0}, "n1": {"clock_offset_ns": -3_000_000_000}}
    metrics = metrics_of(bench, {"ring": bench.ring(waves)}, list(waves), manifests)
    assert metrics["cluster_device_power_peak_1s_w"] == pytest.approx(peak_w)
    assert metrics["power_coincidence_frac"] == pytest.approx(coincidence)
    assert metrics["node_device_power_peak_1s_w"] == pytest.approx(900.0)


def test_a_shared_package_is_summed_once_and_split_between_its_devices(bench):
    manifests = {"n0": {"devices": {name: {"power_domain": "p", "power_limit_w": 500.0} for name in ("gpu0", "gpu1")}}}
    tables = {"ring": bench.ring({GPU: square(), TWIN: square()})}
    metrics = metrics_of(bench, tables, [GPU, TWIN], manifests)
    assert metrics["node_device_power_peak_1s_w"] == pytest.approx(900.0)
    assert metrics["device_power_peak_1s_w"] == pytest.approx(450.0)
    assert metrics["device_power_limit_w"] == 250.0


@pytest.mark.parametrize(("frequency_hz", "inside"), [(0.5, True), (5.0, True), (15.0, True), (0.02, False)])
def test_swing_is_the_rms_of_a_sine_in_the_band(bench, frequency_hz, inside):
    wave = lambda t: 500 + 100 * np.sin(2 * np.pi * frequency_hz * t)  # noqa: E731
    metrics = metrics_of(bench, {"ring": bench.ring({GPU: wave})}, [GPU])
    if inside:
        assert metrics["power_swing_rms_w"] == pytest.approx(100 / np.sqrt(2), rel=0.02)
    else:
        assert metrics["power_swing_rms_w"] < 8.0


def swing_of(bench, time_s, power_w, facts=None):
    fast = bench.tier("fast", {GPU: {"time_s": time_s, "power_instant_w": power_w}})
    manifests = {"n0": {"devices": {"gpu0": facts or {}}}}
    return metrics_of(bench, {"fast": fast}, [GPU], manifests)["power_swing_rms_w"]


@pytest.mark.parametrize("frequency_hz", [1.0, 4.0, 8.0])
def test_swing_of_power_that_is_a_counters_rise_is_that_of_the_power(bench, frequency_hz):
    time_s = np.arange(-1.0, 21.0, 0.05)
    turn = 2 * np.pi * frequency_hz
    energy_j = 500 * time_s - 100 / turn * np.cos(turn * time_s)
    power_w = np.diff(energy_j, prepend=energy_j[0] - 25.0) / 0.05
    swing_w = swing_of(bench, time_s, power_w, {"power_from_energy_counter": True})
    assert swing_w == pytest.approx(100 / np.sqrt(2), rel=0.03)


def test_what_the_sensor_does_not_resolve_is_absent(bench):
    metrics = metrics_of(bench, {"ring": bench.ring({GPU: square()}, period_s=0.2)}, [GPU])
    assert "device_power_peak_20ms_w" not in metrics
    assert "device_power_peak_100ms_w" not in metrics
    assert "power_ramp_max_w_per_s" not in metrics
    assert metrics["device_power_peak_1s_w"] == pytest.approx(900.0)


def test_the_limit_is_the_lowest_read_in_the_window(bench):
    time_s = np.arange(-5.0, 25.0)
    limit_w = np.where(time_s < 0, 300.0, np.where(time_s < 10, 650.0, 700.0))
    slow = bench.tier("slow", {GPU: {"time_s": time_s, "power_limit_w": limit_w}})
    assert (
        metrics_of(bench, {"ring": bench.ring({GPU: square()}), "slow": slow}, [GPU])["device_power_limit_w"] == 650.0
    )


def limits_manifest(tier, finest_window_s):
    return {"n0": {"devices": {"gpu0": {"sensor_limits": {tier: {"finest_window_s": finest_window_s}}}}}}


def test_a_calibrated_sensor_gives_only_windows_it_resolves(bench):
    """A ring of 20 ms samples whose values are means of 0.3 s tells no 20 or 100 ms peak, whatever its spacing."""
    tables = {"ring": bench.ring({GPU: square()})}
    coarse = metrics_of(bench, tables, [GPU], limits_manifest("ring", 0.3))
    assert "device_power_peak_1s_w" in coarse
    assert "device_power_peak_100ms_w" not in coarse
    assert "device_power_peak_20ms_w" not in coarse
    assert metrics_of(bench, tables, [GPU], limits_manifest("ring", 0.039)) == metrics_of(bench, tables, [GPU])
