#!/usr/bin/env python
"""Times one question to `model_guided` over 50,000 candidates with 200 results, and fits beside scikit-learn's.

    OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 python benchmarks/search_ask.py

Three models and two engines share the space. Two bounds and the device's memory have a surrogate each, and some trials
fail. The first question fits every hyperparameter. Later ones, with a result told before each, mostly do not.
"""

import itertools
import math
import time
import warnings
from dataclasses import replace
from typing import Final

import numpy as np

from wattune.catalog.hardware import ClusterSpec
from wattune.catalog.models import MODELS
from wattune.objective import Question
from wattune.plans.axes import Plan
from wattune.search.strategies.features import make_features
from wattune.search.strategies.gaussian_process import RELEVANCE_AT, Hyperprior, fit
from wattune.search.strategies.model_guided import ModelGuided
from wattune.search.strategies.protocol import Estimates, Problem
from wattune.trial import TrialResult, TrialSpec, TrialStatus, Workload

NUM_TOLD: Final = 200
TARGET_S: Final = 2.0


def candidates() -> list[TrialSpec]:
    """Lists some 52,000 specifications of three models and two engines."""
    base = TrialSpec(
        model=MODELS["llama3_8b"],
        cluster=ClusterSpec(device="h200_sxm", num_nodes=8, devices_per_node=8),
        engine="torch",
        workload=Workload(seq_len=4096, global_batch_size=512),
        plan=Plan(),
    )
    choices = itertools.product(
        (1, 2, 4, 8), (1, 2, 4, 8), (1, 2), (1, 2), (1, 2, 4, 8, 16), ("none", "zero1", "zero3"),
        ("none", "selective", "full"), ("none", "grad", "grad_param"),
    )  # fmt: skip
    plans = [
        Plan(
            tp=tp,
            pp=pp,
            cp=cp,
            vpp=vpp,
            etp=tp,
            micro_batch_size=size,
            sharding=shard,
            recompute=again,
            overlap=overlap,
        )
        for tp, pp, cp, vpp, size, shard, again, overlap in choices
    ]
    named = [MODELS[name] for name in ("llama3_8b", "llama3_70b", "mixtral_8x7b")]
    return [
        replace(base, model=model, engine=engine, plan=plan)
        for model in named
        for engine in ("torch", "megatron")
        for plan in plans
    ]


def measured(spec: TrialSpec, dice: np.random.Generator) -> TrialResult:
    """Invents a result: faster with less parallelism, out of memory for one in ten."""
    plan = spec.plan
    speed = 1e5 * 1e10 / spec.model.num_active_parameters / (1 + 0.2 * math.log2(plan.tp)) / (1 + 0.1 * plan.pp)
    speed *= (1 + 0.1 * math.log2(plan.micro_batch_size)) * math.exp(0.03 * dice.standard_normal())
    fails = plan.micro_batch_size == 16 and plan.recompute == "none"
    metrics = {
        "tokens_per_s": speed,
        "node_device_power_peak_1s_w": 4000 + 600 * math.log2(plan.micro_batch_size) + 50 * dice.standard_normal(),
        "device_temp_max_c": 60 + 4 * math.log2(plan.micro_batch_size) + dice.standard_normal(),
        "memory_peak_bytes": 2e10 * plan.micro_batch_size / plan.tp,
    }
    status = TrialStatus.OUT_OF_MEMORY if fails else TrialStatus.COMPLETED
    return TrialResult(trial_id="0" * 12, repeat=0, status=status, metrics={} if fails else metrics)


def time_questions(specs: list[TrialSpec]) -> dict[str, tuple[float, float]]:
    """Times making the strategy and its questions: wall and processor seconds of each."""
    dice, found = np.random.default_rng(0), {}
    guess = np.array([measured(spec, dice).metrics.get("tokens_per_s", 1e5) for spec in specs])

    def timed(name: str, action: object) -> object:
        wall_s, cpu_s = time.perf_counter(), time.process_time()
        value = action()  # type: ignore[operator]
        found[name] = time.perf_counter() - wall_s, time.process_time() - cpu_s
        return value

    problem = Problem(
        specs=specs,
        seed=0,
        question=Question.of("maximize tokens_per_s", "node_device_power_peak_1s_w <= 5600", "device_temp_max_c <= 70"),
        estimates=Estimates(values={"tokens_per_s": guess}),
    )
    strategy = timed("making it, once a study", lambda: ModelGuided(problem, stops=False))
    assert isinstance(strategy, ModelGuided)
    for place in dice.permutation(len(specs))[:NUM_TOLD]:
        strategy.tell(specs[place], measured(specs[place], dice))
    asked = timed("first question, every fit from the start", lambda: strategy.ask(1))
    for _ in range(5):
        assert isinstance(asked, list)
        strategy.tell(asked[0], measured(asked[0], dice))
        asked = timed("a later question", lambda: strategy.ask(1))
    timed("a question for four lanes", lambda: strategy.ask(4))
    return found


def time_fits(specs: list[TrialSpec]) -> dict[str, tuple[float, float, float | None]]:
    """Fits 40 and 200 results: ours with three priors of its columns' weights, scikit-learn's with a length for each.

    Returns:
        By fit: seconds of CPU, error on 800 other plans as a share of their spread, and the mean log density of these
        plans, None where it is not computed.
    """
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.gaussian_process import GaussianProcessRegressor
    from sklearn.gaussian_process.kernels import ConstantKernel, Matern, WhiteKernel

    dice = np.random.default_rng(1)
    some = [specs[place] for place in dice.permutation(len(specs))[: 5 * NUM_TOLD]]
    features = make_features(some)
    truth = np.array([math.log(measured(spec, dice).metrics.get("tokens_per_s", 1e5)) for spec in some])
    rest = np.arange(NUM_TOLD, len(some))
    found: dict[str, tuple[float, float, float | None]] = {}
    for count in (NUM_TOLD // 5, NUM_TOLD):
        y, rows = (truth - truth[:count].mean()) / truth[:count].std(), np.arange(count)
        own = Hyperprior.of(features.num_columns, count, 0.1, 0.05, 0.3)
        priors = {
            "ours": own,
            "ours, free weights": Hyperprior.of(features.num_columns, RELEVANCE_AT, 0.1, 0.05, 0.3),
            "ours, one weight": Hyperprior(
                own.log_mean, np.append(own.log_std[:5], np.full(features.num_columns, 1e-3))
            ),
        }
        for name, prior in priors.items():
            start_s = time.process_time()
            ours = fit(features, rows, y[rows], np.ones(count), np.ones(len(some)), 0.5, prior)
            mean, std = ours.predict(rest)
            variance = std**2 + 0.05**2
            density = -0.5 * float(np.mean(np.log(2 * np.pi * variance) + (mean - y[rest]) ** 2 / variance))
            spent_s, error = time.process_time() - start_s, float(np.sqrt(np.mean((mean - y[rest]) ** 2)))
            found[f"{name}, {count} results"] = spent_s, error, density
    place = features.place.astype(np.float64)
    kernel = ConstantKernel(1.0) * Matern(np.ones(place.shape[1]), nu=2.5) + WhiteKernel(0.01)
    start_s = time.process_time()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        theirs = GaussianProcessRegressor(kernel).fit(place[rows], y[rows])
    error = float(np.sqrt(np.mean((theirs.predict(place[rest]) - y[rest]) ** 2)))
    found[f"scikit-learn, {NUM_TOLD} results"] = time.process_time() - start_s, error, None
    return found


def main() -> None:
    """Prints both tables."""
    specs = candidates()
    print(f"{len(specs):,} candidates, {NUM_TOLD} results\n\n| what | wall, s | CPU, s |\n|---|---|---|")
    times = time_questions(specs)
    for name, (wall_s, cpu_s) in times.items():
        print(f"| {name} | {wall_s:.2f} | {cpu_s:.2f} |")
    slowest_s = times["first question, every fit from the start"][1]
    print(f"\nA question takes {slowest_s:.2f} s of CPU, target below {TARGET_S:g} s: {slowest_s < TARGET_S}\n")
    print("| fit of one metric | CPU, s | error on others, of their spread | their log density |\n|---|---|---|---|")
    for name, (fit_s, error, density) in time_fits(specs).items():
        print(f"| {name} | {fit_s:.2f} | {error:.3f} | {'' if density is None else f'{density:.2f}'} |")


if __name__ == "__main__":
    main()
