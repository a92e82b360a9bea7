"""Optuna's samplers as strategies: the tree-structured Parzen estimator and its Gaussian process, with constraints.

A sampler proposes values axis by axis; the nearest candidate that is left is run and told. Optuna evaluates no
constraints of failed trials. So a failure is told as a completed trial that is as bad as the worst and violates all.
"""

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from wattune.fidelity import is_burst
from wattune.run import Run, RunStatus
from wattune.search.strategies.protocol import FAILED, TEACHES_NOTHING, Problem
from wattune.search.strategies.snapping import Axes
from wattune.trial import TrialSpec

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution
    from optuna.samplers import BaseSampler
    from optuna.trial import Trial

_RUNS: Final = "runs"
"""Name of the constraint that every failure violates, so that it holds in a study without any other."""


class OptunaStrategy:
    """A sampler of Optuna's over the kept candidates."""

    learns = True

    def __init__(self, problem: Problem, make_sampler: Callable[[int], "BaseSampler"]) -> None:
        """Takes the problem, and what makes the sampler of a seed. Estimates and earlier studies are not used."""
        import optuna  # only this strategy waits for it

        assert problem.question is not None, "a strategy that learns has a question"
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self.stopped_because: str | None = None
        self._question, self._optuna = problem.question, optuna
        self._axes = Axes(problem.specs, seed=problem.seed)
        distributions = optuna.distributions
        self._space: dict[str, BaseDistribution] = {
            name: distributions.IntDistribution(0, len(values) - 1)
            if self._axes.is_number(name)
            else distributions.CategoricalDistribution(values)
            for name, values in self._axes.values.items()
        }
        direction = "maximize" if self._question.objective.maximize else "minimize"
        self._study = optuna.create_study(direction=direction, sampler=make_sampler(problem.seed))
        self._asked: dict[int, Trial] = {}
        self._worst: float | None = None
        self._told: set[int] = set()
        self._failed_first: list[int] = []
        """Rows that failed before any value was measured: nothing is as bad as the worst yet."""

    def ask(self, n: int, expected_s: object = None) -> list[TrialSpec]:
        """Returns up to `n` candidates, each the nearest that is left to what the sampler proposes."""
        del expected_s
        asked = []
        for _ in range(min(n, self._axes.num_free)):
            trial = self._study.ask(self._space)
            row = self._axes.take_nearest(trial.params)
            self._asked[row] = trial
            asked.append(self._axes.specs[row])
        return asked

    def tell(self, spec: TrialSpec, result: Run) -> None:
        """Adds a result under the candidate's own values; the proposal that led to it is closed.

        A completed run whose bounds are not all known is left out: a sampler knows kept and broken alone.
        """
        row = self._axes.take(spec)
        if row is None:
            return
        states = self._optuna.trial.TrialState
        if (trial := self._asked.pop(row, None)) is not None:
            self._study.tell(trial, state=states.FAIL)  # such trials teach a sampler nothing
        if result.status in TEACHES_NOTHING or row in self._told:
            return
        excess = {str(bound): bound.excess_frac(result.metrics) for bound in self._question.constraints}
        value = None if None in excess.values() else self._value(result)
        if value is None and result.status not in FAILED:
            return
        if not is_burst(result):  # a full measurement after it is told too, as another trial of the same values
            self._told.add(row)
        if value is None:
            self._failed_first.append(row)
        else:
            self._add(
                row, value, {_RUNS: 0.0, **{name: _violation(one) for name, one in excess.items() if one is not None}}
            )
        if self._worst is not None:
            for failed in self._failed_first:
                self._add(failed, self._worst, {_RUNS: 1.0, **dict.fromkeys(excess, 1.0)})
            self._failed_first.clear()

    def _add(self, row: int, value: float, constraints: dict[str, float]) -> None:
        self._study.add_trial(
            self._optuna.trial.create_trial(
                params=self._axes.params[row],
                distributions=self._space,
                value=value,
                constraints=constraints,
            )
        )

    def _value(self, result: Run) -> float | None:
        """Returns the objective that a result measured, and keeps the worst one; None where it measured none."""
        objective = self._question.objective
        value = result.metrics.get(objective.metric) if result.status is RunStatus.COMPLETED else None
        if value is None or not math.isfinite(value):
            return None
        worse = min if objective.maximize else max
        self._worst = value if self._worst is None else worse(self._worst, value)
        return value


def _violation(excess: float) -> float:
    """Returns the relative excess e over a bound as e / (1 + e), and e itself where the bound holds: it is negative.

    So every measured excess is below 1, which a failure counts. Optuna adds up the violations of a trial. By e itself
    a failure would be preferred to every plan that runs, where a bound is far from all of them.
    """
    return excess / (1.0 + excess) if excess > 0 else excess


def tpe(problem: Problem) -> OptunaStrategy:
    """Makes Optuna's tree-structured Parzen estimator."""
    from optuna.samplers import TPESampler

    return OptunaStrategy(problem, lambda seed: TPESampler(seed=seed))


def gp(problem: Problem) -> OptunaStrategy:
    """Makes Optuna's Gaussian process with expected improvement."""
    from optuna.samplers import GPSampler

    return OptunaStrategy(problem, lambda seed: GPSampler(seed=seed))
