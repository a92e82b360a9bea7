"""Temperature of a node's devices under a predicted power, in the steady state."""

from dataclasses import replace
from typing import Final

import numpy as np

from wattune.arrays import Floats
from wattune.catalog.hardware import DeviceSpec, chip_of
from wattune.cost.batch import Batch
from wattune.cost.coefficients import ThermalCoefficients
from wattune.cost.tables import EstimatedMetric

H200: Final = ThermalCoefficients(
    inlet_c=31.0,  # between 27.0 and 35.2 of two hosts: give a host's own
    resistances_k_per_w=(0.0315, 0.0038),
    time_constants_s=(0.38, 98.0),
    preheat_k_per_w=0.0137,
    preheat_time_constant_s=4.7,
    leakage_w_per_k=0.5,  # slope of power on temperature at rest and the highest clock, 31 to 54 degC: 0.45 and 0.62
    reference_c=57.0,
    rest_w=77.5,
    origin="measured here",
    error_k=8.0,  # half the distance of the two hosts' inlets, doubled; 4 K remain where the inlet is known
)
"""Fitted to eight minutes of varying load on four H200s (`tests/fakes/host_temperature.py`). On another host, fitted
apart, the warmest slot has the same sum of resistances within 2 %."""

H200_LIMIT_W: Final = 700.0

DATASHEET_ERROR_K: Final = 20.0
"""Assumed where only a power limit is known."""


def thermal_coefficients(device: DeviceSpec) -> ThermalCoefficients | None:
    """Returns the coefficients of a device without a fit of its own; None where its power limit is unknown.

    A device other than H200 is that fit scaled by power limits, so that coolers of both reach the same temperature at
    the limit.
    """
    device = chip_of(device)
    if device.name == "h200_sxm":
        return H200
    return None if device.power_limit_w is None else scaled(device.power_limit_w)


def scaled(limit_w: float) -> ThermalCoefficients:
    """Returns the coefficients of a device of which only the power limit is known, in watts."""
    share = limit_w / H200_LIMIT_W
    return replace(
        H200,
        resistances_k_per_w=tuple(each / share for each in H200.resistances_k_per_w),
        preheat_k_per_w=H200.preheat_k_per_w / share,
        leakage_w_per_k=H200.leakage_w_per_k * share,
        rest_w=H200.rest_w * share,
        origin="datasheet",
        error_k=DATASHEET_ERROR_K,
    )


def inlet_at_rest(temp_c: float, power_w: float, coefficients: ThermalCoefficients) -> float:
    """Computes a device's inlet where all devices of its node rest at that temperature and power."""
    return temp_c - (sum(coefficients.resistances_k_per_w) + coefficients.preheat_k_per_w) * power_w


def lagged(power_w: Floats, tau_s: float, cell_s: float) -> Floats:
    """Computes the first-order lag of a power that is constant over each cell, as the mean over each cell.

    It starts in balance with the first cell. Exact: the solution of tau dx/dt = P - x, averaged over the cell. Power is
    [..., cells].
    """
    from scipy.signal import lfilter  # estimates do not wait for it

    keep, first = np.exp(-cell_s / tau_s), power_w[..., :1]
    state, _ = lfilter([1.0 - keep], [1.0, -keep], power_w, zi=keep * first)
    before = np.concatenate([first, state[..., :-1]], axis=-1)
    return np.asarray(power_w + (before - power_w) * tau_s / cell_s * (1.0 - keep))


def predict(batch: Batch, own_w: Floats, node_w: Floats, coefficients: ThermalCoefficients) -> EstimatedMetric:
    """Predicts the temperature of the warmest device: the one that draws most, in the slot that is heated most.

    In degrees Celsius in the steady state. `own_w` is the mean power of that device, `node_w` of all of its node.
    """
    c = coefficients.with_inlet(batch.cluster.inlet_c)
    others = batch.cluster.devices_per_node > 1
    upstream_w = node_w / batch.cluster.devices_per_node * others
    warm_c = _steady(c, own_w, upstream_w, others, batch.limit_w)
    return EstimatedMetric(value=warm_c, low=warm_c - c.error_k, high=warm_c + c.error_k)


def _steady(c: ThermalCoefficients, own_w: Floats, upstream_w: Floats, others: bool, limit_w: Floats) -> Floats:
    """Solves T = inlet + R (P + leak) + preheat (P_up + leak), leak = leakage * (T - reference), for T.

    It is linear in T. The leak is bounded by the room below the power limit. Raises `ValueError` where each kelvin
    leaks more heat than one kelvin takes to carry off, so that no steady state exists.
    """
    resistance = sum(c.resistances_k_per_w) + c.preheat_k_per_w * others
    gain = resistance * c.leakage_w_per_k
    if gain >= 1:
        raise ValueError(f"leakage of {c.leakage_w_per_k} W/K through {resistance} K/W has no steady state; lower one")
    dry_c = c.inlet_c + sum(c.resistances_k_per_w) * own_w + c.preheat_k_per_w * upstream_w
    free_w = c.leakage_w_per_k * (dry_c - c.reference_c) / (1.0 - gain)
    leaked_w = np.minimum(free_w, np.maximum(limit_w - own_w, 0.0))
    return dry_c + resistance * leaked_w
