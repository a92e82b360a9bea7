#!/usr/bin/env python
"""Replays measured tables for every search strategy, and says how many trials and GPU-seconds each takes.

    python benchmarks/search_regret.py --table benchmarks/data/moe_ep_h200x4.parquet \
        --objective "maximize tokens_per_s" --where "node_device_power_peak_1s_w <= 2750" --csv rows.csv

A table has one row per trial repeat (`benchmarks/data/README.md`). A strategy is told one repeat, drawn by the seed. It
is scored by the mean over repeats. Columns named `estimated_METRIC` are the estimates that `model_guided` gets as its
prior. `--estimates` takes them from another table. A trial costs its whole time, from build to end, on all its devices.

With a ladder (`search.ladder`) each proposal is a burst first, and the best are measured in full. A burst costs its
trial's time with a shorter window. What it measures is drawn: `BURST_ERRORS` says from what. `--window` sets the
seconds of full windows, since measured tables have short ones. A trial is found once it is measured in full; bursts
count in GPU-seconds.
"""

import argparse
import csv
import itertools
import json
import math
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow.parquet as pq

from wattune.fidelity import BURST, FIDELITY
from wattune.objective import Constraint, Objective, parse_constraint, parse_objective
from wattune.orchestrate.scheduling.ladder import Ladder, LadderRule
from wattune.schema import METRICS
from wattune.search.strategies.model_guided import ModelGuided
from wattune.search.strategies.protocol import Estimates, Observation, Problem, Strategy
from wattune.search.strategy import STRATEGIES
from wattune.trial import FIRST_BURST_REPEAT, TrialResult, TrialSpec, TrialStatus
from wattune.units import NS_PER_S

ESTIMATES: Final = "estimated_"
LOG_STD: Final = "_log_std"
WITHIN: Final = 0.02
"""A trial is found when its objective is this near to that of the best feasible one."""
QUANTILES: Final = (0.1, 0.5, 0.9)


BURST_STEPS: Final = 3
BURST_S: Final = 1.5
"""Least length of a burst: the defaults of `search.ladder.burst`."""
BURST_ERRORS: Final = {
    "tokens_per_s": (0.005, 0.02),
    "tokens_per_s_per_device": (0.005, 0.02),
    "step_time_s": (-0.005, 0.02),
    "node_device_power_peak_1s_w": (-0.007, 0.006),
    "device_temp_max_c": (-0.085, 0.02),
    "memory_peak_bytes": (0.0, 0.0),
    "memory_headroom_frac": (0.0, 0.0),
}
"""Bias and standard deviation of log(burst / full) by metric. `benchmarks/burst_noise.py` measures them, on two trials
of four H200s: too few for more than one digit."""
OTHER_ERROR: Final = (0.0, 0.02)
SYNTHETIC_WARMUP_STEPS: Final = 5
"""Of the 15 steps of a synthetic trial, those that a burst runs too before its window."""
LADDERED: Final = ("random", "tpe", "model_guided")
"""Strategies that are replayed with a ladder too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """Everything a table says about one configuration."""

    spec: TrialSpec
    results: tuple[TrialResult, ...]
    metrics: dict[str, float]
    """Means over completed repeats."""
    estimate: dict[str, float]
    cost_s: float
    """Mean seconds of its first repeats on all its devices together, with a window as long as is asked for."""
    burst_cost_s: float
    """The same of a burst."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A table with a goal."""

    name: str
    trials: tuple[Trial, ...]
    objective: Objective
    constraints: tuple[Constraint, ...]
    warm: tuple[Trial, ...] = ()

    def value(self, trial: Trial) -> float:
        """The objective as a number of which more is better; minus infinity where the trial is not feasible."""
        value = trial.metrics.get(self.objective.metric)
        if value is None or not all(bound.holds(trial.metrics) for bound in self.constraints):
            return -math.inf
        return value if self.objective.maximize else -value

    def regret(self, value: float, best: float) -> float:
        """The relative distance to the best feasible trial."""
        return math.inf if value == -math.inf else (best - value) / abs(best)


def read_table(path: Path, estimates: Path | None = None, window_s: float | None = None) -> tuple[Trial, ...]:
    """Reads a table of trials, with its estimates or those of another table; windows are as long as asked, if asked."""
    rows = pq.read_table(path).to_pylist()
    of_trial: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        of_trial[row["trial_id"]].append(row)
    source = {row["trial_id"]: row for row in (pq.read_table(estimates).to_pylist() if estimates else rows)}
    return tuple(_trial(group, source.get(trial_id, {}), window_s) for trial_id, group in of_trial.items())


def _trial(rows: list[dict[str, Any]], source: dict[str, Any], window_s: float | None) -> Trial:
    spec = TrialSpec.from_json(json.loads(rows[0]["spec"]))
    results = tuple(
        TrialResult(
            trial_id=row["trial_id"],
            repeat=row["repeat"],
            status=TrialStatus(row["status"]),
            metrics={name: row[name] for name in METRICS if row.get(name) is not None},
        )
        for row in rows
    )
    done = [result.metrics for result in results if result.status is TrialStatus.COMPLETED]
    common = set.intersection(*map(set, done)) if done else set()
    first = min(row["repeat"] for row in rows)
    costs_s = np.mean([_costs_s(row, window_s) for row in rows if row["repeat"] == first], axis=0)
    return Trial(
        spec=spec,
        results=results,
        metrics={name: float(np.mean([metrics[name] for metrics in done])) for name in common},
        estimate={key: value for key, value in source.items() if key.startswith(ESTIMATES) and value is not None},
        cost_s=float(costs_s[0]) * spec.cluster.world_size,
        burst_cost_s=float(costs_s[1]) * spec.cluster.world_size,
    )


def _costs_s(row: dict[str, Any], window_s: float | None) -> tuple[float, float]:
    """Seconds of a run from build to end, and of a burst in its place. A run that failed takes as long as a burst."""
    took_s, step_s = (row["end_wall_ns"] - row["start_wall_ns"]) / NS_PER_S, row.get("step_time_s")
    if step_s is None:
        return took_s, took_s
    tags = json.loads(row["tags"])
    warmup_s = SYNTHETIC_WARMUP_STEPS * step_s
    own_s = float(tags["window_s"]) if "window_s" in tags else took_s - float(tags["build_time_s"]) - warmup_s
    full_s = own_s if window_s is None else max(window_s, step_s)
    return took_s - own_s + full_s, took_s - own_s + max(BURST_S, BURST_STEPS * step_s)


def estimates_of(trials: Sequence[Trial]) -> Estimates | None:
    """The estimates of trials in columns; None where the table has none."""
    names = {name for trial in trials for name in trial.estimate}
    if not names:
        return None
    columns = {name: np.array([trial.estimate.get(name, math.nan) for trial in trials]) for name in sorted(names)}
    plain = {name.removeprefix(ESTIMATES): column for name, column in columns.items()}
    return Estimates(
        values={name: column for name, column in plain.items() if not name.endswith(LOG_STD)},
        log_std={name.removesuffix(LOG_STD): column for name, column in plain.items() if name.endswith(LOG_STD)},
    )


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
class Run:
    """One replay: the trials in order."""

    trials: tuple[Trial, ...]
    """Those measured in full."""
    costs_s: tuple[float, ...]
    """Device-seconds until each of them ended, with bursts."""
    num_bursts: int
    stopped_because: str | None
    ask_s: float
    """Longest single question."""


def replay(
    make: Callable[[Problem], Strategy], case: Case, seed: int, most: int, promote_frac: float | None = None
) -> Run:
    """Runs a strategy on a table, one trial after another, until it stops or has proposed so many.

    Args:
        make: Makes the strategy.
        case: The table.
        seed: Seed of the order of candidates, of what is drawn, and of the strategy.
        most: Most proposals.
        promote_frac: Share of the bursts that is measured in full; None measures every proposal in full.
    """
    dice = np.random.default_rng(seed)
    trials = [case.trials[index] for index in dice.permutation(len(case.trials))]
    by_spec = {trial.spec: trial for trial in trials}
    problem = Problem(
        specs=list(by_spec),
        seed=seed,
        objective=case.objective,
        constraints=case.constraints,
        estimates=estimates_of(trials),
    )
    strategy, done, ask_s = make(problem), list[Trial](), 0.0
    ladder = None if promote_frac is None else _ladder(case, promote_frac)
    costs_s, spent_s, num_asked = list[float](), 0.0, 0
    while True:
        # As the queue of a study: a strategy that does not learn has all its bursts first.
        promoted = ladder.next((), searching=True) if ladder and strategy.learns else None
        asked: list[TrialSpec] = []
        if promoted is None and num_asked < most:
            start_s = time.perf_counter()
            asked = strategy.ask(1)
            ask_s = max(ask_s, time.perf_counter() - start_s)
            num_asked += len(asked)
        if promoted is None and not asked and ladder is not None:
            promoted = ladder.next((), searching=False)
        if promoted is None and not asked:
            break
        trial = by_spec[promoted or asked[0]]
        result = trial.results[dice.integers(len(trial.results))]
        if promoted is None and ladder is not None:
            result = _burst(result, dice)
            spent_s += trial.burst_cost_s
        else:
            spent_s += trial.cost_s
            done.append(trial)
            costs_s.append(spent_s)
        if ladder is not None:
            ladder.note(trial.spec, result)
        strategy.tell(trial.spec, result)
    return Run(
        trials=tuple(done),
        costs_s=tuple(costs_s),
        num_bursts=num_asked if ladder is not None else 0,
        stopped_because=strategy.stopped_because,
        ask_s=ask_s,
    )


def _ladder(case: Case, promote_frac: float) -> Ladder:
    rule = LadderRule(
        min_steps=BURST_STEPS,
        min_seconds=BURST_S,
        promote_frac=promote_frac,
        objective=case.objective,
        constraints=case.constraints,
    )
    return Ladder(rule)


def _burst(result: TrialResult, dice: np.random.Generator) -> TrialResult:
    """Returns the result that a burst in the place of a full run would have had."""
    errors = {name: BURST_ERRORS.get(name, OTHER_ERROR) for name in result.metrics}
    metrics = {
        name: value * math.exp(errors[name][0] + errors[name][1] * dice.standard_normal())
        for name, value in result.metrics.items()
    }
    return replace(result, repeat=FIRST_BURST_REPEAT, metrics=metrics, tags={FIDELITY: BURST})


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
    name, key = case.objective.metric, ESTIMATES + case.objective.metric
    known = [(t.metrics[name], t.estimate[key]) for t in case.trials if name in t.metrics and key in t.estimate]
    pairs = [(a[0] - b[0]) * (a[1] - b[1]) > 0 for a, b in itertools.combinations(known, 2) if a[0] != b[0]]
    return sum(pairs) / len(pairs) if pairs else None


def curve(case: Case, run: Run, best: float, most: int) -> list[float]:
    """The regret after each trial; a run that stopped stays where it was."""
    values = itertools.accumulate((case.value(trial) for trial in run.trials), max)
    regrets = [case.regret(value, best) for value in values]
    return (regrets + (regrets[-1:] or [math.inf]) * (most - len(regrets)))[:most]


def figures(case: Case, strategy: str, runs: Sequence[Run], most: int, power: str) -> dict[str, Any]:
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
        "num_bursts": _whole(float(np.median([run.num_bursts for run in runs]))),
        "num_trials_run": _whole(float(np.median([len(run.trials) for run in runs]))),
        "stopped_frac": round(float(np.mean([run.stopped_because is not None for run in runs])), 3),
        "end_regret_median_frac": _short(float(np.median(ends))),
        "feasible_frac": round(float(np.mean(feasible)), 3),
        "hypervolume_frac": _hypervolume_frac(case, runs, power),
        "ask_longest_s": _short(max(run.ask_s for run in runs)),
    }


def _whole(number: float) -> int | str:
    return round(number) if math.isfinite(number) else ""


def _short(number: float) -> float | str:
    return float(f"{number:.3g}") if math.isfinite(number) else ""


def _hypervolume_frac(case: Case, runs: Sequence[Run], power: str) -> float | str:
    """Median share of the table's hypervolume of objective against power that the runs found."""
    name, sign = case.objective.metric, 1.0 if case.objective.maximize else -1.0

    def points(trials: Sequence[Trial]) -> list[tuple[float, float]]:
        return [(sign * t.metrics[name], t.metrics[power]) for t in trials if name in t.metrics and power in t.metrics]

    whole = points(case.trials)
    if not whole:
        return ""
    worst = min(value for value, _ in whole), max(watts for _, watts in whole)
    area = hypervolume(whole, worst)
    return _short(float(np.median([hypervolume(points(run.trials), worst) for run in runs])) / area) if area else ""


def draw_plot(path: Path, curves: dict[str, np.ndarray]) -> None:
    """Writes regret against trials: the median of the seeds, and a band from the 10th to the 90th percentile."""
    import plotly.graph_objects as go
    from plotly.colors import qualitative

    figure = go.Figure()
    for color, (name, regrets) in zip(itertools.cycle(qualitative.Dark24), curves.items(), strict=False):
        steps = np.arange(1, regrets.shape[1] + 1)
        shown = np.minimum(regrets, 1.0)  # nothing feasible yet
        low, median, high = np.quantile(shown, QUANTILES, axis=0)
        rgb = ",".join(str(int(color[place : place + 2], 16)) for place in (1, 3, 5))
        x, y = np.concatenate([steps, steps[::-1]]), np.concatenate([high, low[::-1]])
        band = {"fill": "toself", "fillcolor": f"rgba({rgb},0.12)", "line": {"width": 0}, "hoverinfo": "skip"}
        figure.add_scatter(x=x, y=y, legendgroup=name, showlegend=False, visible="legendonly", **band)
        figure.add_scatter(x=steps, y=median, name=name, line={"color": color})
    figure.add_hline(y=WITHIN, line_dash="dot")
    figure.update_layout(xaxis_title="trials", yaxis_title="regret to the best feasible, as a fraction")
    figure.update_yaxes(type="log")
    if path.suffix == ".html":
        figure.write_html(path, include_plotlyjs=True)
    else:
        figure.write_image(path, width=1100, height=560, scale=1.5)


def print_rows(case: Case, rows: Sequence[dict[str, Any]]) -> None:
    """Prints a table of Markdown."""
    best = max(case.trials, key=case.value)
    accuracy = pairwise_accuracy(case)
    known = "no estimate" if accuracy is None else f"the estimate orders {accuracy:.1%} of pairs rightly"
    print(f"\n{case.name}: {len(case.trials)} candidates, best feasible {best.spec.label}; {known}\n")
    print(
        "| strategy | trials to 2 % (p10, p90) | found | GPU-s | GPU-s whole | bursts | run | stopped | end regret | "
        "feasible | HV | ask s |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|---|---|")
    for row in rows:
        print(
            f"| {row['strategy']} | {row['num_trials_median']} ({row['num_trials_p10']}, {row['num_trials_p90']}) | "
            f"{row['found_frac']:.0%} | {row['gpu_time_median_s']} | {row['gpu_time_whole_median_s']} | "
            f"{row['num_bursts']} | {row['num_trials_run']} | "
            f"{row['stopped_frac']:.0%} | {row['end_regret_median_frac']} | {row['feasible_frac']:.0%} | "
            f"{row['hypervolume_frac']} | {row['ask_longest_s']} |",
            flush=True,
        )


def main() -> None:
    """Replays the tables that are named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", type=Path, required=True)
    parser.add_argument("--estimates", type=Path, help="a table with trial_id and estimated_METRIC columns")
    parser.add_argument("--warm", type=Path, help="a table of an earlier study, for the warm start")
    parser.add_argument("--objective", type=parse_objective, required=True)
    parser.add_argument("--where", type=parse_constraint, action="append", default=[])
    parser.add_argument("--power", default="node_device_power_peak_1s_w", help="metric of the hypervolume")
    parser.add_argument("--window", type=float, help="seconds of a full window, instead of the table's own")
    parser.add_argument("--promote", type=float, default=0.25, help="share of the bursts that is measured in full")
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--most", type=int, default=200, help="most trials of a run")
    parser.add_argument("--only", action="append", help="a strategy to replay; all without it")
    parser.add_argument("--name", help="name of the table in the output")
    parser.add_argument("--csv", type=Path, help="file that the rows are added to")
    parser.add_argument("--plot", type=Path, help="PNG or HTML file of the regret curves")
    args = parser.parse_args()
    case = Case(
        name=args.name or args.table.stem,
        trials=read_table(args.table, args.estimates, args.window),
        objective=args.objective,
        constraints=tuple(args.where),
        warm=read_table(args.warm) if args.warm else (),
    )
    if max(map(case.value, case.trials)) == -math.inf:
        parser.error(f"{args.table}: no trial holds every bound; loosen --where")
    most, rows, curves = min(args.most, len(case.trials)), [], {}
    best = max(map(case.value, case.trials))
    compared = {name: (make, None) for name, make in variants(case).items()}
    compared |= {f"{name}, ladder": (STRATEGIES[name], args.promote) for name in LADDERED}
    for name, (make, promote_frac) in compared.items():
        if args.only and name not in args.only:
            continue
        runs = [replay(make, case, seed, most, promote_frac) for seed in range(args.seeds)]
        rows.append(figures(case, name, runs, most, args.power))
        curves[name] = np.array([curve(case, run, best, most) for run in runs])
    print_rows(case, rows)
    if args.csv:
        is_new = not args.csv.exists()
        with args.csv.open("a", newline="") as out:
            writer = csv.DictWriter(out, list(rows[0]), lineterminator="\n")
            if is_new:
                writer.writeheader()
            writer.writerows(rows)
    if args.plot:
        draw_plot(args.plot, curves)


if __name__ == "__main__":
    main()
