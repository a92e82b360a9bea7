#!/usr/bin/env python
"""Draws the synthetic table anew, for what one table cannot say of a search, and times a decision among 50,000 plans.

    python benchmarks/search_priors.py --redrawn 20 --case synthetic_600_5250w
    python benchmarks/search_priors.py --ask 200            # processor time of a decision

One table is one draw: how many trials a search takes there, and whether a plan that is left is better at its end, says
little of the next table. What each plan of the synthetic table deviates by is drawn anew, with the seed, from the law
that the table came from; formulas and estimates stay. The peer is the list by the estimate. `search_regret.py --priors`
replays the tables as they are.
"""

import time
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice, product
from typing import Final

import numpy as np
from harness import Found, Rows, benchmark
from search_regret import CASES, QUANTILES, WITHIN, Case, Column, ListByEstimate, Trial, cases_of, curve, found_after
from search_regret import replay as replayed

from wattune.cost.tables import EstimatedMetric
from wattune.objective import Question
from wattune.plans.axes import Plan
from wattune.run import Run, RunStatus
from wattune.search.strategies.model_guided import ModelGuided
from wattune.search.strategies.protocol import Problem, Strategy

NUM_ASKED: Final = 50_000
MOST_ASK_S: Final = 1.0
SPEED: Final = "tokens_per_s"
POWER: Final = "node_device_power_peak_1s_w"
TEMPERATURE: Final = "device_temp_max_c"
OWN_DEVIATION: Final = np.array([0.03, 0.015])
"""Of step time and power of the synthetic table's plans from its formulas, and the noise of a run, as it was made."""
NOISE: Final = np.array([0.02, 0.006])


def redrawn(case: Case, seed: int) -> Case:
    """Draws anew by what each plan of the synthetic table deviates from its formulas, and the noise of its runs.

    The deviations of the table were drawn with the trial id as seed, so they are taken out first; the noise of the mean
    of three runs stays in. Plans are judged by what they truly are, without the noise of their runs.
    """
    dice, found = np.random.default_rng([seed, 600]), list[Trial]()
    for trial in case.trials:
        before = np.random.default_rng(int(trial.spec.trial_id, 16)).standard_normal(2)
        away, true = OWN_DEVIATION * (dice.standard_normal(2) - before), trial.metrics
        if true:
            true = changed(true, away)
        results = (
            replace(run, metrics=changed(true, NOISE * dice.standard_normal(2)) if true else {})
            for run in trial.results
        )
        found.append(replace(trial, results=tuple(results), metrics=true))
    return replace(case, trials=tuple(found))


def changed(metrics: dict[str, float], away: Column) -> dict[str, float]:
    """Changes step time and power of a plan, and what follows them, by factors on the logarithmic scale."""
    slower, hotter = np.exp(away).tolist()
    changes = {"step_time_s": slower, SPEED: 1.0 / slower, POWER: hotter, TEMPERATURE: hotter}
    return metrics | {name: metrics[name] * change for name, change in changes.items()}


def of_redrawn(given: Namespace) -> Found:
    """Adds a row for each case: trials of search and list on tables drawn anew, and what the search says at its end."""
    quantiles = "num_p10", "num_median", "num_p90"
    ends = "num_trials", "within_2_frac", "num_bad_stops", "worst_stop_frac", "P(better left)", "true_frac"
    rows = Rows("case", "by", "num_tables", *quantiles, *ends)
    missed = []
    for case, _, _ in cases_of(CASES, given.case):
        took: dict[str, list[float]] = {"search": [], "list by the estimate": []}
        said, true, stops, ended = list[float](), list[bool](), list[float](), list[int]()
        for seed in range(given.redrawn):
            table, made = redrawn(case, seed), list[ModelGuided]()
            best = max(map(table.value, table.trials))

            def make(problem: Problem, made: list[ModelGuided] = made) -> Strategy:
                made.append(ModelGuided(problem))
                return made[0]

            for name, maker in zip(took, (make, ListByEstimate), strict=True):
                run = replayed(maker, table, seed, given.most)
                took[name].append(found_after(table, run, best))
                if name == "search":
                    ended.append(len(run.trials))
                    stops += curve(table, run, best, 0)[-1:] if run.stopped_because else []
                    seen = {trial.spec for trial in run.trials}
                    left = [trial for trial in table.trials if trial.spec not in seen]
                    gain = made[0].joint_gain([trial.spec for trial in left])
                    if gain is not None:
                        said.append(gain[2])
                        true.append(max(map(table.value, left)) > max(map(table.value, run.trials)))
        near = [own <= other + 2.0 for own, other in zip(*took.values(), strict=True)]
        bad, shares = sum(one > WITHIN for one in stops), [*map(float, map(np.mean, (ended, near, said, true)))]
        of_search = [*shares[:2], bad, max(stops, default=0.0), *shares[2:]]
        for name, values in took.items():
            took_most = np.quantile(values, QUANTILES, method="higher").tolist()
            rest = of_search if name == "search" else [""] * len(ends)
            rows.add(case.name, name, given.redrawn, *took_most, *rest)
        medians = [float(np.median(values)) for values in took.values()]
        if medians[0] > medians[1] + 2.0:
            missed.append(f"{case.name}: the search takes {medians[0]:g} trials, the list {medians[1]:g}")
        if bad:
            missed.append(f"{case.name}: {bad} of {given.redrawn} stop above {WITHIN:.0%}")
    return Found(rows, missed=missed)


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
    true = {SPEED: 1e4 * (limit / 700) ** 0.4 * micro**0.1 / tp**0.05, POWER: 4 * limit}
    true = {name: column * np.exp(0.04 * rng.standard_normal(num)) for name, column in true.items()}
    estimates = {n: EstimatedMetric.of(each * np.exp(0.1 * rng.standard_normal(num)), 0.15) for n, each in true.items()}
    question = Question.of(f"maximize {SPEED}", f"{POWER} <= 2500")
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
    parser.add_argument("--ask", type=int, default=0, metavar="TRIALS", help="time a decision after so many trials")
    parser.add_argument("--redrawn", type=int, default=20, metavar="TABLES", help="draws of each synthetic table")
    parser.add_argument("--case", action="append", help="a synthetic case by name (synthetic_600_5250w)")
    parser.add_argument("--most", type=int, default=60, help="most trials of a replay")


@benchmark(
    claim="On tables drawn anew the search is no more than two trials behind the list by its estimate.",
    bar=f"medians within 2 trials; no stop above {WITHIN:.0%} regret; a decision <= {MOST_ASK_S:g} CPU-s",
    options=_options,
)
def main(given: Namespace) -> Found:
    """Replays drawn tables, or times decisions."""
    if given.ask:
        asked = Rows("candidates", "trials", "mean_cpu_s", "most_cpu_s")
        mean_s, most_s = cpu_s_of_asking(given.ask)
        asked.add(NUM_ASKED, given.ask, mean_s, most_s)
        return Found(asked, missed=[f"a decision takes {mean_s:.1f} CPU-s"] if mean_s > MOST_ASK_S else [])
    given.case = given.case or ["synthetic_600_5250w"]
    return of_redrawn(given)


if __name__ == "__main__":
    main()
