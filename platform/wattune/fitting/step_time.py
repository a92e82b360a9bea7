"""Fits the coefficients of step times to measured trials, with the error on configurations held out."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np

from wattune.arrays import Floats
from wattune.cost.batch import batches
from wattune.cost.coefficients import PowerCoefficients, StepTimeCoefficients
from wattune.cost.step_time.predict import predict
from wattune.cost.tables import FULL_MEMORY_FRAC
from wattune.errors import PlanError
from wattune.fitting.interval import FEW_KINDS, half_width, half_width_elsewhere
from wattune.trial import TrialSpec

TimedTrial = tuple[TrialSpec, Mapping[str, float | None]]
"""A specification and its metrics, of which `step_time_s` and `device_power_limit_w` are read."""

_Known = tuple[StepTimeCoefficients, PowerCoefficients]
_Start = tuple[Floats, Floats]
"""Factors' logs of a fit to a few trials more, and its slopes."""

_ERROR: Final = 0.04
"""Error of a log step time that counts as one unit, and beyond 1.5 units less than quadratically."""
_HUBER: Final = 1.5
_STEP: Final = 0.1
"""Step in the log of a factor over which a slope is taken, to both sides: a shorter one sees one side of the kink where
a host and its device take equally long, and ends there. Of 119 trials on H200 the loss is 56.4 so, 59.6 by 0.02."""
_ROUNDS: Final = 6
MOST_FOLDS: Final = 10


_PARAMETERS: Final = {
    "matrix products": (0.15, "kernel", ("matmul_frac",)),
    "grouped products": (0.15, "kernel", ("grouped_frac",)),
    "attention": (0.3, "kernel", ("attention_forward_frac", "attention_backward_frac")),
    "memory-bound kernels": (0.2, "kernel", ("memory_frac",)),
    "links": (0.2, "link", ("in_step_frac",)),
    "slowdown under overlap": (0.5, "link", ("slowdown_frac",)),
    "host": (1.0, "overhead", ("host_op_s",)),
    "stragglers": (0.5, "overhead", ("straggler_frac",)),
}
"""Factors on coefficients, 1 at the published ones: the standard deviation of its log before anything is measured (how
far the fit may easily move), and the coefficients it is on."""


Unseen = tuple[StepTimeCoefficients, Sequence[TimedTrial]]
"""A fit, and trials that it has not seen."""


def fit(
    trials: Sequence[TimedTrial], prior: StepTimeCoefficients, power: PowerCoefficients
) -> tuple[StepTimeCoefficients, Mapping[str, float], Floats, list[Unseen]]:
    """Fits few factors on the coefficients, held near 1 by their scatter, to the logs of step times.

    Trials that nearly fill their memory are left out where others are left. Returns the coefficients, the fitted values
    over those before, and predicted over measured, less 1, of every trial fitted to when its configuration was held
    out: the errors are those of as many fits as there are folds of whole configurations. Repeats of one trial are held
    out together. Last come the fits that have not seen a kind (a model and engine), with its trials, for a figure that
    depends on steps; of few kinds those of the folds. Raises `PlanError` where no trial has a step time.
    """
    timed = [one for one in trials if one[1].get("step_time_s")]
    usable = [one for one in timed if not _fills_memory(one)] or timed
    if not usable:
        raise PlanError("no trial has a step time to fit coefficients to; give results of completed trials")
    of = [spec.trial_id for spec, _ in usable]
    names = sorted(set(of))
    fold_of = {name: index % min(MOST_FOLDS, len(names)) for index, name in enumerate(names)}
    known = prior, power
    logs = _fitted(usable, known)
    coefficients, factors = _applied(prior, logs), dict(zip(_PARAMETERS, np.exp(logs).tolist(), strict=True))
    start = logs, _linear(usable, known, logs)[1]  # where every fit to some of the trials begins
    held_out, folds = _held_out(usable, [fold_of[name] for name in of], known, start)
    kind_of = [(spec.engine, spec.model.name) for spec, _ in usable]
    kinds = sorted(set(kind_of))
    other, without = _held_out(usable, [kinds.index(kind) for kind in kind_of], known, start)
    error_frac = half_width(held_out, of) or prior.error_frac
    other_frac = half_width_elsewhere(other, of, kind_of) or max(prior.error_frac, prior.elsewhere_error_frac)
    coefficients = replace(
        coefficients,
        error_frac=error_frac,
        elsewhere_error_frac=max(other_frac, error_frac),
        seen=tuple(sorted({_family(spec) for spec, _ in usable})),
        seen_domains=tuple(sorted({spec.cluster.num_domains for spec, _ in usable})),
        seen_networks=tuple(
            sorted({getattr(spec.cluster.network, "name", "") for spec, _ in usable if spec.cluster.num_domains > 1})
        ),
    )
    unseen = without if len(kinds) >= FEW_KINDS else folds
    wide_frac = coefficients.elsewhere_error_frac if len(kinds) >= FEW_KINDS else error_frac
    unseen = [(replace(one, error_frac=wide_frac), hidden) for one, hidden in unseen]
    return coefficients.of("measured here"), factors, held_out, unseen


def _fills_memory(trial: TimedTrial) -> bool:
    """Tells whether a trial's device waited for memory, which no factor is about: by a count, else by what it held."""
    spec, metrics = trial
    if (retries := metrics.get("memory_retries_per_step_count")) is not None:
        return retries > 0
    peak, room = metrics.get("memory_peak_bytes"), spec.cluster.sensed_device.memory_bytes
    return peak is not None and room is not None and peak >= FULL_MEMORY_FRAC * room


def _family(spec: TrialSpec) -> str:
    model = spec.model
    return StepTimeCoefficients.family(spec.engine, model.name, model.num_layers, spec.cluster.world_size)


def _held_out(
    trials: Sequence[TimedTrial], fold_of: Sequence[int], known: _Known, start: _Start
) -> tuple[Floats, list[Unseen]]:
    """Predicts each fold by a fit to the others; relative errors, NaN where there is one fold, and those fits."""
    folds, errors, unseen = np.array(fold_of), np.full(len(trials), np.nan), list[Unseen]()
    if folds.max() > 0:
        for fold in range(folds.max() + 1):
            seen = [one for one, number in zip(trials, folds, strict=True) if number != fold]
            coefficients = _applied(known[0], _fitted(seen, known, (start[0], start[1][folds != fold])))
            hidden = [one for one, number in zip(trials, folds, strict=True) if number == fold]
            errors[folds == fold] = np.exp(_log_errors(hidden, coefficients, known[1])) - 1
            unseen.append((coefficients, hidden))
    return errors, unseen


def predicted_s(trials: Sequence[TimedTrial], coefficients: StepTimeCoefficients, power: PowerCoefficients) -> Floats:
    """Predicts the step time of every trial under its own power limit."""
    times_s = np.empty(len(trials))
    limits_w = np.array([metrics.get("device_power_limit_w") or 0.0 for _, metrics in trials])
    for positions, batch in batches([spec for spec, _ in trials]):
        own_w = limits_w[positions]
        limited = replace(batch, limit_w=np.where(own_w > 0, own_w, batch.limit_w))
        times_s[positions] = predict(limited, coefficients, power).step_time_s
    return times_s


def _log_errors(trials: Sequence[TimedTrial], coefficients: StepTimeCoefficients, power: PowerCoefficients) -> Floats:
    measured_s = np.array([metrics["step_time_s"] for _, metrics in trials], float)
    errors: Floats = np.log(predicted_s(trials, coefficients, power) / measured_s)
    return errors


_Linear = tuple[Floats, Floats]
"""Errors of each trial in units of `_ERROR`, and their slopes along the log of each factor."""


def _linear(trials: Sequence[TimedTrial], known: _Known, logs: Floats, slopes: Floats | None = None) -> _Linear:

    def residuals(at: Floats) -> Floats:
        return _log_errors(trials, _applied(known[0], at), known[1]) / _ERROR

    errors = residuals(logs)
    if slopes is None:
        ends = [(residuals(logs + unit), residuals(logs - unit)) for unit in _STEP * np.eye(len(logs))]
        slopes = np.stack([(more - less) / (2 * _STEP) for more, less in ends], axis=1)
    return errors, slopes


def _fitted(trials: Sequence[TimedTrial], known: _Known, start: _Start | None = None) -> Floats:
    """Finds the factors' logs: least Huber's loss plus their squares over their scatter, by Gauss-Newton.

    Slopes are found each round, but for those of `start`.
    """
    scatter = np.array([each for each, _, _ in _PARAMETERS.values()])
    logs, begun = start or (np.zeros(len(_PARAMETERS)), None)
    for _ in range(_ROUNDS):
        errors, slopes = _linear(trials, known, logs, begun)
        weights = np.minimum(1.0, _HUBER / np.maximum(np.abs(errors), 1e-9))[:, None]
        normal = slopes.T @ (weights * slopes) + np.diag(scatter**-2)
        right = -slopes.T @ (weights[:, 0] * errors) - logs / scatter**2
        logs = logs + np.clip(np.linalg.solve(normal, right), -0.4, 0.4)
    return logs


def _applied(prior: StepTimeCoefficients, logs: Floats) -> StepTimeCoefficients:
    applied = prior
    for (_, part, names), factor in zip(_PARAMETERS.values(), np.exp(logs).tolist(), strict=True):
        before = getattr(applied, part)
        changes: dict[str, Any] = {part: replace(before, **{name: getattr(before, name) * factor for name in names})}
        applied = replace(applied, **changes)
    return applied
