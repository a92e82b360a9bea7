"""Predicted measurements of candidates, in the metrics' own units: values, intervals, and probabilities of bounds."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np

from wattune.objective import Constraint
from wattune.run import Prediction
from wattune.search.strategies.gaussian_process import Vector
from wattune.search.strategies.surrogate import Belief, Quantity, log_expected_improvement, log_probability
from wattune.trial import TrialSpec


def log_joint(logs: Sequence[Vector]) -> Vector:
    """Computes the log of the probability that several bounds hold.

    Bounds on power, temperature and throttling hold or break together. The truth is between independent bounds, whose
    probabilities multiply, and bounds of one cause, of which the tightest decides.
    """
    return np.asarray(0.5 * np.sum(logs, axis=0) + 0.5 * np.min(logs, axis=0))


@runtime_checkable
class Predicts(Protocol):
    """A strategy that can say what it expects of a candidate."""

    def prediction(self, spec: TrialSpec) -> Prediction | None:
        """Predicts the next measurement of a candidate; None while too little is known."""
        ...


def prediction_of(strategy: object, spec: TrialSpec) -> Prediction | None:
    """Returns a strategy's prediction of a trial that it has just proposed; None where it makes none."""
    return strategy.prediction(spec) if isinstance(strategy, Predicts) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Predictions:
    """Everything that a model predicts of candidates, one row each."""

    objective: Belief
    sign: float
    """1 where more of the objective is better, else -1."""
    best: float | None
    """The objective of the best trial measured to hold every bound, in the units of `objective.mean` times `sign`."""
    bounded: Mapping[Quantity, Belief]
    """Quantities that bounds are on, where anything is known of them."""
    log_runs: Sequence[Vector]
    """Logs of the probabilities that the trial completes, of which one is about memory and one about failures."""

    def log_feasible(self, constraints: Sequence[Constraint]) -> Vector:
        """Computes the log of the probability that each candidate completes and holds all of some bounds.

        A bound on something that nothing is known of counts as held, as it does in the strategy.
        """
        logs = [np.zeros(len(self.objective.mean)), *self.log_runs]
        logs += [held for one in constraints if (held := self.log_holds(one)) is not None]
        return log_joint(logs)

    def log_holds(self, constraint: Constraint) -> Vector | None:
        """Computes the log of the probability that each candidate holds one bound; None where nothing is known."""
        found = self.bounded.get(Quantity(metric=constraint.metric, limit_metric=constraint.limit_metric))
        return None if found is None else found.log_within(constraint.operator, constraint.factor)

    def gain(self, constraints: Sequence[Constraint]) -> Vector | None:
        """Computes by how much each candidate is expected to improve on the best feasible trial, as a fraction.

        It is the expected improvement times the probability of feasibility. None while no trial is feasible.
        """
        if self.best is None:
            return None
        log_gain = log_expected_improvement(self.sign * self.objective.mean, self.objective.std, self.best)
        unit = 1.0 if self.objective.is_log else max(abs(self.best), 1e-12)
        return np.exp(log_gain + self.log_feasible(constraints)) / unit

    def log_beats(self, value: float) -> Vector:
        """Computes the log of the probability that each candidate is truly better than a value of the objective."""
        if self.objective.is_log and value <= 0:
            return np.full(len(self.objective.mean), 0.0 if self.sign > 0 else -math.inf)
        level = math.log(value) if self.objective.is_log else value
        return log_probability(self.sign * (self.objective.mean - level) / self.objective.std)

    def one(self, row: int, metric: str, constraints: Sequence[Constraint]) -> Prediction:
        """Returns the prediction of one candidate."""
        return Prediction(
            metric=metric,
            value=float(self.objective.value[row]),
            low=float(self.objective.low[row]),
            high=float(self.objective.high[row]),
            feasible_probability=float(np.exp(self.log_feasible(constraints)[row])),
        )
