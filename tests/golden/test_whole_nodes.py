"""Plans of whole nodes, which no fit has: estimates, the search's regret, gains that were foretold of placements.

Of each node `benchmarks/data/nodes/NODE` has a table of each part, what was estimated before anything ran, and what
`place` said before its move ran.
"""

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from measured_tables import completed
from search_regret import ESTIMATES, LOG_STD, Case, curve, read_table, replay

from wattune.cost.defaults import default_coefficients
from wattune.cost.estimate import estimate
from wattune.intervals import NORMAL_95
from wattune.metrics import METRICS
from wattune.objective import Question
from wattune.ranking.difference import Counted, difference
from wattune.ranking.spreads import Spreads
from wattune.run import Numbers, Run, RunStatus
from wattune.search.strategy import STRATEGIES
from wattune.trial import TrialSpec

DATA = Path(__file__).parents[2] / "benchmarks" / "data" / "nodes"
POWER = "node_device_power_peak_1s_w"
MOST_PROPOSALS = 8
"""Of the guided search, of each model; at most half of its plans."""

BOUNDS = (0.25, 0.5, 0.75)
"""Bounds on the node's power, as quantiles of the dense plans that were measured."""


@pytest.fixture(scope="module", params=("h200x8", "h200x4"))
def judged(request):
    first = {row["trial_id"]: row for row in reversed(completed(DATA / request.param / "sweep.parquet"))}
    specs = [TrialSpec.from_json(json.loads(row["spec"])) for row in first.values()]
    return [*first.values()], estimate(specs, default_coefficients).columns


@pytest.mark.parametrize(
    ("metric", "median"),
    [("tokens_per_s", 0.06), (POWER, 0.04), ("device_power_mean_w", 0.04), ("memory_peak_bytes", 0.02)],
)
def test_plans_of_a_node_are_estimated(judged, metric: str, median: float) -> None:
    rows, columns = judged
    got = np.array([row[metric] for row in rows])
    column = columns[metric]
    assert np.median(abs(column.value / got - 1)) <= median
    assert np.mean((column.low <= got) & (got <= column.high)) >= 0.92


def as_prior(said: dict[str, Any]) -> dict[str, float]:
    """Returns what was estimated of a plan, as replays take it."""
    found = {}
    for key in [one for one in said if one.startswith("estimate.") and f"{one}.low" in said]:
        name = ESTIMATES + key.removeprefix("estimate.")
        found[name] = said[key]
        if said[f"{key}.low"] > 0.0:
            found[name + LOG_STD] = math.log(said[f"{key}.high"] / said[f"{key}.low"]) / (2 * NORMAL_95)
    return found


def cases() -> Iterator[Case]:
    """Each model of the node of four under each bound: all of its plans were measured."""
    estimates = {one["trial_id"]: one for one in pq.read_table(DATA / "h200x4" / "sweep_estimates.parquet").to_pylist()}
    table = read_table(DATA / "h200x4" / "sweep.parquet")
    dense = [one.metrics[POWER] for one in table if not one.spec.model.num_experts]
    for model in dict.fromkeys(one.spec.model.name for one in table):
        own = [one for one in table if one.spec.model.name == model]
        assert len(own) == sum(one["model"] == model for one in estimates.values())
        trials = tuple(replace(one, estimate=as_prior(estimates[one.spec.trial_id])) for one in own)
        for share in BOUNDS:
            question = Question.of("maximize tokens_per_s", f"{POWER} <= {np.quantile(dense, share)}")
            yield Case(name=model, trials=trials, question=question)


def test_a_guided_search_finds_the_best_of_an_exhaustive_table_under_each_bound() -> None:
    regrets = []
    for case in cases():
        most, best = min(MOST_PROPOSALS, len(case.trials) // 2), max(map(case.value, case.trials))
        runs = [replay(STRATEGIES["model_guided"], case, seed, most) for seed in range(2)]
        regrets.append(np.mean([curve(case, run, best, most)[-1] for run in runs]))
    assert len(regrets) == 6 and max(regrets) <= 0.02


def moved_runs() -> Iterator[tuple[TrialSpec, Run]]:
    """The completed runs of the moves on the node of four, in the order they ran."""
    table = pq.read_table(DATA / "h200x4" / "place.parquet").to_pylist()
    for row in sorted(table, key=lambda row: row["start_wall_ns"]):
        if row["status"] == RunStatus.COMPLETED:
            metrics = {metric: row[metric] for metric in METRICS if row.get(metric) is not None}
            times = {key: row[key] for key in ("trial_id", "repeat", "start_wall_ns", "end_wall_ns")}
            numbers = Numbers(**json.loads(row["numbers"]))
            yield (
                TrialSpec.from_json(json.loads(row["spec"])),
                Run(status=RunStatus.COMPLETED, metrics=metrics, numbers=numbers, **times),
            )


def test_both_placements_gained_what_was_foretold() -> None:
    said, ran = pq.read_table(DATA / "h200x4" / "place_said.parquet").to_pylist(), [*moved_runs()]
    assert len(said) == 2
    for one in said:
        sides = ([run for spec, run in ran if spec.trial_id == one[key]] for key in ("present", "moved"))
        found = difference("step_time_s", *(Counted(side, Spreads(ran)) for side in sides))
        assert found is not None and found.high_frac < 0
        assert abs(math.log1p(one["gain_frac"]) + math.log1p(found.change_frac)) <= 0.015
