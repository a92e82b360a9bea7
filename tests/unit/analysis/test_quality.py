"""The verdict as a function of facts."""

import itertools
from dataclasses import fields, replace

import pytest

from wattune.analysis.quality import INDICATIVE, INVALID, PUBLISHABLE, THRESHOLDS, VERDICTS, Facts, assess_quality
from wattune.schema import METRICS

GOOD = Facts(
    num_steps=40,
    coverage_frac=1.0,
    largest_gap_s=0.04,
    energy_error_frac=0.002,
    rate_frac=1.0,
    step_time_drift_frac=0.001,
    temperature_rise_c_per_min=0.2,
    thermal_window_s=120.0,
    unexplained_frac=0.01,
)


def test_good_facts_are_publishable_without_a_reason():
    verdict = assess_quality(GOOD)
    assert (verdict.quality, verdict.reasons, verdict.groups) == (PUBLISHABLE, (), {})


@pytest.mark.parametrize(
    ("change", "quality", "reason"),
    [
        ({"num_steps": 19}, INDICATIVE, "few_steps"),
        ({"num_steps": 1}, INVALID, "few_steps"),
        ({"coverage_frac": 0.97}, INDICATIVE, "low_coverage"),
        ({"coverage_frac": 0.5}, INVALID, "low_coverage"),
        ({"largest_gap_s": 1.0}, INDICATIVE, "gap"),
        ({"largest_gap_s": 5.0}, INVALID, "gap"),
        ({"energy_error_frac": 0.005}, PUBLISHABLE, None),
        ({"energy_error_frac": 0.0051}, INDICATIVE, "energy_disagrees"),
        ({"energy_error_frac": 0.051}, INVALID, "energy_disagrees"),
        ({"energy_checked": False}, INDICATIVE, "energy_unchecked"),
        ({"rate_frac": 0.2}, INDICATIVE, "slow_sampling"),
        ({"clock_step_s": 0.011}, INDICATIVE, "clock_stepped"),
        ({"clock_step_s": 0.0}, PUBLISHABLE, None),
        ({"clock_uncertainty_s": 0.26}, INDICATIVE, "clock_uncertain"),
        ({"clock_uncertainty_s": 0.25}, PUBLISHABLE, None),
        ({"num_other_processes": 1}, INDICATIVE, "other_gpu_users"),
        ({"num_other_processes": 0}, PUBLISHABLE, None),
        ({"step_time_drift_frac": 0.3}, INDICATIVE, "unsteady_steps"),
        ({"simulated": True}, INDICATIVE, "simulated"),
        ({"has_power": False}, INDICATIVE, "no_device_power"),
        ({"num_missing_devices": 1}, INVALID, "device_missing"),
        ({"num_missing_ranks": 1}, INVALID, "rank_missing"),
    ],
)
def test_each_fact_has_its_bounds(change, quality, reason):
    verdict = assess_quality(replace(GOOD, **change))
    assert verdict.quality == quality
    assert verdict.reasons == (() if reason is None else (reason,))


def test_groups_are_judged_apart_from_the_whole():
    verdict = assess_quality(replace(GOOD, temperature_rise_c_per_min=6.0, thermal_window_s=15.0, unexplained_frac=0.2))
    assert verdict.quality == PUBLISHABLE
    assert verdict.groups == {"thermal": INDICATIVE, "step_breakdown": INDICATIVE}
    assert verdict.reasons == ("short_for_thermal", "warming", "step_unexplained")
    assert assess_quality(replace(GOOD, temperature_rise_c_per_min=6.0, simulated=True)).groups == {}


def test_the_whole_is_the_worst_of_its_parts():
    bad = {"num_steps": 5, "largest_gap_s": 9.0, "simulated": True, "energy_error_frac": 0.01}
    alone = {
        name: VERDICTS.index(assess_quality(replace(GOOD, **{name: value})).quality) for name, value in bad.items()
    }
    for size in range(1, len(bad) + 1):
        for names in itertools.combinations(bad, size):
            quality = assess_quality(replace(GOOD, **{name: bad[name] for name in names})).quality
            assert VERDICTS.index(quality) == min(alone[name] for name in names)


def test_the_table_names_facts_groups_and_codes_once():
    assert {threshold.fact for threshold in THRESHOLDS} == {field.name for field in fields(Facts)}
    assert {threshold.scope for threshold in THRESHOLDS} - {"all"} <= {metric.group for metric in METRICS.values()}
    assert len({threshold.code for threshold in THRESHOLDS}) == len(THRESHOLDS)
    for threshold in THRESHOLDS:
        if threshold.indicative is not None:
            assert (threshold.publishable >= threshold.indicative) == (threshold.at_least or threshold.publishable == 0)
