#!/usr/bin/env python
"""Replays measured tables for every search strategy, and says how many trials and GPU-seconds each takes.

    python benchmarks/search_regret.py --cases benchmarks/data/search_cases.yaml    # every table; prints rows
    python benchmarks/search_regret.py --cases benchmarks/data/search_cases.yaml --case moe_ep_h200x4_2750w \
        --csv benchmarks/results/search_regret.csv --markdown benchmarks/results/search_regret.md \
        --svg benchmarks/results/search_regret    # one table anew: its rows, its part of the page, its drawing
    python benchmarks/search_regret.py --table PATH --objective "maximize tokens_per_s" --where "METRIC <= NUMBER"

A table has one row per trial repeat (`benchmarks/data/README.md`). A strategy is told one repeat, drawn by the seed. It
is scored by the mean over repeats. Columns named `estimated_METRIC` are the estimates that `model_guided` gets as its
prior. `--estimates` takes them from another table, `--held-out` fits them to other tables. A trial costs its whole
time, from build to end, on all its devices.
"""

import argparse
import itertools
import json
import math
import os
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, NoReturn

import numpy as np
import pyarrow.parquet as pq
import yaml
from harness import header
from measured_tables import held_out_estimates
from search_regret_page import draw_regret, merge_rows, print_rows, write_tables

from wattune.cost.tables import EstimatedMetric
from wattune.metrics import METRICS
from wattune.objective import Question, parse_constraint, parse_objective
from wattune.run import Run, RunStatus
from wattune.search.strategies.model_guided import ModelGuided
from wattune.search.strategies.protocol import Observation, Problem, Strategy
from wattune.search.strategy import STRATEGIES
from wattune.trial import TrialSpec
from wattune.units import NS_PER_S

ESTIMATES: Final = "estimated_"
LOG_STD: Final = "_log_std"
USUAL_LOG_STD: Final = 0.15
"""Of a table that states none; as a surrogate takes it."""
WITHIN: Final = 0.02
"""A trial is found when its objective is this near to that of the best feasible one."""
QUANTILES: Final = (0.1, 0.5, 0.9)
PAIRS_AFTER: Final = 20
"""Trials, or half of a smaller table, after which a surrogate's order is judged."""
SLOW_SEEDS: Final = 5
"""Seeds of a strategy that a case calls slow."""


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


def read_table(path: Path, estimates: Path | None = None, *, held_out: bool = False) -> tuple[Trial, ...]:
    """Reads a table of trials.

    Args:
        path: The table.
        estimates: A table that the estimates are taken from, instead of its own.
        held_out: Whether the estimates are fitted to the other tables beside it.
    """
    rows = pq.read_table(path).to_pylist()
    of_trial: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        of_trial[row["trial_id"]].append(row)
    source = {row["trial_id"]: row for row in (pq.read_table(estimates).to_pylist() if estimates else rows)}
    found = tuple(_trial(group, source.get(trial_id, {})) for trial_id, group in of_trial.items())
    if not held_out:
        return found
    known = held_out_estimates(path, tuple(trial.spec for trial in found))
    return tuple(replace(trial, estimate=known[trial.spec.trial_id]) for trial in found)


def _trial(rows: list[dict[str, Any]], source: dict[str, Any]) -> Trial:
    spec = TrialSpec.from_json(json.loads(rows[0]["spec"]))
    results = tuple(
        Run(
            trial_id=row["trial_id"],
            repeat=row["repeat"],
            status=RunStatus(row["status"]),
            metrics={name: row[name] for name in METRICS if row.get(name) is not None},
        )
        for row in rows
    )
    done = [result.metrics for result in results if result.status is RunStatus.COMPLETED]
    common = set.intersection(*map(set, done)) if done else set()
    first = min(row["repeat"] for row in rows)
    took_ns = np.mean([row["end_wall_ns"] - row["start_wall_ns"] for row in rows if row["repeat"] == first])
    return Trial(
        spec=spec,
        results=results,
        metrics={name: float(np.mean([metrics[name] for metrics in done])) for name in common},
        estimate={key: value for key, value in source.items() if key.startswith(ESTIMATES) and value is not None},
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
    pairs_frac: float | None = None
    """Share of pairs with a trial not yet run that the surrogate orders rightly, after `PAIRS_AFTER` trials."""


def replay(make: Callable[[Problem], Strategy], case: Case, seed: int, most: int) -> Replay:
    """Runs a strategy on a table, one trial after another, until it stops or has proposed so many.

    Args:
        make: Makes the strategy.
        case: The table.
        seed: Seed of the order of candidates, of what is drawn, and of the strategy.
        most: Most proposals.
    """
    dice = np.random.default_rng(seed)
    trials = [case.trials[index] for index in dice.permutation(len(case.trials))]
    by_spec = {trial.spec: trial for trial in trials}
    problem = Problem(specs=list(by_spec), seed=seed, question=case.question, estimates=estimates_of(trials))
    strategy = make(problem)
    done, costs, spent_s, ask_s = list[Trial](), list[float](), 0.0, 0.0
    inside: list[bool] = []
    pairs_frac = None
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
        if isinstance(strategy, ModelGuided) and len(done) == min(PAIRS_AFTER, len(trials) // 2):
            pairs_frac = surrogate_pairs(case, strategy, trials, {one.spec for one in done})
    return Replay(
        trials=tuple(done),
        costs_s=tuple(costs),
        stopped_because=strategy.stopped_because,
        ask_s=ask_s,
        inside=tuple(inside),
        pairs_frac=pairs_frac,
    )


def surrogate_pairs(
    case: Case, strategy: ModelGuided, trials: Sequence[Trial], ran: Container[TrialSpec]
) -> float | None:
    """Share of pairs that a strategy's surrogate of the objective orders rightly, one of each not yet run."""
    metric = case.question.objective.metric
    known = [trial for trial in trials if metric in trial.metrics]
    found = strategy.predict([trial.spec for trial in known])
    if found is None:
        return None
    truth, guess = np.array([trial.metrics[metric] for trial in known]), found.objective.mean
    new = np.array([trial.spec not in ran for trial in known])
    first, second = np.triu_indices(len(known), 1)
    counted = (new[first] | new[second]) & (truth[first] != truth[second])
    first, second = first[counted], second[counted]
    right = (truth[first] - truth[second]) * (guess[first] - guess[second]) > 0
    return float(right.mean()) if len(right) else None


def hypervolume(points: Sequence[tuple[float, float]], worst: tuple[float, float]) -> float:
    """Area that points (more objective, less power) dominate, from the worst point on."""
    area, height = 0.0, worst[1]
    for value, power in sorted(points, key=lambda point: -point[0]):
        if power < height and value > worst[0]:
            area += (value - worst[0]) * (height - power)
            height = power
    return area


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


def figures(case: Case, strategy: str, runs: Sequence[Replay], most: int, power: str) -> dict[str, Any]:
    """Computes a row of the table: quantiles over the seeds."""
    best = max(map(case.value, case.trials))
    found, costs = [], []
    for run in runs:
        regrets = curve(case, run, best, most)
        at = next((index for index, regret in enumerate(regrets) if regret <= WITHIN), None)
        found.append(math.inf if at is None else at + 1)
        costs.append(math.inf if at is None else run.costs_s[at])
    feasible = [sum(case.value(t) > -math.inf for t in run.trials) / max(len(run.trials), 1) for run in runs]
    low, median, high = np.quantile(found, QUANTILES, method="higher")
    ends = [curve(case, run, best, most)[-1] for run in runs]
    return {
        "table": case.name,
        "strategy": strategy,
        "num_candidates": len(case.trials),
        "num_seeds": len(runs),
        "num_trials_most": most,
        "num_trials_p10": _whole(low),
        "num_trials_median": _whole(median),
        "num_trials_p90": _whole(high),
        "found_frac": round(float(np.mean(np.isfinite(found))), 3),
        "gpu_time_median_s": _whole(float(np.quantile(costs, 0.5, method="higher"))),
        "gpu_time_whole_median_s": _whole(float(np.median([run.costs_s[-1] if run.costs_s else 0 for run in runs]))),
        "num_trials_run": _whole(float(np.median([len(run.trials) for run in runs]))),
        "stopped_frac": round(float(np.mean([run.stopped_because is not None for run in runs])), 3),
        "end_regret_median_frac": _short(float(np.median(ends))),
        "feasible_frac": round(float(np.mean(feasible)), 3),
        "hypervolume_frac": _hypervolume_frac(case, runs, power),
        "pairwise_frac": _mean([run.pairs_frac for run in runs if run.pairs_frac is not None]),
        "inside_frac": _mean([inside for run in runs for inside in run.inside]),
        "estimate_pairs_frac": _mean([one for one in [pairwise_accuracy(case)] if one is not None]),
        "ask_longest_s": _short(max(run.ask_s for run in runs)),
    }


def _mean(numbers: Sequence[float]) -> float | str:
    return round(float(np.mean(numbers)), 3) if numbers else ""


def _whole(number: float) -> int | str:
    return round(number) if math.isfinite(number) else ""


def _short(number: float) -> float | str:
    return float(f"{number:.3g}") if math.isfinite(number) else ""


def _hypervolume_frac(case: Case, runs: Sequence[Replay], power: str) -> float | str:
    """Median share of the table's hypervolume of objective against power that the runs found."""
    name, sign = case.question.objective.metric, 1.0 if case.question.objective.maximize else -1.0

    def points(trials: Sequence[Trial]) -> list[tuple[float, float]]:
        return [(sign * t.metrics[name], t.metrics[power]) for t in trials if name in t.metrics and power in t.metrics]

    whole = points(case.trials)
    if not whole:
        return ""
    worst = min(value for value, _ in whole), max(watts for _, watts in whole)
    area = hypervolume(whole, worst)
    return _short(float(np.median([hypervolume(points(run.trials), worst) for run in runs])) / area) if area else ""


def replay_case(
    case: Case, given: argparse.Namespace, most: dict[str, int], slow: Sequence[str]
) -> list[dict[str, Any]]:
    """Replays a case for every strategy; prints its rows, and draws them where asked."""
    if max(map(case.value, case.trials)) == -math.inf:
        refuse(f"{case.name}: no trial holds every bound; loosen them")
    rows, curves = [], {}
    best = max(map(case.value, case.trials))
    for name, make in variants(case).items():
        if given.only and name not in given.only:
            continue
        own_most = min(most.get(name, most["others"]), len(case.trials))
        seeds = min(given.seeds, SLOW_SEEDS) if name in slow else given.seeds
        runs = [replay(make, case, seed, own_most) for seed in range(seeds)]
        rows.append(figures(case, name, runs, own_most, given.power))
        curves[name] = np.array([curve(case, run, best, own_most) for run in runs])
    accuracy = pairwise_accuracy(case)
    known = "no estimate" if accuracy is None else f"the estimate orders {accuracy:.1%} of pairs rightly"
    label = max(case.trials, key=case.value).spec.label
    print_rows(f"{case.name}: {len(case.trials)} candidates, best feasible {label}; {known}", rows)
    if given.svg:
        draw_regret(given.svg / f"{case.name}.svg", f"{case.name}: regret to the best feasible", curves, WITHIN)
    return rows


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


def main() -> None:
    """Replays the tables that are named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--cases", type=Path, help="file of tables with goals, such as benchmarks/data/search_cases.yaml")
    what.add_argument("--table", type=Path)
    parser.add_argument("--case", action="append", default=[], help="only this one of the cases; may be repeated")
    parser.add_argument("--estimates", type=Path, help="a table with trial_id and estimated_METRIC columns")
    parser.add_argument("--held-out", action="store_true", help="estimates fitted to the other H200 tables")
    parser.add_argument("--warm", type=Path, help="a table of an earlier study, for the warm start")
    parser.add_argument("--objective", type=parse_objective)
    parser.add_argument("--where", type=parse_constraint, action="append", default=[])
    parser.add_argument("--power", default="node_device_power_peak_1s_w", help="metric of the hypervolume")
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--most", type=int, default=200, help="most trials of a run of --table")
    parser.add_argument("--only", action="append", help="a strategy to replay; all without it")
    parser.add_argument("--name", help="name of the table in the output")
    parser.add_argument("--csv", type=Path, help="file whose rows of the same table and strategy are replaced")
    parser.add_argument(
        "--markdown", type=Path, help="results page whose tables are written anew from all rows of --csv"
    )
    parser.add_argument("--svg", type=Path, help="folder that a drawing of each table's regret is written to")
    given = parser.parse_args()
    header(
        "A strategy finds a plan near the best one in fewer trials than a search at random.",
        "regret by trials, beside that of every other strategy; none is the bar of all tables",
    )
    if given.markdown and not given.csv:
        parser.error("--markdown needs --csv, whose rows it shows")
    cases: Iterable[tuple[Case, dict[str, int], list[str]]]
    if given.cases:
        cases = cases_of(given.cases, given.case)
    elif given.objective is None:
        parser.error("--table needs --objective")
    else:
        case = Case(
            name=given.name or given.table.stem,
            trials=read_table(given.table, given.estimates, held_out=given.held_out),
            question=Question(objective=given.objective, constraints=tuple(given.where)),
            warm=read_table(given.warm) if given.warm else (),
        )
        cases = [(case, {"others": given.most}, [])]
    for case, most, slow in cases:
        rows = replay_case(case, given, most, slow)
        if given.csv and rows:  # after each table, so that a run that is cut short keeps what it has
            every = merge_rows(given.csv, rows)
            if given.markdown:
                drawings = os.path.relpath(given.svg, given.markdown.parent) if given.svg else given.markdown.stem
                write_tables(given.markdown, every, drawings)


if __name__ == "__main__":
    main()
