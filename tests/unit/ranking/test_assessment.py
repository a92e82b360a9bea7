"""Assessment of single trials: intervals, margins and verdicts."""

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_trials import CAPPED, COOL, FASTEST, POWER, on_n0, reference_runs, speed, trial

from wattune.objective import parse_constraint
from wattune.ranking.assessment import Spreads, Verdict, assess_trial, is_simulated
from wattune.ranking.order import rank
from wattune.trial import TrialStatus


def test_slack_is_in_the_metrics_unit_and_as_a_fraction_of_the_bound():
    measured = {"tokens_per_s": 1.0, "device_power_peak_1s_w": 630.0, "device_power_limit_w": 700.0}
    (margin,) = rank([trial(1, measured)], FASTEST, [CAPPED]).feasible[0].margins
    assert (margin.got, margin.bound, margin.slack) == (630.0, 700.0, 70.0)
    assert margin.slack_frac == pytest.approx(0.1)


def test_a_bound_of_zero_has_no_fraction():
    bound = parse_constraint("excursion_count <= 0")
    row = rank([trial(1, {"tokens_per_s": 1.0, "excursion_count": 2.0})], FASTEST, [bound]).infeasible[0]
    assert row.margins[0].slack_frac is None
    assert row.margins[0].slack == -2.0


def test_a_strict_bound_is_violated_on_the_bound():
    row = rank([trial(1, {"tokens_per_s": 1.0, "device_temp_max_c": 85.0})], FASTEST, [COOL]).trials[0]
    assert row.verdict is Verdict.INFEASIBLE
    assert row.failing == row.margins


def test_repeats_are_an_interval_and_the_worst_one_decides():
    ranking = rank([speed(1, 100.0), speed(1, 120.0, power_w=2760.0, repeat=1)], FASTEST, [POWER])
    (row,) = ranking.infeasible
    # Student's t of two repeats: 110 ± 12.706 * sqrt(200) / sqrt(2), and never without saying what it rests on.
    assert (row.objective.value, row.objective.method, row.objective.num_runs) == (110.0, "repeats", 2)
    assert row.objective.high == pytest.approx(110 + 12.7062 * 10, rel=1e-4)
    assert (row.margins[0].repeat, row.margins[0].got) == (1, 2760.0)
    assert [result.repeat for result in row.repeats] == [0, 1]


def test_a_single_run_without_a_reference_is_known_as_far_as_its_steps_tell():
    known = {"tokens_per_s": 100.0, "step_time_uncertainty_frac": 0.02, "node_device_power_peak_1s_w": 2700.0}
    (row,) = rank([trial(1, known)], FASTEST, [POWER]).feasible
    assert (row.objective.method, row.objective.low) == ("steps", pytest.approx(98.0))
    assert row.margins[0].holds_probability is None  # steps tell nothing of how a peak scatters


def test_how_likely_a_bound_holds_follows_from_the_references_scatter():
    reference = reference_runs([100.0] * 4)
    for (_, result), power_w in zip(reference, (1980.0, 2020.0, 1990.0, 2010.0), strict=True):
        result.metrics["node_device_power_peak_1s_w"] = power_w
    pairs = [*reference, on_n0(speed(1, 200.0, power_w=2740.0)), on_n0(speed(2, 210.0, power_w=2750.0))]
    ranking = rank([*pairs, on_n0(speed(3, 220.0, power_w=2790.0))], FASTEST, [POWER])
    likely = {row.spec.plan.micro_batch_size: row.margins[0].holds_probability for row in ranking.trials}
    assert likely[2] == pytest.approx(0.5)
    assert 0.5 < likely[1] < likely[90]
    assert likely[90] > 0.999
    assert likely[3] < 0.2


def test_a_finalists_long_run_counts_for_bounds_and_not_for_the_rank():
    spec, hot = speed(1, 90.0, power_w=2760.0, repeat=1)
    soaked = (spec, replace(hot, tags={"soak": "true"}))
    (row,) = rank([speed(1, 100.0), soaked], FASTEST, [POWER]).infeasible
    assert (row.objective.value, row.objective.num_runs) == (100.0, 1)
    assert (row.margins[0].repeat, row.margins[0].got) == (1, 2760.0)
    assert rank([soaked], FASTEST, []).best.objective.value == 90.0


@pytest.mark.parametrize("status", [TrialStatus.CRASHED, TrialStatus.OUT_OF_MEMORY, TrialStatus.ABORTED])
def test_one_failed_repeat_fails_the_trial(status):
    ranking = rank([speed(1, 100.0), trial(1, repeat=1, status=status, reason="why")], FASTEST, [POWER])
    assert ranking.failed[0].reason == f"{status}: why (1 of 2 repeats)"
    assert (ranking.failed[0].objective.low, ranking.failed[0].objective.high) == (100.0, 100.0)


@pytest.mark.parametrize("status", [TrialStatus.INTERRUPTED, TrialStatus.INVALID])
def test_a_repeat_that_decides_nothing_is_shown_but_not_counted(status):
    lost = trial(1, {"tokens_per_s": 900.0}, repeat=1, status=status, quality="invalid")
    (row,) = rank([speed(1, 100.0), lost], FASTEST, [POWER]).feasible
    assert len(row.repeats) == 2
    assert len(row.counted) == 1
    assert (row.objective.value, row.objective.num_runs, row.quality) == (100.0, 1, "publishable")
    alone = Verdict.INTERRUPTED if status is TrialStatus.INTERRUPTED else Verdict.FAILED
    assert [row.verdict for row in rank([lost], FASTEST, [POWER]).trials] == [alone]


def test_a_metric_missing_in_one_repeat_is_unknown_and_a_violation_elsewhere_weighs_more():
    blind = trial(1, {"tokens_per_s": 100.0}, repeat=1)
    assert rank([speed(1, 100.0), blind], FASTEST, [POWER]).trials[0].verdict is Verdict.UNKNOWN
    assert rank([speed(1, 100.0, power_w=9e3), blind], FASTEST, [POWER]).trials[0].verdict is Verdict.INFEASIBLE


def test_a_trial_without_the_objective_is_unknown():
    (row,) = rank([trial(1, {"node_device_power_peak_1s_w": 1.0})], FASTEST, [POWER]).unknown
    assert (row.objective, row.missing) == (None, ("tokens_per_s",))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_figure_that_is_no_number_was_not_measured(value):
    ranking = rank([speed(1, value)], FASTEST, [POWER])
    assert ranking.unknown[0].missing == ("tokens_per_s",)
    json.dumps(ranking.to_json(), allow_nan=False)


def test_scatter_and_drift_are_of_each_set_of_nodes_by_itself():
    on_n0_only = reference_runs([99.0, 101.0])
    elsewhere = [(spec, replace(result, tags={**result.tags, "nodes": "n1"})) for spec, result in reference_runs([7.0])]
    soaked = [(spec, replace(result, tags={**result.tags, "soak": "true"})) for spec, result in reference_runs([500.0])]
    spreads = Spreads([*on_n0_only, *elsewhere, *soaked, speed(1, 3.0)])
    found = spreads.references("tokens_per_s")
    assert set(found) == {"n0"}, "one run on n1 has no scatter"
    # Two runs 1 % below and above their mean: a standard deviation of sqrt(2) %.
    assert (found["n0"].num_runs, found["n0"].mean) == (2, 100.0)
    assert found["n0"].spread_frac == pytest.approx(0.01 * 2**0.5)
    assert spreads.reference("n0", "mfu_frac") is None and spreads.references("mfu_frac") == {}


@given(
    st.lists(st.integers(1, 40).map(lambda each: 100.0 * each), min_size=1, max_size=4),
    st.sampled_from(["<=", "<", ">=", ">"]),
    st.integers(1, 40).map(lambda each: 100.0 * each),
)
def test_a_margin_is_that_of_the_worst_repeat_and_holds_where_every_repeat_does(watts, operator, bound_w):
    bound = parse_constraint(f"node_device_power_peak_1s_w {operator} {bound_w:g}")
    pairs = [speed(1, 10.0, power_w=power_w, repeat=repeat) for repeat, power_w in enumerate(watts)]
    repeats = tuple(result for _, result in pairs)
    row = assess_trial("", pairs[0][0], repeats, Spreads(pairs), FASTEST, [bound])
    (margin,) = row.margins
    below = operator.startswith("<")
    assert margin.got == (max(watts) if below else min(watts))
    assert margin.slack == (bound_w - margin.got if below else margin.got - bound_w)
    keeps = {"<=": float.__le__, "<": float.__lt__, ">=": float.__ge__, ">": float.__gt__}[operator]
    assert margin.holds == all(keeps(power_w, bound_w) for power_w in watts)
    assert row.verdict is (Verdict.FEASIBLE if margin.holds else Verdict.INFEASIBLE)
    assert (row.rank, row.failing) == (None, () if margin.holds else (margin,))


def test_a_trial_without_a_completed_repeat_has_no_quality_and_no_margin():
    spec, result = trial(1, status=TrialStatus.TIMED_OUT, reason="rank 0: no step")
    row = assess_trial("moe", spec, (result,), Spreads([(spec, result)]), FASTEST, [POWER])
    assert (row.verdict, row.reason) == (Verdict.FAILED, "timed_out: rank 0: no step")
    assert (row.quality, row.simulated, row.margins, row.objective, row.counted) == ("", False, (), None, ())
    assert row.setting == {"study": "moe", "model": "llama3_8b", "cluster": "1x4 h200_sxm", "engine": "torch"}


@pytest.mark.parametrize(
    ("tags", "reasons", "simulated"),
    [
        ({"simulated": "true"}, (), True),
        ({}, ("simulated", "few_steps"), True),
        ({"simulated": "false"}, ("gap",), False),
    ],
)
def test_simulation_is_known_by_tag_or_by_reason(tags, reasons, simulated):
    _, result = trial(1, {"tokens_per_s": 1.0}, tags=tags)
    assert is_simulated(replace(result, quality_reasons=reasons)) is simulated
