"""Reading what was measured as another plan or machine: its residual kept, the estimate of the other in its place.

value = estimate of the other x (measured / its estimate). What an estimate gets wrong of both cancels. The error of a
*ratio* of estimates is left; the interval joins it with that of the measurement and with a distance: how far, by the
estimates' own sensitivities, the one does not stand for the other.
"""

from typing import Final

import numpy as np

from wattune.arrays import Floats
from wattune.cost.tables import EstimatedMetric
from wattune.errors import PlanError

RATIO_LOG_STD: Final = 0.019
"""Standard deviation of log(measured ratio / estimated ratio) of two sizes of one plan, where nothing closer is known:
that of published families (`benchmarks/results/projection.md`)."""


def read_as(
    measured: Floats | float,
    estimated: Floats | float,
    other: Floats | float,
    *,
    measured_log_std: Floats | float,
    ratio_log_std: Floats | float = RATIO_LOG_STD,
    distance_percent: Floats | float = 0.0,
) -> EstimatedMetric:
    """Reads what was `measured`, in any unit, [n] or one number, as another plan or machine; with 95 % intervals.

    `estimated` is the estimate of what was measured, `other` that of what it is read as. Deviations are of logarithms,
    of the measurement and of the ratio. By `distance_percent` the ratio may be off through what is known not to be
    kept. The truth lies evenly within, so it counts with 1/sqrt(3) (Guide to the expression of uncertainty in
    measurement, 4.3.7). Raises `PlanError` where a figure is no positive number.
    """
    each = [np.atleast_1d(np.asarray(one, np.float64)) for one in (measured, estimated, other)]
    if not all(np.isfinite(one).all() and (one > 0).all() for one in each):
        raise PlanError(
            "got a figure that is no positive number, allowed: a trial that was measured and has an estimate"
        )
    evenly = np.log1p(np.asarray(distance_percent, np.float64) / 100) / np.sqrt(3)
    log_std = np.sqrt(np.square(measured_log_std) + np.square(ratio_log_std) + np.square(evenly))
    return EstimatedMetric.of(each[2] * each[0] / each[1], log_std)
