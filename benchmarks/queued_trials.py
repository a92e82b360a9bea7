"""A queue of trials of an engine that takes 10 ms a step, run as `wattune run` runs one: with tracking and live view.

`trial_overhead.py --queue` calls it. After each twentieth of the trials it notes time and memory of every process. It
times how long the controller takes to start the next trial and to take a result in, and how long the live view and the
progress of the running trial take.
"""

import io
import statistics
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import psutil
from rich.console import Console

from wattune import api
from wattune.objective import Question
from wattune.orchestrate.attempt import Attempt
from wattune.orchestrate.cluster import connect
from wattune.orchestrate.events import Event, TrialEvent
from wattune.orchestrate.run_study import run_study
from wattune.orchestrate.scheduling.controller import AskProgress, StudyController
from wattune.orchestrate.scheduling.study_run import StudyRun
from wattune.run import RunStatus
from wattune.search.search_entry import Search
from wattune.search.strategy import make_strategy
from wattune.storage.study import StudyFolder
from wattune.terminal.progress import StudyProgress
from wattune.tracking.store import default_uri
from wattune.tracking.tracker import Tracker
from wattune.trial import Measure, TrialSpec
from wattune.upload import Delivery
from wattune.workers.engine import ExpertTokens, Ranks, StepSpans
from wattune.workers.phases import Span

ENGINE: Final = "queued_trials:TenMilliseconds"
NUM_LOOKS: Final = 20
LEAST_LOOKS: Final = 4
"""With fewer nothing can be said of a line."""

ASK_EVERY_S: Final = 1.0
OBJECTIVE: Final = "maximize tokens_per_s"

ROLES: Final = {
    "ray::ImplicitFunc": "trials' driver",
    "ray::LaneKeeper": "lane keeper",
    "ray::RayTrainWorker": "workers",
    "ray::TelemetryActor": "telemetry actor",
    "ray::": "Ray's own actors",
    "gcs_server": "Ray's head",
    "raylet": "Ray's node",
    "dashboard": "Ray's dashboard",
}
"""Name of a process, by the first of these that its command line contains."""


class TenMilliseconds:
    """An engine whose steps take 10 ms and that needs nothing."""

    def build(self, spec: TrialSpec, ranks: Ranks, *, seed: int) -> None:
        """Builds nothing."""

    def step(self) -> StepSpans:
        """Sleeps."""
        start_ns = time.monotonic_ns()
        time.sleep(0.01)
        return StepSpans(spans=(Span("step", start_ns, time.monotonic_ns()),), loss=1.0, grad_norm=1.0)

    def memory_peak_bytes(self) -> int:
        """Nothing."""
        return 0

    def facts(self) -> dict[str, str]:
        """None."""
        return {}

    def expert_tokens(self) -> ExpertTokens:
        """None, without experts."""
        return ()

    def close(self) -> None:
        """Closes nothing."""


@dataclass
class Stopwatch:
    """Durations of one thing, each with the number of trials before it."""

    num_trials: Callable[[], int]
    took_s: list[tuple[int, float]] = field(default_factory=list)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Times the body."""
        begun_s = time.perf_counter()
        yield
        self.took_s.append((self.num_trials(), time.perf_counter() - begun_s))

    def summary(self, half: int) -> dict[str, float]:
        """Median and 99th percentile in milliseconds, over all and of the second half of the trials."""
        every = [value for _, value in self.took_s]
        late = [value for at, value in self.took_s if at >= half] or every
        early = [value for at, value in self.took_s if at < half] or every
        return {
            "median_ms": 1e3 * statistics.median(every),
            "p99_ms": 1e3 * float(np.quantile(every, 0.99)),
            "median_first_half_ms": 1e3 * statistics.median(early),
            "median_second_half_ms": 1e3 * statistics.median(late),
        }


class TimedController(StudyController):
    """The controller, and the time it takes to answer."""

    next_s: Stopwatch
    finish_s: Stopwatch

    def next(self, tune_id: str, progress: AskProgress | None = None) -> Attempt | None:
        """Times the controller's; only calls that start a trial count."""
        begun_s = time.perf_counter()
        running = super().next(tune_id, progress)
        if running is not None:
            self.next_s.took_s.append((self.next_s.num_trials(), time.perf_counter() - begun_s))
        return running

    def finish(self, tune_id: str, *, error: bool) -> None:
        """Times the controller's."""
        with self.finish_s.running():
            super().finish(tune_id, error=error)


class Watch:
    """The use of processors and memory by the study's processes, and the waits of those who ask about it."""

    def __init__(self, num_trials: int) -> None:
        """Nothing has run."""
        self.num_trials = num_trials
        self.num_done = self.num_before = 0
        self.looks: list[dict[str, Any]] = []
        self.ask_s, self.view_s = (Stopwatch(lambda: self.num_done) for _ in range(2))
        self._begun_s = time.monotonic()
        self._ask: Callable[[], object] | None = None
        self._over = threading.Event()
        self._view: Callable[[], object] = lambda: None
        self._asking = threading.Thread(target=self._run, daemon=True)

    def start(self, view: Callable[[], object]) -> None:
        """Begins to ask once a second.

        Args:
            view: Draws the live view.
        """
        self._view = view
        self._asking.start()

    def stop(self) -> None:
        """Asks no more."""
        self._over.set()
        self._asking.join()

    def hear(self, event: Event) -> None:
        """Counts; looks at the processes after each twentieth."""
        if not isinstance(event, TrialEvent):
            return
        if event.result is None:
            self._ask = event.progress
            return
        if event.result.status is RunStatus.INTERRUPTED:  # Ctrl-C: what was seen so far is told
            return
        if event.result.status is not RunStatus.COMPLETED:
            raise SystemExit(f"trial {self.num_done} is {event.result.status}: {event.result.reason}")
        self.num_done += 1
        if event.kind == "skipped":
            self.num_before += 1
        elif self.num_done % max(self.num_trials // NUM_LOOKS, 1) == 0:
            used = usage()
            self.looks.append({"trials": self.num_done, "wall_s": time.monotonic() - self._begun_s, "used": used})

    def _run(self) -> None:
        while not self._over.wait(ASK_EVERY_S):
            with self.view_s.running():
                self._view()
            if self._ask is not None:
                with self.ask_s.running():
                    self._ask()


def usage() -> dict[str, dict[str, float]]:
    """Processor seconds since their start and resident MiB, by role; samplers end with trials and are left out."""
    found: dict[str, dict[str, float]] = defaultdict(lambda: {"cpu_s": 0.0, "rss_mib": 0.0})
    me = psutil.Process()
    for process in [me, *me.children(recursive=True)]:
        try:
            with process.oneshot():
                command = " ".join(process.cmdline()[:4])
                times, memory = process.cpu_times(), process.memory_info()
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue  # it ended since it was listed
        role = "driver" if process == me else role_of(command)
        found[role]["cpu_s"] += times.user + times.system
        found[role]["rss_mib"] += memory.rss / 2**20
    return dict(found)


def role_of(command: str) -> str:
    """Returns the name of a process by its command line, where Ray writes an actor's class."""
    return next((role for part, role in ROLES.items() if part in command), "other")


def straight(trials: Sequence[float], values: Sequence[float]) -> dict[str, float]:
    """The straight line through what was seen, and how far from one it is.

    Returns:
        `slope`, a trial; `residual_frac`, the largest distance from the line over the line's own rise; and `halves`,
        what the second half of the trials added over what the first half did (1 is linear, 0 a bound that is reached).
    """
    x, y = np.asarray(trials, dtype=float), np.asarray(values, dtype=float)
    slope, start = np.polyfit(x, y, 1)
    rise = abs(slope) * (x[-1] - x[0]) or 1.0
    middle = float(np.interp((x[0] + x[-1]) / 2, x, y))
    return {
        "slope": float(slope),
        "residual_frac": float(np.abs(y - (slope * x + start)).max() / rise),
        "halves": float((y[-1] - middle) / (middle - y[0])) if middle != y[0] else float("nan"),
    }


def run_queue(specs: Sequence[TrialSpec], root: Path) -> dict[str, Any]:
    """Runs a study of these trials and says what it took.

    Args:
        specs: What to run, each once; those that an earlier call finished in this storage are skipped.
        root: The storage folder.
    """
    watch = Watch(len(specs))
    study = StudyFolder.create(root, "queued", {"study": "queued", "objective": OBJECTIVE, "constraints": []})
    run = StudyRun(
        measure=Measure(warmup_steps=4, min_steps=8, min_seconds=0.0, reference_every=0),
        num_trials=len(specs),
        search=Search(),
        question=Question.of(OBJECTIVE),
        limits={},
        tags=api.environment_tags(),
        finalists=list,
        clusters=(specs[0].cluster,),
    )
    view = StudyProgress(Console(file=io.StringIO(), force_terminal=True, width=120), Question.of(OBJECTIVE))
    with Delivery(study, Tracker(default_uri(root), study.name, document=study.document()), None) as delivery:

        def heard(event: Event) -> None:
            if isinstance(event, TrialEvent) and event.kind == "finished" and event.result is not None:
                delivery.send(event.spec, event.result)
            view(event)
            watch.hear(event)

        controller = TimedController(study, make_strategy("grid", specs, seed=0), run, heard)
        controller.next_s, controller.finish_s = (Stopwatch(lambda: watch.num_done) for _ in range(2))
        controller.begin()
        with connect() as cluster:
            watch.start(view.view)
            ended = run_study(study, controller, run, cluster)
            watch.stop()
        after_s = {}
        with noting(after_s, "rank"):
            ranking = api.rank(study)
        with noting(after_s, "report"):
            api.report(study, ranking)
        with noting(after_s, "send"):
            delivery.conclude(ranking)
    with noting(after_s, "resume"):
        StudyController(study, make_strategy("grid", specs, seed=0), run, lambda _event: None).begin()
    if ended not in ("finished", "interrupted") or delivery.tracking_problem or len(watch.looks) < LEAST_LOOKS:
        raise SystemExit(f"{watch.num_done} of {len(specs)} ran, {ended}; {delivery.tracking_problem}")
    return figures(watch, controller, after_s)


@contextmanager
def noting(times_s: dict[str, float], what: str) -> Iterator[None]:
    """Notes how long the body takes."""
    begun_s = time.monotonic()
    yield
    times_s[what] = time.monotonic() - begun_s


def figures(watch: Watch, controller: TimedController, after_s: dict[str, float]) -> dict[str, Any]:
    """Returns the notes as figures."""
    first, last = watch.looks[0], watch.looks[-1]
    trials = [look["trials"] for look in watch.looks]
    processes = {}
    for role in last["used"]:
        if all(role in look["used"] for look in watch.looks):
            series = {name: [look["used"][role][name] for look in watch.looks] for name in ("cpu_s", "rss_mib")}
            processes[role] = {name: straight(trials, values) | {"last": values[-1]} for name, values in series.items()}
    half = (watch.num_before + last["trials"]) // 2
    waits = {
        "controller: which trial is next": controller.next_s.summary(half),
        "controller: takes a result in": controller.finish_s.summary(half),
        "how far is the running trial": watch.ask_s.summary(half),
        "drawing the live view": watch.view_s.summary(half),
    }
    trial_s = (last["wall_s"] - first["wall_s"]) / (last["trials"] - first["trials"])
    wall = straight(trials, [look["wall_s"] for look in watch.looks])
    return {
        "num_trials": last["trials"] - watch.num_before,
        "num_before": watch.num_before,
        "num_queued": watch.num_trials,
        "trial_s": trial_s,
        "wall": wall,
        "after_s": after_s,
        "processes": processes,
        "waits": waits,
        "looks": watch.looks,
    }


def table(found: Mapping[str, Any]) -> list[str]:
    """Returns the findings of `run_queue` as lines for people."""
    processes, after_s = found["processes"], found["after_s"]
    first, last = found["num_before"] + 1, found["num_before"] + found["num_trials"]
    driver_ms = 1e3 * processes["driver"]["cpu_s"]["slope"]
    lines = [
        (
            f"Trials {first} to {last} of {found['num_queued']} queued, of a 10 ms engine: {found['trial_s']:.2f} s a "
            f"trial (second half over first half {found['wall']['halves']:.2f}), {driver_ms:.0f} ms of the driver's "
            f"processor time. Then: ranking {after_s['rank']:.2f} s, the report {after_s['report']:.2f} s, what the "
            f"tracking store still lacks {after_s['send']:.2f} s, opening the study again {after_s['resume']:.2f} s."
        ),
        "",
        "| process | CPU a trial | off a line | second half over first half | memory a trial | likewise | end |",
        "|---|---|---|---|---|---|---|",
    ]
    for role, used in sorted(processes.items(), key=lambda item: -item[1]["cpu_s"]["slope"]):
        cpu, memory = used["cpu_s"], used["rss_mib"]
        lines.append(
            f"| {role} | {1e3 * cpu['slope']:.0f} ms | {cpu['residual_frac']:.1%} | {cpu['halves']:.2f} | "
            f"{1024 * memory['slope']:+.0f} KiB | {memory['halves']:.2f} | {memory['last']:.0f} MiB |"
        )
    lines += [
        "",
        "| how long it takes | median | 99 % | median, first half | median, second half |",
        "|---|---|---|---|---|",
    ]
    for name, wait in found["waits"].items():
        lines.append(f"| {name} | " + " | ".join(f"{value:.2f} ms" for value in wait.values()) + " |")
    return lines
