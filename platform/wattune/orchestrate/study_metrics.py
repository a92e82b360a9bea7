"""Metrics of a running study on Ray's own metrics page, beside what `wattune record --serve` exposes of a node.

Ray puts `ray_` before each name and `_total` behind a counter's. They are of one call: a counter begins at 0 with it.
"""

from collections import Counter, defaultdict
from typing import Any, Final

from ray.util import metrics

from wattune.orchestrate.events import Event, TrialEvent
from wattune.orchestrate.failures import CAUSE_TAG
from wattune.run import TIME_PARTS, RunStatus

STUDY_METRICS: Final = {
    "wattune_study_trials": (
        metrics.Gauge,
        "Trials with their repeats by state: waiting, running, or how they ended, in this call or an earlier one.",
        ("study", "state"),
    ),
    "wattune_study_failures": (
        metrics.Counter,
        "Attempts that failed in this call, by the part of the cluster that failed, else by how they ended.",
        ("study", "cause"),
    ),
    "wattune_study_seconds": (
        metrics.Counter,
        "Wall seconds of each set of nodes by the part of a trial, as `wattune rank --time` has them.",
        ("study", "part"),
    ),
    "wattune_study_measured_ratio": (
        metrics.Gauge,
        "Share of the wall seconds of this call in which steps were measured.",
        ("study",),
    ),
}
"""Kind, help text and labels of each metric by name."""

_MEASURED: Final = "window"


class StudyMetrics:
    """Listener of a study whose process is connected to Ray."""

    def __init__(self, study: str) -> None:
        """Makes the metrics of a study by name; nothing is set before its first event."""
        self._study = study
        self._metrics: dict[str, Any] = {
            name: kind(name, text, tag_keys=labels) for name, (kind, text, labels) in STUDY_METRICS.items()
        }
        self._states: Counter[str] = Counter(running=0)
        self._spent_s: dict[str, float] = defaultdict(float)

    def __call__(self, event: Event) -> None:
        """Takes an event."""
        if not isinstance(event, TrialEvent):
            return
        if event.num_left is not None:
            self._states["waiting"] = event.num_left
        if event.result is None:
            self._states["running"] += 1
        else:
            status = event.result.status
            self._states[status] += not event.again
            if event.kind == "finished":
                self._states["running"] = max(self._states["running"] - (status is not RunStatus.REJECTED), 0)
                if waited_s := event.result.numbers.node_wait_s:
                    self._metrics["wattune_study_seconds"].inc(
                        waited_s, tags={"study": self._study, "part": "for nodes"}
                    )
                self._spend(event.result.times_s)
                if status not in (RunStatus.COMPLETED, RunStatus.INTERRUPTED, RunStatus.REJECTED):
                    cause = event.result.tags.get(CAUSE_TAG, status)
                    self._metrics["wattune_study_failures"].inc(tags={"study": self._study, "cause": str(cause)})
        for state, number in self._states.items():
            self._metrics["wattune_study_trials"].set(number, tags={"study": self._study, "state": str(state)})

    def _spend(self, times_s: dict[str, float]) -> None:
        for part in (*TIME_PARTS, "other"):
            if (time_s := times_s.get(part, 0.0)) > 0:
                self._spent_s[part] += time_s
                self._metrics["wattune_study_seconds"].inc(time_s, tags={"study": self._study, "part": part})
        if total_s := sum(self._spent_s.values()):
            ratio = self._spent_s[_MEASURED] / total_s
            self._metrics["wattune_study_measured_ratio"].set(ratio, tags={"study": self._study})
