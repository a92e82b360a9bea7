"""Settled temperature: what the hottest device reaches if the measured power goes on.

A window of seconds ends before heat sinks and the air around them are warm, and it begins with heat of whatever ran
before. The readings from the start of telemetry, warm-up included, are fitted by the thermal ladder of
`wattune.cost.temperature`, whose time constants are given:

    T = c + R1 L1(P) + R2 L2(P) + Rp Lp(P of all) + Rc Lc(P of all) + a2 exp(-t / tau2) + ap exp(-t / taup)
      + ac exp(-t / tauc)

L is the lag of the measured power, P of all the mean over the node's sampled devices. The last stage, Lc, is air and
chassis, which the ladder lacks. c, the resistances and the heat stored at the start are free. It is linear least
squares with a Gaussian prior (Gelman et al., Bayesian Data Analysis, 3rd edition, section 14.8): where the readings
cannot tell the slow stage, the prior's width is left. The settled value is the hottest of the window's readings, each
with what is left to warm at its time added.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np

from wattune.analysis.metrics.energy import Powers, PowerTrace
from wattune.analysis.signals.align import Aligned
from wattune.analysis.signals.series import Series
from wattune.arrays import Floats
from wattune.catalog.hardware import DeviceSpec
from wattune.cost.coefficients import ThermalCoefficients
from wattune.cost.temperature import H200_LIMIT_W, lagged, scaled, thermal_coefficients
from wattune.intervals import NORMAL_95
from wattune.schema import DeviceKey

CELL_S: Final = 0.5
"""Grid of the fit: ten readings of the fast tier, and no longer than the first stage takes."""

MOST_S: Final = 600.0
"""Longest stretch that is fitted: six time constants of the slow stage before the window's end."""

NOISE_K: Final = 1.0
"""Standard deviation of a cell in the fit. Cells scatter by 0.3 to 0.5 K about fits of four recorded H200s, and errors
of the model last for seconds: 1 K is 0.5 K of which four neighbours say one thing."""

RESISTANCE_SPREADS: Final = (0.2, 0.5, 0.5)
"""Standard deviations of the two stages' resistances and of half of the preheating, as shares of the fit's own. Two
hosts of H200 agree within 7 % on the first, and slots differ up to threefold in the preheating
(`wattune.cost.temperature`)."""

CHASSIS_S: Final = 300.0
"""Time constant of air and chassis. Ours: an air-cooled node needs five to fifteen minutes."""

CHASSIS_SHARE: Final = 0.25
"""Share of the model's `error_k` that is taken as standard deviation of what air and chassis warm at the power limit.

It is 2 K on an H200, where four recorded devices show none, and 5 K on a device without a fit. Two H100s read 6 K more
in runs of four seconds some minutes after the first ones (`benchmarks/data/dense_llama_repeats_h100x2.parquet`)."""

HIGHEST_K: Final = 0.5
"""Standard deviation of the highest of many readings about the same of other readings: half of their step. In simulated
windows of 300 s it is 0.4 K."""

CONFLICT: Final = 2.0
"""Standard deviations of the prior by which what is left to warm may leave it. Beyond that the curve is not the
ladder's, as where fans speed up: one of two H100s warmed to 81 degC in 60 s at 700 W and fell to 73 in 220 s. Then as
much is the standard deviation: the curve narrows nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settled:
    """The settled temperature of one device."""

    start_c: float
    """Temperature at the start of the window."""
    settled_c: float
    """Hottest reading once stored heat is in balance with the measured power."""
    uncertainty_k: float
    """Half width of its 95 % interval."""
    mean_c: float  # of the readings, not the hottest: what goes with the mean power of a load that comes and goes


def coefficients_of(device: DeviceSpec | None, limit_w: float | None) -> ThermalCoefficients:
    """Returns thermal coefficients by the device of the catalog, else by the power limit that was read, in watts."""
    known = None if device is None else thermal_coefficients(device)
    return known or scaled(limit_w or H200_LIMIT_W)


def settled_temperatures(
    aligned: Aligned, powers: Powers, device: DeviceSpec | None, limit_w: float | None
) -> dict[DeviceKey, Settled]:
    """Computes the settled temperature of every device; empty unless all have power and temperature in the window.

    `aligned` holds the readings before the window too.
    """
    temps = {where: one.series("gpu_temp_c") for where, one in aligned.readings("fast")}
    watts = _watts(aligned, powers)
    ladder = coefficients_of(device, limit_w)
    found: dict[DeviceKey, Settled] = {}
    for node in sorted({where[0] for where in aligned.devices}):
        here = {where: (temps.get(where), watts.get(where)) for where in aligned.devices if where[0] == node}
        curves = {
            where: (warm, drawn) for where, (warm, drawn) in here.items() if warm is not None and drawn is not None
        }
        if len(curves) < len(here):
            return {}
        found |= settle(curves, aligned.duration_s, ladder, limit_w or H200_LIMIT_W)
    return found if len(found) == len(aligned.devices) else {}


def _watts(aligned: Aligned, powers: Powers) -> dict[DeviceKey, Series]:
    """Returns each device's power from the start of telemetry on; devices behind one sensor share it evenly."""
    found: dict[DeviceKey, Series] = {}
    for trace in powers.traces if powers.usable else ():
        series = _whole(aligned, trace)
        if series is not None:
            found |= {where: Series(series.time_s, series.value / trace.share) for where in trace.devices}
    return found


def _whole(aligned: Aligned, trace: PowerTrace) -> Series | None:
    tier, column = ("ring", "power_w") if trace.from_ring else ("fast", "power_instant_w")
    readings = aligned.tiers.get(tier, {}).get(trace.devices[0])
    return None if readings is None else readings.series(column)


def settle(
    curves: Mapping[DeviceKey, tuple[Series, Series]], end_s: float, ladder: ThermalCoefficients, limit_w: float
) -> dict[DeviceKey, Settled]:
    """Fits the devices of one node, empty where they have no cell of the window in common.

    Each curve is core temperature in degC and power in watts; the window begins at time 0, and what is before it tells
    of stored heat.
    """
    both = [one for pair in curves.values() for one in pair]
    end_s = min(end_s, *(float(one.time_s[-1]) for one in both))
    num_cells = math.floor(min(end_s - max(float(one.time_s[0]) for one in both), MOST_S) / CELL_S)
    edges_s = end_s - CELL_S * np.arange(num_cells, -1, -1.0)
    if num_cells < 2 or end_s < CELL_S:
        return {}
    watts = np.stack([_means(drawn, edges_s) for _, drawn in curves.values()])
    stages = [lagged(watts, tau_s, CELL_S) for tau_s in ladder.time_constants_s]
    together = watts.mean(0)
    around = [lagged(together, tau_s, CELL_S) for tau_s in (ladder.preheat_time_constant_s, CHASSIS_S)]
    found: dict[DeviceKey, Settled] = {}
    for number, (where, (warm, _)) in enumerate(curves.items()):
        lags = np.stack([*(stage[number] for stage in stages), *around])
        one = _fit(warm, edges_s, watts[number], together, lags, ladder, limit_w)
        if one is not None:
            found[where] = one
    return found


def _means(drawn: Series, edges_s: Floats) -> Floats:
    part = drawn.clip(float(edges_s[0]), float(edges_s[-1]))
    assert part is not None, "edges are inside"
    return np.asarray(np.diff(part.cumulative(edges_s)) / CELL_S)


def _fit(
    warm: Series,
    edges_s: Floats,
    own_w: Floats,
    all_w: Floats,
    lags_w: Floats,
    ladder: ThermalCoefficients,
    limit_w: float,
) -> Settled | None:
    """Fits one device from its lags of power, [stages and surroundings, cells]; None without a reading."""
    mean_c, top_c = _cells(warm, edges_s)
    time_s = (edges_s[:-1] + edges_s[1:]) / 2
    inside = time_s > 0
    read = np.isfinite(mean_c)
    if not (inside & read).any():
        return None
    since_s = time_s - edges_s[0]
    fades = np.exp(-since_s / np.array([[ladder.time_constants_s[1]], [ladder.preheat_time_constant_s], [CHASSIS_S]]))
    columns = np.concatenate([np.ones((1, len(time_s))), lags_w, fades])
    mean, spread = _prior(ladder, limit_w, own_w[0], all_w[0])
    mean[0] = float(mean_c[read][0] - mean[1:5] @ columns[1:5, read][:, 0])
    theta, covariance = _least_squares(columns[:, read], mean_c[read], mean, spread)
    goal_w = np.array([own_w[inside].mean()] + 2 * [all_w[inside].mean()])[:, None]
    left = np.concatenate([np.zeros((2, len(time_s))), goal_w - lags_w[1:], -fades])
    likely_k, reach_k = mean @ left, np.sqrt(spread**2 @ left**2)
    left_k = np.clip(theta @ left, likely_k - CONFLICT * reach_k, likely_k + CONFLICT * reach_k)
    reached_c = np.where(inside & read, top_c + left_k, -np.inf)
    hottest = int(reached_c.argmax())
    variance = float(left[:, hottest] @ covariance @ left[:, hottest])
    if left_k[hottest] != (theta @ left)[hottest]:
        variance = float((CONFLICT * reach_k[hottest]) ** 2)  # the ladder is not this cooler's
    return Settled(
        start_c=float(mean_c[inside & read][0]),
        settled_c=float(reached_c[hottest]),
        uncertainty_k=NORMAL_95 * math.sqrt(variance + HIGHEST_K**2),
        mean_c=float((mean_c + left_k)[inside & read].mean()),
    )


def _cells(warm: Series, edges_s: Floats) -> tuple[Floats, Floats]:
    """Returns mean and largest reading of each cell; NaN where nothing was read."""
    cell = np.searchsorted(edges_s, warm.time_s, side="right") - 1
    used = (cell >= 0) & (cell < len(edges_s) - 1)
    cell, value = cell[used], warm.value[used]
    count = np.bincount(cell, minlength=len(edges_s) - 1)
    total = np.bincount(cell, weights=value, minlength=len(edges_s) - 1)
    top: Floats = np.full(len(edges_s) - 1, -np.inf)
    np.maximum.at(top, cell, value)
    return np.where(count > 0, total / np.maximum(count, 1), np.nan), np.where(count > 0, top, np.nan)


def _prior(c: ThermalCoefficients, limit_w: float, first_w: float, first_all_w: float) -> tuple[Floats, Floats]:
    """Returns means and standard deviations of the eight unknowns.

    The power before telemetry began was anything between rest and the limit, uniform: that is the heat stored at the
    start.
    """
    r1, r2 = c.resistances_k_per_w
    half = c.preheat_k_per_w / 2
    before_w, before_spread_w = (c.rest_w + limit_w) / 2, max(limit_w - c.rest_w, 0.0) / math.sqrt(12.0)
    chassis_k = CHASSIS_SHARE * c.error_k
    mean = np.array([0.0, r1, r2, half, 0.0, r2 * (before_w - first_w), half * (before_w - first_all_w), 0.0])
    spread = np.array(
        [
            100.0,
            RESISTANCE_SPREADS[0] * r1,
            RESISTANCE_SPREADS[1] * r2,
            2 * RESISTANCE_SPREADS[2] * half,
            chassis_k / limit_w,
            r2 * before_spread_w,
            2 * half * before_spread_w,
            chassis_k,
        ]
    )
    return mean, spread


def _least_squares(columns: Floats, value: Floats, mean: Floats, spread: Floats) -> tuple[Floats, Floats]:
    """Returns the posterior's mean and covariance; noise is `NOISE_K`, or more where the fit is worse than that."""
    scaled_columns = columns * spread[:, None]
    missing = value - mean @ columns
    noise = NOISE_K
    for _ in range(2):
        information = scaled_columns @ scaled_columns.T / noise**2 + np.eye(len(mean))
        found = np.linalg.solve(information, scaled_columns @ missing / noise**2)
        rms = float(np.sqrt(np.mean((missing - found @ scaled_columns) ** 2)))
        noise = max(NOISE_K, 2.0 * rms)
    covariance = np.linalg.inv(information) * np.outer(spread, spread)
    return mean + found * spread, covariance
