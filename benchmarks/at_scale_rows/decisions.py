"""Decisions and verbs on a study of ten thousand trials."""

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from large_study import NAME, NUM_TRIALS, planned_study, write_study

from at_scale_rows import Row, measures
from wattune.fidelity import FIRST_REFERENCE_REPEAT
from wattune.orchestrate.scheduling.early_stop import EarlyStop
from wattune.ranking.posterior import Posterior
from wattune.search.strategy import Problem, make_strategy

DECISIONS: Final = 20
VERBS: Final = {
    "rank, first call": ["rank", NAME],
    "rank": ["rank", NAME],
    "rank --top 20": ["rank", NAME, "--top", "20"],
    "suggest": ["suggest", NAME, "--budget", "1h"],
    "suggest again": ["suggest", NAME, "--budget", "1h"],
    "frontier": ["frontier", NAME],
    "frontier again": ["frontier", NAME],
    "report": ["report", NAME],
    "report again": ["report", NAME],
}
"""Commands, after `wattune`: `again` those whose fits are kept."""


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
    """Each command whole, with the start of Python."""
    with tempfile.TemporaryDirectory() as temporary:
        storage = Path(temporary)
        write_study(storage, *planned_study(storage))
        environment = os.environ | {"WATTUNE_STORAGE": temporary}
        for name, arguments in VERBS.items():
            command = [sys.executable, "-m", "wattune", *arguments]
            process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
            _, _, used = os.wait4(process.pid, 0)
            yield Row(f"{name} of {NUM_TRIALS:,} trials", "CPU-s", bar=5, value=used.ru_utime + used.ru_stime)
            yield Row(f"{name} of {NUM_TRIALS:,} trials, memory", "GB", bar=1, value=used.ru_maxrss / 1e6)
        page = storage / NAME / "report.html"
        size_mb = page.stat().st_size / 1e6 if page.exists() else float("inf")
        yield Row(f"report.html of {NUM_TRIALS:,} trials", "MB", bar=10, value=size_mb)
