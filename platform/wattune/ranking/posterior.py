"""The posterior of a study: all that its results say to a question, each part computed once.

Ranking, race, live view, early stops, the frontier and suggestions ask it, so that they give one answer.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import chain, islice
from typing import Any, Final

import numpy as np

from wattune.arrays import Floats, Indices
from wattune.fidelity import is_of_race, is_soak
from wattune.objective import Question
from wattune.ranking.assessment import RankedTrial, Verdict, assess_trials, completed, finite
from wattune.ranking.best import (
    HOPELESS,
    Drawn,
    Standing,
    Standings,
    headroom_of,
    may_be_best,
    on_one_scale,
    standings,
    waiting_frac,
    work_behind,
)
from wattune.ranking.spreads import Results, Spreads
from wattune.run import Run
from wattune.scale_down.reading import as_large
from wattune.trial import TrialSpec

_SURELY_NOT: Final = 0.02 * HOPELESS
"""Probability to keep a bound below which a trial is not looked at again until its study has grown by `_LOOK_AT`: what
is known of scatter moves little meanwhile, and it would have to move the probability fifty times."""

_LOOK_AT: Final = 1.1

_AT_ONCE: Final = 8
"""Trials that are assessed together where one of them may lead in a draw: the next ones mostly may, too."""


class Posterior:
    """All that the results of one study say to a question."""

    def __init__(self, results: Results, question: Question) -> None:
        """Groups every repeat of a study's trials by trial; small trials are read as the large ones they stand for."""
        self.question = question
        self._begin(as_large((spec, finite(result)) for spec, result in results))

    def _begin(self, kept: list[tuple[TrialSpec, Run]]) -> None:
        self.results: list[tuple[TrialSpec, Run]] = kept
        """The results, without figures that are not finite."""
        self.spreads = Spreads(kept)
        """Scatter of every metric, the same for every question."""
        found: dict[str, tuple[TrialSpec, list[Run]]] = {}
        for spec, result in kept:
            found.setdefault(result.trial_id, (spec, []))[1].append(result)
        self._trials = {
            trial_id: (spec, tuple(sorted(own, key=lambda result: result.repeat)))
            for trial_id, (spec, own) in found.items()
        }
        self._forget(self._trials)

    def _forget(self, trials: Iterable[str]) -> None:
        """Forgets what followed from results so far; of a trial's own figures, only those of some."""
        for name in ("rows", "standings", "front", "_figures"):
            self.__dict__.pop(name, None)
        self._seen: dict[str, RankedTrial] = {}
        self._known: dict[Any, dict[str, Any]] = {}
        """Margins and figures of trials, by bound and metric, for questions that share them."""
        self._changed = dict.fromkeys(trials)
        if len(self._changed) == len(self._trials):
            self._placed: dict[str, tuple[int, float, int]] = {}
            self._works: dict[str, int] = {}
            self._hopeless: set[str] = set()
            self._num_looked = 0

    def tell(self, spec: TrialSpec, result: Run) -> None:
        """Takes in one more result. What came before it is not computed again, a model of scatter apart."""
        (read,) = as_large([(spec, finite(result))])
        _, own = self._trials.get(result.trial_id, (spec, ()))
        if any(one.repeat == result.repeat for one in own):  # measured anew: the earlier one does not count
            key = result.trial_id, result.repeat
            self._begin([*(pair for pair in self.results if (pair[1].trial_id, pair[1].repeat) != key), read])
            return
        self.results.append(read)
        self.spreads.add(read[1])
        self._trials[result.trial_id] = read[0], tuple(sorted((*own, read[1]), key=lambda one: one.repeat))
        self._hopeless.discard(result.trial_id)
        changed = self._changed
        self._forget(())
        self._changed = changed | {result.trial_id: None}

    def asking(self, question: Question, *, tighter: bool = False) -> "Posterior":
        """Returns what the same results say to another question: a `tighter` one differs in one bound alone."""
        other = object.__new__(Posterior)
        other.question, other.results, other.spreads = question, self.results, self.spreads
        other._trials = self._trials
        other._forget(self._trials)
        other._known = self._known
        if question.objective == self.question.objective:
            other.__dict__["_figures"] = self._figures
        if tighter:
            other._hopeless, other._num_looked = set(self._hopeless), self._num_looked
        return other

    @cached_property
    def rows(self) -> tuple[RankedTrial, ...]:
        """Every trial, assessed: its figures, its distance to each bound, a verdict. None is ranked yet."""
        found = assess_trials("", [*self._trials.values()], self.spreads, self.question, known=self._known)
        self._seen = dict(zip(self._trials, found, strict=True))
        return tuple(found)

    @property
    def unjudged(self) -> list[RankedTrial]:
        """Every trial with its figures alone: no bound is looked at."""
        every = [*self._trials.values()]
        return assess_trials("", every, self.spreads, self.question, judged=False, known=self._known)

    @cached_property
    def standings(self) -> Standings:
        """The trials that may be the best, with P(best) of each, and the one whose next run tells most."""
        return standings(self.rows, self.question)

    @cached_property
    def front(self) -> Standings:
        """The same of trials that may lead in a draw: others are not assessed, unless they are ahead of what keeps."""
        if (found := self._figures) is None:
            return standings((), self.question)
        if any(result.reading_errors for _, result in self.results[:1]):
            return self.standings  # errors of reading small trials as large ones are not among the figures
        names, one, headroom, works = found
        hopeful = np.array([name not in self._hopeless for name in names], np.bool_)
        order = np.argsort(-(one.mean + headroom), kind="stable")
        order = order[hopeful[order]]
        seen: dict[int, RankedTrial] = {}

        at_once = _AT_ONCE

        def row_of(place: int) -> RankedTrial | None:
            """Assesses a trial and the next ones with it, more of them where none of the last may keep its bounds."""
            nonlocal at_once
            if place not in seen and names[place] not in self._hopeless:
                at = int(np.flatnonzero(order == place)[0])
                found = dict(self._hopeful(names, order[at : at + at_once], at_once))
                at_once = _AT_ONCE if found else 2 * at_once
                seen.update(found)
            row = seen.get(place)
            return row if row is not None and may_be_best(row) else None

        drawn = Drawn(one, headroom, works, lambda place: ("", names[place]))
        return replace(drawn.standings(self.question.risk, order, row_of), behind=drawn.behind(seen))

    def best_first(self) -> Iterator[RankedTrial]:
        """Assesses trials one after another, the best figure first, without those that surely break a bound."""
        if (found := self._figures) is not None:
            names, one, *_ = found
            for _, row in self._hopeful(names, np.argsort(-one.mean, kind="stable")):
                yield row

    def _hopeful(self, names: Sequence[str], order: Indices, num_first: int = 4) -> Iterator[tuple[int, RankedTrial]]:
        """Assesses trials in order, some at a time, without those that surely break a bound or have no verdict."""
        if len(self.results) > _LOOK_AT * self._num_looked:
            self._hopeless.clear()
            self._num_looked = len(self.results)
        left = (place for place in order.tolist() if names[place] not in self._hopeless)
        while places := [*islice(left, num_first)]:
            num_first *= 2
            new = [names[place] for place in places if names[place] not in self._seen]
            some = [self._trials[name] for name in new]
            rows = assess_trials("", some, self.spreads, self.question, known=self._known)
            self._seen |= dict(zip(new, rows, strict=True))
            for place in places:
                row = self._seen[names[place]]
                judged = row.verdict in (Verdict.FEASIBLE, Verdict.UNDECIDED, Verdict.INFEASIBLE)
                if judged and all((one.holds_probability or 0.0) >= _SURELY_NOT for one in row.margins):
                    yield place, row
                else:
                    self._hopeless.add(names[place])

    @cached_property
    def _figures(self) -> tuple[list[str], Standing, Floats, Indices] | None:
        """Returns the trials that have a figure of the objective, all on one scale, their headroom and their works."""
        metric = self.question.objective.metric
        fitted = self.spreads.fitted(metric)
        if fitted is None:
            return None
        for trial_id in self._changed:
            counted = completed(self._trials[trial_id][1])
            if (placed := self.spreads.placed(counted, metric)) is not None:
                work = self._works.setdefault(work_behind(self._trials[trial_id][0], metric), len(self._works))
                self._placed[trial_id] = placed[1], waiting_frac(counted, metric), work
            else:
                self._placed.pop(trial_id, None)
        self._changed = {}
        if not self._placed:
            return None
        numbers, waits, works = np.fromiter(chain.from_iterable(self._placed.values()), np.float64).reshape(-1, 3).T
        places = numbers.astype(np.intp)
        values = self.spreads.figures(metric)[places]
        maximize = self.question.objective.maximize
        one = on_one_scale([(fitted.scatter, places, values)], maximize=maximize)
        headroom = headroom_of(waits, values, maximize=maximize, logarithmic=one.logarithmic)
        return [*self._placed], one, headroom, works.astype(np.intp)


MOST_MOMENTS: Final = 24
"""Most repeats of a race for which its history is computed."""


def race_standings(results: Results, question: Question) -> Standings:
    """Computes who may be the best, without long runs: they follow the race, and must not open it again."""
    return Posterior([(spec, result) for spec, result in results if not is_soak(result)], question).front


def history(results: Results, question: Question) -> list[tuple[int, Standings]]:
    """Computes how P(best) moved over the repeats of a race, from the results alone, in the order in which they ended.

    The first moment is before the first repeat of the race. Of more than `MOST_MOMENTS` repeats some are left out, so
    that a long race costs no more than a short one. Returns the repeats of the race so far and the standings then; none
    without a repeat of a race.
    """
    ended = sorted(results, key=lambda pair: (pair[1].end_wall_ns, pair[1].trial_id, pair[1].repeat))
    ends = [index + 1 for index, (_, result) in enumerate(ended) if is_of_race(result)]
    if not ends:
        return []
    num_runs = [ends[0] - 1, *ends]
    numbers = sorted({round(at) for at in np.linspace(0, len(ends), min(len(ends), MOST_MOMENTS) + 1)})
    return [(number, race_standings(ended[: num_runs[number]], question)) for number in numbers]
