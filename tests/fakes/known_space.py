"""A small space with a known truth, for tests of strategies that learn."""

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate

from specs import trial_spec

from wattune.objective import Question, parse_constraint, parse_objective
from wattune.plans.axes import Plan
from wattune.run import Run, RunStatus
from wattune.search.strategies.protocol import Problem
from wattune.trial import TrialSpec

BASE = trial_spec(on="1x8 h200_sxm", batch=64)
SPECS = [
    replace(
        BASE, plan=Plan(tp=tp, etp=tp, micro_batch_size=size, sharding=sharding, recompute=recompute, overlap=overlap)
    )
    for tp, size, sharding, recompute, overlap in itertools.product(
        (1, 2, 4, 8), (1, 2, 4, 8), ("none", "zero1", "zero3"), ("none", "selective", "full"), ("none", "grad")
    )
]
OBJECTIVE = parse_objective("maximize tokens_per_s")
POWER = parse_constraint("node_device_power_peak_1s_w <= 3700")


def metrics(spec: TrialSpec) -> dict[str, float]:
    """The truth: speed with a kink in tp, power by speed, memory by micro-batch, recompute and sharding."""
    plan = spec.plan
    speed = 1e5 * math.exp(
        -0.3 * abs(math.log2(plan.tp) - 1)
        + 0.22 * math.log2(plan.micro_batch_size)
        - 0.25 * (plan.recompute == "full")
        - 0.05 * (plan.recompute == "selective")
        - 0.2 * (plan.sharding == "zero3") * (plan.overlap == "none")
        + 0.04 * (plan.overlap == "grad")
    )
    kept = {"none": 1.0, "selective": 0.6, "full": 0.1}[plan.recompute]
    memory = 141e9 * (0.3 / (3 if plan.sharding == "zero3" else 1) + 0.14 * plan.micro_batch_size * kept / plan.tp)
    return {
        "tokens_per_s": speed,
        "node_device_power_peak_1s_w": 2000 + 1500 * (speed / 1e5) * (1.25 if plan.sharding == "none" else 1.0),
        "memory_peak_bytes": memory,
    }


def result(spec: TrialSpec, repeat: int = 0, **changed: float) -> Run:
    """The result of a specification: out of memory where it does not fit."""
    values = metrics(spec) | changed
    fits = values["memory_peak_bytes"] < 0.95 * 141e9
    status = RunStatus.COMPLETED if fits else RunStatus.OUT_OF_MEMORY
    return Run(trial_id=spec.trial_id, repeat=repeat, status=status, metrics=values if fits else {})


def is_feasible(spec: TrialSpec) -> bool:
    """Returns whether a specification fits and holds the bound on power."""
    done = result(spec)
    return done.status is RunStatus.COMPLETED and bool(POWER.holds(done.metrics))


BEST = max(filter(is_feasible, SPECS), key=lambda spec: metrics(spec)["tokens_per_s"])


def problem(**changed) -> Problem:
    """The problem of that space."""
    asked = {name: changed.pop(name) for name in ("objective", "constraints") if name in changed}
    question = Question(**({"objective": OBJECTIVE, "constraints": (POWER,)} | asked))
    return Problem(**({"specs": SPECS, "seed": 0, "question": question} | changed))


def sought(strategy, most: int, answer: Callable[[TrialSpec], Run] = result) -> list[TrialSpec]:
    """Trials that a search asks for one at a time, told how each went."""
    found = []
    while len(found) < most and (asked := strategy.ask(1)):
        found += asked
        strategy.tell(asked[0], answer(asked[0]))
    return found


def regrets(strategy, most: int) -> list[float]:
    """The regret after each trial of such a search."""
    speeds = (metrics(spec)["tokens_per_s"] * is_feasible(spec) for spec in sought(strategy, most))
    return [1 - reached / metrics(BEST)["tokens_per_s"] for reached in accumulate(speeds, max)]
