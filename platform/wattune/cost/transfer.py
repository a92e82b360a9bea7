"""Reading what was measured as another plan or machine: its residual kept, the estimate of the other in its place.

value = estimate of the other x (measured / its estimate). What an estimate gets wrong of both cancels; what is left is
the error of a *ratio* of estimates, which is far below that of an estimate. The interval joins it with the error of the
measurement and with a distance: how far, by the estimates' own sensitivities, the one does not stand for the other.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np

from wattune.arrays import Floats
from wattune.cost.estimate import EstimatedMetric
from wattune.errors import PlanError

RATIO_LOG_STD: Final = 0.017
"""Standard deviation of log(measured ratio / estimated ratio) of two sizes of one plan, where nothing closer is known:
what `ratio_log_std` learns of 142 steps of 40 families in `benchmarks/data/published_steps.parquet` at 8 to 2,432
devices."""


def read_as(
    measured: Floats | float,
    estimated: Floats | float,
    other: Floats | float,
    *,
    measured_log_std: Floats | float,
    ratio_log_std: Floats | float = RATIO_LOG_STD,
    distance_percent: Floats | float = 0.0,
) -> EstimatedMetric:
    """Reads measurements as another plan or machine, with 95 % intervals.

    Args:
        measured: What was measured, in any unit; shape [n], or one number.
        estimated: The estimate of what was measured, in the same unit.
        other: The estimate of what the measurement is read as.
        measured_log_std: Standard deviation of log(measured), by repeats.
        ratio_log_std: That of log(measured ratio / estimated ratio), as `ratio_log_std` learns it.
        distance_percent: How far the ratio may be off by what is known not to be kept; the truth lies evenly within
            it, so it counts with 1/sqrt(3) (Guide to the expression of uncertainty in measurement, 4.3.7).

    Raises:
        PlanError: A figure is not a positive number, so there is no ratio.
    """
    each = [np.atleast_1d(np.asarray(one, np.float64)) for one in (measured, estimated, other)]
    if not all(np.isfinite(one).all() and (one > 0).all() for one in each):
        raise PlanError(
            "a measurement cannot be read as another: got a figure that is no positive number, allowed: positive ones; "
            "name a trial that was measured and has an estimate"
        )
    evenly = np.log1p(np.asarray(distance_percent, np.float64) / 100) / np.sqrt(3)
    log_std = np.sqrt(np.square(measured_log_std) + np.square(ratio_log_std) + np.square(evenly))
    return EstimatedMetric.of(each[2] * each[0] / each[1], log_std)


def ratio_log_std(measured: Floats, estimated: Floats, families: Sequence[object]) -> float:
    """Learns the error of a ratio from measurements with estimates: the robust one over all pairs inside a family.

    A family is what shares a residual, such as the sizes of one plan. 1.4826 times the median of absolute errors is the
    deviation of normal ones, and leaves out what went wrong in a few.

    Raises:
        PlanError: No family has two measurements.
    """
    residuals = np.log(measured / estimated)
    errors: list[float] = []
    for family in dict.fromkeys(families):
        own = residuals[[one == family for one in families]]
        errors += [abs(a - b) for place, a in enumerate(own) for b in own[:place]]
    if not errors:
        raise PlanError("the error of a ratio cannot be learned: no two measurements belong together; measure two")
    return float(1.4826 * np.median(errors))
