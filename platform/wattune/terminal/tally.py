"""State of a study from its events: what runs, what ended, the best so far, and the time left."""

import math
import statistics
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from wattune.objective import Question
from wattune.orchestrate.events import Event, Placement, Preview, RaceStep, RowStopped, TrialEvent
from wattune.ranking.order import Ranking, rank
from wattune.run import Run, RunStatus
from wattune.trial import TrialSpec

_CHEAP_S: Final = 0.1
"""Seconds of a ranking below which a view never waits for it."""

_WAITS: Final = 20.0
"""Times its own cost that a ranking is drawn before it is made anew: 5 % of the time at most."""


@dataclass
class Tally:
    """State of a study from its events; each event costs the same, however many came before.

    The answer is that of the ranking of all results: one rule, as `wattune rank` says it afterwards.
    """

    question: Question
    total: int = 0
    """Trials with all repeats, including those done before, without those left to a later call."""
    done: int = 0
    skipped: int = 0
    failed: Counter[RunStatus] = field(default_factory=Counter)
    running: dict[tuple[str, int], tuple[TrialEvent, float]] = field(default_factory=dict)
    """Starts of the trials that run now, and the seconds at which they came."""
    lanes: int = 1
    """Trials that run side by side."""
    took_s: list[float] = field(default_factory=list)
    """Seconds of each trial that ended in this call."""
    work_s: float = 0.0
    """Expected seconds of all trials of this call, one after another; 0 where nothing tells trials apart."""
    num_planned: int = 0
    """The trials of this call that `work_s` is of."""
    expected_ended_s: float = 0.0
    """Expected seconds, before they ran, of the trials that ended in this call."""
    expected_s: float | None = None
    """Expected seconds to the end before the first trial, if finished trials give an estimate."""
    waits_for: str = ""
    """Nodes that trials wait for: they do not live, or other jobs use them."""
    waits_since_s: float = 0.0
    end_s: float = math.inf
    """Time at which this call's budget of hours is used, on the clock of `add`."""
    stopped: list[str] = field(default_factory=list)
    """Descriptions of trials that are not started, because those before them failed alike."""
    race: RaceStep | None = None
    """The latest step of the race of finalists."""
    may_race: bool = False
    """True while `total` has repeats of a race that may never run."""
    _measured: bool = False
    _results: dict[tuple[str, int], tuple[TrialSpec, Run]] = field(default_factory=dict)
    _ranking: Ranking | None = None
    _is_ranked: bool = True
    _ranked_s: float = 0.0
    _cost_s: float = 0.0
    """Seconds of the last ranking."""

    def add(self, event: Event, now_s: float) -> None:
        """Adds an event."""
        if isinstance(event, Preview):
            self.total = event.num_now + event.num_done
            self.end_s = now_s + event.most_s
            self._measured = event.measured or event.estimated
            self.num_planned, self.may_race = event.num_now, event.num_race > 0
            self.work_s = sum(event.load_now_s.values()) if event.estimated else 0.0
        elif isinstance(event, Placement) and event.waits_for:
            self.waits_for, self.waits_since_s = event.waits_for, now_s
        elif isinstance(event, Placement):
            self.waits_for = ""
            self.lanes = max(1, event.num_at_once)
            self.expected_s = event.wall_s if self._measured else None
        elif isinstance(event, RowStopped):
            self.stopped.append(str(event))
        elif isinstance(event, RaceStep):
            self.race, self.may_race = event, not event.ending
        elif event.kind == "started":
            self.running[key_of(event)] = event, now_s
        else:
            self._ended(event, now_s)
        if isinstance(event, TrialEvent) and event.num_left is not None:
            # Repeats of a failed trial are never run, nor its references, so fewer trials run than were announced.
            self.total = self.done + len(self.running) + event.num_left

    def _ended(self, event: TrialEvent, now_s: float) -> None:
        assert event.result is not None, "only a trial that started has none"
        begun = self.running.pop(key_of(event), None)
        if begun is not None:
            start, begun_s = begun
            self.took_s.append(now_s - begun_s)
            self.expected_ended_s += start.expected_s
        if not event.result.status.is_final:
            if event.result.status is RunStatus.INFRA_FAILED and not event.again:
                self.failed[event.result.status] += 1
            return
        self.done += 1
        self.skipped += event.kind == "skipped"
        if event.result.status is not RunStatus.COMPLETED:
            self.failed[event.result.status] += 1
        self._results[event.result.trial_id, event.result.repeat] = event.spec, event.result
        self._is_ranked = False

    @property
    def total_text(self) -> str:
        """Number of trials in words."""
        return f"{'up to ' if self.may_race else ''}{self.total}"

    def ranking(self, *, patient: bool = False) -> Ranking | None:
        """Returns the ranking of all results, made anew where results came since the last time; None without any.

        A `patient` caller takes an earlier one where a ranking costs much and it is no older than `_WAITS` times that:
        a view that is drawn twice a second then takes a small share of the time, however many trials there are.
        """
        now_s = time.perf_counter()
        waits = patient and self._cost_s > _CHEAP_S and now_s - self._ranked_s < _WAITS * self._cost_s
        if not self._is_ranked and not waits:
            self._ranking = rank([*self._results.values()], self.question)
            self._is_ranked, self._ranked_s = True, time.perf_counter()
            self._cost_s = self._ranked_s - now_s
        return self._ranking

    def left_s(self, now_s: float) -> float | None:
        """Returns expected seconds to the end, None if unknown.

        Until a trial has ended they are those that were announced. Afterwards estimates tell trials apart, corrected by
        the trials that ended. Without estimates every trial takes as long as the median one. The budget ends the call
        at the latest.
        """
        if not self.took_s:
            left_s = self.expected_s
        elif self.work_s and self.expected_ended_s:
            left_s = self._left_by_estimates_s(now_s)
        else:
            left_s = self._left_by_median_s(now_s)
        if left_s is None:
            return None
        if self.done >= self.total:
            return 0.0
        return min(left_s, max(0.0, self.end_s - now_s))

    def _left_by_estimates_s(self, now_s: float) -> float:
        num_of_call = len(self.took_s) + self.total - self.done
        # Of a failed trial no repeat runs, so fewer trials may run than were announced.
        planned_s = self.work_s * min(1.0, num_of_call / max(1, self.num_planned))
        slower = sum(self.took_s) / self.expected_ended_s
        to_end_s = (planned_s - self.expected_ended_s) * slower
        return self._on_lanes_s(to_end_s, now_s, lambda start: start.expected_s * slower)

    def _left_by_median_s(self, now_s: float) -> float:
        typical_s = statistics.median(self.took_s)
        return self._on_lanes_s((self.total - self.done) * typical_s, now_s, lambda _: typical_s)

    def _on_lanes_s(self, to_end_s: float, now_s: float, expected_s: Callable[[TrialEvent], float]) -> float:
        """Returns the time that trials take side by side, less what those that run have behind them.

        `to_end_s` is of all trials that have not ended, one after another. A running trial never counts for more than
        its expected seconds, however long it has run.
        """
        begun_s = sum(min(expected_s(start), now_s - since_s) for start, since_s in self.running.values())
        return max(0.0, to_end_s - begun_s) / self.lanes


def key_of(event: TrialEvent) -> tuple[str, int]:
    """Returns a trial's id and repeat, by which running trials are found."""
    return event.spec.trial_id, event.repeat
