"""Assessment of single trials: intervals, margins and verdicts."""

import json
import math
from dataclasses import replace

import pytest
from made_trials import COOL, FASTEST, POWER, asked, on_n0, reference_runs, speed, trial
from study_files import SPEC, result_of

from wattune.fidelity import UNPROFILED
from wattune.objective import Question, parse_constraint
from wattune.ranking.assessment import Verdict, assess_trials, is_simulated, start_up_text
from wattune.ranking.difference import Counted, difference
from wattune.ranking.order import rank
from wattune.ranking.spreads import Spreads
from wattune.run import RunStatus


def test_repeats_are_an_interval_and_the_worst_one_decides():
    (row,) = rank([speed(1, 99.0), speed(1, 101.0, power_w=3500.0, repeat=1)], asked(FASTEST, POWER)).trials
    assert (row.objective.value, row.objective.method, row.objective.num_runs) == (100.0, "repeats", 2)
    # One repeat and a prior worth six: far from the 12.7 standard errors of two runs alone, and not below 1 %.
    assert 0.01 < row.objective.half_width_frac < 0.03
    assert (row.margins[0].repeat, row.margins[0].got) == (1, 3500.0)
    assert row.verdict is Verdict.UNDECIDED, "one run kept the bound and one did not"
    assert [result.repeat for result in row.repeats] == [0, 1]


def test_the_error_of_its_own_steps_is_the_least_error_of_a_run():
    wide = {"tokens_per_s": 100.0, "step_time_uncertainty_frac": 0.2, "node_device_power_peak_1s_w": 2000.0}
    (row,) = rank([trial(1, wide)], asked(FASTEST, POWER)).feasible
    assert row.objective.method == "prior"
    assert row.objective.low < 100.0 * math.exp(-0.2)
    narrow = rank([trial(1, wide | {"step_time_uncertainty_frac": 1e-4})], asked(FASTEST, POWER)).best.objective
    assert narrow.half_width_frac == pytest.approx(2.447 * 0.01, rel=0.02)  # t of 6 degrees, 1 %


def test_how_likely_a_bound_holds_follows_from_the_references_scatter():
    reference = reference_runs([100.0] * 4)
    for (_, result), power_w in zip(reference, (1980.0, 2020.0, 1990.0, 2010.0), strict=True):
        result.metrics["node_device_power_peak_1s_w"] = power_w
    pairs = [*reference, on_n0(speed(1, 200.0, power_w=2740.0)), on_n0(speed(2, 210.0, power_w=2750.0))]
    ranking = rank([*pairs, on_n0(speed(3, 220.0, power_w=2990.0))], asked(FASTEST, POWER))
    likely = {row.spec.plan.micro_batch_size: row.margins[0].holds_probability for row in ranking.trials}
    assert likely[2] == pytest.approx(0.45, abs=0.01), "the reference draws more later than at the start"
    assert 0.5 < likely[1] < likely[90]
    assert likely[90] > 0.999
    assert likely[3] < 0.05


def test_a_finalists_long_run_counts_for_bounds_and_not_for_the_rank():
    spec, hot = speed(1, 90.0, power_w=3200.0, repeat=1)
    soaked = (spec, replace(hot, tags={"soak": "true"}))
    (row,) = rank([speed(1, 100.0), soaked], asked(FASTEST, POWER)).infeasible
    assert (row.objective.value, row.objective.num_runs) == (100.0, 1)
    assert (row.margins[0].repeat, row.margins[0].got) == (1, 3200.0)
    assert rank([soaked], asked(FASTEST)).best.objective.value == 90.0


@pytest.mark.parametrize("status", [RunStatus.CRASHED, RunStatus.OUT_OF_MEMORY, RunStatus.ABORTED])
def test_one_failed_repeat_fails_the_trial(status):
    ranking = rank([speed(1, 100.0), trial(1, repeat=1, status=status, reason="why")], asked(FASTEST, POWER))
    assert ranking.failed[0].reason == f"{status}: why (1 of 2 repeats)"
    assert ranking.failed[0].objective.low < 100.0 < ranking.failed[0].objective.high


@pytest.mark.parametrize("status", [RunStatus.INTERRUPTED, RunStatus.INVALID])
def test_a_repeat_that_decides_nothing_is_shown_but_not_counted(status):
    lost = trial(1, {"tokens_per_s": 900.0}, repeat=1, status=status, quality="invalid")
    (row,) = rank([speed(1, 100.0), lost], asked(FASTEST, POWER)).feasible
    assert len(row.repeats) == 2
    assert len(row.counted) == 1
    assert (row.objective.value, row.objective.num_runs, row.quality) == (100.0, 1, "publishable")
    alone = Verdict.INTERRUPTED if status is RunStatus.INTERRUPTED else Verdict.FAILED
    assert [row.verdict for row in rank([lost], asked(FASTEST, POWER)).trials] == [alone]


def test_a_metric_missing_in_one_repeat_is_unknown_and_a_violation_elsewhere_weighs_more():
    blind = trial(1, {"tokens_per_s": 100.0}, repeat=1)
    assert rank([speed(1, 100.0), blind], asked(FASTEST, POWER)).trials[0].verdict is Verdict.UNKNOWN
    assert rank([speed(1, 100.0, power_w=9e3), blind], asked(FASTEST, POWER)).trials[0].verdict is Verdict.INFEASIBLE


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_figure_that_is_no_number_was_not_measured(value):
    ranking = rank([speed(1, value)], asked(FASTEST, POWER))
    assert ranking.unknown[0].missing == ("tokens_per_s",)
    json.dumps(ranking.to_json(), allow_nan=False)


def test_the_long_runs_of_the_reference_are_not_repeats_of_it():
    runs = reference_runs([99.0, 101.0])
    soaked = [
        (spec, replace(result, repeat=2000, tags={**result.tags, "soak": "true"}))
        for spec, result in reference_runs([500.0])
    ]
    alone, both = (Spreads(pairs).fitted("tokens_per_s").scatter for pairs in (runs, [*runs, *soaked]))
    assert (alone.steady.num_repeats, both.steady.num_repeats) == (1, 1)
    assert both.spread_frac == pytest.approx(alone.spread_frac, rel=0.05)


@pytest.mark.parametrize(
    ("group", "quality"), [("thermal", "indicative"), ("power", "publishable"), ("speed", "publishable")]
)
def test_the_quality_of_a_row_is_the_worst_of_the_groups_it_uses(group, quality):
    metrics = {"tokens_per_s": 1.0, "device_temp_max_c": 50.0, "node_device_power_peak_1s_w": 100.0}
    tags = {"quality_speed": "publishable", "quality_power": "publishable", "quality_thermal": "indicative"}
    bounds = {"thermal": [COOL], "power": [POWER], "speed": []}[group]
    assert rank([trial(1, metrics, tags=tags)], asked(FASTEST, *bounds)).best.quality == quality


def test_a_trial_without_a_completed_repeat_has_no_quality_and_no_margin():
    spec, result = trial(1, status=RunStatus.TIMED_OUT, reason="rank 0: no step")
    row = assess_trials("moe", [(spec, (result,))], Spreads([(spec, result)]), asked(FASTEST, POWER))[0]
    assert (row.verdict, row.reason) == (Verdict.FAILED, "timed_out: rank 0: no step")
    assert (row.quality, row.simulated, row.margins, row.objective, row.counted) == ("", False, (), None, ())
    assert row.setting == {
        "study": "moe",
        "model": "llama3_8b",
        "cluster": "1x4 h200_sxm",
        "engine": "torch",
        "seq_len": "4096",
        "batch": "16",
    }


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


def test_what_commands_cost_beside_their_steps_is_said_in_the_median():
    told = [{"startup_s": 8.0, "overhead_frac": 0.5}, {"startup_s": 12.0, "overhead_frac": 0.25}, {"startup_s": 9.0}]
    rows = rank([trial(n, {"tokens_per_s": 100.0, **one}) for n, one in enumerate(told)], asked(FASTEST)).trials
    text = start_up_text(rows)
    assert text.startswith("each command started anew: 9") and "38 % of its run outside of measured steps" in text
    assert start_up_text(rank([speed(1, 99.0)], asked(FASTEST)).trials) == ""


def test_repeats_without_a_profiled_pass_leave_its_figures_to_those_that_had_one() -> None:
    """Asked afterwards, also as a bound and against another plan: the pass is of the plan, not of each repeat."""
    other = replace(SPEC, plan=replace(SPEC.plan, micro_batch_size=2 * SPEC.plan.micro_batch_size))
    pairs = []
    for spec, frac in ((SPEC, 0.02), (other, 0.04)):
        first = replace(result_of(), trial_id=spec.trial_id, metrics={"tokens_per_s": 100.0, "host_bound_frac": frac})
        later = replace(first, repeat=1, metrics={"tokens_per_s": 101.0}, tags={"profile": UNPROFILED})
        pairs += [(spec, first), (spec, later)]
    bound = Question.of("minimize host_bound_frac", "host_bound_frac <= 0.5")
    ranking = rank(pairs, bound)
    assert [row.objective.value for row in ranking.feasible] == [0.02, 0.04] and not ranking.unknown
    assert ranking.feasible[0].objective.num_runs == 1 and ranking.best.margins[0].verdict == "holds"
    kept = rank(pairs, Question.of("maximize tokens_per_s"), where=(parse_constraint("host_bound_frac < 0.03"),))
    assert [row.trial_id for row in kept.feasible] == [SPEC.trial_id]
    sides = [Counted(row.counted, row.spreads) for row in ranking.feasible]
    assert difference("host_bound_frac", *sides) is not None
    failed = [(spec, replace(one, tags={})) for spec, one in pairs]
    assert not rank(failed, bound).feasible, "one whose pass is missing for another reason is unknown as before"
