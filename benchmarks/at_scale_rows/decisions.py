"""Decisions and verbs on a study of ten thousand trials: real plans, with results drawn about their estimates.

Its folders are written by the product's own storage, without the syncs to disk. Every metric is there. Each hundredth
run is another one of the reference trial, and one trial of fifty runs out of memory or crashes.
"""

import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

import numpy as np

from at_scale_rows import Row, measures
from wattune import api
from wattune.api.beforehand import Beforehand
from wattune.api.spaces import StudyPlan
from wattune.fidelity import FIRST_REFERENCE_REPEAT
from wattune.metrics import METRICS
from wattune.orchestrate.scheduling.early_stop import EarlyStop
from wattune.ranking.posterior import Posterior
from wattune.run import Run, RunStatus
from wattune.search.strategy import Problem, make_strategy
from wattune.storage.study import StudyFolder
from wattune.trial import TrialSpec

NUM_TRIALS: Final = 10_000
REFERENCE_EVERY: Final = 100
FAILED_EVERY: Final = 50
TRIAL_NS: Final = 20 * 10**9
START_NS: Final = 1_790_000_000 * 10**9
NAME: Final = "ten_thousand"

Pairs = list[tuple[TrialSpec, Run]]
DECISIONS: Final = 20
VERBS: Final = {"rank": [], "suggest": ["--budget", "1h"], "frontier": [], "report": []}
"""Commands of `wattune` and their options."""
TIMES: Final = ("first call, no file kept", "again", "first call after the study's own end")


def document(**search: Any) -> dict[str, Any]:
    """A space of some thousand plans more than are measured."""
    return {
        "study": NAME,
        "model": "llama3_8b",
        "cluster": {"device": "h200_sxm", "num_nodes": 16, "devices_per_node": 8, "network": "ndr"},
        "engine": "torch",
        "workload": {"mode": "pretrain", "seq_len": [2048, 4096, 8192], "global_batch_size": [256, 512]},
        "space": {
            "tp": [1, 2, 4, 8],
            "pp": [1, 2, 4, 8],
            "cp": [1, 2, 4],
            "micro_batch_size": [1, 2, 4],
            "sharding": ["none", "zero1", "zero2", "zero3"],
            "recompute": ["none", "selective", "full"],
            "power_limit_w": ["found", 600, 500, 400],
        },
        "objective": "maximize tokens_per_s",
        "constraints": ["node_device_power_peak_1s_w <= 5000", "throttle_thermal_frac <= 0.01"],
        "search": {"strategy": "grid", **search},
    }


def planned_study(storage: Path, num_trials: int = NUM_TRIALS) -> tuple[StudyPlan, Pairs]:
    """The plan, and a result for so many of its trials, in the order in which they ended."""
    planned = api.plan(document())
    known = Beforehand(planned, storage)
    found = known.fitting(StudyFolder(storage / NAME))
    specs, estimates = found.planned.candidates.specs, found.estimates
    assert estimates is not None and len(specs) > num_trials, f"{len(specs)} plans fit"
    columns = {name: column.value for name, column in estimates.columns.items()}
    order = np.random.default_rng(0).permutation(len(specs))[:num_trials]
    dice, pairs = random.Random(0), Pairs()
    for place, number in enumerate(order.tolist()):
        pairs.append(_result(specs[number], columns, number, dice, len(pairs), repeat=0))
        if place % REFERENCE_EVERY == 0:
            first = order[0].item()
            repeat = FIRST_REFERENCE_REPEAT + place // REFERENCE_EVERY
            pairs.append(_result(specs[first], columns, first, dice, len(pairs), repeat=repeat))
    return planned, pairs


def _result(
    spec: TrialSpec, estimates: dict[str, Any], number: int, dice: random.Random, place: int, *, repeat: int
) -> tuple[TrialSpec, Run]:
    """A run whose figures are those estimated, off by what is the plan's own and what is the run's."""
    own = random.Random(number).gauss(0.0, 0.04) + dice.gauss(0.0, 0.003)
    metrics = {name: dice.uniform(0.1, 0.9) for name in METRICS}
    metrics |= {name: float(values[number]) for name, values in estimates.items() if np.isfinite(values[number])}
    for name in ("tokens_per_s", "tokens_per_s_per_device", "mfu_frac"):
        metrics[name] *= 1.0 + own
    for name in ("node_device_power_peak_1s_w", "node_device_power_mean_w"):
        metrics[name] *= 1.0 + 0.2 * own
    metrics["step_time_s"] /= 1.0 + own
    metrics |= {"throttle_thermal_frac": 0.0, "host_bound_frac": 0.0, "step_time_uncertainty_frac": 0.002}
    failed = repeat == 0 and place % FAILED_EVERY == FAILED_EVERY - 1
    start_ns = START_NS + place * TRIAL_NS
    run = Run(
        trial_id=spec.trial_id,
        repeat=repeat,
        status=(RunStatus.OUT_OF_MEMORY if place % 4 else RunStatus.CRASHED) if failed else RunStatus.COMPLETED,
        reason="rank 3: CUDA out of memory" if failed else "",
        metrics={} if failed else metrics,
        quality="" if failed else "publishable",
        tags={"simulated": "false", "nodes": f"n{place % 4}", "version.torch": "2.13.0", "engine": spec.engine}
        | ({"reference": "true"} if repeat else {}),
        start_wall_ns=start_ns,
        end_wall_ns=start_ns + TRIAL_NS,
    )
    return spec, run


def write_study(storage: Path, planned: StudyPlan, pairs: Sequence[tuple[TrialSpec, Run]]) -> StudyFolder:
    """Writes the study folder."""
    study = StudyFolder.create(storage, NAME, planned.spec.document)
    with patch("os.fsync"):
        study.commit(planned.spec.document, planned.candidates.rows())
        for spec, result in pairs:
            folder = study.trial(result.trial_id, result.repeat)
            folder.write_spec(spec)
            folder.write_result(result)
    return study


def _each_ms(name: str, decide: Callable[[int], object]) -> Row:
    """Measures processor time of some decisions, each after a result more."""
    taken_ms = []
    for number in range(DECISIONS):
        begun_s = time.process_time()
        decide(number)
        taken_ms.append(1e3 * (time.process_time() - begun_s))
    middle, spread = statistics.median(taken_ms), statistics.stdev(taken_ms)
    return Row(f"{name} at {NUM_TRIALS:,} trials", "ms", bar=50, value=middle, spread=spread)


@measures(timeout_s=900)
def decisions() -> Iterator[Row]:
    """A decision after each of the last results, of which all before are known; a ranking of all stands beside it."""
    planned, pairs = planned_study(Path("none"))
    question, latest = planned.spec.question, pairs[-DECISIONS:]
    race, stop = Posterior(pairs[:-DECISIONS], question), EarlyStop(question)
    for spec, run in pairs[:-DECISIONS]:
        stop.note(spec, run)
    _ = race.front, stop.stop_above_s(pairs[0][0])

    def raced(number: int) -> object:
        race.tell(*latest[number])
        return race.front

    def stopped(number: int) -> object:
        stop.note(*latest[number])
        return stop.stop_above_s(latest[number][0])

    yield _each_ms("race", raced)
    yield _each_ms("early stop", stopped)
    begun_s = time.process_time()
    whole = Posterior(pairs, question).standings
    yield Row("race, all anew", "ms", value=1e3 * (time.process_time() - begun_s))
    apart = [abs(whole.likely.get(key, 0.0) - value) for key, value in race.front.likely.items()]
    yield Row("race, largest difference of P(best) from all anew", "", bar=0.005, value=max(apart, default=0.0))
    first = [(spec, run) for spec, run in pairs if run.repeat < FIRST_REFERENCE_REPEAT]
    for name in ("grid", "random"):
        strategy = make_strategy(name, Problem(specs=planned.candidates.specs, seed=0, question=question))
        for spec, run in first:
            strategy.tell(spec, run)
        yield _each_ms(f"ask of {name}", lambda _, one=strategy: one.ask(1))


@measures(timeout_s=1800)
def verbs() -> Iterator[Row]:
    """Each command whole, with the start of Python; a study's own end reads, ranks and reports what is there."""
    with tempfile.TemporaryDirectory() as temporary:
        storage = Path(temporary)
        write_study(storage, *planned_study(storage))
        environment = os.environ | {"WATTUNE_STORAGE": temporary}
        for when, (name, options) in product(TIMES, VERBS.items()):
            if when == TIMES[0] or (when, name) == (TIMES[2], "rank"):
                for path in (storage / NAME / "trials").glob(".*"):
                    path.unlink()
            if (when, name) == (TIMES[2], "rank"):
                api.run_study(document(), storage=temporary, max_hours=0, set_power_limits=True)
            command = [sys.executable, "-m", "wattune", name, NAME, *options]
            process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
            _, _, used = os.wait4(process.pid, 0)
            yield Row(f"{name}, {when}", "CPU-s", bar=5, value=used.ru_utime + used.ru_stime)
            yield Row(f"{name}, {when}, memory", "GB", bar=1, value=used.ru_maxrss / 1e6)
        page = storage / NAME / "report.html"
        size_mb = page.stat().st_size / 1e6 if page.exists() else float("inf")
        yield Row(f"report.html of {NUM_TRIALS:,} trials", "MB", bar=10, value=size_mb)
