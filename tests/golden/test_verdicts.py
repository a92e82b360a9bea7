"""Verdicts of a recorded and of a simulated study: the same in another order, with another seed, one more reference."""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
from runs import run_data
from small_study import GOLDEN, PLANS, START_NS, make_study, spec_of
from specs import made_run

from wattune.analysis.summary import summarize
from wattune.fidelity import FIRST_REFERENCE_REPEAT
from wattune.objective import Question, parse_constraint, parse_objective
from wattune.ranking.assessment import Verdict
from wattune.ranking.order import Ranking, rank
from wattune.run import Run
from wattune.simulation.sensors import simulate
from wattune.storage.measured import MeasuredFolder
from wattune.trial import TrialSpec

Pair = tuple[TrialSpec, Run]
Study = Callable[[int, int], list[Pair]]
"""Makes a study from a seed and a number of reference runs."""

FASTEST = parse_objective("maximize tokens_per_s")
MINUTE_NS = 60_000_000_000
SCATTER = 0.003
"""Standard deviation of speed and power from run to run."""


def placed(result: Run, number: int, repeat: int) -> Run:
    return replace(
        result, repeat=repeat, start_wall_ns=START_NS + number * MINUTE_NS, tags={**result.tags, "nodes": "n0"}
    )


def scattered(result: Run, rng: np.random.Generator) -> Run:
    """The same trial run again: speed and power a little off."""
    speed, power = (math.exp(SCATTER * one) for one in rng.normal(size=2))
    factors = {"tokens_per_s": speed, "step_time_s": 1 / speed, "node_device_power_peak_1s_w": power}
    return replace(result, metrics={name: value * factors.get(name, 1.0) for name, value in result.metrics.items()})


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Study:
    """Two trials measured on four H200s and one that failed; the first is the reference too."""
    pairs = make_study(tmp_path_factory.mktemp("storage")).results()

    def study(seed: int, num_references: int) -> list[Pair]:
        rng = np.random.default_rng(seed)
        found = [(spec, placed(scattered(one, rng), 2 * n, 0)) for n, (spec, one) in enumerate(pairs)]
        (reference,) = [(spec, one) for spec, one in pairs if spec == spec_of(PLANS["dp4"])]
        runs = np.random.default_rng(9)  # of the reference, the earlier ones stay as they were
        found += [
            (reference[0], placed(scattered(reference[1], runs), 2 * n + 1, FIRST_REFERENCE_REPEAT + n))
            for n in range(num_references)
        ]
        return found

    return study


@pytest.fixture(scope="module")
def simulated() -> Study:
    """The same steps under simulated sensors, whose noise is drawn anew by the seed."""
    known: dict[tuple[str, int], Pair] = {}

    def measured(name: str, seed: int) -> Pair:
        if (name, seed) not in known:
            spec, spans = spec_of(PLANS[name]), MeasuredFolder(GOLDEN / name).spans()
            assert spans is not None
            ((node, (tables, manifest)),) = simulate(spec, spans, seed=seed).items()
            found = summarize(run_data(spec, spans, tables, {node: {**manifest, "simulated": True}}))
            result = made_run(
                spec,
                metrics=found.metrics,
                quality=found.quality,
                quality_reasons=found.quality_reasons,
                tags=found.tags,
            )
            known[name, seed] = spec, result
        return known[name, seed]

    def study(seed: int, num_references: int) -> list[Pair]:
        runs = [(name, seed, 2 * n, 0) for n, name in enumerate(PLANS)]
        runs += [("dp4", 50 + n, 2 * n + 1, FIRST_REFERENCE_REPEAT + n) for n in range(num_references)]
        return [
            (spec, placed(result, number, repeat))
            for name, own, number, repeat in runs
            for spec, result in [measured(name, own)]
        ]

    return study


def ranked(pairs: Sequence[Pair], *bounds: str) -> Ranking:
    return rank(list(pairs), Question(objective=FASTEST, constraints=tuple(parse_constraint(text) for text in bounds)))


def verdicts(ranking: Ranking) -> dict[str, Verdict]:
    return {row.label: row.verdict for row in ranking.trials}


@pytest.mark.parametrize(
    ("name", "bounds"),
    [
        ("recorded", ("node_device_power_peak_1s_w <= 3000", "throttle_loss_frac <= 0.1")),
        ("recorded", ("node_device_power_peak_1s_w <= 3200",)),
        ("simulated", ("node_device_power_peak_1s_w <= 2900", "throttle_loss_frac <= 0.1")),
        ("simulated", ("node_device_power_peak_1s_w <= 2725",)),
    ],
)
def test_the_same_verdicts_in_another_order_with_another_seed_and_one_more_reference(
    name: str, bounds: tuple[str, ...], request: pytest.FixtureRequest
) -> None:
    study: Study = request.getfixturevalue(name)
    pairs = study(1, 3)
    first = ranked(pairs, *bounds)
    assert len(first.infeasible) == (bounds[-1] != "node_device_power_peak_1s_w <= 3200")
    for seed in range(3):
        shuffled = random.Random(seed).sample(pairs, len(pairs))
        assert ranked(shuffled, *bounds).to_json() == first.to_json()
    others = [study(2, 3), study(3, 3), study(1, 4)]
    for other in (ranked(one, *bounds) for one in others):
        assert verdicts(other) == verdicts(first)
        assert [(row.label, row.rank) for row in other.feasible] == [(row.label, row.rank) for row in first.feasible]


def test_the_verdicts_are_those_of_the_recordings(recorded: Study, simulated: Study) -> None:
    bounded = ranked(recorded(1, 3), "node_device_power_peak_1s_w <= 3000", "throttle_loss_frac <= 0.1")
    assert [row.label for row in bounded.feasible] == ["tp2 pp2 mbs1"]
    assert [row.label for row in bounded.infeasible] == ["dp4 mbs1 overlap=grad_param"]
    free = ranked(recorded(1, 3), "node_device_power_peak_1s_w <= 3200")
    assert [(row.rank, row.label) for row in free.feasible] == [(1, "dp4 mbs1 overlap=grad_param"), (2, "tp2 pp2 mbs1")]
    modelled = ranked(simulated(1, 3), "node_device_power_peak_1s_w <= 2900", "throttle_loss_frac <= 0.1")
    assert [row.label for row in modelled.feasible] == ["tp2 pp2 mbs1"]
    assert [row.label for row in modelled.infeasible] == ["dp4 mbs1 overlap=grad_param"]
    near = ranked(simulated(1, 3), "node_device_power_peak_1s_w <= 2725")
    assert [row.label for row in near.undecided] == ["tp2 pp2 mbs1"], "1.3 % below the bound"
