"""Temperatures predicted from power, with the inlet that devices at rest tell, against recorded series."""

from dataclasses import replace
from pathlib import Path
from typing import Final

import numpy as np
import pyarrow.parquet as pq
import pytest
from host_temperature import HostFit, Trace, recording, run, study_trace
from specs import trial_spec

from wattune.arrays import Floats
from wattune.cost.batch import batches
from wattune.cost.temperature import H200, inlet_at_rest, predict
from wattune.placement.slots import SlotReading, fit_map

BENCHMARKS: Final = Path(__file__).parents[2] / "benchmarks"
REST: Final = 20
"""Seconds of rest that each series begins with."""


def inlet_of(trace: Trace, rest: int = REST) -> float:
    """Computes the median over devices, as `wattune doctor` does."""
    means = zip(trace.temp_c[:, :rest].mean(1), trace.power_w[:, :rest].mean(1), strict=True)
    return float(np.median([inlet_at_rest(temp_c, power_w, H200) for temp_c, power_w in means]))


def warmest_error_k(trace: Trace, inlet_c: float) -> Floats:
    """Computed less read temperature of the warmest device, second by second."""
    known = replace(H200, inlet_c=inlet_c)
    fit = HostFit(coefficients=known, preheat_k_per_w=(known.preheat_k_per_w,) * len(trace.power_w))
    read = np.all(np.isfinite(trace.temp_c), axis=0)
    return (run(fit, trace.power_w).max(0) - trace.temp_c.max(0))[read]


def steady_c(trace: Trace, seconds: slice, inlet_c: float | None) -> float:
    """Estimates from the mean power of some seconds."""
    return steady_of(trace.power_w[:, seconds].mean(1), inlet_c)


def steady_of(mean_w: Floats, inlet_c: float | None) -> float:
    """Estimates from the mean power of each device."""
    ((_, batch),) = batches([trial_spec(on=f"1x{len(mean_w)} h200_sxm", inlet_c=inlet_c)])
    return float(predict(batch, mean_w.max(keepdims=True), mean_w.sum(keepdims=True), H200).value[0])


@pytest.mark.parametrize(
    ("name", "inlet_c", "without_k", "known_k"),
    [("soak_llama_h200x2", 34.6, 4.2, 0.9), ("moe_ep_h200x4", 34.7, 5.3, 1.8)],
)
def test_an_h200_is_within_two_kelvin_second_by_second(name, inlet_c, without_k, known_k) -> None:
    trace = study_trace(name)
    assert inlet_of(trace) == pytest.approx(inlet_c, abs=0.1)
    for inlet, p95_k in ((H200.inlet_c, without_k), (inlet_c, known_k)):
        assert np.percentile(np.abs(warmest_error_k(trace, inlet)), 95) == pytest.approx(p95_k, abs=0.1)


@pytest.mark.parametrize(("name", "without_k"), [("dp4", 5.8), ("tp2pp2", 5.1), ("square_inphase", 4.4)])
def test_another_h200_host_is_within_the_four_kelvin_that_an_estimate_states(name, without_k) -> None:
    trace = recording(name)
    inlet_c = inlet_of(trace, rest=1)  # it rests for a second only
    assert 25 < inlet_c < 28
    assert np.percentile(np.abs(warmest_error_k(trace, H200.inlet_c)), 95) == pytest.approx(without_k, abs=0.1)
    assert np.percentile(np.abs(warmest_error_k(trace, inlet_c)), 95) < 3.5 < H200.with_inlet(inlet_c).error_k


@pytest.mark.parametrize(
    ("name", "seconds", "read_c", "usual_k", "known_k"),
    [
        ("soak_llama_h200x2", slice(150, 210), 67.5, -2.4, 1.2),
        ("soak_matmul_h100x2", slice(75, 90), 81.1, -15.8, -6.1),  # before its fans answer
        ("soak_matmul_h100x2", slice(238, 248), 73.1, -7.8, 1.9),  # after
    ],
)
def test_the_steady_estimate_with_the_inlet_at_rest(name, seconds, read_c, usual_k, known_k) -> None:
    trace = study_trace(name)
    assert np.nanmean(trace.temp_c[:, seconds], axis=1).max() == pytest.approx(read_c, abs=0.1)
    for inlet_c, error_k in ((None, usual_k), (inlet_of(trace), known_k)):
        assert steady_c(trace, seconds, inlet_c) - read_c == pytest.approx(error_k, abs=0.2)


@pytest.mark.parametrize(
    ("table", "num_rows", "usual_k", "known_k"),
    [
        ("dense_llama_h100x2", 32, -10.1, -0.1),
        ("moe_ep_h100x2", 33, -10.2, -0.3),
        ("dense_llama_minute_h100x2", 1, -8.8, 1.0),
        ("dense_llama_repeats_h100x2", 23, -4.7, 5.0),  # devices 4 K apart, not 10
    ],
)
def test_the_inlet_of_two_h100s_explains_the_hottest_readings_of_other_tables(
    table, num_rows, usual_k, known_k
) -> None:
    names = ["device_power_mean_w", "device_temp_max_c"]
    found = pq.read_table(BENCHMARKS / "data" / f"{table}.parquet", columns=names).to_pandas().dropna().to_numpy()
    inlet_at_rest_c = inlet_of(study_trace("soak_matmul_h100x2"))
    assert len(found) == num_rows
    for inlet_c, error_k in ((None, usual_k), (inlet_at_rest_c, known_k)):
        errors = [steady_of(np.full(2, mean_w), inlet_c) - hottest_c for mean_w, hottest_c in found]
        assert np.median(errors) == pytest.approx(error_k, abs=0.2)


def test_the_map_tells_inlet_and_resistance_of_two_real_slots() -> None:
    """Seven half minutes of a soak stand for runs: the inlet is what rest tells, and one slot cools less well."""
    trace, readings = study_trace("soak_llama_h200x2"), []
    for begin in range(0, 224 - 30, 30):
        for slot in range(2):
            warm_c = float(trace.temp_c[slot, begin + 15 : begin + 30].mean())
            mean_w = float(trace.power_w[slot, begin : begin + 30].mean())
            if np.isfinite(warm_c):
                readings.append(SlotReading(str(begin), ("a", slot, ""), ("t", slot), begin, 1.0, True, warm_c, mean_w))
    rows = fit_map(readings).rows
    assert all(abs(one["inlet_c"] - inlet_of(trace)) < one["inlet_half_k"] < 2 for one in rows)
    assert [one["resistance_k_per_w"] for one in rows] == pytest.approx([0.0458, 0.0364], abs=1e-3)
    assert all(one["resistance_half_k_per_w"] < 0.0035 for one in rows)
