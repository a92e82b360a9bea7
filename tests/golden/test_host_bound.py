"""Studies of one space on one H200: what one calls sure, runs of the other break as seldom as it says.

Plans whose device waits for its host ran at another pace in each. The width that they are given was found on the runs
of the Llama. Those of the GPT came later and are a blind test of it.
"""

import itertools
import math

import numpy as np
import pytest
from stored_tables import results_of

from wattune.fidelity import is_burst, is_soak
from wattune.intervals import t_quantile
from wattune.objective import RISK, Question, parse_constraint, parse_objective
from wattune.ranking.order import rank
from wattune.ranking.spreads import PRIORS, Spreads
from wattune.run import RunStatus

TABLES = ("dense_llama_1b_h200", "dense_llama_1b_h200_ladder")
LATER = ("dense_gpt_1b_h200_before", "dense_gpt_1b_h200", "dense_gpt_1b_h200_guided")
ELSEWHERE = (
    LATER,
    ("dense_llama_h100x2", "dense_llama_minute_h100x2", "dense_llama_repeats_h100x2"),
    ("moe_ep_h200x2", "moe_ep_h200x2_guided"),
)
"""Studies of the same plans on other days or devices of the kind."""
PEAK = "node_device_power_peak_1s_w"
BOUNDS = (450, 500, 550, 600, 620, 640, 660)


def runs(table: str, *, without: tuple[str, ...] = ()):
    return [pair for pair in results_of(table, without=without) if pair[1].status is RunStatus.COMPLETED]


def promises(tables=TABLES, *, without: tuple[str, ...] = ()) -> tuple[list[tuple[str, int, float]], float]:
    """Plans that a study calls sure to keep a bound, against every run of the same plan in another study.

    Returns:
        Those that a run is past by more than 1 %, and their share.
    """
    broken, count = [], 0
    for one, other in itertools.permutations(tables, 2):
        seen = [(run.trial_id, run.metrics[PEAK]) for _, run in runs(other)]
        for bound in BOUNDS:
            constraint = parse_constraint(f"{PEAK} <= {bound}")
            ranking = rank(
                runs(one, without=without),
                Question(objective=parse_objective("maximize tokens_per_s"), constraints=(constraint,)),
            )
            sure = {row.trial_id for row in ranking.feasible}
            count += sum(trial in sure for trial, _ in seen)
            broken += [(trial, bound, peak_w) for trial, peak_w in seen if trial in sure and peak_w > 1.01 * bound]
    return broken, len(broken) / count


@pytest.mark.parametrize("tables", [TABLES, LATER], ids=["llama", "gpt"])
def test_what_is_called_sure_is_broken_as_seldom_as_the_risk_says(tables) -> None:
    _, share = promises(tables)
    assert share <= RISK


@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize("metric", ["tokens_per_s", PEAK])
def test_runs_of_another_study_are_inside_the_interval_of_the_next_run(metric: str, *, waits: bool) -> None:
    """19 of 20 are promised. Studies ran on other days and devices of one kind, which a study cannot know."""
    inside = []
    for tables in (TABLES, LATER):
        for one, other in itertools.permutations(tables, 2):
            spreads, own = Spreads(runs(one)), {}
            for _, run in runs(one):
                if not is_burst(run):
                    own.setdefault(run.trial_id, []).append(run)
            for _, run in runs(other):
                seen = own.get(run.trial_id, [])
                if not seen or (np.mean([each.metrics["host_bound_frac"] for each in seen]) > 0.1) is not np.bool_(
                    waits
                ):
                    continue
                (next_run,) = spreads.next_runs(seen, metric)
                scatter, at = next_run.scatter, next_run.number
                away = scatter.place_share @ (scatter.away[at] ** 2 + scatter.away_variance[at])
                variance = next_run.own_variance + away + next_run.elsewhere_variance
                reach = t_quantile(next_run.degrees_of_freedom) * math.sqrt(variance)
                inside.append(abs(math.log(run.metrics[metric]) - next_run.mean) < reach)
    assert len(inside) >= 26 and np.mean(inside) >= 0.88


@pytest.mark.parametrize(("group", "metric"), [("power", PEAK), ("speed", "tokens_per_s"), ("energy", "tokens_per_j")])
def test_plans_of_two_studies_differ_as_the_prior_says_of_another_day_and_device(group: str, metric: str) -> None:
    away = []
    for tables in ELSEWHERE:
        levels = []
        for table in tables:
            found: dict[str, list[float]] = {}
            for _, run in runs(table):
                if not (is_burst(run) or is_soak(run) or run.metrics.get("host_bound_frac", 0.0) > 0.1):
                    found.setdefault(run.trial_id, []).append(math.log(run.metrics[metric]))
            levels.append({trial_id: np.mean(each) for trial_id, each in found.items()})
        for one, other in itertools.combinations(levels, 2):
            away += [one[trial_id] - other[trial_id] for trial_id in one.keys() & other.keys()]
    assert len(away) == 30
    assert math.sqrt(np.square(away).mean() / 2.0) == pytest.approx(PRIORS[group].elsewhere, rel=0.12)


def test_a_plan_that_does_not_wait_breaks_a_bound_it_is_far_past() -> None:
    """Plans that wait were repeated in this study and scattered by 15 %. That says nothing of those that do not."""
    constraint = parse_constraint(f"{PEAK} <= 620")
    for table in LATER:
        pairs = runs(table)
        past = {
            run.trial_id for _, run in pairs if run.metrics["host_bound_frac"] < 0.1 and run.metrics[PEAK] > 1.05 * 620
        } - {run.trial_id for _, run in pairs if run.metrics["host_bound_frac"] >= 0.1}
        ranking = rank(pairs, Question(objective=parse_objective("maximize tokens_per_s"), constraints=(constraint,)))
        assert len(past) >= 2 and past <= {row.trial_id for row in ranking.infeasible}


def test_the_wait_for_the_host_is_why() -> None:
    broken, share = promises(without=("host_bound_frac",))
    assert ("31a874a52868", 620, pytest.approx(651.2, abs=0.1)) in broken
    assert share > 1.5 * RISK, "0.094: step times that scatter tell part of it; 0.119 while power was judged by itself"


def test_both_studies_name_the_same_plan_under_the_bound() -> None:
    objective, constraint = parse_objective("maximize tokens_per_s"), parse_constraint(f"{PEAK} <= 620")
    best = [rank(runs(table), Question(objective=objective, constraints=(constraint,))).best for table in TABLES]
    assert [row and row.trial_id for row in best] == ["3d2a723dc2be"] * 2


def test_the_step_without_the_host_repeats_where_the_step_does_not() -> None:
    """Six runs of a plan that waited for 9 to 39 % of a step, and of one that waited for 37 to 55 %, on two devices."""
    pairs = [pair for table in LATER for pair in runs(table)]
    for trial_id, least, scatter in (("9ff8108fdf07", 0.15, 0.003), ("6592e73e2464", 0.12, 0.0095)):
        own = [run.metrics for _, run in pairs if run.trial_id == trial_id]
        step_s = np.array([each["step_time_s"] for each in own])
        device_s = np.array([each["device_bound_step_time_s"] for each in own])
        assert len(own) == 6 and step_s.std(ddof=1) / step_s.mean() > least
        assert device_s.std(ddof=1) / device_s.mean() < scatter
