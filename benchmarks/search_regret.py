#!/usr/bin/env python
"""Replays measured tables for every search strategy, and says how many trials and GPU-seconds each takes.

    python benchmarks/search_regret.py                                  # every table and goal of search_cases.yaml
    python benchmarks/search_regret.py --case moe_ep_h200x4_2750w --only random --only model_guided
    python benchmarks/search_regret.py --priors --seeds 4 --most 60     # by estimates that are wrong on purpose
    python benchmarks/search_regret.py --ask 200    # processor time of a decision among 50,000 candidates

A table has one row per trial repeat (`benchmarks/data/README.md`). A strategy is told one repeat, drawn by the seed. It
is scored by the mean over repeats. Columns named `estimated_METRIC` are the estimates that `model_guided` gets as its
prior; those of a case with `held_out` are fitted to other tables. A trial costs its whole time, from build to end, on
all its devices.

With `--priors` it is replayed with the estimate that a table has, with that mirrored, with its ranks reversed, and with
none, beside the list of a table by its estimate. None of them may make it stop at a plan that is far from the best.
"""

import itertools
import json
import math
import sys
import time
from argparse import ArgumentParser, Namespace
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice, product
from pathlib import Path
from typing import Any, Final, NoReturn

import numpy as np
import pyarrow.parquet as pq
import yaml
from harness import Found, Rows, benchmark
from measured_tables import held_out_estimates, run_of
from numpy.typing import NDArray

from wattune.cost.tables import EstimatedMetric
from wattune.objective import Question
from wattune.plans.axes import Plan
from wattune.run import Run, RunStatus
from wattune.search.strategies.model_guided import ModelGuided
from wattune.search.strategies.protocol import Observation, Problem, Strategy
from wattune.search.strategy import STRATEGIES
from wattune.trial import TrialSpec
from wattune.units import NS_PER_S

Column = NDArray[np.float64]
CASES: Final = Path(__file__).parent / "data/search_cases.yaml"
ESTIMATES: Final = "estimated_"
LOG_STD: Final = "_log_std"
USUAL_LOG_STD: Final = 0.15
"""Of a table that states none; as a surrogate takes it."""
WITHIN: Final = 0.02
"""A trial is found when its objective is this near to that of the best feasible one."""
QUANTILES: Final = (0.1, 0.5, 0.9)
NUM_ASKED: Final = 50_000
MOST_ASK_S: Final = 1.0
"""Candidates of a decision that is timed, and the processor seconds that it may take."""
SLOW_SEEDS: Final = 5
"""Seeds of a strategy that a case calls slow."""
COLUMNS: Final = (
    "table", "strategy", "num_candidates", "num_seeds", "num_trials_most", "num_trials_p10", "num_trials_median",
    "num_trials_p90", "found_frac", "gpu_time_median_s", "num_trials_run", "stopped_frac", "worst_stop_frac",
    "end_regret_median_frac", "feasible_frac", "inside_frac", "estimate_pairs_frac", "ask_longest_s",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """Everything a table says about one configuration."""

    spec: TrialSpec
    results: tuple[Run, ...]
    metrics: dict[str, float]
    """Means over completed repeats."""
    estimate: dict[str, float]
    cost_s: float
    """Mean seconds of its first repeats on all its devices together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A table with a goal."""

    name: str
    trials: tuple[Trial, ...]
    question: Question
    warm: tuple[Trial, ...] = ()

    def value(self, trial: Trial) -> float:
        """The objective as a number of which more is better; minus infinity where the trial is not feasible."""
        value = trial.metrics.get(self.question.objective.metric)
        if value is None or not self.question.kept(trial.metrics):
            return -math.inf
        return value if self.question.objective.maximize else -value

    def regret(self, value: float, best: float) -> float:
        """The relative distance to the best feasible trial."""
        return math.inf if value == -math.inf else (best - value) / abs(best)


def read_table(path: Path, *, held_out: bool = False) -> tuple[Trial, ...]:
    """Reads a table of trials; with `held_out` their estimates are fitted to the other tables beside it."""
    of_trial: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in pq.read_table(path).to_pylist():
        of_trial[row["trial_id"]].append(row)
    found = tuple(map(_trial, of_trial.values()))
    if not held_out:
        return found
    known = held_out_estimates(path, tuple(trial.spec for trial in found))
    return tuple(replace(trial, estimate=known[trial.spec.trial_id]) for trial in found)


def _trial(rows: list[dict[str, Any]]) -> Trial:
    spec, results = TrialSpec.from_json(json.loads(rows[0]["spec"])), tuple(map(run_of, rows))
    done = [result.metrics for result in results if result.status is RunStatus.COMPLETED]
    common = set.intersection(*map(set, done)) if done else set()
    first = min(row["repeat"] for row in rows)
    took_ns = np.mean([row["end_wall_ns"] - row["start_wall_ns"] for row in rows if row["repeat"] == first])
    return Trial(
        spec=spec,
        results=results,
        metrics={name: float(np.mean([metrics[name] for metrics in done])) for name in common},
        estimate={key: value for key, value in rows[0].items() if key.startswith(ESTIMATES) and value is not None},
        cost_s=float(took_ns) / NS_PER_S * spec.cluster.world_size,
    )


def estimates_of(trials: Sequence[Trial]) -> dict[str, EstimatedMetric] | None:
    """The estimates of trials in columns; None where the table has none."""
    names = {name for trial in trials for name in trial.estimate}
    if not names:
        return None
    columns = {name: np.array([trial.estimate.get(name, math.nan) for trial in trials]) for name in sorted(names)}
    plain = {name.removeprefix(ESTIMATES): column for name, column in columns.items()}
    return {
        name: EstimatedMetric.of(column, plain.get(name + LOG_STD, USUAL_LOG_STD))
        for name, column in plain.items()
        if not name.endswith(LOG_STD)
    }


def earlier(trials: Sequence[Trial]) -> tuple[Observation, ...]:
    """Trials as results of an earlier study."""
    return tuple(
        Observation(
            spec=trial.spec,
            result=trial.results[0],
            estimate={name.removeprefix(ESTIMATES): value for name, value in trial.estimate.items()},
        )
        for trial in trials
    )


def mirrored(values: Column) -> Column:
    """Mirrors what is known about its middle: the logarithm where all is positive. Missing values stay missing."""
    known = values[np.isfinite(values)]
    if len(known) and (known > 0).all():
        return np.asarray(np.exp(2 * np.log(known).mean() - np.log(values)))
    return np.asarray(known.min() + known.max() - values) if len(known) else values


def reversed_ranks(values: Column) -> Column:
    """Gives the lowest value to the row that had the highest, and so on. Missing values stay missing."""
    known = np.flatnonzero(np.isfinite(values))
    order = known[np.argsort(values[known], kind="stable")]
    turned = values.copy()
    turned[order] = values[order[::-1]]
    return turned


def _with(problem: Problem, change: Callable[[Column], Column], only: str | None = None) -> Problem:
    if problem.estimates is None:
        return problem
    changed = {
        name: EstimatedMetric.of(change(np.asarray(one.value, dtype=np.float64)), one.log_std)
        if only in (None, name)
        else one
        for name, one in problem.estimates.items()
    }
    return replace(problem, estimates=changed)


def _objective(problem: Problem) -> str:
    assert problem.question is not None
    return problem.question.objective.metric


PRIORS: Final[dict[str, Callable[[Problem], Problem]]] = {
    "prior": lambda problem: problem,
    "mirrored": lambda problem: _with(problem, mirrored),
    "reversed": lambda problem: _with(problem, reversed_ranks, _objective(problem)),
    "both": lambda problem: _with(problem, reversed_ranks),
    "none": lambda problem: replace(problem, estimates=None),
}
"""By name: the estimate as it is; every estimate mirrored; ranks of the objective reversed; ranks of every estimate
reversed; none."""


class ListByEstimate:
    """Goes down the list of the estimate: plans whose estimate holds every bound by their objective, then the others.

    The others come by how far their estimate is past the bound that they break most.
    """

    learns = False
    stopped_because: str | None = None

    def __init__(self, problem: Problem) -> None:
        """Sorts the candidates of a problem with estimates."""
        question, estimates = problem.question, problem.estimates
        assert question is not None and estimates is not None
        value = np.asarray(estimates[question.objective.metric].value, dtype=np.float64)
        gain = value if question.objective.maximize else -value
        past = np.zeros(len(value))
        for one in question.constraints:
            if one.metric in estimates:
                limit = estimates[one.limit_metric].value if one.limit_metric else 1.0
                share = np.asarray(estimates[one.metric].value) / limit
                over = (share - one.factor) if one.operator.startswith("<") else (one.factor - share)
                past = np.maximum(past, np.nan_to_num(over, nan=np.inf) / max(abs(one.factor), 1e-9))
        rows: Sequence[int] = np.lexsort((-np.nan_to_num(gain, nan=-np.inf), past)).tolist()
        self._left = [problem.specs[row] for row in rows]

    def ask(self, n: int, expected_s: object = None) -> list[TrialSpec]:
        """Returns the next ones of the list."""
        del expected_s
        asked, self._left = self._left[:n], self._left[n:]
        return asked

    def tell(self, spec: TrialSpec, result: Run) -> None:
        """Learns nothing."""


def variants(case: Case) -> dict[str, Callable[[Problem], Strategy]]:
    """Lists what is compared: every strategy, and `model_guided` without each of its parts."""
    found = dict(STRATEGIES)
    if case.warm:
        found["model_guided, warm start"] = lambda p: ModelGuided(replace(p, warm=earlier(case.warm)))
    if estimates_of(case.trials) is not None:
        found["model_guided, no prior"] = lambda p: ModelGuided(replace(p, estimates=None))
    found["model_guided, never stops"] = lambda p: ModelGuided(p, stops=False)
    found["model_guided, no constraint model"] = lambda p: ModelGuided(p, models_constraints=False)
    return found


def priors(case: Case) -> dict[str, Callable[[Problem], Strategy]]:
    """Lists `model_guided` with each prior, and the list of the table by its estimate."""
    has = estimates_of(case.trials) is not None
    found: dict[str, Callable[[Problem], Strategy]] = {
        name: lambda problem, prior=prior: ModelGuided(prior(problem))
        for name, prior in PRIORS.items()
        if has or name == "none"
    }
    return found | ({"list by the estimate": ListByEstimate} if has else {})


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """One replay: the trials in order."""

    trials: tuple[Trial, ...]
    costs_s: tuple[float, ...]
    """Device-seconds until each of them ended."""
    stopped_because: str | None
    ask_s: float
    """Longest single question."""
    inside: tuple[bool, ...] = ()
    """For each predicted trial whether its measurement was in the 95 % interval."""


def replay(make: Callable[[Problem], Strategy], case: Case, seed: int, most: int) -> Replay:
    """Runs a strategy on a table, one trial after another, until it stops or has proposed so many.

    The seed is of the order of candidates, of what is drawn, and of the strategy.
    """
    dice = np.random.default_rng(seed)
    trials = [case.trials[index] for index in dice.permutation(len(case.trials))]
    by_spec = {trial.spec: trial for trial in trials}
    problem = Problem(specs=list(by_spec), seed=seed, question=case.question, estimates=estimates_of(trials))
    strategy = make(problem)
    done, costs, spent_s, ask_s = list[Trial](), list[float](), 0.0, 0.0
    inside: list[bool] = []
    while len(done) < most:
        start_s = time.perf_counter()
        asked = strategy.ask(1)
        ask_s = max(ask_s, time.perf_counter() - start_s)
        if not asked:
            break
        predicted = strategy.prediction(asked[0]) if isinstance(strategy, ModelGuided) else None
        trial = by_spec[asked[0]]
        result = trial.results[dice.integers(len(trial.results))]
        spent_s += trial.cost_s
        done.append(trial)
        costs.append(spent_s)
        if predicted is not None and predicted.metric in result.metrics:
            inside.append(predicted.low <= result.metrics[predicted.metric] <= predicted.high)
        strategy.tell(trial.spec, result)
    return Replay(
        trials=tuple(done),
        costs_s=tuple(costs),
        stopped_because=strategy.stopped_because,
        ask_s=ask_s,
        inside=tuple(inside),
    )


def pairwise_accuracy(case: Case) -> float | None:
    """Share of pairs of completed trials that the estimate of the objective puts in their order."""
    name, key = case.question.objective.metric, ESTIMATES + case.question.objective.metric
    known = [(t.metrics[name], t.estimate[key]) for t in case.trials if name in t.metrics and key in t.estimate]
    pairs = [(a[0] - b[0]) * (a[1] - b[1]) > 0 for a, b in itertools.combinations(known, 2) if a[0] != b[0]]
    return sum(pairs) / len(pairs) if pairs else None


def curve(case: Case, run: Replay, best: float, most: int) -> list[float]:
    """The regret after each full measurement; a run that stopped stays where it was."""
    values = itertools.accumulate((case.value(trial) for trial in run.trials), max)
    regrets = [case.regret(value, best) for value in values]
    return regrets + (regrets[-1:] or [math.inf]) * (most - len(regrets))


def found_after(case: Case, run: Replay, best: float) -> float:
    """Returns the trials until a plan is within `WITHIN` of the best; infinity where none is."""
    return next((at + 1.0 for at, one in enumerate(curve(case, run, best, 0)) if one <= WITHIN), math.inf)


def figures(case: Case, strategy: str, runs: Sequence[Replay], most: int) -> tuple[Any, ...]:
    """Computes a row of the table: quantiles over the seeds."""
    best = max(map(case.value, case.trials))
    found = [found_after(case, run, best) for run in runs]
    costs = [run.costs_s[int(at) - 1] if math.isfinite(at) else at for run, at in zip(runs, found, strict=True)]
    ends = [curve(case, run, best, most)[-1] for run in runs]
    stops = [end for run, end in zip(runs, ends, strict=True) if run.stopped_because is not None]
    feasible = [sum(case.value(t) > -math.inf for t in run.trials) / max(len(run.trials), 1) for run in runs]
    inside, pairs = [one for run in runs for one in run.inside], pairwise_accuracy(case)
    return (
        case.name, strategy, len(case.trials), len(runs), most,
        *(_whole(each) for each in np.quantile(found, QUANTILES, method="higher")),
        round(float(np.mean(np.isfinite(found))), 3),
        _whole(float(np.quantile(costs, 0.5, method="higher"))),
        _whole(float(np.median([len(run.trials) for run in runs]))),
        round(len(stops) / len(runs), 3),
        max(stops, default=0.0),
        ends[0] if len(ends) == 1 else float(np.median(ends)),
        round(float(np.mean(feasible)), 3),
        round(float(np.mean(inside)), 3) if inside else "",
        "" if pairs is None else round(pairs, 3),
        max(run.ask_s for run in runs),
    )  # fmt: skip


def _whole(number: float) -> int | str:
    return round(number) if math.isfinite(number) else ""


def refuse(text: str) -> NoReturn:
    """Ends the program as wrong input does."""
    print(f"error: {text}", file=sys.stderr)
    raise SystemExit(2)


def cases_of(path: Path, wanted: Sequence[str]) -> Iterator[tuple[Case, dict[str, int], list[str]]]:
    """Reads a file of cases: those that are wanted, else all; each with its most trials and its slow strategies."""
    listed = yaml.safe_load(path.read_text())
    unknown = set(wanted) - {one["name"] for one in listed}
    if unknown:
        refuse(f"{path}: has no case {', '.join(sorted(unknown))}; it has {', '.join(c['name'] for c in listed)}")
    for one in listed:
        if wanted and one["name"] not in wanted:
            continue
        case = Case(
            name=one["name"],
            trials=read_table(path.parent / one["table"], held_out=one.get("held_out", False)),
            question=Question.of(one["objective"], *one["where"]),
            warm=read_table(path.parent / one["warm"]) if "warm" in one else (),
        )
        yield case, {"others": 200, **one.get("most", {})}, one.get("slow", [])


def cpu_s_of_asking(num_trials: int) -> tuple[float, float]:
    """Measures a decision after so many trials of 50,000 made-up candidates: mean and most of the last 20."""
    axes: dict[str, Sequence[object]] = {
        "tp": (1, 2, 4, 8),
        "pp": (1, 2, 4, 8),
        "micro_batch_size": (1, 2, 4, 8, 16),
        "recompute": ("none", "selective", "full"),
        "sharding": ("none", "zero1", "zero2", "zero3"),
        "power_limit_w": np.linspace(300.0, 700.0, 18).tolist(),
        "overlap": ("none", "grad", "grad_param"),
    }
    base = next(cases_of(CASES, ["moe_ep_h200x4_2750w"]))[0].trials[0].spec
    plans = (Plan(**dict(zip(axes, values, strict=True))) for values in product(*axes.values()))
    specs = tuple(replace(base, plan=plan) for plan in islice(plans, NUM_ASKED))
    rng, num = np.random.default_rng(0), len(specs)
    limit, micro, tp = (
        np.array([getattr(s.plan, n) for s in specs]) for n in ("power_limit_w", "micro_batch_size", "tp")
    )
    speed, power = "tokens_per_s", "node_device_power_peak_1s_w"
    true = {speed: 1e4 * (limit / 700) ** 0.4 * micro**0.1 / tp**0.05, power: 4 * limit}
    true = {name: column * np.exp(0.04 * rng.standard_normal(num)) for name, column in true.items()}
    estimates = {n: EstimatedMetric.of(each * np.exp(0.1 * rng.standard_normal(num)), 0.15) for n, each in true.items()}
    question = Question.of("maximize tokens_per_s", "node_device_power_peak_1s_w <= 2500")
    strategy = ModelGuided(Problem(specs=specs, question=question, estimates=estimates, seed=0), stops=False)
    rows, spent_s = {spec: row for row, spec in enumerate(specs)}, []
    for _ in range(num_trials):
        begun_s = time.process_time()
        (spec,) = strategy.ask(1)
        spent_s.append(time.process_time() - begun_s)
        metrics = {name: float(column[rows[spec]]) for name, column in true.items()}
        run = Run(trial_id=spec.trial_id, repeat=0, status=RunStatus.COMPLETED, metrics=metrics)
        strategy.tell(spec, run)
    return float(np.mean(spent_s[-20:])), max(spent_s[-20:])


def _options(parser: ArgumentParser) -> None:
    parser.add_argument("--cases", type=Path, default=CASES, help="file of tables with goals")
    parser.add_argument("--case", action="append", default=[], help="only this one of the cases; may be repeated")
    parser.add_argument("--priors", action="store_true", help="model_guided by wrong estimates, in place of strategies")
    parser.add_argument("--ask", type=int, default=0, metavar="TRIALS", help="time a decision after so many trials")
    parser.add_argument("--only", action="append", help="a strategy to replay; all without it")
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--most", type=int, help="most trials of a run; else as the case says")


@benchmark(
    claim="A strategy finds a plan near the best one in fewer trials than a search at random, and never stops far off.",
    bar=f"no stop above {WITHIN:.0%} regret; trials beside those of other strategies; a decision {MOST_ASK_S:g} CPU-s",
    options=_options,
)
def main(given: Namespace) -> Found:
    """Replays every case by every strategy, or with every prior; or times decisions."""
    if given.ask:
        mean_s, most_s = cpu_s_of_asking(given.ask)
        asked = Rows("candidates", "trials", "mean_cpu_s", "most_cpu_s")
        asked.add(NUM_ASKED, given.ask, mean_s, most_s)
        return Found(asked, missed=[f"a decision takes {mean_s:.1f} CPU-s"] if mean_s > MOST_ASK_S else [])
    rows, missed = Rows(*COLUMNS), []
    for case, most, slow in cases_of(given.cases, given.case):
        if max(map(case.value, case.trials)) == -math.inf:
            refuse(f"{case.name}: no trial holds every bound; loosen them")
        for name, make in (priors if given.priors else variants)(case).items():
            if given.only and name not in given.only:
                continue
            own_most = min(given.most or most.get(name, most["others"]), len(case.trials))
            seeds = min(given.seeds, SLOW_SEEDS) if name in slow else given.seeds
            rows.add(*figures(case, name, [replay(make, case, seed, own_most) for seed in range(seeds)], own_most))
            print(rows.cells[-1], file=sys.stderr, flush=True)
            if (worst := rows.cells[-1][COLUMNS.index("worst_stop_frac")]) > WITHIN:
                missed.append(f"{case.name}, {name}: a stop at {worst:.1%}")
    return Found(rows, missed=missed)


if __name__ == "__main__":
    main()
