"""The fidelity ladder: which trial is only a burst, and which is promoted to a full measurement. No Ray here.

Every trial that the strategy proposes begins as a burst: a few steps on warm workers. The best share of the bursts is
promoted. While a search goes on, a trial is promoted as soon as it is among that share of the bursts so far; the rule
is that of asynchronous successive halving (Li et al. 2020, "A System for Massively Parallel Hyperparameter Tuning",
MLSys) with two rungs. After the search the share is that of all bursts, and one trial at least.

The study folder is the record: a study that is continued starts from the bursts that are there.
"""

import math
from collections.abc import Container, Iterable
from dataclasses import replace
from typing import Final

from wattune.fidelity import FIRST_REFERENCE_REPEAT, is_burst
from wattune.objective import Question
from wattune.orchestrate.scheduling.durations import Pace
from wattune.orchestrate.scheduling.graphs import Start
from wattune.ranking.assessment import finite
from wattune.run import Run, RunStatus
from wattune.search.search_entry import LadderSettings
from wattune.trial import Measure, TrialSpec

MOST_VIOLATED_FRAC: Final = 0.005
"""A burst that breaks a bound by more than this share of it is not promoted while another keeps its bounds. Peaks and
temperatures over a short window are lower than over a long one (power by 0.7 %, scatter 0.6 %:
`benchmarks/results/search_ladder.md`), so what a burst breaks, a full measurement rarely keeps."""


class Ladder:
    """Chooses what is promoted, from the bursts it was told."""

    def __init__(self, settings: LadderSettings, question: Question) -> None:
        self.settings = settings
        self._question = question
        self.pace = Pace()
        """Times of bursts."""
        self._bursts: dict[str, tuple[TrialSpec, Run]] = {}
        self._promoted: dict[str, TrialSpec] = {}

    def burst(self, measure: Measure) -> Measure:
        """Returns the settings of a burst: those of the study, few steps, no profile."""
        least = self.settings.burst
        return replace(measure, min_steps=least.min_steps, min_seconds=least.min_seconds, profile_steps=0)

    def note(self, spec: TrialSpec, result: Run, start: Start | None = None) -> None:
        """Takes a final result and how its trial started; of others than bursts it learns that they were promoted."""
        if not is_burst(result):
            if result.repeat < FIRST_REFERENCE_REPEAT:
                self._promoted[result.trial_id] = spec
            return
        self._bursts[result.trial_id] = spec, finite(result)
        if result.status is RunStatus.COMPLETED:
            took_s = result.took_s + (result.numbers.cooldown_s or 0.0)
            self.pace.add(spec, took_s, start, result.numbers.start_time_s or 0.0)

    def next(self, left_out: Container[str], *, searching: bool) -> TrialSpec | None:
        """Promotes the best trial that is not left out, or None. `searching` says that more bursts are to come."""
        for trial_id in self._worthy(searching=searching):
            if trial_id not in self._promoted and f"{trial_id}-0" not in left_out:
                spec = self._bursts[trial_id][0]
                self._promoted[trial_id] = spec
                return spec
        return None

    def num_full_left(self, num_bursts: int, repeats: int) -> int:
        """The full measurements, with repeats, that are expected to be queued yet."""
        return self.num_to_promote(num_bursts) * repeats + self.num_promoted * (repeats - 1)

    @property
    def num_promoted(self) -> int:
        """Trials that were promoted so far."""
        return len(self._promoted)

    def promoted(self, specs: Iterable[TrialSpec]) -> list[TrialSpec]:
        """Returns those of some trials that were promoted, in their order."""
        return [spec for spec in specs if spec.trial_id in self._promoted]

    def num_to_promote(self, num_bursts: int) -> int:
        """Returns the promotions that are expected to come, if a search runs so many bursts in all."""
        return max(0, max(1, math.ceil(self.settings.promote * num_bursts)) - len(self._promoted)) if num_bursts else 0

    def _worthy(self, *, searching: bool) -> list[str]:
        """Lists trials that are worth a full measurement, the best first."""
        completed = [key for key, (_, result) in self._bursts.items() if result.status is RunStatus.COMPLETED]
        # The measurement of an invalid burst failed, not its trial: it says nothing, so the trial is measured in full.
        unknown = [key for key, (_, result) in self._bursts.items() if result.status is RunStatus.INVALID]
        ordered = sorted(completed, key=lambda key: (*self._place(self._bursts[key][1]), key))
        share = self.settings.promote * len(ordered)
        num = math.floor(share + 1e-9) if searching else max(1, math.ceil(share - 1e-9))
        keeping = [key for key in ordered if not self._place(self._bursts[key][1])[0]]
        return unknown + (keeping[:num] if keeping or searching else ordered[:1])

    def _place(self, result: Run) -> tuple[float, float]:
        """Returns the place of a burst among others: by the worst broken bound, then by the objective.

        A bound that was not measured breaks nothing: a peak over a second has no figure in a shorter window.
        """
        metrics, objective = result.metrics, self._question.objective
        excess = [bound.excess_frac(metrics) for bound in self._question.constraints]
        worst = max((one for one in excess if one is not None and one > MOST_VIOLATED_FRAC), default=0.0)
        value = metrics.get(objective.metric)
        # Without its objective a burst comes last: nothing says that the trial is good.
        return worst, math.inf if value is None else -value if objective.maximize else value
