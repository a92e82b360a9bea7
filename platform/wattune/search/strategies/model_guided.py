"""The strategy of wattune's own: estimates as prior, a surrogate for the objective and for each bound.

Every candidate is scored exactly, by expected improvement times the probability that it runs and holds every bound.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from wattune.arrays import Indices, one_thread
from wattune.fidelity import is_burst, is_soak
from wattune.objective import Constraint
from wattune.run import Prediction, Run, RunStatus
from wattune.search.strategies.features import kept_features, make_features
from wattune.search.strategies.gaussian_process import GaussianProcess, Vector
from wattune.search.strategies.prediction import Predictions, log_joint
from wattune.search.strategies.protocol import (
    CHOSEN_EVERY,
    FAILED,
    MOST_TAUGHT,
    TEACHES_NOTHING,
    Observation,
    Problem,
    draw,
    telling,
)
from wattune.search.strategies.surrogate import Belief, Quantity, Surrogate, log_expected_improvement, log_probability
from wattune.trial import TrialSpec, limit_of

LEAST_FEASIBLE: Final = 0.05
"""A candidate that holds every bound with a smaller probability is proposed only when no other is left."""

DOUBT: Final = 2.0
"""Extra power of the probability of a candidate that breaks a bound rather than holds it.

The fastest plans of a node lie just past a bound on its power, one beside the other. Each alone promises much with a
small probability; all of them fail for one reason. With a power of 0 the search measures them one by one.
`benchmarks/search_regret.py` shows what that costs.
"""

NUM_DRAWN: Final = 3
"""Trials that are drawn before the model proposes, where nothing is estimated and no earlier study is known."""

NUM_BEFORE_STOP: Final = 6
"""Least results before the search may stop. It also needs one for each column of features that varies."""

PATIENCE: Final = 16
"""Proposals in a row whose expected gain is below the noise until the search stops, while calibration is unknown."""

CALIBRATED_PATIENCE: Final = 8
"""The same once `NUM_CALIBRATED` predictions came back."""

NUM_CALIBRATED: Final = 6
"""Predictions that came back from which on their calibration is known."""

MOST_MISSED: Final = 1.5
"""Calibration (`Surrogate.calibration`) above which the search does not stop: a gain of 0 is then no reason to.
Where no estimate orders plans rightly, patience begins anew when it falls below: a model that was wrong and has
nothing to go by proposed what came in between."""

MOST_BENT: Final = 0.5
"""Distance of an estimate's learned slope from 1 up to which the estimate counts as one that orders plans rightly."""

AUDIT_EVERY: Final = 2
"""While nothing promises a gain, one proposal of so many is drawn from all candidates, whatever the model says.

A model that is wrong everywhere promises nothing either. Only a trial that it would not have chosen can show that.
Where estimates are known to order plans rightly none is drawn: what such a model misses stands next in its order.
"""

MOST_TIMED: Final = 64
"""Best candidates among which the time of a trial may decide."""

_SHORTLIST: Final = 2000
"""Best candidates that one is drawn from, whatever the model says of it."""
_MOST_FOR_STOP: Final = 256
"""Most promising candidates that the expected gain is computed over."""
_NUM_SAMPLES: Final = 256
_MEMORY: Final = Quantity(metric="memory_peak_bytes")
_DEVICES: Final = {
    "device_power_mean_w": "",
    "device_power_peak_1s_w": "",
    "node_device_power_mean_w": "devices_per_node",
    "node_device_power_peak_1s_w": "devices_per_node",
    "cluster_device_power_peak_1s_w": "world_size",
}
"""Devices of a cluster, else one, whose limits add up to the most that a metric can be: limits act within a second."""

_NO_ROWS: Final = np.zeros(0, dtype=np.intp)


@dataclass(slots=True)
class _Bound:
    """A constraint, and the surrogate of what it bounds."""

    surrogate: Surrogate
    quantity: Quantity
    bound: float
    below: bool
    kept: NDArray[np.bool_]
    """Candidates whose devices' limits of power keep it, as long as no measurement says otherwise."""

    def tell(self, row: int, value: float, burst: bool) -> None:
        """Takes a measurement."""
        (self.surrogate.tell_burst if burst else self.surrogate.tell)(row, value)
        if self.kept[row] and value > self.bound:
            self.kept[:] = False  # these devices do not keep their limits

    def log_kept(self, belief: Belief, rows: Indices | slice) -> Vector:
        """Log of the probability that it holds for some candidates."""
        z = (self.surrogate.transformed(self.bound) - belief.mean) / belief.std
        return np.where(self.kept[rows], 0.0, log_probability(z if self.below else -z))


class ModelGuided:
    """Gaussian processes over all candidates, one for the objective, one for each bound, one for success."""

    learns = True

    def __init__(self, problem: Problem, *, models_constraints: bool = True, stops: bool = True) -> None:
        """Takes the problem.

        Without `models_constraints` bounds and failures have no model, for comparison only; without `stops` it goes on
        until no candidate is left.
        """
        assert problem.question is not None, "a strategy that learns has a question"
        self._question = problem.question
        objective = self._question.objective
        self.stopped_because: str | None = None
        self._specs = list(problem.specs)
        self._index = {spec: row for row, spec in enumerate(self._specs)}
        self._draws: dict[int, bytes] = {}
        self._seed = problem.seed
        clusters = {id(spec.cluster): spec.cluster for spec in self._specs}.values()
        devices = {one.sensed_device.counted for one in clusters}
        warm = [one for one in problem.warm if one.spec.cluster.sensed_device.counted in devices]
        of_all, path = [*self._specs, *(one.spec for one in warm)], problem.features
        self._features = kept_features(of_all, len(warm), path) if path else make_features(of_all, len(warm))
        self._problem, self._warm = problem, warm
        self._nowhere = np.zeros(len(self._specs) + len(warm), dtype=bool)
        self._goal = Quantity(metric=objective.metric)
        self._sign = 1.0 if objective.maximize else -1.0
        self._objective = self._surrogate(self._goal)
        self._bounds = [self._bound(one) for one in self._question.constraints] if models_constraints else []
        self._success = Surrogate(self._features, signed=True)
        self._memory = self._memory_bound() if models_constraints else None
        self._models_constraints, self._stops = models_constraints, stops
        self._num_idle = self._num_sure = self._num_chosen_of = 0
        self._has_failed = self._is_guided_rightly = False
        self._free = np.ones(len(self._specs), dtype=bool)
        self._pending: list[int] = []
        self._feasible: set[int] = set()
        """Candidates measured to hold every bound: in each full run, or by their burst as long as there is no more."""
        self._measured: set[int] = set()
        """Candidates that were measured in full."""
        self._broken: set[int] = set()
        """Candidates of which a full run broke a bound, or a run failed: the ranking calls none of them feasible."""
        self._first: dict[int, Run] = {}
        """First result of each candidate that teaches something."""
        self._taught: set[int] = set()
        """Rows that surrogates learn from, where more than `MOST_TAUGHT` candidates ran; else empty, and all count."""
        self._stale = True
        for row, one in enumerate(warm, start=len(self._specs)):
            self._take(row, one.result)

    @one_thread()
    def ask(self, n: int, expected_s: Callable[[TrialSpec], float] | None = None) -> list[TrialSpec]:
        """Returns up to `n` proposals; none once the expected gain of all that is left is below the noise.

        With `expected_s` by expected improvement per second (Snoek et al. 2012, arXiv 1206.2944), of the `MOST_TIMED`
        best.
        """
        asked: list[TrialSpec] = []
        while len(asked) < n and self.stopped_because is None and self._free.any():
            drawn = min(np.flatnonzero(self._free).tolist(), key=self._draw) if self._knows_nothing else None
            row = self._scored_row(expected_s) if drawn is None else drawn
            if row is None:
                break
            self._free[row] = False
            self._pending.append(row)
            asked.append(self._specs[row])
        return asked

    def tell(self, spec: TrialSpec, result: Run) -> None:
        """Takes in a result. A search that stopped goes on if a trial that still ran then changes its mind."""
        row = self._index.get(spec)
        if row is None:
            return
        self._free[row] = False
        if row in self._pending:
            self._pending.remove(row)
            self.stopped_because = None
        self._take(row, result)

    def restrict(self, specs: Sequence[TrialSpec]) -> None:
        """Proposes these candidates and none else from now on, those that it proposed or was told of too."""
        self._free[:] = False
        self._free[[self._index[spec] for spec in specs]] = True

    def lead_by(self, specs: Iterable[TrialSpec]) -> None:
        """Takes these trials and none else for feasible until it is told more: the best of them is what others beat.

        It may know of a feasible trial by one run alone, or by a burst, which a ranking does not call feasible.
        """
        self._feasible = {self._index[spec] for spec in specs}

    def prediction(self, spec: TrialSpec) -> Prediction | None:
        """Predicts the next measurement of a candidate by all results so far; None while too little is known."""
        found = self.predict([spec])
        if found is None:
            return None
        return found.one(0, self._goal.metric, self._question.constraints if self._models_constraints else ())

    @one_thread()
    def learn(self) -> bool:
        """Takes in what was told; returns false while too little is known to predict."""
        drawn = self._objective.estimate is None and not self._warm and len(self._first) < NUM_DRAWN
        if knows := not drawn and self._objective.knows:
            self._updated_bounds()
        return knows

    @one_thread()
    def predict(self, specs: Sequence[TrialSpec]) -> Predictions | None:
        """Predicts candidates by all results so far, running trials left out; None while too little is known."""
        if not self.learn():
            return None
        bounds = self._updated_bounds()
        rows = np.array([self._index[spec] for spec in specs], dtype=np.intp)

        def predicted(surrogate: Surrogate) -> Belief:
            return surrogate.believe(surrogate.process(_NO_ROWS), rows)

        own = {id(bound) for bound in self._bounds}
        return Predictions(
            objective=predicted(self._objective),
            sign=self._sign,
            best=self._best(self._objective.process(_NO_ROWS)),
            bounded={one.quantity: predicted(one.surrogate) for one in bounds if id(one) in own},
            log_runs=[one.log_kept(predicted(one.surrogate), rows) for one in bounds if id(one) not in own],
        )

    @one_thread()
    def joint_gain(self, specs: Sequence[TrialSpec]) -> tuple[float, float, float] | None:
        """Computes by how much measuring all of some candidates is expected to improve on the best feasible trial.

        Returns the gain, of the most promising of them, and the noise of one measurement, both as fractions, and the
        probability that one of them keeps every bound and is better. None while no trial is known to be feasible.
        """
        if self._knows_nothing or not specs:
            return None
        bounds = self._updated_bounds()
        processes = [one.process(_NO_ROWS) for one in self._modelled(bounds)]
        best = self._best(processes[0])
        if best is None:
            return None
        rows = np.array([self._index[spec] for spec in specs], dtype=np.intp)
        score, _ = self._score(rows, processes, bounds)
        promising = rows[np.argsort(-score, kind="stable")[:_MOST_FOR_STOP]]
        return self._joint_gain(best, promising, processes, bounds)

    @property
    def _knows_nothing(self) -> bool:
        """True until enough is known for a model to propose."""
        if self._objective.estimate is not None or self._warm:
            return False
        return len(self._first) + len(self._pending) < NUM_DRAWN

    def _draw(self, row: int) -> bytes:
        """Returns a candidate's place in the order drawn by the seed."""
        return self._draws.get(row) or self._draws.setdefault(row, draw(self._seed, self._specs[row].trial_id))

    def _surrogate(self, quantity: Quantity, divide_by: Vector | None = None) -> Surrogate:
        """Makes the surrogate of a quantity, with the estimates of all rows where there are some."""
        estimates = self._problem.estimates
        names = [quantity.metric, *([quantity.limit_metric] if quantity.limit_metric else [])]
        if estimates is None or any(name not in estimates for name in names):
            return Surrogate(self._features)
        columns = {name: np.asarray(estimates[name].value, dtype=np.float64) for name in names}
        value = columns[quantity.metric] / (columns[quantity.limit_metric] if quantity.limit_metric else 1.0)
        if not (np.isfinite(value) & (value > 0)).any():
            return Surrogate(self._features)
        earlier = [quantity.of(self._estimate_of(one)) for one in self._warm]
        value = np.concatenate([value, [math.nan if one is None else one for one in earlier]])
        log_std = estimates[quantity.metric].log_std
        usual = float(np.nanmedian(log_std))
        log_std = np.concatenate([np.where(np.isfinite(log_std), log_std, usual), np.full(len(self._warm), usual)])
        value = value if divide_by is None else value / divide_by
        return Surrogate(self._features, value, log_std, is_exact=quantity.metric == "memory_peak_bytes")

    def _estimate_of(self, one: Observation) -> dict[str, float]:
        """The estimated metrics of an earlier observation: its own, else those of the same candidate."""
        row, estimates = self._index.get(one.spec), self._problem.estimates
        if one.estimate or row is None or estimates is None:
            return dict(one.estimate)
        return {name: float(column.value[row]) for name, column in estimates.items()}

    def _bound(self, constraint: Constraint) -> _Bound:
        quantity = Quantity(metric=constraint.metric, limit_metric=constraint.limit_metric)
        below, each = constraint.operator.startswith("<"), _DEVICES.get(constraint.metric)
        kept = self._nowhere.copy()
        if below and each is not None and constraint.limit_metric is None:
            limits_w = [limit_of(spec) * (getattr(spec.cluster, each) if each else 1) for spec in self._specs]
            kept[: len(limits_w)] = np.array(limits_w) <= constraint.factor
        return _Bound(self._surrogate(quantity), quantity, constraint.factor, below, kept)

    def _memory_bound(self) -> _Bound | None:
        """The bound that a device's memory sets; None where it is not known."""
        capacities = [spec.cluster.sensed_device.memory_bytes for spec in self._specs]
        capacities += [one.spec.cluster.sensed_device.memory_bytes for one in self._warm]
        if not capacities or any(capacity is None for capacity in capacities):
            return None
        self._capacity = np.array(capacities, dtype=np.float64)
        return _Bound(self._surrogate(_MEMORY, self._capacity), _MEMORY, 1.0, True, self._nowhere)

    def _take(self, row: int, result: Run) -> None:
        if result.status in TEACHES_NOTHING:
            return
        self._stale = True
        is_candidate = row < len(self._specs)
        self._taught |= {row} if self._taught else set()
        if is_candidate:
            self._first.setdefault(row, result)
        failed = result.status in FAILED
        self._has_failed |= failed
        self._success.tell(row, -1.0 if failed else 1.0)
        if failed and self._memory is not None and result.status is RunStatus.OUT_OF_MEMORY:
            self._memory.surrogate.tell_above(row, 1.0)
        if failed and is_candidate:
            self._judge(row, holds=False, burst=False)
        if result.status is not RunStatus.COMPLETED:
            return
        metrics, burst = result.metrics, is_burst(result)
        value = self._goal.of(metrics)
        if is_candidate:
            holds = value is not None and self._question.kept(metrics) is True
            self._judge(row, holds=holds, burst=burst)
        if is_soak(result) and self._objective.has(row):
            return  # of a hot machine: beside ordinary runs it would pass for scatter
        if value is not None:
            (self._objective.tell_burst if burst else self._objective.tell)(row, value)
        for bound in self._bounds:
            bounded = bound.quantity.of(metrics)
            if bounded is not None:
                bound.tell(row, bounded, burst)
        memory = _MEMORY.of(metrics)
        if self._memory is not None and memory is not None and memory > 0:
            self._memory.surrogate.tell(row, memory / self._capacity[row])

    def _judge(self, row: int, *, holds: bool, burst: bool) -> None:
        """Keeps whether a candidate is known to be feasible after one more run of it."""
        if burst and row in self._measured:
            return
        if not burst:
            self._measured.add(row)  # from now on its burst does not count
            self._broken |= set() if holds else {row}
        if holds and row not in self._broken:
            self._feasible.add(row)
        else:
            self._feasible.discard(row)

    def _active_bounds(self) -> list[_Bound]:
        bounds = [bound for bound in self._bounds if bound.surrogate.knows]
        if self._models_constraints and self._has_failed:
            bounds.append(_Bound(self._success, Quantity(metric=""), 0.0, False, self._nowhere))
        if self._memory is not None and self._memory.surrogate.knows:
            bounds.append(self._memory)
        return bounds

    def _modelled(self, bounds: Sequence[_Bound]) -> list[Surrogate]:
        """Returns the surrogates of the objective and of bounds, in this order."""
        return [self._objective, *(bound.surrogate for bound in bounds)]

    def _updated_bounds(self) -> list[_Bound]:
        """Returns the bounds that something is known of, every surrogate up to date."""
        bounds = self._active_bounds()
        if self._stale:
            if len(self._first) > max(MOST_TAUGHT, self._num_chosen_of + CHOSEN_EVERY):
                earlier = range(len(self._specs), len(self._nowhere))
                self._taught = telling(self._first, self._question).union(earlier)
                self._num_chosen_of = len(self._first)
            for surrogate in self._modelled(bounds):
                surrogate.update(self._taught, self._problem.fits)
            self._stale = False
        return bounds

    def _scored_row(self, expected_s: Callable[[TrialSpec], float] | None) -> int | None:
        """Chooses a candidate by score; None where the search stops."""
        bounds, rows = self._updated_bounds(), np.flatnonzero(self._free)
        pending = np.array(self._pending, dtype=np.intp)
        processes = [one.process(pending) for one in self._modelled(bounds)]
        score, log_feasible = self._score(rows, processes, bounds)
        allowed = log_feasible >= math.log(LEAST_FEASIBLE)
        score = np.where(allowed | ~allowed.any(), score, score - 1e6)
        order = np.argsort(-score, kind="stable")
        rows, best = rows[order], 0
        if self._gains_too_little(rows[:_MOST_FOR_STOP], processes, bounds):
            return None
        if self._num_idle % AUDIT_EVERY == 1 and not self._is_guided_rightly:
            best = min(range(len(rows[:_SHORTLIST])), key=lambda place: self._draw(int(rows[place])))
        elif expected_s is not None:
            best = self._soonest(rows, score[order], expected_s)
        for surrogate in self._modelled(bounds):
            surrogate.expect(int(rows[best]))
        return int(rows[best])

    def _soonest(self, rows: Indices, score: Vector, expected_s: Callable[[TrialSpec], float]) -> int:
        """Returns the place of the candidate with the largest expected improvement per second among the best ones."""
        times_s = [max(expected_s(self._specs[row]), 1e-9) for row in rows[:MOST_TIMED]]
        return int(np.argmax(score[: len(times_s)] - np.log(times_s)))

    def _best(self, objective: GaussianProcess) -> float | None:
        """The largest mean of the objective over trials measured to hold every bound; None where there is none."""
        if not self._feasible:
            return None
        rows = np.array(sorted((self._feasible & self._taught) or self._feasible), dtype=np.intp)
        return float((self._sign * self._objective.believe(objective, rows).mean).max())

    def _score(
        self, rows: Indices, processes: Sequence[GaussianProcess], bounds: Sequence[_Bound]
    ) -> tuple[Vector, Vector]:
        """Log of expected improvement times probability of feasibility, and log of the latter."""
        where: Indices | slice = slice(0, len(self._specs)) if len(rows) == len(self._specs) else rows
        belief = self._objective.believe(processes[0], where)
        pairs = zip(bounds, processes[1:], strict=True)
        logs = [one.log_kept(one.surrogate.believe(process, where), where) for one, process in pairs]
        logs = logs or [np.zeros(len(rows))]
        log_feasible = log_joint(logs)
        best = self._best(processes[0])
        mean = self._sign * belief.mean
        reference = float(np.median(mean)) if best is None else best
        # The tightest bound alone: with many bounds a plan that holds each of them surely enough has a small product.
        worth = log_feasible + DOUBT * np.minimum(np.min(logs, axis=0) - math.log(0.5), 0.0)
        return log_expected_improvement(mean, belief.std, reference) + worth, log_feasible

    def _gains_too_little(self, rows: Indices, processes: Sequence[GaussianProcess], bounds: Sequence[_Bound]) -> bool:
        """Stops the search if the expected gain of measuring everything that is left is below the noise.

        The gain is computed from joint draws of the most promising candidates, so that likes are not counted twice.
        """
        best = self._best(processes[0])
        if best is None or len(self._first) < max(NUM_BEFORE_STOP, self._features.num_columns):
            return False
        gain, noise, _ = self._joint_gain(best, rows, processes, bounds)
        self._num_idle = self._num_idle + 1 if gain < noise else 0
        modelled = self._modelled(bounds)
        known = self._objective.num_returned >= NUM_CALIBRATED and all(
            abs(one.slope - 1.0) <= MOST_BENT for one in modelled
        )
        missed = max(one.calibration for one in modelled) > MOST_MISSED
        self._is_guided_rightly = known and self._objective.estimate is not None
        self._num_sure = 0 if missed else min(self._num_sure + 1, self._num_idle)
        waited = self._num_idle >= CALIBRATED_PATIENCE if known else self._num_sure >= PATIENCE
        if not waited or missed or not self._stops:
            return False
        left = int(self._free.sum())
        self.stopped_because = (
            f"the expected gain of the {left} trials left is {gain:.1%}, below the measured noise of {noise:.1%}"
        )
        return True

    def _joint_gain(
        self, best: float, rows: Indices, processes: Sequence[GaussianProcess], bounds: Sequence[_Bound]
    ) -> tuple[float, float, float]:
        """Computes what some rows are expected to gain over the best, the noise, and the probability of a gain."""
        dice = np.random.default_rng([self._seed, len(self._first)])
        shape = (len(rows), _NUM_SAMPLES)
        objective, normals = self._objective, dice.standard_normal(shape)
        drawn = self._sign * objective.draws(processes[0], rows, normals, dice.standard_normal(_NUM_SAMPLES))
        common = dice.standard_normal(shape)
        for bound, process in zip(bounds, processes[1:], strict=True):
            mixed = math.sqrt(0.5) * (common + dice.standard_normal(shape))  # as in `_score`: half of one cause
            mixed = mixed if bound.below else -mixed
            values = bound.surrogate.draws(process, rows, mixed, dice.standard_normal(_NUM_SAMPLES))
            limit = bound.surrogate.transformed(bound.bound)
            broken = (values > limit) if bound.below else (values < limit)
            drawn[broken & ~bound.kept[rows][:, None]] = -math.inf
        unit = 1.0 if self._objective.is_log else max(abs(best), 1e-12)
        ahead = drawn.max(0) - best
        return float(np.maximum(ahead, 0.0).mean()) / unit, self._objective.noise / unit, float((ahead > 0.0).mean())
