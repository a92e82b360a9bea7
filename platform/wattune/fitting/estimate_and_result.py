"""An estimate beside a result: the same figures and the same parts of a step, in columns of their own."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from wattune.cost.estimate import Coefficients, estimate
from wattune.cost.step_time.predict import PARTS as PREDICTED_PARTS
from wattune.run import Run
from wattune.trial import TrialSpec

STEP: Final = "step_time_s"
OTHER: Final = "other"

PARTS: Final = tuple(name.removesuffix("_s") for name in PREDICTED_PARTS)
"""Parts of a step, as `<part>_frac` measures them and `<part>_s` is predicted; they add up to it."""

UNDIVIDED: Final = "undivided_wait"
"""Waiting that a measurement does not tell apart: for data, for a slower rank, or for a stage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One figure of a trial. An estimate and a measurement are never in one field."""

    name: str
    estimated: float | None
    low: float | None = None
    """Low end of the estimate's 95 % interval; None for parts, which have none."""
    high: float | None = None
    measured: float | None = None
    """None where the trial did not measure it."""

    @property
    def error_frac(self) -> float | None:
        """Estimated over measured, less 1; None where either is missing or nothing was measured of it."""
        if self.estimated is None or not self.measured:
            return None
        return self.estimated / self.measured - 1

    @property
    def is_inside(self) -> bool | None:
        """Tells whether the measurement lies in the estimate's interval; None where there is no interval."""
        if self.low is None or self.high is None or self.measured is None:
            return None
        return self.low <= self.measured <= self.high


@dataclass(frozen=True, slots=True, kw_only=True)
class Beside:
    """One trial's estimate and result."""

    trial: str
    """Study, id and repeat."""
    plan: str
    source: str
    """Device, and the origin of the coefficients."""
    was_fitted: bool
    """True where the fit behind the estimate may have used this trial: the study is among those it was fitted to."""
    metrics: tuple[Figure, ...]
    parts: tuple[Figure, ...]
    """Seconds of a step."""


def beside(
    trial: str, spec: TrialSpec, result: Run, coefficients: Coefficients, *, source: str, was_fitted: bool
) -> Beside:
    """Lays the estimate of a specification beside its result. Raises `PlanError` where the device has no estimates."""
    found = estimate([spec], lambda _device: coefficients).whole(0)
    metrics = tuple(
        Figure(name=name, estimated=f["value"], low=f["low"], high=f["high"], measured=result.metrics.get(name))
        for name, f in found["estimate"].items()
    )
    return Beside(
        trial=trial,
        plan=spec.label,
        source=source,
        was_fitted=was_fitted,
        metrics=metrics,
        parts=_parts(found["step_parts_s"], result.metrics),
    )


def _parts(parts_s: Mapping[str, float], measured: Mapping[str, float]) -> tuple[Figure, ...]:
    """Returns the parts that either side has, in seconds. Shares of the result are of its own step."""
    step_s = measured.get(STEP)
    found = []
    for name in PARTS:
        estimated, share = parts_s.get(name), measured.get(f"{name}_frac")
        seconds = None if share is None or step_s is None else share * step_s
        if estimated or seconds:
            found.append(Figure(name=name, estimated=estimated, measured=seconds))
    known = [one.measured for one in found if one.measured is not None]
    if step_s is not None and known and (left_s := step_s - sum(known)) > 1e-3 * step_s:
        found.append(Figure(name=UNDIVIDED, estimated=None, measured=left_s))
    return tuple(found)
