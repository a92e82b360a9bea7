#!/usr/bin/env python
"""Counts plans that end undecided at the bounds of their own studies, and verdicts that a held-out repeat contradicts.

    python benchmarks/verdicts.py
    python benchmarks/verdicts.py --learned
    python benchmarks/verdicts.py --intervals
    python benchmarks/verdicts.py --studies 25
    python benchmarks/verdicts.py --studies 25 --earlier 6
    python benchmarks/verdicts.py --studies 25 --first-seed 900000

The tables of `benchmarks/data` with measured sensors are ranked by the question that their spaces ask. Then, of every
plan with repeats, each run in turn is the only one that its study has of the plan, and each other run is the truth, at
13 bounds over the measured range of the study. What a verdict costs is the named plan against the best one whose every
run kept every bound. With `--studies` so many simulated studies of each world (`verdict_worlds.py`) are asked, whose
truth is known. With `--learned` each table is ranked as in a storage that holds the other tables of its device, and
with `--earlier` each simulated study as in one with so many others of its world: what they tell of scatter stands in
for the shipped priors.
`dense_llama_repeats_h100x2` is counted apart too: it was seen when the pooling of unlike trials was chosen. It is older
than the count of waits for another rank's host, and is counted there as the product does now (`waits_as_now`). The
results of `experiments` came last: only the scatter of shares was chosen with them.
"""

import json
from argparse import ArgumentParser, Namespace
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
from harness import Found, Rows, benchmark
from measured_tables import run_of
from verdict_worlds import FIGURES, scores

from wattune.fidelity import is_burst
from wattune.intervals import t_quantile
from wattune.objective import Constraint
from wattune.ranking.assessment import Verdict
from wattune.ranking.bounds import Holds, margins
from wattune.ranking.heat import heat_left, judged_metric
from wattune.ranking.order import Ranking, rank
from wattune.ranking.spreads import Spreads, learned_scatter
from wattune.run import Run, RunStatus
from wattune.search.space import StudySpec, load_space
from wattune.trial import TrialSpec

DATA = Path(__file__).parent / "data"
PEAK = "node_device_power_peak_1s_w"
RISK = 0.05
NUM_BOUNDS = 13
HOST_BOUND = 0.1
NEWEST = "dense_llama_repeats_h100x2"
MOST_UNDECIDED_FRAC = 34 / 276
MOST_OPEN_FRAC = 0.03
MOST_CONTRADICTED_FRAC = 0.05
MOST_LOST_FRAC = 0.02
LEAST_ANSWERED_FRAC = 0.95
LEAST_COVERED_FRAC = 0.9
MOST_COVERED_FRAC = 0.97
MOST_MISCALIBRATED = 0.05
Results = list[tuple[TrialSpec, Run]]
Runs = Results | list[tuple[None, Run]]
METRICS_HELD_OUT = (
    PEAK, "tokens_per_s", "energy_per_token_j", "throttle_power_frac", "throttle_loss_frac", "device_temp_max_c"
)  # fmt: skip


def studies() -> Iterator[tuple[str, StudySpec, Results]]:
    """Yields each table with measured sensors that has a space with bounds: its name, its space, its runs."""
    for path in sorted(DATA.glob("*_h[12]00*.parquet")):
        if path.with_suffix(".yaml").exists() and (space := load_space(path.with_suffix(".yaml"))).constraints:
            yield path.stem, space, [result(row) for row in pq.read_table(path).to_pylist()]


def result(row: Mapping[str, Any]) -> tuple[TrialSpec, Run]:
    """Reads one run of a table."""
    return TrialSpec.from_json(json.loads(row["spec"])), run_of(row)


def experiments() -> Iterator[list[tuple[None, Run]]]:
    """Yields the runs of each result in `experiments`: two plans with two or three runs each, on H200."""
    for path in sorted((DATA.parents[1] / "experiments/results").glob("*.parquet")):
        rows = pq.read_table(path).to_pylist()
        yield [(None, replace(run_of(row), tags={"simulated": str(row["simulated"]).lower()})) for row in rows]


def alone(results: Runs, metric: str) -> Iterator[tuple[bool, Run, list[Run], Spreads]]:
    """Yields each run as its plan's only one: host-bound, the run, the others of its plan, scatter without these."""
    runs = [pair for pair in results if _counts(pair[1], metric)]
    for only in runs:
        own = [run for _, run in runs if run.trial_id == only[1].trial_id]
        if len(own) > 1:
            waits = float(np.mean([run.metrics.get("host_bound_frac", 0.0) for run in own])) >= HOST_BOUND
            spreads = Spreads([pair for pair in runs if pair[1].trial_id != only[1].trial_id or pair is only])
            yield waits, only[1], [run for run in own if run is not only[1]], spreads


def held_out(results: Runs, metric: str) -> Iterator[tuple[bool, Holds, bool]]:
    """Yields, for each run as its plan's only one, each bound, and each other run: host-bound, verdict, truth."""
    values = [run.metrics[metric] for _, run in results if _counts(run, metric)]
    bounds = np.linspace(0.98 * min(values), 1.02 * max(values), NUM_BOUNDS) if values else []
    for waits, only, others, spreads in alone(results, metric):
        for bound in bounds:
            constraint = Constraint(metric=metric, operator="<=", factor=float(bound))
            (found,) = margins(constraint, [[only]], spreads, risk=RISK, simulated=[False])
            assert found is not None, "the run measured it"
            for other in others:
                yield waits, found.verdict, told(other, metric) <= bound


def told(run: Run, metric: str) -> float:
    """Returns what a run tells of a metric: of a temperature the settled one, since a bound is on that."""
    judged = judged_metric(metric, [run])
    return run.metrics[judged] + heat_left(judged, [run])[0]


def covered(results: Runs, metric: str) -> Iterator[tuple[bool, bool, float]]:
    """Yields, for each run as its plan's only one and each other: host-bound, inside the 95 % interval, half width."""
    for waits, only, others, spreads in alone(results, metric):
        (found,) = spreads.next_runs([only], metric)
        scatter, number = found.scatter, found.number
        away = scatter.place_share @ (scatter.away[number] ** 2 + scatter.away_variance[number])
        reach = t_quantile(found.degrees_of_freedom) * float(np.sqrt(found.own_variance + away))
        for run in others:
            yield waits, abs(float(np.log(run.metrics[metric])) - found.mean) < reach, float(np.expm1(reach))


def lost_frac(found: Ranking) -> float | None:
    """Returns by how much the named plan is worse than the best one whose every run kept every bound.

    1 where nothing is named though something was kept, None where nothing was; below 0 where a named plan is better.
    """
    kept = [
        row.objective.value
        for row in found.compared
        if row.objective and len(row.margins) == len(found.constraints) and all(one.holds for one in row.margins)
    ]
    if not kept:
        return None
    if found.best is None or found.best.objective is None:
        return 1.0
    named = found.best.objective.value
    return 1.0 - named / max(kept) if found.objective.maximize else named / min(kept) - 1.0


def _open_fracs(found: Counter[Verdict]) -> tuple[float, float]:
    """Returns the shares of plans that are undecided, and whose open bound changes no answer."""
    num = max(found.total(), 1)
    return found[Verdict.UNDECIDED] / num, found[Verdict.BEHIND] / num


def _counted(verdict: Holds, kept: bool) -> Counter[str]:
    wrong = verdict is (Holds.BREAKS if kept else Holds.HOLDS)
    return Counter(all=1, undecided=verdict is Holds.UNDECIDED, wrong=wrong)


def waits_as_now(results: Results) -> Results:
    """Gives tensor parallel runs of the newest study their wait for the host as the analysis counts it since 9ec7361a.

    The study is older: a kernel of a collective that waits for the other rank's host counted as busy. With its length
    left out, busy time is the time that the device needs: of a profiled step of T, (1 - other) T was counted busy, and
    (1 - other - straggler) T is needed. T is told by runs whose counted wait is not 0, and the need is the plan's own.
    """
    needed_s: dict[str, list[float]] = {}
    for spec, run in results:
        if spec.plan.tp > 1 and (counted := run.metrics["host_bound_frac"]) > 0.0:
            busy_s, idle_frac = (1.0 - counted) * run.metrics["step_time_s"], run.metrics["other_frac"]
            needed_s.setdefault(run.trial_id, []).append(
                busy_s * (1.0 - run.metrics["straggler_frac"] / (1.0 - idle_frac))
            )
    found = []
    for spec, run in results:
        metrics = dict(run.metrics)
        if run.trial_id in needed_s:
            frac = 1.0 - float(np.mean(needed_s[run.trial_id])) / metrics["step_time_s"]
            metrics["host_bound_frac"] = max(frac, 0.0)
        found.append((spec, replace(run, metrics=metrics)))
    return found


def _counts(run: Run, metric: str) -> bool:
    return run.status is RunStatus.COMPLETED and metric in run.metrics and not is_burst(run)


def _options(parser: ArgumentParser) -> None:
    parser.add_argument("--studies", type=int, default=0, help="simulated studies of each world (default: %(default)s)")
    parser.add_argument("--world", default="", help="worlds whose name has this text (default: all)")
    parser.add_argument("--first-seed", type=int, default=0, help="of other simulated studies, the product alone")
    parser.add_argument("--intervals", action="store_true", help="how often the next run is inside its interval")
    parser.add_argument("--earlier", type=int, default=0, help="earlier studies of each world (default: %(default)s)")
    parser.add_argument("--learned", action="store_true", help="scatter learned from the other tables of the device")


def with_learned(tables: list[tuple[str, StudySpec, Results]]) -> list[tuple[str, StudySpec, Results]]:
    """Gives the runs of each table the scatter that the other tables of its device lead to expect."""
    found = []
    for name, space, results in tables:
        device = results[0][0].cluster.device
        others = [one for other, _, one in tables if other != name and one[0][0].cluster.device == device]
        known = learned_scatter(others)
        found.append((name, space, [(spec, replace(run, numbers=known)) for spec, run in results]))
    return found


def of_worlds(given: Namespace, rows: Rows) -> list[str]:
    """Adds a row for each simulated world, and returns what misses its bar."""
    answered, missed, could_be = list[float](), list[str](), list[float]()
    believed, true, broken = 0.0, 0.0, 0.0
    for world, score in scores(given.studies, given.earlier, given.world, given.first_seed):
        could_be += score["open"]
        rows.add(world.name, *(float(np.mean(score[name])) if score[name] else "" for name in FIGURES))
        answered += score["answered"]
        broken = max(broken, float(np.mean(score["broken"])))
        believed, true = believed + sum(score["believed"]), true + sum(score["true"])
        if float(np.mean(score["answered"])) < LEAST_ANSWERED_FRAC:
            missed.append(f"{world.name}: {np.mean(score['answered']):.0%} answered")
    if broken > MOST_CONTRADICTED_FRAC:
        missed.append(f"{broken:.1%} of promises broken")
    if np.mean(could_be) > MOST_OPEN_FRAC:
        missed.append(f"{np.mean(could_be):.1%} of plans undecided that could be the best")
    if abs(believed - true) > MOST_MISCALIBRATED * len(answered):
        missed.append(f"P(best) {believed / len(answered):.2f}, true {true / len(answered):.2f}")
    return missed


def of_intervals() -> Found:
    """Adds a row for each metric and kind of plan: pairs, share inside the interval, half width."""
    rows, missed = Rows("metric", "plans", "num", "covered_frac", "half_width_frac"), []
    tables = [(name, waits_as_now(results) if name == NEWEST else results) for name, _, results in studies()]
    for metric in METRICS_HELD_OUT[:3]:
        pooled: dict[str, list[tuple[bool, float]]] = {}
        for name, results in [*tables, *(("", each) for each in experiments())]:
            for waits, inside, half_width in covered(results, metric):
                plans = "host-bound" if waits else "steady" if name else "experiments"
                pooled.setdefault(plans, []).append((inside, half_width))
        for plans, pairs in sorted(pooled.items()):
            share = float(np.mean([inside for inside, _ in pairs]))
            rows.add(metric, plans, len(pairs), share, float(np.median([width for _, width in pairs])))
            if not LEAST_COVERED_FRAC <= share <= MOST_COVERED_FRAC:
                missed.append(f"{metric}, {plans}: {share:.1%} covered")
    return Found(rows, missed=missed)


def of_tables(learned: bool) -> Found:
    """Adds a row for each table at its own bounds, and for its repeats."""
    rows = Rows("table", "metric", "plans", "num", "undecided_frac", "behind_frac", "contradicted_frac", "lost_frac")
    verdicts: Counter[Verdict] = Counter()
    losses: list[float] = []
    pooled: dict[tuple[str, str], Counter[str]] = {}
    tables = list(studies())
    for name, space, results in with_learned(tables) if learned else tables:
        ranking = rank(results, space.question)
        found = Counter(row.verdict for row in ranking.compared)
        verdicts.update(found)
        lost = lost_frac(ranking)
        losses += [] if lost is None else [lost]
        rows.add(name, "own bounds", "all", found.total(), *_open_fracs(found), "", "" if lost is None else lost)
        for metric in METRICS_HELD_OUT:
            for waits, verdict, kept in held_out(results, metric):
                plans = "host-bound" if waits else "steady"
                pooled.setdefault((metric, plans), Counter()).update(_counted(verdict, kept))
            for _, verdict, kept in held_out(waits_as_now(results), metric) if name == NEWEST else ():
                pooled.setdefault((metric, "newest study, as counted now"), Counter()).update(_counted(verdict, kept))
    for results, metric in product(experiments(), METRICS_HELD_OUT):
        for _, verdict, kept in held_out(results, metric):
            pooled.setdefault((metric, "experiments"), Counter()).update(_counted(verdict, kept))
    undecided_frac, behind_frac = _open_fracs(verdicts)
    rows.add("all", "own bounds", "all", verdicts.total(), undecided_frac, behind_frac, "", float(np.median(losses)))
    missed = [f"{undecided_frac:.0%} undecided"] if undecided_frac > MOST_UNDECIDED_FRAC else []
    if max(losses) > MOST_LOST_FRAC:
        missed.append(f"{sum(one > MOST_LOST_FRAC for one in losses)} of {len(losses)} studies lose throughput")
    for (metric, plans), count in sorted(pooled.items()):
        wrong_frac = count["wrong"] / max(count["all"] - count["undecided"], 1)
        rows.add("repeats", metric, plans, count["all"], count["undecided"] / count["all"], "", wrong_frac, "")
        if wrong_frac > MOST_CONTRADICTED_FRAC:
            missed.append(f"{metric}, {plans}: {wrong_frac:.1%} contradicted")
    return Found(rows, missed=missed)


@benchmark(
    claim="Few plans end undecided at their study's own bounds, and the next run seldom contradicts a verdict.",
    bar=f"undecided <= {MOST_UNDECIDED_FRAC:.0%} of plans; contradicted <= {MOST_CONTRADICTED_FRAC:.0%} of decided; "
    f"lost <= {MOST_LOST_FRAC:.0%}",
    options=_options,
)
def main(given: Namespace) -> Found:
    """Counts them, of recorded tables or with `--studies` of simulated worlds."""
    if given.studies:
        product = "answered_frac", "broken_frac", "P(best)", "best_frac", "num_runs", "undecided_frac", "open_frac"
        rows = Rows("world", *product, *(f"knowing_{one}_frac" for one in ("answered", "broken", "open")))
        return Found(rows, missed=of_worlds(given, rows))
    if given.intervals:
        return of_intervals()
    return of_tables(given.learned)


if __name__ == "__main__":
    main()
