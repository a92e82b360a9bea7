"""The bar of early stops: the step time above which a trial cannot be better than the best so far. No Ray here."""

import math
from typing import Final

from wattune.objective import Question
from wattune.ranking.assessment import Verdict
from wattune.ranking.posterior import Posterior
from wattune.ranking.work import work_of
from wattune.run import Run
from wattune.trial import TrialSpec

_RUN_SCATTERS: Final = 2.0
"""Standard deviations of run-to-run scatter that a run may have been unlucky by: 97.7 % of runs are within."""


class EarlyStop:
    """Keeps the best feasible trial of each size of work, and says from which step time on another one loses to it.

    A run loses where even the better end of its own interval (`wattune.workers.early_stop`) is behind the worse end of
    the best trial's interval, by twice the run-to-run scatter. In a study with trials that wait for their host that is
    theirs: a run says only at its end whether it waits. The best trial is one that keeps every bound at the
    ranking's risk. Trials of another model or sequence length are no match for it: the ranking compares within one.
    """

    def __init__(self, question: Question) -> None:
        self._question = question
        self._posterior = Posterior((), question)
        self._works: set[str] = set()
        self._worst: dict[str, float] = {}
        """By size of work, the objective that a run must be worse than to lose."""
        self._known = True

    def note(self, spec: TrialSpec, result: Run) -> None:
        """Takes a final result of the study."""
        self._posterior.tell(spec, result)
        self._works.add(work_of(spec, self._question.objective.metric))
        self._known = False

    def stop_above_s(self, spec: TrialSpec) -> float | None:
        """Returns the mean step time above which a trial loses; None while none of its work keeps every bound."""
        metric = self._question.objective.metric
        worst = self._worst_of_best().get(work_of(spec, metric), 0.0)
        if worst <= 0:
            return None
        if metric == "step_time_s":
            return worst
        num_tokens = spec.tokens_per_step
        if num_tokens is None:  # the program tells them while it runs
            return None
        return num_tokens / (worst * (spec.cluster.world_size if metric == "tokens_per_s_per_device" else 1))

    def _worst_of_best(self) -> dict[str, float]:
        """Returns the objective that a run must be worse than to lose, by size of work."""
        if not self._known:
            objective, self._known, self._worst = self._question.objective, True, {}
            for row in self._posterior.best_first():
                work = work_of(row.spec, objective.metric)
                if row.verdict is not Verdict.FEASIBLE or row.objective is None or work in self._worst:
                    continue
                fitted = self._posterior.spreads.fitted(objective.metric)
                assert fitted is not None, "a feasible trial has its objective"
                scatter = math.exp(
                    _RUN_SCATTERS * max(fitted.scatter.spread_frac, fitted.host_bound_spread_frac or 0.0)
                )
                self._worst[work] = row.objective.low / scatter if objective.maximize else row.objective.high * scatter
                if len(self._worst) == len(self._works):
                    break
        return self._worst
