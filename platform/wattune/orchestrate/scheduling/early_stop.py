"""The bar of early stops: the step time above which a trial cannot be better than the best so far. No Ray here."""

import math
from dataclasses import dataclass
from typing import Final

from wattune.objective import Constraint, Objective
from wattune.ranking.order import rank
from wattune.trial import TrialResult, TrialSpec

_RUN_SCATTERS: Final = 2.0
"""Standard deviations of run-to-run scatter that a run may have been unlucky by: 97.7 % of runs are within."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlyStopRule:
    """The question that a study asks, where losers stop early."""

    objective: Objective
    constraints: tuple[Constraint, ...]


class EarlyStop:
    """Keeps the best feasible trial, and says from which step time on another one loses to it.

    A run loses where even the better end of its own interval (`wattune.workers.early_stop`) is behind the worse end of
    the best trial's interval, by twice the run-to-run scatter. The best trial is one that keeps every bound at the
    ranking's risk.
    """

    def __init__(self, rule: EarlyStopRule) -> None:
        """Starts without any result."""
        self._rule = rule
        self._results: dict[tuple[str, int], tuple[TrialSpec, TrialResult]] = {}
        self._worst: float | None = None
        self._known = True

    def note(self, spec: TrialSpec, result: TrialResult) -> None:
        """Takes a final result of the study."""
        self._results[result.trial_id, result.repeat] = spec, result
        self._known = False

    def stop_above_s(self, spec: TrialSpec) -> float | None:
        """Returns the mean step time above which a trial loses; None while no trial keeps every bound."""
        worst, metric = self._worst_of_best(), self._rule.objective.metric
        if worst is None or worst <= 0:
            return None
        if metric == "step_time_s":
            return worst
        num_tokens = spec.tokens_per_step
        if num_tokens is None:  # the program tells them while it runs
            return None
        return num_tokens / (worst * (spec.cluster.world_size if metric == "tokens_per_s_per_device" else 1))

    def _worst_of_best(self) -> float | None:
        """Returns the objective that a run must be worse than to lose."""
        if not self._known:
            rule, self._known = self._rule, True
            ranking = rank([*self._results.values()], rule.objective, rule.constraints)
            best = ranking.best
            if best is None or best.objective is None:
                self._worst = None
            else:
                scatter = math.exp(_RUN_SCATTERS * ranking.shared[""]["spread_frac"])
                maximize = rule.objective.maximize
                self._worst = best.objective.low / scatter if maximize else best.objective.high * scatter
        return self._worst
