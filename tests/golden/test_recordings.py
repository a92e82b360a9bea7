"""Figures of real H200 traces. A reference is a value, how far below and above it may be read, and its unit.

The traces and what is said of them are in `h200x4/README.md`. Changing a reference is a decision, not a repair.
"""

import math
from functools import cache
from pathlib import Path

import numpy as np
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from runs import run_data

from wattune.analysis.detail import Detail, detail_of
from wattune.analysis.metrics.energy import powers
from wattune.analysis.metrics.thermal import temperature_rise_c_per_min
from wattune.analysis.run_data import clocks_and_temperatures
from wattune.analysis.signals.align import align
from wattune.analysis.summary import Summary, node_power_series, summarize
from wattune.catalog.hardware import ClusterSpec
from wattune.catalog.models import ModelSpec
from wattune.cost.temperature import H200
from wattune.plans.axes import Plan
from wattune.run import PUBLISHABLE
from wattune.storage.measured import MeasuredFolder
from wattune.trial import TrialSpec
from wattune.units import unit_of
from wattune.workload import Workload

FOLDER = Path(__file__).parent / "h200x4"
RECORDINGS = ("dp4", "tp2pp2", "square_inphase")

MODEL = ModelSpec(
    name="recorded",
    num_layers=8,
    hidden_size=4096,
    ffn_hidden_size=14336,
    num_heads=32,
    num_kv_heads=8,
    vocab_size=32000,
)
"""The dense decoder of the manifests' `load`."""

PLANS = {"dp4": Plan(overlap="grad_param"), "tp2pp2": Plan(tp=2, pp=2)}

# Recording, metric: value, low_frac, high_frac, unit. Rows marked README are figures its author published of the trace.
REFERENCES = [
    ("dp4", "device_power_mean_w", 692.0, 0.001, 0.001, "W"),  # README
    ("dp4", "device_power_peak_20ms_w", 931.0, 0.001, 0.001, "W"),  # README
    ("dp4", "node_device_power_peak_1s_w", 2788.0, 0.001, 0.001, "W"),  # README
    ("dp4", "throttle_loss_frac", 0.1602, 0.002, 0.002, "1"),  # of README's 0.17, the part near the cap
    ("dp4", "clock_deficit_frac", 0.17, 0.03, 0.03, "1"),  # README
    ("dp4", "throttle_frac", 0.9330, 0.002, 0.002, "1"),
    ("dp4", "power_cap_active_frac", 1.0, 0.01, 0.0, "1"),  # README: practically the whole of any busy load
    ("dp4", "device_power_limit_w", 700.0, 0.0, 0.0, "W"),  # README
    ("dp4", "device_temp_max_c", 61.0, 0.0, 0.0, "degC"),
    ("dp4", "step_time_s", 0.3965, 0.005, 0.005, "s"),
    ("dp4", "excursion_count", 80.0, 0.0, 0.0, "1"),
    # By sums over a grid of 10 us and a loop, not by this package.
    ("dp4", "excursion_energy_j", 330.02, 1e-4, 1e-4, "J"),
    ("dp4", "excursion_time_frac", 0.12382, 1e-4, 1e-4, "1"),
    ("tp2pp2", "excursion_count", 35.0, 0.0, 0.0, "1"),
    ("tp2pp2", "excursion_energy_j", 110.30, 1e-4, 1e-4, "J"),
    ("tp2pp2", "excursion_peak_over_limit_frac", 0.08304, 1e-4, 1e-4, "1"),
    ("square_inphase", "excursion_count", 124.0, 0.0, 0.0, "1"),
    ("square_inphase", "excursion_energy_j", 1110.81, 1e-4, 1e-4, "J"),
    ("dp4", "energy_per_step_j", 1096.0, 0.001, 0.001, "J"),
    ("tp2pp2", "node_device_power_peak_1s_w", 2644.0, 0.001, 0.001, "W"),  # README
    ("tp2pp2", "clock_deficit_frac", 0.05, 0.09, 0.09, "1"),  # README, whole percents
    ("tp2pp2", "throttle_loss_frac", 0.0296, 0.005, 0.005, "1"),  # of README's 0.05, the part near the cap
    ("tp2pp2", "throttle_frac", 0.345, 0.005, 0.005, "1"),
    ("tp2pp2", "power_cap_active_frac", 1.0, 0.01, 0.0, "1"),  # README
    ("tp2pp2", "throttle_thermal_frac", 0.0, 0.0, 0.0, "1"),
    ("tp2pp2", "device_temp_max_c", 61.0, 0.0, 0.0, "degC"),
    ("square_inphase", "node_device_power_peak_100ms_w", 3309.0, 0.001, 0.001, "W"),  # README
    ("square_inphase", "node_device_power_mean_w", 1801.0, 0.001, 0.001, "W"),  # README
    ("square_inphase", "node_device_power_peak_1s_w", 1800.0, 0.002, 0.002, "W"),
    ("square_inphase", "power_cap_active_frac", 1.0, 0.01, 0.0, "1"),  # README
]


def spec_of(recording: str) -> TrialSpec | None:
    if recording not in PLANS:
        return None
    return TrialSpec(
        model=MODEL,
        cluster=ClusterSpec(device="h200_sxm", devices_per_node=4),
        engine="megatron",
        workload=Workload(seq_len=4096, global_batch_size=16),
        plan=PLANS[recording],
    )


@cache
def summary(recording: str) -> Summary:
    folder = MeasuredFolder(FOLDER / recording)
    return summarize(run_data(spec_of(recording), folder.spans(), folder.telemetry(), folder.manifests()))


@cache
def details(recording: str) -> Detail:
    folder = MeasuredFolder(FOLDER / recording)
    examined = run_data(spec_of(recording), folder.spans(), folder.stored(), folder.manifests()).examined
    assert examined is not None
    return detail_of(examined)


@cache
def aligned(recording: str):
    folder = MeasuredFolder(FOLDER / recording)
    return align(folder.telemetry(), folder.spans(), folder.manifests())


@pytest.mark.parametrize(("recording", "metric", "value", "low_frac", "high_frac", "unit"), REFERENCES)
def test_figures(recording, metric, value, low_frac, high_frac, unit):
    assert unit_of(metric) == unit
    got = summary(recording).metrics[metric]
    low, high = value * (1 - low_frac), value * (1 + high_frac)
    assert low <= got <= high, f"{recording} {metric}: {got:.6g} {unit}, reference {low:.6g} to {high:.6g} {unit}"


@pytest.mark.parametrize("recording", RECORDINGS)
def test_integrated_power_agrees_with_the_energy_counters(recording):
    # README: within 0.2 % over 15 s, all devices together.
    assert summary(recording).metrics["energy_integral_error_frac"] <= 0.002


@pytest.mark.parametrize("recording", RECORDINGS)
def test_real_traces_are_publishable_but_for_their_temperatures(recording):
    found = summary(recording)
    assert found.quality == PUBLISHABLE
    assert found.quality_reasons == ("short_for_thermal", "warming")
    assert found.tags["quality_thermal"] == "indicative"
    assert found.tags["simulated"] == "false"
    assert found.tags["power_source"] == "ring"
    assert found.metrics["sample_coverage_frac"] == 1.0
    assert found.metrics["sensor_period_s"] == pytest.approx(0.02, rel=0.01)


def test_the_last_stage_of_a_pipeline_takes_more_power_and_clocks_lower():
    traces = {trace.devices[0][1]: trace.series.mean() for trace in powers(aligned("tp2pp2")).traces}
    assert traces["gpu0"] == pytest.approx(624.0, abs=0.5)  # README: first stage
    assert traces["gpu3"] == pytest.approx(666.0, abs=0.5)  # README: last stage
    clock_mhz = {
        device[1]: readings.series("sm_clock_mhz").clip(0.0, aligned("tp2pp2").duration_s).mean()
        for device, readings in aligned("tp2pp2").tiers["fast"].items()
    }
    stages_mhz = [(clock_mhz["gpu0"] + clock_mhz["gpu1"]) / 2, (clock_mhz["gpu2"] + clock_mhz["gpu3"]) / 2]
    assert stages_mhz[0] - stages_mhz[1] == pytest.approx(100.0, rel=0.15)  # README: 100 MHz slower


def test_outer_slots_run_hotter_at_the_same_power():
    temps_c = {
        device[1]: readings.series("gpu_temp_c").clip(0.0, aligned("dp4").duration_s).mean()
        for device, readings in aligned("dp4").tiers["fast"].items()
    }
    for hot in ("gpu0", "gpu3"):
        for cool in ("gpu1", "gpu2"):
            assert 3.0 <= temps_c[hot] - temps_c[cool] <= 6.0  # README: 3 to 6 °C
    assert summary("dp4").metrics["device_temp_spread_c"] == pytest.approx(5.04, abs=0.02)


def test_temperatures_still_climb_at_the_end():
    assert 3.0 <= temperature_rise_c_per_min(clocks_and_temperatures(aligned("dp4"), None)[0]) <= 15.0


def test_the_power_cap_counter_is_no_measure_of_throttling():
    """It runs all the time, also where two thirds of the clock samples or half the devices lose next to nothing."""
    for recording in RECORDINGS:
        found = summary(recording).metrics
        assert found["power_cap_active_frac"] > 0.99
        assert found["throttle_thermal_frac"] == found["thermal_active_frac"] == 0.0
    found = summary("tp2pp2").metrics
    assert found["throttle_loss_frac"] < 0.6 * found["clock_deficit_frac"] < 0.06
    # Neither half of the first stage is near its cap: nearly all loss is the last stage's.
    lost = dict(zip(details("tp2pp2").slots["slot"].to_pylist(), column("tp2pp2", "throttle_frac"), strict=True))
    assert lost[0] + lost[1] < 0.3 < lost[2] + lost[3]


def test_the_square_wave_swings_at_its_own_period():
    time_s, watts = node_power_series(aligned("square_inphase"), window_s=0.02)["node0"]
    spectrum = np.abs(np.fft.rfft(watts - watts.mean()))
    frequency_hz = np.fft.rfftfreq(len(watts), float(time_s[1] - time_s[0]))
    assert frequency_hz[spectrum.argmax()] == pytest.approx(2.0, abs=0.07)
    assert summary("square_inphase").metrics["power_swing_rms_w"] > 1000.0
    assert summary("square_inphase").metrics["power_coincidence_frac"] == pytest.approx(0.99, abs=0.01)


def test_without_its_ring_the_square_wave_swings_as_much_up_to_5_hz():
    """1,135 W of the ring's 1,231 W; a wave has no other line below the Nyquist frequency of the 100 ms of `fast`."""
    folder = MeasuredFolder(FOLDER / "square_inphase")
    tables = {tier: table for tier, table in folder.telemetry().items() if tier != "ring"}
    found = summarize(run_data(None, folder.spans(), tables, folder.manifests()))
    assert found.tags["power_source"] == "fast" and found.metrics["sensor_period_s"] == pytest.approx(0.1, rel=0.01)
    assert found.metrics["power_swing_rms_w"] == pytest.approx(1135, rel=0.02)


@pytest.mark.parametrize("recording", RECORDINGS)
def test_every_metric_is_finite_and_shares_are_shares(recording):
    for name, value in summary(recording).metrics.items():
        assert math.isfinite(value), name
        if name.endswith("_frac"):
            assert 0.0 <= value <= 1.0, name


def test_spans_of_steps_alone_leave_the_decomposition_out():
    for recording in PLANS:
        assert "compute_frac" not in summary(recording).metrics


def test_a_pipeline_recorded_by_its_steps_alone_has_its_time_undivided():
    """`tp2pp2` has spans of steps, so nobody knows how long a stage computed: the parts are absent, not 0."""
    found = details("tp2pp2").breakdown
    assert [*found.parts] == ["undivided", "other"]
    assert found.parts["undivided"][0] == pytest.approx(summary("tp2pp2").metrics["step_time_s"], rel=0.02)
    absent = {f"{name}_frac" for name in ("compute", "exposed_comm", "bubble", "straggler", "other")}
    assert not absent & summary("tp2pp2").metrics.keys()


def test_clock_lost_by_stage_of_the_pipeline():
    deficits = dict(
        zip(details("tp2pp2").slots["slot"].to_pylist(), column("tp2pp2", "clock_deficit_frac"), strict=True)
    )
    first, last = (deficits[0] + deficits[1]) / 2, (deficits[2] + deficits[3]) / 2
    # The last stage loses 100 of 1,980 MHz more (README), both together the 5 % of the whole.
    assert last - first == pytest.approx(100 / 1980, rel=0.15)
    assert (first + last) / 2 == pytest.approx(0.05, abs=0.005)


def column(recording: str, name: str) -> list[float]:
    return details(recording).slots[name].to_pylist()


def test_slots_are_in_order_and_hold_what_devices_did():
    slots = details("dp4").slots
    assert slots["slot"].to_pylist() == [0, 1, 2, 3]
    assert column("dp4", "power_mean_w") == pytest.approx([692.7, 692.9, 690.6, 691.2], abs=0.5)
    assert max(column("dp4", "temp_max_c")) == summary("dp4").metrics["device_temp_max_c"]
    assert max(column("dp4", "power_peak_1s_w")) == pytest.approx(summary("dp4").metrics["device_power_peak_1s_w"])


@pytest.mark.parametrize("recording", RECORDINGS)
def test_energy_of_ranks_phases_and_steps_is_the_energy_of_the_whole(recording):
    found, whole_j = (
        details(recording),
        summary(recording).metrics["energy_per_step_j"] * details(recording).steps.num_rows,
    )
    assert sum(found.phases["energy_j"].to_pylist()) == pytest.approx(whole_j, rel=1e-9)
    assert sum(found.steps["energy_j"].to_pylist()) == pytest.approx(whole_j, rel=1e-9)
    assert found.breakdown.step_energy_j * found.steps.num_rows == pytest.approx(whole_j, rel=1e-9)
    assert len(set(found.phases["rank"].to_pylist())) == 4


def test_an_uneven_pipeline_and_hot_slots_are_no_outliers():
    assert summary("dp4").metrics["device_outlier_frac"] < 0.02
    # 624 W and 666 W between stages. Each rank has a stage and a slice of its own: none has a peer.
    assert "device_outlier_frac" not in summary("tp2pp2").metrics
    assert details("tp2pp2").outliers == ()
    assert all("outlier" not in summary(recording).tags for recording in RECORDINGS)


@pytest.mark.parametrize("recording", RECORDINGS)
def test_nothing_is_called_saturated_or_unsteady_that_was_not(recording):
    found = summary(recording)
    assert not {"saturated", "steady_from_step", "thermally_settled_from_s"} & (found.tags | found.numbers.known).keys()
    nvlink = [one for one in details(recording).saturation if one.what == "nvlink"]
    assert all(0 < one.achieved_frac < 0.2 for one in nvlink)


def test_excursions_and_throttling_are_listed_as_they_are_counted():
    excursions, metrics = details("dp4").excursions, summary("dp4").metrics
    assert excursions.num_rows == metrics["excursion_count"] == 80
    assert sum(excursions["energy_j"].to_pylist()) == pytest.approx(metrics["excursion_energy_j"])
    assert max(excursions["peak_w"].to_pylist()) / 700 - 1 == pytest.approx(metrics["excursion_peak_over_limit_frac"])
    throttles = details("tp2pp2").throttles
    assert set(throttles["cause"].to_pylist()) == {"power"}
    lost_s = sum(
        a * b
        for a, b in zip(throttles["duration_s"].to_pylist(), throttles["clock_lost_frac"].to_pylist(), strict=True)
    )
    window_s = summary("tp2pp2").numbers.window_s
    assert lost_s / 4 / window_s == pytest.approx(summary("tp2pp2").metrics["throttle_power_loss_frac"], rel=0.02)
    assert all(45 <= celsius <= 61 for celsius in throttles["onset_temp_c"].to_pylist())


def test_mean_temperatures_go_with_mean_powers_where_a_load_comes_and_goes():
    """A square wave's hottest readings are 8 K above its mean, and what they say of a cooler is a third too little."""
    settled = {}
    for name in ("square_inphase", "dp4"):
        folder = MeasuredFolder(FOLDER / name)
        spans = pq.read_table(FOLDER / name / "spans.parquet")
        window = pc.min(spans["start_wall_ns"]).as_py(), pc.max(spans["end_wall_ns"]).as_py()
        examined = run_data(None, None, folder.telemetry(), folder.manifests(), window=window).examined
        settled[name] = [
            (examined.traces[where][0].mean_w, one.mean_c, one.settled_c) for where, one in examined.settled.items()
        ]
    low, high = (np.array(settled[name]) for name in ("square_inphase", "dp4"))
    by_mean, by_hottest = ((high - low)[:, column] / (high - low)[:, 0] for column in (1, 2))
    known = sum(H200.resistances_k_per_w), H200.preheat_k_per_w
    assert (by_mean > known[0]).all() and (by_mean < sum(known) + 0.015).all()
    assert (by_hottest < known[0]).all()
