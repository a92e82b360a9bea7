"""Racing of finalists over simulated studies whose truth is known: how often it names the best, and at what cost.

Each study has 24 trials that ran once and a reference trial between them. Speed and peak power have a true mean and a
scatter; faster trials draw more, and a bound cuts off some. The best trial is the fastest whose next run keeps the
bound with a probability of 0.95. After the search, repeats are added one at a time until the best is told apart with
P = 0.95 or the repeats are used. They are given in three ways:

- race: the trial whose next run tells most (`wattune.ranking.racing`);
- finalists in turn: the trials that lead in at least 1 % of the draws, those with the fewest runs first;
- all in turn: every trial once more, as `measure.repeats` does.

Ends with 1 if the race names the best in less than 93 % of the studies that it decides, by more than chance, or if it
needs more repeats than all in turn.
"""

import math
from argparse import ArgumentParser, Namespace
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
from harness import Found, Rows, benchmark

from wattune.catalog.hardware import ClusterSpec
from wattune.catalog.models import model
from wattune.fidelity import FIRST_REFERENCE_REPEAT
from wattune.objective import Question, parse_constraint, parse_objective
from wattune.plans.axes import Plan
from wattune.ranking.best import Standings
from wattune.ranking.racing import race_standings
from wattune.run import Run, RunStatus
from wattune.trial import TrialSpec
from wattune.workload import Workload

OBJECTIVE: Final = parse_objective("maximize tokens_per_s")
BOUND_W: Final = 2750.0
BOUND: Final = parse_constraint(f"node_device_power_peak_1s_w <= {BOUND_W:g}")

NUM_TRIALS: Final = 24
MOST_REPEATS: Final = 40
UNTIL: Final = 0.95
LEAST_NAMED_FRAC: Final = 0.93
SURE: Final = 3.0
"""Standard errors of a share by which it may miss its limit: a simulation is a sample too."""
_FEASIBLE: Final = 1.644854
"""One-sided 95 % quantile of the normal distribution."""
_TRIAL_S: Final = 60.0


@dataclass(frozen=True)
class Case:
    """One kind of study."""

    name: str
    apart_frac: float = 0.03
    """Standard deviation of the trials' true speeds."""
    spread_frac: float = 0.01
    unequal: float = 0.0
    """Standard deviation of the logarithm of trials' own scatter."""
    drift_frac: float = 0.0
    bound_at: float = 0.0
    """Place of the bound in the trials' powers, in standard deviations above their mean."""


CASES: Final = (
    Case("bound far away", bound_at=5.0),
    Case("bound through the leaders", bound_at=1.0),
    Case("unequal scatter", unequal=0.4, bound_at=5.0),
    Case("drift of 4 %", drift_frac=0.04, bound_at=5.0),
)


COLUMNS: Final = ("case", "way", "num_studies", "told_frac", "named_frac", "num_repeats_mean", "num_repeats_median")
"""Of a row, for one kind of study and one way to give repeats: `told_frac` is the share of the studies in which the
best was told apart, `named_frac` the share of those in which it was the true one."""

Row = dict[str, Any]


class Study:
    """A simulated study and its truth."""

    def __init__(self, rng: np.random.Generator, case: Case) -> None:
        """Draws the truth, and runs every trial once with a reference trial between them."""
        self._rng, self._case = rng, case
        self.speed = rng.normal(0.0, case.apart_frac, NUM_TRIALS + 1)
        self.power = 0.5 * self.speed + rng.normal(0.0, 0.02, NUM_TRIALS + 1)
        self.power += -case.bound_at * math.hypot(0.5 * case.apart_frac, 0.02)
        self.speed[-1] = self.speed[:-1].mean()  # the reference trial is an ordinary one
        self.spread = case.spread_frac * np.exp(rng.normal(0.0, case.unequal, NUM_TRIALS + 1))
        self.results: list[tuple[TrialSpec, Run]] = []
        self.runs: Counter[int] = Counter()
        self._length = NUM_TRIALS + 12
        for number in (NUM_TRIALS, NUM_TRIALS, *rng.permutation(NUM_TRIALS)):
            if len(self.results) in (12, 24):
                self.run(NUM_TRIALS)
            self.run(int(number))

    @property
    def best(self) -> int | None:
        """Number of the fastest trial that truly keeps the bound."""
        keeps = np.flatnonzero(self.power + _FEASIBLE * self.spread <= 0.0)
        return int(keeps[self.speed[keeps].argmax()]) if len(keeps) else None

    def run(self, number: int) -> None:
        """Measures a trial."""
        repeat, at = self.runs[number], len(self.results)
        self.runs[number] += 1
        noise = self.spread[number] * self._rng.normal(size=2)
        drift = self._case.drift_frac * (at / self._length - 0.5)
        spec = replace(_SPEC, plan=Plan(micro_batch_size=number + 1))
        result = Run(
            trial_id=spec.trial_id,
            repeat=repeat + (FIRST_REFERENCE_REPEAT if number == NUM_TRIALS else 0),
            status=RunStatus.COMPLETED,
            metrics={
                "tokens_per_s": 50_000.0 * math.exp(self.speed[number] + noise[0] + drift),
                "node_device_power_peak_1s_w": BOUND_W * math.exp(self.power[number] + noise[1]),
            },
            quality="indicative",
            tags={"simulated": "true", "nodes": "n0"},
            start_wall_ns=round((1_790_000_000 + at * _TRIAL_S) * 1e9),
        )
        self.results.append((spec, result))


_CLUSTER, _WORK = ClusterSpec(device="h200_sxm", devices_per_node=4), Workload(seq_len=4096, global_batch_size=16)
_SPEC: Final = TrialSpec(model=model("llama3_8b"), cluster=_CLUSTER, engine="torch", workload=_WORK, plan=Plan())

Way = Callable[[Study, Standings], int | None]


def race(_study: Study, found: Standings) -> int | None:
    """Chooses the trial whose next run tells most."""
    row = found.next({})
    return None if row is None else _number(row.spec)


def finalists_in_turn(study: Study, found: Standings) -> int | None:
    """Chooses the finalist with the fewest runs."""
    numbers = [_number(one.row.spec) for one in found.finalists if one.best_probability >= 0.01]
    return min(numbers, key=lambda number: study.runs[number], default=None)


def all_in_turn(study: Study, _found: Standings) -> int | None:
    """Chooses the trial with the fewest runs."""
    return min(range(NUM_TRIALS), key=lambda number: study.runs[number])


WAYS: Final[dict[str, Way]] = {"race": race, "finalists in turn": finalists_in_turn, "all in turn": all_in_turn}


def _number(spec: TrialSpec) -> int:
    return spec.plan.micro_batch_size - 1


def follow(study: Study, way: Way, most_repeats: int) -> tuple[int, bool, bool]:
    """Adds repeats to a study until its best is told apart.

    Returns:
        The repeats, whether the best was told apart, and whether it is the true one.
    """
    for num_repeats in range(most_repeats + 1):
        found = race_standings(study.results, Question(objective=OBJECTIVE, constraints=(BOUND,)))
        if found.told_apart(UNTIL):
            leader = None if found.none_probability >= UNTIL or found.leader is None else found.leader.row
            return num_repeats, True, (None if leader is None else _number(leader.spec)) == study.best
        number = way(study, found)
        if number is None or num_repeats == most_repeats:
            break
        study.run(number)
    return num_repeats, False, False


def count(case: Case, name: str, num_studies: int, seed: int, most_repeats: int) -> Row:
    """Simulates studies of one kind and counts."""
    ends = []
    for number in range(num_studies):
        study = Study(np.random.default_rng([seed, number, CASES.index(case)]), case)
        ends.append(follow(study, WAYS[name], most_repeats))
    repeats = np.array([end[0] for end in ends], np.float64)
    stopped = [end for end in ends if end[1]]
    named_frac = sum(end[2] for end in stopped) / len(stopped) if stopped else math.nan
    middle = float(repeats.mean()), float(np.median(repeats))
    row = (case.name, name, num_studies, len(stopped) / num_studies, named_frac, *middle)
    return dict(zip(COLUMNS, row, strict=True))


def falls_short(rows: list[Row]) -> list[str]:
    """Names the kinds of studies in which the race misses its limits by more than chance."""
    found = []
    for case in dict.fromkeys(row["case"] for row in rows):
        of = {row["way"]: row for row in rows if row["case"] == case}
        raced, turns = of["race"], of["all in turn"]
        num_told = raced["told_frac"] * raced["num_studies"]
        room = SURE * math.sqrt(UNTIL * (1.0 - UNTIL) / num_told) if num_told else 1.0
        if raced["named_frac"] < LEAST_NAMED_FRAC - room:
            found.append(f"{case}: names the best in {raced['named_frac']:.3f} of the studies it decides")
        if raced["num_repeats_mean"] > turns["num_repeats_mean"]:
            found.append(f"{case}: needs more repeats than all in turn")
    return found


def _options(parser: ArgumentParser) -> None:
    parser.add_argument("--studies", type=int, default=100, help="simulated studies of each row")
    parser.add_argument("--repeats", type=int, default=MOST_REPEATS, help="most repeats of a study")
    parser.add_argument("--seed", type=int, default=0)


@benchmark(
    claim="A race tells the best apart in fewer repeats than all in turn, and names the true one as often as it says.",
    bar="no kind of study falls short by more than chance",
    options=_options,
)
def main(given: Namespace) -> Found:
    """Counts for every kind of study and way to give repeats."""
    found = [count(case, way, given.studies, given.seed, given.repeats) for case in CASES for way in WAYS]
    rows = Rows(*COLUMNS)
    for row in found:
        rows.add(*row.values())
    return Found(rows, missed=falls_short(found))


if __name__ == "__main__":
    main()
