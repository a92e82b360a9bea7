"""The posterior of a study: all that its results say to a question, each part computed once.

Ranking, race, live view, early stops, the frontier and suggestions ask it, so that they give one answer.
"""

from functools import cached_property

from wattune.objective import Question
from wattune.ranking.assessment import RankedTrial, assess_trial, finite
from wattune.ranking.best import Standings, standings
from wattune.ranking.spreads import Results, Spreads
from wattune.run import Run
from wattune.scale_down.reading import as_large
from wattune.trial import TrialSpec


class Posterior:
    """All that the results of one study say to a question."""

    def __init__(self, results: Results, question: Question) -> None:
        """Groups every repeat of a study's trials by trial; small trials are read as the large ones they stand for."""
        self.question = question
        kept = as_large((spec, finite(result)) for spec, result in results)
        self.results: Results = kept
        """The results, without figures that are not finite."""
        self.spreads = Spreads(kept)
        """Scatter of every metric, the same for every question."""
        specs: dict[str, TrialSpec] = {}
        repeats: dict[str, list[Run]] = {}
        for spec, result in kept:
            specs[result.trial_id] = spec
            repeats.setdefault(result.trial_id, []).append(result)
        self._trials = [
            (specs[trial_id], tuple(sorted(own, key=lambda result: result.repeat))) for trial_id, own in repeats.items()
        ]

    def asking(self, question: Question) -> "Posterior":
        """Returns what the same results say to another question: scatter and grouping are not computed again."""
        other = object.__new__(Posterior)
        other.question, other.results, other.spreads = question, self.results, self.spreads
        other._trials = self._trials
        return other

    @cached_property
    def rows(self) -> tuple[RankedTrial, ...]:
        """Every trial, assessed: its figures, its distance to each bound, a verdict. None is ranked yet."""
        return tuple(assess_trial("", spec, own, self.spreads, self.question) for spec, own in self._trials)

    @cached_property
    def standings(self) -> Standings:
        """The trials that may be the best, with P(best) of each, and the one whose next run tells most."""
        return standings(self.rows, self.question)
