"""Odd devices are found, and devices that do other work are not taken for odd."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from runs import run_data
from specs import trial_spec

from wattune.analysis.metrics.outlier import BROKEN_FRAC, VARIES_FRAC, _compared
from wattune.analysis.summary import summarize
from wattune.catalog.hardware import ClusterSpec
from wattune.catalog.models import MODELS
from wattune.plans.axes import Plan
from wattune.run import INDICATIVE, INVALID, PUBLISHABLE

DEVICES = [("n0", f"gpu{index}") for index in range(4)]
FAST_S = np.arange(-1.0, 21.0, 0.05)


def spec(plan=None, num_devices=4):
    return trial_spec(on=f"1x{num_devices} h200_sxm", plan=plan or Plan())


def trial(bench, *, clocks=(1900,) * 4, watts=(600.0,) * 4, busy_s=(0.7,) * 4, spec_=None):
    devices = DEVICES[: len(clocks)]
    slow_s = np.arange(-0.6, 21.0)
    fast = {
        d: {"time_s": FAST_S, "sm_clock_mhz": np.full(len(FAST_S), mhz)} for d, mhz in zip(devices, clocks, strict=True)
    }
    tables = {
        "ring": bench.ring({d: (lambda t, w=w: np.full(len(t), w)) for d, w in zip(devices, watts, strict=True)}),
        "fast": bench.tier("fast", fast),
        "slow": bench.tier(
            "slow", {d: {"time_s": slow_s, "energy_j": w * (slow_s + 2)} for d, w in zip(devices, watts, strict=True)}
        ),
    }
    spans = []
    for rank, (device, busy) in enumerate(zip(devices, busy_s, strict=True)):
        for step in range(20):
            spans += [
                (device, rank, step, "step", step, step + 1),
                (device, rank, step, "forward", step, step + busy),
                (device, rank, step, "wait", step + busy, step + 0.98),
            ]
    return summarize(run_data(spec_ or spec(), bench.spans(spans), tables, {}))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"clocks": (1900, 1900, 400, 1900)}, "n0/gpu2: sm_clock_mhz 400"),
        ({"watts": (600.0, 120.0, 600.0, 600.0)}, "n0/gpu1: power_w 120"),
        ({"busy_s": (0.2, 0.2, 0.2, 0.8)}, "n0/gpu3: compute_time_s 0.8"),
    ],
)
def test_one_device_far_from_its_peers_makes_the_trial_invalid_and_is_named(bench, change, named):
    found = trial(bench, **change)
    assert (found.quality, found.quality_reasons) == (INVALID, ("device_outlier",))
    assert found.tags["outlier"].startswith(named)


def test_what_sound_devices_vary_by_is_publishable_and_more_is_indicative(bench):
    for slow_mhz, quality in (
        (1900 / (1 + 0.95 * VARIES_FRAC), PUBLISHABLE),
        (1900 / (1 + 0.9 * BROKEN_FRAC), INDICATIVE),
    ):
        assert trial(bench, clocks=(1900, 1900, 1900, slow_mhz)).quality == quality


def experts(**axes):
    """Four devices and Mixtral, its experts on two ranks: ranks 0 and 2 hold the same, and 1 and 3."""
    return replace(spec(Plan(ep=2, **axes)), model=MODELS["mixtral_8x7b"])


def test_busy_experts_are_imbalance_and_no_broken_device(bench):
    busy = {"clocks": (1500, 1950, 1500, 1950), "watts": (690.0, 450.0, 695.0, 440.0)}
    found = trial(bench, **busy, spec_=experts())
    assert found.quality == PUBLISHABLE
    assert found.metrics["device_outlier_frac"] == pytest.approx(450 / 440 - 1, abs=1e-3)
    # Without experts the ranks do the same work, and with them two that hold the same must agree.
    assert trial(bench, **busy).quality == INVALID
    assert trial(bench, clocks=(1500, 1950, 600, 1950), spec_=experts()).quality == INVALID


def test_slices_of_a_tensor_are_compared_between_replicas_alone(bench):
    slices = {"clocks": (1950, 1100, 1950, 1100)}
    assert trial(bench, **slices, spec_=spec(Plan(tp=2))).quality == PUBLISHABLE
    assert trial(bench, clocks=(1950, 1950, 1950, 1100), spec_=spec(Plan(tp=2))).quality == INVALID
    alone = trial(bench, **slices, spec_=spec(Plan(tp=2, pp=2)))
    assert "device_outlier_frac" not in alone.metrics and alone.quality == PUBLISHABLE


def test_processes_on_a_hosts_processors_are_not_compared(bench):
    on_cpu = replace(spec(), cluster=ClusterSpec(device="cpu", devices_per_node=4, simulate_sensors_of="h200_sxm"))
    found = trial(bench, busy_s=(0.2, 0.2, 0.2, 0.8), spec_=on_cpu)
    assert "device_outlier_frac" not in found.metrics and "device_outlier" not in found.quality_reasons


@given(st.lists(st.sampled_from([1.0, 2.0, 3.0, 5.5, 9.0]), min_size=2, max_size=9))
def test_each_device_stands_against_the_median_of_the_others(values):
    devices = [("node", f"gpu{number}") for number in range(len(values))]
    found = _compared("power_w", devices, dict(zip(devices, values, strict=True)))
    for number, one in enumerate(found):
        others = values[:number] + values[number + 1 :]
        assert (one.value, one.peers_median, one.num_peers) == (values[number], np.median(others), len(others))
