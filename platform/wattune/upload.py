"""Sends a study's results to a tracking store and to storage at a URL.

The study folder is the record and needs neither. Results that could not be sent stay there, and the same functions send
them later.
"""

import functools
import queue
import threading
import time
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final, Self, TypeAlias

import numpy as np
from numpy.typing import NDArray

from wattune.analysis.run_data import RunData
from wattune.analysis.signals.align import Aligned
from wattune.analysis.summary import node_power_series
from wattune.errors import ImpossibleValueError, PlanError, TelemetryError, TrackingError, WattuneError
from wattune.forced_exit import asked
from wattune.ranking.assessment import is_simulated
from wattune.ranking.order import Ranking
from wattune.run import Run
from wattune.storage.measured import MeasuredFolder
from wattune.storage.remote import RemoteStorage
from wattune.storage.study import StudyFolder
from wattune.tracking.destinations import StudyTracker
from wattune.tracking.picture import trial_picture
from wattune.tracking.run import Curves
from wattune.trial import TrialSpec
from wattune.units import NS_PER_S
from wattune.view.table import worded

_FIGURES: Final = {
    "tokens_per_s": "{} tokens",
    "step_time_s": "step {}",
    "node_device_power_mean_w": "node {} mean",
    "node_device_power_peak_1s_w": "{} peak over 1 s",
}
"""Figures under a picture's name, and their words."""

SendTrial = Callable[[TrialSpec, Run], bool]
"""Sends one repeat of a trial in the study folder; returns true if the destination did not have it yet."""

STOP_WITHIN_S: Final = 300.0
"""Longest time that the end of a study waits for uploads."""

STOPPED_WITHIN_S: Final = 3.0
"""The same for a study that was stopped: whoever stops it may kill what takes longer, and the next call sends the rest.
"""


Charts: TypeAlias = tuple[Curves, str]
"""Telemetry of one trial as a tracking store shows it: node power over wall time by node, and an SVG of node power
above the time of each step."""

NO_CHARTS: Final[Charts] = ({}, "")


def charts_of(folder: MeasuredFolder, spec: TrialSpec, result: Run) -> Charts:
    """Draws a trial's own telemetry for a tracking store.

    Empty without a window, or if the tables do not have the expected schema.
    """
    try:
        examined = RunData.of(folder.path).examined
        if examined is None:
            return NO_CHARTS
        aligned, power_w = examined.aligned, node_power_series(examined.aligned)
    except ImpossibleValueError:  # the result is invalid and says why
        return NO_CHARTS
    series = {
        f"{node}/node_device_power_w": (aligned.start_ns + (time_s * NS_PER_S).astype("int64"), watts)
        for node, (time_s, watts) in power_w.items()
    }
    known = [
        template.format(worded(name, result.metrics[name]))
        for name, template in _FIGURES.items()
        if name in result.metrics
    ]
    picture = trial_picture(
        f"{spec.label} #{result.repeat}",
        ", ".join(known) or str(result.status).replace("_", " "),
        power_w,
        _steps_of(aligned),
        simulated=is_simulated(result),
    )
    return series, picture


def _steps_of(aligned: Aligned) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Returns when each measured step begins on its first rank, and how long it takes to its last one, in seconds."""
    if aligned.steps is None:
        return np.empty(0), np.empty(0)
    start_ns, end_ns = aligned.steps.start_ns.min(axis=1), aligned.steps.end_ns.max(axis=1)
    return (start_ns - aligned.start_ns) / NS_PER_S, (end_ns - start_ns) / NS_PER_S


def to_tracking(study: StudyFolder, tracker: StudyTracker) -> SendTrial:
    """Returns a function that sends trials of a study to a tracking store.

    It sends the result that is in the folder at that time.
    """

    def send(spec: TrialSpec, result: Run) -> bool:
        folder = study.trial(result.trial_id, result.repeat)
        folder.check()
        kept = folder.result() or result
        return tracker.log_trial(spec, kept, folder.path, *charts_of(folder, spec, kept))

    return send


def conclude_study(study: StudyFolder, tracker: StudyTracker, ranking: Ranking) -> None:
    """Sends facts of the whole study to a tracking store, with the report if there is one."""
    report_path = study.report_path if study.report_path.exists() else None
    tracker.log_study(study.document(), ranking.to_json(), report_path, study.results())


def to_storage(study: StudyFolder, remote: RemoteStorage) -> SendTrial:
    """Returns a function that sends trials of a study to storage at a URL."""
    return lambda _spec, result: remote.send_trial(study.name, study.trial(result.trial_id, result.repeat))


def send_all(study: StudyFolder, senders: Mapping[str, tuple[SendTrial, Callable[[], object]]]) -> dict[str, int]:
    """Sends every finished trial of a study, then facts of the whole study, to each of several places.

    `senders` has by name of the place a function that sends a trial, and one that sends the study. Returns the number
    of trials that were sent now, by place. Raises `WattuneError`: a place cannot be reached or refuses, or a trial
    cannot be read; all others were sent.
    """
    results, unreadable = study.finished()
    sent = dict.fromkeys(senders, 0)
    problems: list[WattuneError] = []
    for place, (send_trial, send_study) in senders.items():
        try:
            for spec, result in results:
                try:
                    sent[place] += send_trial(spec, result)
                except (PlanError, TelemetryError) as error:  # this trial is damaged; the others are sent
                    problems.append(error)
            send_study()
        except WattuneError as error:
            problems.append(error)
    problems += map(PlanError, unreadable.values())
    if problems:
        raise problems[0]
    return sent


class Uploader:
    """Sends results of a running study from threads of its own, so that a slow or dead server never delays a trial."""

    def __init__(self, name: str, send: SendTrial, at_once: int = 1) -> None:
        self.problem = ""
        """Reason of the first failure; empty if everything was sent."""
        self._name, self._send = name, send
        self._queue: queue.SimpleQueue[Callable[[], Any] | None] = queue.SimpleQueue()
        # Not an executor's: the process waits at its end for those, and a store may hang.
        self._threads = [threading.Thread(target=self._run, daemon=True, name=name) for _ in range(at_once)]
        self._stopped = False

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def send(self, spec: TrialSpec, result: Run) -> None:
        """Queues a result; returns at once."""
        self.call(lambda: self._send(spec, result))

    def call(self, action: Callable[[], object]) -> None:
        """Queues any other action."""
        self._queue.put(action)

    def stop(self, within_s: float = STOP_WITHIN_S) -> None:
        """Waits for all queued actions, for so long at most. The first call decides."""
        if self._stopped or not any(thread.is_alive() for thread in self._threads):
            return
        self._stopped = True
        end_s = time.monotonic() + within_s
        for _ in self._threads:
            self._queue.put(None)
        for thread in self._threads:
            thread.join(max(end_s - time.monotonic(), 0.0))
        if any(thread.is_alive() for thread in self._threads):
            self.problem = self.problem or f"{self._name}: still sending after {within_s:g} s"

    def _run(self) -> None:
        while (action := self._queue.get()) is not None:
            try:
                action()
            except WattuneError as error:
                self.problem = self.problem or str(error)
            except Exception as error:
                # A result that cannot be sent, for whatever reason, must not hold back the others.
                self.problem = self.problem or f"{self._name}: {type(error).__name__}: {error}"


class Delivery:
    """All destinations of a running study."""

    def __init__(
        self,
        study: StudyFolder,
        tracker: StudyTracker,
        remote: RemoteStorage | None,
        further: Mapping[str, StudyTracker] = MappingProxyType({}),
    ) -> None:
        self._study, self._remote = study, remote
        self._trackers = {
            name: (one, Uploader(name, to_tracking(study, one)))
            for name, one in {"tracking": tracker, **further}.items()
        }
        self._storage = Uploader("storage", to_storage(study, remote), remote.at_once) if remote else None
        self._uploaders = [*filter(None, [self._storage]), *(uploader for _, uploader in self._trackers.values())]
        self._fetch_problem = ""

    @property
    def tracking_problem(self) -> str:
        """Reason of the first failure to send to each tracking store, a line each; empty without one."""
        return "\n".join(filter(None, (uploader.problem for _, uploader in self._trackers.values())))

    @property
    def storage_problem(self) -> str:
        """Reason of the first failure to fetch from or send to the storage's URL; empty without one."""
        return self._fetch_problem or (self._storage.problem if self._storage else "")

    def __enter__(self) -> Self:
        """Fetches finished trials that other machines sent, and starts to send.

        Raises `SpaceError`: the storage has a study of this name that contradicts this one.
        """
        if self._remote is not None:
            try:
                self._remote.fetch_study(self._study.name, self._study.path.parent, may_lack=True)
            except TrackingError as error:
                self._fetch_problem = str(error)
        self.send_study()
        for uploader in self._uploaders:
            uploader.__enter__()
        return self

    def __exit__(self, error: type[BaseException] | None = None, *_: object) -> None:
        """Waits for all queued actions, a moment where the study was stopped."""
        stopped = asked() or (error is not None and issubclass(error, KeyboardInterrupt))
        self._stop(STOPPED_WITHIN_S if stopped else STOP_WITHIN_S)

    def _stop(self, within_s: float) -> None:
        end_s = time.monotonic() + within_s
        for uploader in self._uploaders:
            uploader.stop(max(end_s - time.monotonic(), 0.0))

    def send_study(self) -> None:
        """Queues the files of the study as a whole, for the storage; returns at once."""
        if self._remote is not None and self._storage is not None:
            self._storage.call(functools.partial(self._remote.send_study, self._study))

    def send(self, spec: TrialSpec, result: Run) -> None:
        """Queues the result of a trial that has just finished; returns at once."""
        for _, uploader in self._trackers.values():
            uploader.send(spec, result)
        self.send_again(spec, result)

    def send_again(self, spec: TrialSpec, result: Run) -> None:
        """Queues a result of an earlier run, which the storage may not have."""
        if self._storage is not None:
            self._storage.send(spec, result)

    def conclude(self, ranking: Ranking, *, stopped: bool = False) -> None:
        """Sends facts of the whole study after all queued results, and waits for the queues.

        Of a study that was stopped, what is not sent in a moment is left to the next call.
        """
        self.send_study()
        for tracker, uploader in self._trackers.values():
            uploader.call(functools.partial(self._complete, tracker))
            uploader.call(functools.partial(conclude_study, self._study, tracker, ranking))
        self._stop(STOPPED_WITHIN_S if stopped else STOP_WITHIN_S)

    def _complete(self, tracker: StudyTracker) -> None:
        """Sends what a tracking store lacks of the study's finished trials, or has as interrupted or older.

        A process that was killed after a trial, a store that was down and a trial that completed while its study was
        being stopped all leave such a gap, in this call or an earlier one.
        """
        send = to_tracking(self._study, tracker)
        delivered = tracker.delivered()
        for spec, result in self._study.results():
            sent = delivered.get((result.trial_id, result.repeat))
            if result.status.is_final and (sent is None or not sent.holds(result)):
                send(spec, result)
