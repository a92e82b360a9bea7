"""The race of a study's finalists: how many repeats it may take, which one is next, and when it ends. No Ray here.

The study folder is the record: a race that is continued starts from the results that are there.
"""

import math
from collections import Counter
from collections.abc import Container

from wattune.fidelity import FIRST_REFERENCE_REPEAT, is_of_race, is_soak, role_of
from wattune.objective import Question
from wattune.orchestrate.events import RaceStep
from wattune.ranking.best import NEAR_FRAC, Standings
from wattune.ranking.posterior import Posterior
from wattune.run import Run, RunStatus
from wattune.search.search_entry import Finalists
from wattune.trial import Measure, TrialSpec


class Race:
    """Chooses the repeats of finalists, from the results it was told."""

    def __init__(self, settings: Finalists, question: Question, measure: Measure) -> None:
        """Starts without any result. The settings of measuring number the repeats of the search."""
        self._settings = settings
        self._first_repeat = measure.repeats
        self._specs: dict[str, TrialSpec] = {}
        self._ended: set[tuple[str, int]] = set()
        self._posterior = Posterior((), question)
        """Of all results but long runs; they follow the race, and must not open it again."""
        self._running: set[tuple[str, int]] = set()
        self._num_repeats = 0
        self._num_completed = 0
        self._found: Standings | None = None
        self._step: RaceStep | None = None
        self._told: RaceStep | None = None

    def note(self, spec: TrialSpec, result: Run) -> None:
        """Takes a final result of the study; long runs are no matter of the race."""
        key = (result.trial_id, result.repeat)
        if role_of(result) == "finalist":
            return
        self._running.discard(key)
        if key not in self._ended:
            # One of the race from before the ordinary repeats grew is now one of those.
            own = is_of_race(result) and self._first_repeat <= result.repeat < FIRST_REFERENCE_REPEAT
            self._num_repeats += own
            ordinary = not own and result.repeat < FIRST_REFERENCE_REPEAT
            self._num_completed += ordinary and result.status is RunStatus.COMPLETED
        self._ended.add(key)
        self._specs.setdefault(result.trial_id, spec)
        if not is_soak(result):
            self._posterior.tell(spec, result)
        self._found = None

    def give_up(self, trial_id: str, repeat: int) -> None:
        """Forgets a run that this call does not start again."""
        self._running.discard((trial_id, repeat))

    def num_expected(self, num_to_come: int) -> int:
        """Returns the most repeats that are left to start if so many runs of the search come and complete."""
        return max(0, self._most(num_to_come) - self._num_repeats)

    @property
    def over(self) -> bool:
        """True if no further repeat starts. After a new result, it costs a look at those that may be the best."""
        return bool(self._look().ending)

    @property
    def num_left(self) -> int:
        """The most repeats that are left to start; 0 once it is over."""
        return 0 if self.over else max(0, self._most() - self._num_repeats - len(self._running))

    def news(self) -> RaceStep | None:
        """Returns how the race stands if that was not told yet."""
        step = self._look()
        if step is self._told:
            return None
        self._told = step
        return step

    def next(self, left_out: Container[str]) -> tuple[TrialSpec, int] | None:
        """Returns the trial to repeat now and the repeat's number; None while none may start."""
        found = self._standings()
        if not self.num_left:
            return None
        row = found.next(Counter(trial_id for trial_id, _ in self._running), self._settings.until)
        if row is None:
            return None
        trial_id, repeat = row.trial_id, self._first_repeat
        while (key := (trial_id, repeat)) in self._ended or key in self._running or f"{trial_id}-{repeat}" in left_out:
            repeat += 1
        if repeat >= FIRST_REFERENCE_REPEAT:
            return None
        return self._specs[trial_id], repeat

    def start(self, trial_id: str, repeat: int) -> None:
        """Counts a repeat that is going to run."""
        self._running.add((trial_id, repeat))

    def _standings(self) -> Standings:
        if self._found is None:
            self._found = self._posterior.front
            self._step = None
        return self._found

    def _look(self) -> RaceStep:
        """Returns how the race stands."""
        found = self._standings()
        if self._step is None:
            self._step = RaceStep(
                leader=found.leader.spec if found.leader is not None else None,
                leader_name=found.leader.label if found.leader is not None else "",
                best_probability=found.best_probability,
                before=self._told.best_probability if self._told is not None else None,
                num_repeats=self._num_repeats,
                most_repeats=self._most(),
                ending=self._ending(found),
            )
        return self._step

    def _most(self, num_to_come: int = 0) -> int:
        """Returns the most repeats of the race, with those that ended."""
        return math.floor(self._settings.max_share * (self._num_completed + num_to_come) + 1e-9)

    def _ending(self, found: Standings) -> str:
        """Says why the race is over; empty while it is not."""
        if found.none_probability >= self._settings.until or found.leader is None:
            return "no trial keeps every bound"
        if found.told_apart(self._settings.until):
            apart = found.best_probability >= self._settings.until
            return "the best is told apart" if apart else f"none is {100 * NEAR_FRAC:g} % better"
        if self._num_repeats >= self._most():
            return "its share of repeats is used"
        return ""
