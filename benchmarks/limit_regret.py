#!/usr/bin/env python
"""Replays measured tables with an axis of power limits, beside the same tables without: trials that the axis costs.

    python benchmarks/limit_regret.py                                  # five goals on four H200s, ten seeds
    python benchmarks/limit_regret.py --case moe_ep_h200x4_2600w --seeds 4

Each trial of a table (`search_regret.py`) is given every limit. What a device would have done under one is simulated:
it keeps 0.99 of the limit by its clock, a law whose exponent is drawn for each plan, and only the part of a step that
draws power gets longer. The strategy gets the cost model's estimate of every plan under every limit, by coefficients
fitted to the other tables. That model has another law, the same for all plans.
"""

from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import yaml
from harness import Found, Rows, benchmark
from measured_tables import held_out_estimates
from search_regret import WITHIN, Case, Trial, cases_of, curve, replay

from wattune.search.strategies.model_guided import ModelGuided
from wattune.search.strategies.protocol import Problem, Strategy
from wattune.search.strategy import STRATEGIES

LIMITS_W: Final = (None, 650, 600, 550, 500, 400)
CASES: Final = (
    "moe_ep_h200x4_2750w",
    "moe_ep_h200x4_2600w",
    "dense_llama_h200x4_2750w",
    "dense_gpt_h200x4_2700w",
    "moe_mixtral_megatron_h200x4_2700w",
)
BAR: Final = 1.5
OWN_W: Final = 700.0
REGULATED_FRAC: Final = 0.99
READY_W: Final = 118.4
"""A process holds the device and nothing runs: `wattune.simulation.device_model`."""
EXPONENTS: Final = (1.6, 3.2)
"""Of power over clock: between what trials here show and the cube of a voltage that falls with the clock."""


def under_limit(trial: Trial, limit_w: int | None, exponent: float) -> tuple[dict[str, float], float]:
    """Returns factors by metric that a limit puts on a trial's measurements, and the limit it keeps."""
    if limit_w is None or "device_power_mean_w" not in trial.metrics:
        return {}, np.inf
    most_w = REGULATED_FRAC * limit_w
    hot_w = min(trial.metrics["device_power_peak_1s_w"], REGULATED_FRAC * OWN_W)
    clock = min(1.0, ((most_w - READY_W) / max(hot_w - READY_W, 1.0)) ** (1 / exponent))
    busy = float(np.clip((trial.metrics["device_power_mean_w"] - READY_W) / (hot_w - READY_W), 0.1, 1.0))
    longer = 1.0 - busy + busy / clock
    return {"tokens_per_s": 1 / longer, "tokens_per_s_per_device": 1 / longer, "step_time_s": longer}, most_w


def limited(trial: Trial, limit_w: int | None, exponent: float) -> Trial:
    """Returns a trial as it would have been under a limit."""
    factors, most_w = under_limit(trial, limit_w, exponent)
    spec = replace(trial.spec, plan=replace(trial.spec.plan, power_limit_w=limit_w))
    devices = spec.cluster.devices_per_node

    def changed(metrics: dict[str, float]) -> dict[str, float]:
        found = {name: value * factors.get(name, 1.0) for name, value in metrics.items()}
        for name in (one for one in found if "power" in one and one.endswith("_w") and "limit" not in one):
            found[name] = min(found[name], most_w * (devices if name.startswith("node_") else 1))
        return found

    results = tuple(replace(one, trial_id=spec.trial_id, metrics=changed(dict(one.metrics))) for one in trial.results)
    return replace(trial, spec=spec, results=results, metrics=changed(trial.metrics))


def with_limits(case: Case, table: Path, seed: int) -> Case:
    """Returns a case whose trials have every limit, with the cost model's estimates of them."""
    dice = np.random.default_rng(seed)
    drawn = [
        limited(one, limit_w, exponent)
        for one in case.trials
        for exponent in [dice.uniform(*EXPONENTS)]
        for limit_w in LIMITS_W
    ]
    known = held_out_estimates(table, tuple(one.spec for one in drawn))
    return replace(case, trials=tuple(replace(one, estimate=known[one.spec.trial_id]) for one in drawn))


def trials_needed(make: Callable[[Problem], Strategy], case: Case, seeds: int, most: int) -> tuple[float, int]:
    """Returns the mean of trials until one is found, as many as were allowed where none was, and how often that was."""
    best, found = max(map(case.value, case.trials)), []
    for seed in range(seeds):
        regrets = curve(case, replay(make, case, seed, most), best, most)
        found.append(next((index + 1 for index, regret in enumerate(regrets) if regret <= WITHIN), np.inf))
    return float(np.minimum(found, most).mean()), int(np.isinf(found).sum())


def add_arguments(parser: ArgumentParser) -> None:
    """Adds the cases, and how often each is replayed."""
    parser.add_argument("--cases", type=Path, default=Path(__file__).parent / "data/search_cases.yaml")
    parser.add_argument("--case", action="append", default=[], help=f"a case by name; else {', '.join(CASES)}")
    parser.add_argument("--seeds", type=int, default=10)


STRATEGY: Final[dict[str, tuple[int, Callable[[Problem], Strategy]]]] = {
    "model_guided": (24, lambda problem: ModelGuided(problem, stops=False)),
    "random": (400, STRATEGIES["random"]),
}
"""By name: most trials of a replay, and what makes the strategy."""


@benchmark(
    claim="A limit of power is one more axis, and the search needs hardly more trials with it.",
    bar=f"model_guided needs at most {BAR:g} times the trials, over all tables; random shows the axis unaided",
    options=add_arguments,
)
def main(given: Namespace) -> Found:
    """Replays every case with the axis and without."""
    rows = Rows(
        "case", "strategy", "num_plans", "num_with_limits", "num_trials_without", "num_trials_with", "trials_frac",
        "num_lost_without", "num_lost_with", "gain_frac",
    )  # fmt: skip
    tables = {one["name"]: given.cases.parent / one["table"] for one in yaml.safe_load(given.cases.read_text())}
    sums: dict[str, list[Any]] = {name: [] for name in STRATEGY}
    for case, _, _ in cases_of(given.cases, given.case or CASES):
        wide = with_limits(case, tables[case.name], seed=len(case.trials))
        gain = max(map(wide.value, wide.trials)) / max(map(case.value, case.trials)) - 1
        for name, (most, make) in STRATEGY.items():
            plain, lost = trials_needed(make, case, given.seeds, most)
            more, lost_with = trials_needed(make, wide, given.seeds, most)
            sums[name].append((plain, more))
            rows.add(
                case.name, name, len(case.trials), len(wide.trials), plain, more, more / plain, lost, lost_with, gain
            )
            print(rows.cells[-1], flush=True)
    ratios = {name: _whole(pairs) for name, pairs in sums.items()}
    for name, ratio in ratios.items():
        rows.add("all", name, "", "", "", "", ratio, "", "", "")
    return Found(rows, missed=[] if ratios["model_guided"] <= BAR else [f"{ratios['model_guided']:.2f} times"])


def _whole(pairs: Sequence[tuple[float, float]]) -> float:
    """Returns the ratio of all trials with the axis to all without."""
    return sum(more for _, more in pairs) / sum(plain for plain, _ in pairs)


if __name__ == "__main__":
    main()
