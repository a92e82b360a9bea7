"""Temperatures of devices at rest and warming."""

import numpy as np
import pytest
from runs import constant

from wattune.analysis.metrics.thermal import temperature_rise_c_per_min, thermal_metrics
from wattune.analysis.run_data import clocks_and_temperatures
from wattune.analysis.signals.align import align

DEVICES = [("n0", "gpu0"), ("n0", "gpu1"), ("n1", "gpu0")]


def tables(bench, temps, end_s=21.0):
    time_s = np.arange(-1.0, end_s, 0.05)
    slow_s = np.arange(0.5, end_s)
    return {
        "fast": bench.tier("fast", {d: {"time_s": time_s, "gpu_temp_c": w(time_s)} for d, w in temps.items()}),
        "slow": bench.tier(
            "slow",
            {
                d: {"time_s": slow_s, "memory_temp_c": w(slow_s) - 8, "thermal_margin_c": 89 - w(slow_s)}
                for d, w in temps.items()
            },
        ),
    }


def test_spread_is_within_a_node_and_maxima_are_over_all(bench):
    temps = dict(zip(DEVICES, map(constant, (50, 56, 70)), strict=True))
    aligned = align(tables(bench, temps), bench.steps(DEVICES), {})
    assert thermal_metrics(aligned, clocks_and_temperatures(aligned, None)[0], {}) == pytest.approx(
        {
            "device_temp_max_c": 70,
            "device_temp_mean_c": (50 + 56 + 70) / 3,
            "device_temp_spread_c": 6,
            "memory_temp_max_c": 62,
            "thermal_margin_min_c": 19,
        }
    )


def test_the_rise_is_that_of_the_fastest_warming_device_in_the_second_half(bench):
    temps = {DEVICES[0]: constant(50), DEVICES[1]: lambda t: np.where(t < 10, 40 + t, 50 + (t - 10) / 20)}
    aligned = align(tables(bench, temps), bench.steps(DEVICES[:2]), {})
    assert temperature_rise_c_per_min(clocks_and_temperatures(aligned, None)[0]) == pytest.approx(3.0, rel=1e-3)
