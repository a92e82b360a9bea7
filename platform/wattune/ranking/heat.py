"""Heat that a short run does not show: what a temperature still rises by, and throttling that only heat brings.

A bound on a temperature is judged on the settled value. A run that was analysed with its curve has it with its
uncertainty (`wattune.analysis.metrics.settled`). An older run has the highest reading alone. It counts as settled after
a minute; before that, heat of unknown size is left. No repeat of the same length shows either, so both stay beside the
scatter from run to run.
"""

import math
from collections.abc import Sequence
from statistics import NormalDist, fmean
from typing import Final

from wattune.intervals import NORMAL_95
from wattune.run import Run
from wattune.units import format_quantity

HOTTEST: Final = "device_temp_max_c"
SETTLED: Final = "device_temp_settled_c"
UNCERTAINTY: Final = "device_temp_settled_uncertainty_c"

_SIGNS: Final = {HOTTEST: 1.0, "device_temp_mean_c": 1.0, "memory_temp_max_c": 1.0, "thermal_margin_min_c": -1.0}
"""Signs of the change of a window's metrics while the hottest device warms on."""

BY_HEAT: Final = ("throttle_thermal_frac", "throttle_thermal_loss_frac", "thermal_active_frac")
"""Shares that heat alone brings: 0 in a cool window tells nothing of a hot one."""

LONG_S: Final = 60.0
"""Window from which a reading counts as settled where nothing else is known: of an H200 at full power 1.3 K are left
after it (`wattune.cost.temperature`)."""

FULL_S: Final = 300.0
"""Window after which a twentieth of the slow stage is left: three of its time constants."""

UNTOLD_K: Final = 4.0
UNTOLD_SPREAD_K: Final = 5.0
"""Mean and standard deviation of the heat that is left in a run of seconds without a curve.

Of 206 ordered pairs of runs of one plan, of 1.5 to 16 s (`benchmarks/data`), the second contradicts 4.0 % of what the
first decided so on bounds within 15 K, and 6.2 % of what it decided without. Runs of one plan at the same watts read 62
to 76 degC (`moe_ep_h100x2.parquet`), and one that read 61 to 70 in four seconds read 74 in a minute."""

COOL_SPREAD_K: Final = 1.0
"""Standard deviation from run to run of a settled temperature: the ranking's prior of any temperature."""

_CLOSE_K: Final = 3.0
"""Distance of a bound that a minute's window does not resolve: its interval is 3 K wide on an H200."""

_NORMAL: Final = NormalDist()


Heat = tuple[float, float]
"""Heat left at the end of some runs, in kelvin of a metric, and its variance."""

NO_HEAT: Final = (0.0, 0.0)


def judged_metric(metric: str, runs: Sequence[Run]) -> str:
    """Returns the metric whose readings decide a bound: the settled value of the hottest where all runs have it."""
    return SETTLED if metric == HOTTEST and runs and all(SETTLED in run.metrics for run in runs) else metric


def heat_left(metric: str, runs: Sequence[Run]) -> Heat:
    """Returns the heat that a metric of some runs of one plan does not show yet; nothing for what is no temperature."""
    if metric == SETTLED:
        return 0.0, _variance(runs)
    sign = _SIGNS.get(metric)
    if sign is None or not runs:
        return NO_HEAT
    if all(SETTLED in run.metrics and HOTTEST in run.metrics for run in runs):
        return sign * fmean([run.metrics[SETTLED] - run.metrics[HOTTEST] for run in runs]), _variance(runs)
    if all(is_long(run) for run in runs):
        return NO_HEAT
    return sign * UNTOLD_K, UNTOLD_SPREAD_K**2


def stays_cool_probability(metric: str, runs: Sequence[Run]) -> float:
    """Computes the probability that heat brings nothing to a share of `BY_HEAT` that the runs do not show.

    It is that of the hottest device staying below its own limit once settled. 1 for other metrics, where the distance
    to the limit was not read, and after a long run, whose own share says it.
    """
    margin = "thermal_margin_min_c"
    if metric not in BY_HEAT or not runs or not all(margin in run.metrics for run in runs):
        return 1.0
    heat = heat_left(margin, runs)
    if heat is NO_HEAT:
        return 1.0
    left_k, variance_k2 = heat
    room_k = fmean([run.metrics[margin] for run in runs]) + left_k
    return _NORMAL.cdf(room_k / math.hypot(math.sqrt(variance_k2), COOL_SPREAD_K))


def unsettled_text(metric: str, bound: float, runs: Sequence[Run]) -> str:
    """Says in words what the runs do not tell and what would; empty where a metric does not wait for heat."""
    if metric not in (*_SIGNS, *BY_HEAT) or not runs:
        return ""
    window_s = max(_window_s(run) for run in runs)
    known = all(SETTLED in run.metrics for run in runs)
    if not known and window_s >= LONG_S:
        return ""
    need_s = LONG_S
    settles = ""
    if known:
        settled_c, reach_k = fmean(run.metrics[SETTLED] for run in runs), NORMAL_95 * math.sqrt(_variance(runs))
        settles = f", settles at {format_quantity(SETTLED, settled_c)} ± {reach_k:.1f} K"
        if window_s >= LONG_S or (metric == HOTTEST and abs(bound - settled_c) < _CLOSE_K):
            need_s = FULL_S
    if window_s >= need_s:
        return ""
    seen = f"{window_s:.0f} s of load" if window_s else "a run of unknown length"
    return (
        f"not settled after {seen}{settles}: measure {need_s:.0f} s (measure.min_seconds), or a soak of the finalists "
        "(measure.soak_finalists)"
    )


def is_long(run: Run) -> bool:
    """Tells whether a run's window is so long that its readings count as settled."""
    return _window_s(run) >= LONG_S


def _variance(runs: Sequence[Run]) -> float:
    """Returns the mean variance of settled values: runs of one length err together, so more of them are no better."""
    return fmean([(run.metrics.get(UNCERTAINTY, 0.0) / NORMAL_95) ** 2 for run in runs]) if runs else 0.0


def _window_s(run: Run) -> float:
    return run.numbers.window_s or 0.0
