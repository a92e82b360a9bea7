#!/usr/bin/env python
"""Asks a search what is the probability that one of the plans that are left is better, and whether one is.

    python benchmarks/plans_left.py --seeds 2

Measured tables are replayed: in the order of `model_guided`, and in an order that was drawn. After 4 to 30 trials the
model states the probability that `wattune suggest` prints. The table says what is true: a plan that is left has a
larger objective than the best one that was measured, and keeps every bound.
"""

from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Final

import numpy as np
from harness import Found, Rows, benchmark
from search_regret import Case, cases_of, estimates_of

from wattune.search.strategies.model_guided import ModelGuided
from wattune.search.strategies.protocol import Problem

AFTER: Final = (4, 7, 11, 16, 22, 30)
"""Trials after which the model is asked."""
EDGES: Final = (0.0, 0.02, 0.1, 0.3, 0.6, 0.9, 1.0)
MOST_APART: Final = 0.05
SYNTHETIC: Final = "synthetic"


def stated(case: Case, seed: int, *, guided: bool) -> Iterator[tuple[float, bool]]:
    """Yields the stated probability and the truth, after each of `AFTER` trials of one replay."""
    dice = np.random.default_rng(seed)
    trials = [case.trials[index] for index in dice.permutation(len(case.trials))]
    left = {trial.spec: trial for trial in trials}
    problem = Problem(specs=list(left), seed=seed, question=case.question, estimates=estimates_of(trials))
    model, best = ModelGuided(problem, stops=False), -np.inf
    for number in range(1, min(max(AFTER) + 1, len(trials))):
        asked = model.ask(1) if guided else [trials[number - 1].spec]
        if not asked:
            return
        trial = left.pop(asked[0])
        best = max(best, case.value(trial))
        model.tell(trial.spec, trial.results[dice.integers(len(trial.results))])
        if number in AFTER and (found := model.joint_gain(list(left))) is not None:
            yield found[2], max(map(case.value, left.values())) > best


def add_arguments(parser: ArgumentParser) -> None:
    """Adds the cases, and how often each is replayed."""
    parser.add_argument("--cases", type=Path, default=Path(__file__).parent / "data/search_cases.yaml")
    parser.add_argument(
        "--case", action="append", default=[], help="a case by name; the measured ones if none is given"
    )
    parser.add_argument("--seeds", type=int, default=2)


@benchmark(
    claim="The stated probability that a plan which is left is better is as often right as it says.",
    bar=f"mean within {MOST_APART:g} of the truth, in either order",
    options=add_arguments,
)
def main(given: Namespace) -> Found:
    """Compares what is stated with what is true, by bins of the stated probability."""
    rows = Rows("order", "least_frac", "num_states", "stated_frac", "true_frac")
    cases = [case for case, _, _ in cases_of(given.cases, given.case, None) if given.case or SYNTHETIC not in case.name]
    missed = []
    for order in ("guided", "drawn"):
        pairs = np.array(
            [
                pair
                for case in cases
                for seed in range(given.seeds)
                for pair in stated(case, seed, guided=order == "guided")
            ]
        )
        for low, high in (*pairwise(EDGES), (0.0, 1.0)):
            own = pairs[(pairs[:, 0] >= low) & ((pairs[:, 0] < high) | (high == 1.0))]
            name = order if (low, high) != (0.0, 1.0) else f"{order}, all"
            rows.add(name, low, len(own), *(own.mean(axis=0).tolist() if len(own) else ("", "")))
        told, true = pairs.mean(axis=0)
        if abs(told - true) > MOST_APART:
            missed.append(f"{order} order: {told:.2f} stated, {true:.2f} true")
    return Found(rows, missed=missed)


if __name__ == "__main__":
    main()
