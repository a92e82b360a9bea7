"""The verdict as a function of facts."""

import itertools

import pytest

from wattune.analysis.quality import THRESHOLDS, assess_quality
from wattune.metrics import METRICS
from wattune.run import INDICATIVE, INVALID, PUBLISHABLE, QUALITIES

GOOD = {
    "few_steps": 40,
    "low_coverage": 1.0,
    "gap": 0.04,
    "energy_disagrees": 0.002,
    "slow_sampling": 1.0,
    "unsteady_steps": 0.001,
    "warming": 0.2,
    "short_for_thermal": 120.0,
    "step_unexplained": 0.01,
}


@pytest.mark.parametrize(
    ("change", "quality", "reason"),
    [
        ({"few_steps": 19}, INDICATIVE, "few_steps"),
        ({"few_steps": 1}, INVALID, "few_steps"),
        ({"low_coverage": 0.97}, INDICATIVE, "low_coverage"),
        ({"low_coverage": 0.5}, INVALID, "low_coverage"),
        ({"gap": 1.0}, INDICATIVE, "gap"),
        ({"gap": 5.0}, INVALID, "gap"),
        ({"energy_disagrees": 0.005}, PUBLISHABLE, None),
        ({"energy_disagrees": 0.0051}, INDICATIVE, "energy_disagrees"),
        ({"energy_disagrees": 0.051}, INVALID, "energy_disagrees"),
        ({"energy_unchecked": False}, INDICATIVE, "energy_unchecked"),
        ({"slow_sampling": 0.2}, INDICATIVE, "slow_sampling"),
        ({"clock_stepped": 0.011}, INDICATIVE, "clock_stepped"),
        ({"clock_stepped": 0.0}, PUBLISHABLE, None),
        ({"clock_uncertain": 0.26}, INDICATIVE, "clock_uncertain"),
        ({"clock_uncertain": 0.25}, PUBLISHABLE, None),
        ({"other_gpu_users": 1}, INDICATIVE, "other_gpu_users"),
        ({"other_gpu_users": 0}, PUBLISHABLE, None),
        ({"unsteady_steps": 0.3}, INDICATIVE, "unsteady_steps"),
        ({"simulated": True}, INDICATIVE, "simulated"),
        ({"no_device_power": False}, INDICATIVE, "no_device_power"),
        ({"device_missing": 1}, INVALID, "device_missing"),
        ({"rank_missing": 1}, INVALID, "rank_missing"),
    ],
)
def test_each_fact_has_its_bounds(change, quality, reason):
    assert assess_quality(GOOD | change)[:2] == (quality, () if reason is None else (reason,))


def test_groups_are_judged_apart_from_the_whole():
    quality, reasons, groups = assess_quality(
        GOOD | {"warming": 6.0, "short_for_thermal": 15.0, "step_unexplained": 0.2}
    )
    assert quality == PUBLISHABLE
    assert groups == {"thermal": INDICATIVE, "step_breakdown": INDICATIVE}
    assert reasons == ("short_for_thermal", "warming", "step_unexplained")
    assert assess_quality(GOOD | {"warming": 6.0, "simulated": True})[2] == {}


def test_the_whole_is_the_worst_of_its_parts():
    bad = {"few_steps": 5, "gap": 9.0, "simulated": True, "energy_disagrees": 0.01}
    alone = {name: QUALITIES.index(assess_quality(GOOD | {name: value})[0]) for name, value in bad.items()}
    for size in range(1, len(bad) + 1):
        for names in itertools.combinations(bad, size):
            quality = assess_quality(GOOD | {name: bad[name] for name in names})[0]
            assert QUALITIES.index(quality) == min(alone[name] for name in names)


def test_the_table_names_groups_and_codes_once():
    assert {threshold.scope for threshold in THRESHOLDS} - {"all"} <= {metric.group for metric in METRICS.values()}
    assert len({threshold.code for threshold in THRESHOLDS}) == len(THRESHOLDS)
    for threshold in THRESHOLDS:
        if threshold.indicative is not None:
            assert (threshold.publishable >= threshold.indicative) == (threshold.at_least or threshold.publishable == 0)
