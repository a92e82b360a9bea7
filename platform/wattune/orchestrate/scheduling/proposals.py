"""The trials that a strategy which learns proposes, and those it proposed in earlier calls that are not measured yet.

A strategy that is asked anew may propose others and leave the interrupted ones unmeasured for good. So they run without
being asked for, and take the place they had among `num_trials`. No Ray here.
"""

from collections import deque
from collections.abc import Callable, Container
from dataclasses import replace

from wattune.fidelity import role_of
from wattune.orchestrate.attempt import Attempt
from wattune.run import Prediction, Run, RunStatus
from wattune.search.strategies.prediction import prediction_of
from wattune.search.strategy import Strategy
from wattune.trial import TrialSpec


class Proposals:
    """Proposed trials, one at a time: what earlier calls began first, and last what may have ended one of them."""

    def __init__(self, strategy: Strategy) -> None:
        self._strategy = strategy
        self._begun: dict[str, tuple[TrialSpec, Run]] = {}
        self._run_last: set[str] = set()
        self._first: deque[TrialSpec] = deque()
        self._last: deque[TrialSpec] = deque()
        self._predicted: dict[str, Prediction | None] = {}

    def add(self, spec: TrialSpec, result: Run, *, runs_last: bool) -> None:
        """Takes in a result of an earlier call that counts for nothing, if it is one of the search.

        `runs_last` says that it may keep other trials from running.
        """
        if role_of(result) in ("trial", "race", "burst"):
            self._begun.setdefault(result.trial_id, (spec, result))
            if runs_last:
                self._run_last.add(result.trial_id)

    def keep(self, measured: Container[str], is_listed: Callable[[str], bool]) -> None:
        """Keeps the trials of which the search measured nothing, and tells the strategy not to propose them.

        The other runs of measured ones are queued with their repeats. One that the space has lost is not run again.
        """
        for trial_id, (spec, result) in self._begun.items():
            if trial_id not in measured and is_listed(trial_id):
                (self._last if trial_id in self._run_last else self._first).append(spec)
                self._strategy.tell(spec, replace(result, status=RunStatus.INTERRUPTED, metrics={}))
        self._begun.clear()

    def next(self, room: int, expected_s: Callable[[TrialSpec], float] | None) -> list[TrialSpec]:
        """Returns one trial, or none while there is none, and keeps what the strategy predicts of it.

        There is room for so many more, those of earlier calls included. Expected seconds are None where nothing is
        known.
        """
        found = self._next(room, expected_s)
        self._predicted |= {spec.trial_id: prediction_of(self._strategy, spec) for spec in found}
        return found

    def with_prediction(self, queued: Attempt) -> Attempt:
        """Returns a run with what was predicted of its trial when it was proposed.

        So the full measurement after a burst is told against what was known before the burst.
        """
        return replace(queued, predicted=self._predicted.get(queued.trial_id))

    def _next(self, room: int, expected_s: Callable[[TrialSpec], float] | None) -> list[TrialSpec]:
        if self._first:
            return [self._first.popleft()]
        if room > len(self._last) and (found := self._strategy.ask(1, expected_s)):
            return found
        return [self._last.popleft()] if self._last else []
