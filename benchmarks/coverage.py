"""Coverage of what a ranking concludes, over simulated studies whose truth is known.

Each study has 30 trials once, except eight that run 1 to 6 times, and a reference trial between them on every set of
nodes. Three things are counted:

- intervals: the share of 95 % intervals that hold the trial's true figure;
- next run: the share of next runs below the figure that they keep with P = 0.95;
- told apart: the share of studies in which the truly best trial is told to be worse than another.

Ends with 1 where a row that is judged falls short: 93 to 97 % for the first two, at most 5 % for the third.
"""

import math
from argparse import ArgumentParser, Namespace
from dataclasses import asdict, dataclass, fields
from typing import Final

import numpy as np
from harness import Found, Rows, benchmark

from wattune.arrays import Floats
from wattune.intervals import t_cumulative, t_quantile
from wattune.ranking.best import on_one_scale, ranks
from wattune.ranking.scatter import Prior, Runs, Scatter, fit

NUM_TRIALS: Final = 30
NUM_REPEATED: Final = 8
NUM_REFERENCES: Final = 5
REPEATS: Final = (1, 2, 3, 4, 5, 6)
LEAST_FRAC, MOST_FRAC = 0.93, 0.97
MOST_ERRORS_FRAC: Final = 0.05
SURE: Final = 3.0
"""Standard errors of a share by which a row may miss its limits: a simulation is a sample too."""


@dataclass(frozen=True)
class Case:
    """One kind of study."""

    name: str
    spread_frac: float = 0.01
    unequal: float = 0.0
    """Standard deviation of the logarithm of trials' own scatter."""
    drift_frac: float = 0.0
    offset_frac: float = 0.0
    """Standard deviation of the sets of nodes."""
    num_node_sets: int = 1
    judged: bool = True


CASES: Final = (
    Case("equal scatter"),
    Case("unequal scatter", unequal=0.4),
    Case("drift of 4 %", drift_frac=0.04),
    Case("node offsets of 6 %", offset_frac=0.06, num_node_sets=3),
    Case("all of these", unequal=0.4, drift_frac=0.04, offset_frac=0.06, num_node_sets=3),
    Case("prior twice too wide", spread_frac=0.005, judged=False),
    Case("prior half too narrow", spread_frac=0.02, judged=False),
)


@dataclass(frozen=True)
class Row:
    """Counts for one kind of study with so many runs of some trials."""

    case: str
    judged: bool
    num_runs: int
    num_studies: int
    intervals_frac: float
    next_run_frac: float
    told_wrong_frac: float
    half_width_frac: float
    """Median half width of the intervals."""

    @property
    def falls_short(self) -> list[str]:
        """Names what missed its limits by more than chance."""
        if not self.judged:
            return []
        found, num = [], self.num_studies * NUM_REPEATED
        for name, share in (("intervals", self.intervals_frac), ("next run", self.next_run_frac)):
            room = SURE * math.sqrt(0.05 * 0.95 / num)
            if not LEAST_FRAC - room <= share <= MOST_FRAC + room:
                found.append(name)
        room = SURE * math.sqrt(0.05 * 0.95 / self.num_studies)
        return found + (["told apart"] if self.told_wrong_frac > MOST_ERRORS_FRAC + room else [])


@dataclass(frozen=True)
class Study:
    """A simulated study and its truth, on the logarithmic scale."""

    runs: Runs
    mean: Floats
    """True figure of each trial without drift and offsets."""
    spread: Floats
    offset: Floats
    drift: float


def simulate(rng: np.random.Generator, case: Case, num_runs: int) -> Study:
    """Makes one study; the last trial is the reference trial."""
    mean = rng.normal(10.0, 0.01, NUM_TRIALS + 1)
    mean[-1] -= 0.1  # the reference trial is an ordinary one, and not among the best
    spread = case.spread_frac * np.exp(rng.normal(0.0, case.unequal, NUM_TRIALS + 1))
    offset = rng.normal(0.0, case.offset_frac, case.num_node_sets)
    place = rng.integers(case.num_node_sets, size=NUM_TRIALS)
    turns = np.repeat(np.arange(NUM_TRIALS), [num_runs] * NUM_REPEATED + [1] * (NUM_TRIALS - NUM_REPEATED))
    rng.shuffle(turns)
    every = len(turns) // (NUM_REFERENCES - 1)
    both = [(NUM_TRIALS, each) for each in range(case.num_node_sets)]
    order_of: list[tuple[int, int]] = []
    for number, trial in enumerate(turns):
        order_of += both if number % every == 0 else []
        order_of.append((int(trial), int(place[trial])))
    order_of += both
    trial, node_set = (np.array(column, np.intp) for column in zip(*order_of, strict=True))
    time_s = np.linspace(0.0, 3600.0, len(trial))
    noise = rng.normal(size=len(trial)) * spread[trial]
    logs = mean[trial] + offset[node_set] + case.drift_frac * (time_s / 3600.0 - 0.5) + noise
    runs = Runs(value=np.exp(logs), trial=trial, node_set=node_set, time_s=time_s, within=np.zeros(len(trial)))
    return Study(runs, mean, spread, offset, case.drift_frac)


def count(case: Case, num_runs: int, num_studies: int, seed: int) -> Row:
    """Simulates studies of one kind and counts."""
    rng = np.random.default_rng([seed, num_runs, CASES.index(case)])
    held, kept, wrong, widths = 0, 0, 0, []
    for _ in range(num_studies):
        study = simulate(rng, case, num_runs)
        found = fit(study.runs, Prior())
        base = int(np.flatnonzero((found.node_offset == 0) & (found.node_offset_error == 0))[0])
        errors = found.standard_error()
        for trial in range(NUM_REPEATED):
            reach = t_quantile(found.degrees_of_freedom[trial]) * errors[trial]
            held += abs(found.mean[trial] - study.mean[trial] - study.offset[base]) <= reach
            widths.append(reach)
            kept += _next_run(rng, study, found, trial) <= 0.95
        values = np.exp(found.mean[:NUM_TRIALS])
        order = ranks(on_one_scale([(found, np.arange(NUM_TRIALS), values)], maximize=True))
        wrong += int(order[int(study.mean[:NUM_TRIALS].argmax())] > 1)
    num = num_studies * NUM_REPEATED
    return Row(
        case=case.name,
        judged=case.judged,
        num_runs=num_runs,
        num_studies=num_studies,
        intervals_frac=held / num,
        next_run_frac=kept / num,
        told_wrong_frac=wrong / num_studies,
        half_width_frac=float(np.median(widths)),
    )


def _next_run(rng: np.random.Generator, study: Study, found: Scatter, trial: int) -> float:
    """Returns the P that a next run at any time and on any nodes of the study had been given: uniform if P is right."""
    drawn = study.mean[trial] + study.offset[rng.choice(study.runs.node_set)] + study.spread[trial] * rng.normal()
    drawn += study.drift * (rng.random() - 0.5)
    own = float(found.variance[trial]) * (1.0 + 1.0 / int(found.num_runs[trial]))
    errors = np.sqrt(own + found.away_variance[trial])
    freedom = float(found.degrees_of_freedom[trial]) * (errors**2 / own) ** 2
    apart = (drawn - found.raw_mean[trial] - found.away[trial]) / errors
    each = [t_cumulative(float(one), float(free)) for one, free in zip(apart, freedom, strict=True)]
    return float(found.place_share @ each)


def coverage(num_studies: int, *, seed: int = 0, repeats: tuple[int, ...] = REPEATS) -> list[Row]:
    """Counts for every kind of study."""
    return [count(case, num_runs, num_studies, seed) for case in CASES for num_runs in repeats]


def _options(parser: ArgumentParser) -> None:
    parser.add_argument("--studies", type=int, default=400, help="simulated studies of each row")
    parser.add_argument("--seed", type=int, default=0)


@benchmark(
    claim="Intervals hold the truth, and P the next run, as often as they say; the best is seldom told worse.",
    bar="no judged row falls short of 95 % by more than chance",
    options=_options,
)
def main(given: Namespace) -> Found:
    """Counts for every kind of study."""
    found = coverage(given.studies, seed=given.seed)
    rows = Rows(*(one.name for one in fields(Row)))
    for row in found:
        rows.add(*asdict(row).values())
    missed = [f"{row.case}, {row.num_runs} runs: {', '.join(row.falls_short)}" for row in found if row.falls_short]
    return Found(rows, missed=missed)


if __name__ == "__main__":
    main()
