"""The bar of early stops: the worse end of the best feasible trial's interval, and the scatter of runs."""

import math
from dataclasses import replace

import pytest

from wattune.objective import Question, parse_constraint, parse_objective
from wattune.orchestrate.scheduling.early_stop import EarlyStop
from wattune.run import Run, RunStatus

POWER = parse_constraint("node_device_power_peak_1s_w <= 1000")


def bar(objective: str) -> EarlyStop:
    return EarlyStop(Question(objective=parse_objective(objective), constraints=(POWER,)))


def ended(spec, speed: float, power_w: float = 800.0) -> Run:
    tokens = spec.workload.tokens_per_step
    figures = {"tokens_per_s": speed, "step_time_s": tokens / speed, "tokens_per_s_per_device": speed}
    metrics = {**figures, "node_device_power_peak_1s_w": power_w}
    return Run(trial_id=spec.trial_id, repeat=0, status=RunStatus.COMPLETED, metrics=metrics)


def test_without_a_feasible_trial_nothing_stops(specs):
    early = bar("maximize tokens_per_s")
    assert early.stop_above_s(specs[0]) is None
    early.note(specs[0], ended(specs[0], 100.0, power_w=1500.0))
    assert early.stop_above_s(specs[1]) is None


@pytest.mark.parametrize("objective", ["maximize tokens_per_s", "minimize step_time_s"])
def test_the_bar_is_behind_the_best_feasible_trial_by_its_interval_and_a_run_s_scatter(specs, objective):
    early = bar(objective)
    early.note(specs[0], ended(specs[0], 100.0))
    early.note(specs[1], ended(specs[1], 300.0, power_w=1500.0))  # faster, and it breaks the bound
    best_s = specs[0].workload.tokens_per_step / 100.0
    above_s = early.stop_above_s(specs[2])
    assert 1.02 * best_s < above_s < 1.1 * best_s


def test_a_trial_of_another_model_is_no_match(specs):
    """The ranking says not to compare the two, and names the best of each. So each is measured whole."""
    early = bar("maximize tokens_per_s")
    early.note(specs[0], ended(specs[0], 100.0))
    larger = replace(specs[1], model=replace(specs[1].model, num_layers=10 * specs[1].model.num_layers))
    longer = replace(specs[1], workload=replace(specs[1].workload, seq_len=2 * specs[1].workload.seq_len))
    assert early.stop_above_s(larger) is None and early.stop_above_s(longer) is None
    early.note(larger, ended(larger, 10.0))
    bars_s = [early.stop_above_s(one) for one in (replace(larger, plan=specs[2].plan), specs[2])]
    assert bars_s[0] == pytest.approx(10 * bars_s[1], rel=0.02)


def test_a_faster_trial_lowers_the_bar(specs):
    early = bar("maximize tokens_per_s")
    early.note(specs[0], ended(specs[0], 100.0))
    before_s = early.stop_above_s(specs[2])
    early.note(specs[1], ended(specs[1], 200.0))
    assert math.isclose(early.stop_above_s(specs[2]), before_s / 2, rel_tol=0.02)


def test_where_a_trial_waits_for_its_host_the_bar_is_as_wide_as_such_runs_scatter(specs):
    """A plan that waits may be a sixth slower in one run than in the next, and the run may be of such a plan."""
    early = bar("maximize tokens_per_s")
    early.note(specs[0], ended(specs[0], 100.0))
    before_s = early.stop_above_s(specs[2])
    waits = ended(specs[1], 60.0)
    early.note(specs[1], replace(waits, metrics={**waits.metrics, "host_bound_frac": 0.5}))
    assert early.stop_above_s(specs[2]) > 1.25 * before_s
