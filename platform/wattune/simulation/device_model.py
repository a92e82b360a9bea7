"""Physics of a simulated device, from work to power, clock and temperature; used by `wattune.simulation.sensors`.

A model with a stated error, not truth: parameters are fitted to two recordings of one host and its error on a third is
asserted (`tests/golden/test_simulated_h200.py`): mean power of a device and 1 s peak of
the node within 5 %, rise of temperature within 10 %; the highest single 20 ms samples come out up to 20 % too high.
All arrays are (devices, cells) on a common grid of `CELL_S` seconds; devices of one call share a node and its air.
"""

from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import numpy.typing as npt

from wattune.catalog.hardware import DEVICES, DeviceSpec
from wattune.cost.clock import limited_frac, slowed_frac
from wattune.errors import SensorChoiceError

Array = npt.NDArray[np.float64]

CELL_S: Final = 0.01
"""Grid of the model: half the finest sensor period (20 ms ring), so that no table shows the grid."""

KINDS: Final = ("tensor", "memory", "link", "wait", "other")
"""Uses of a device's time: matrix products, memory-bound kernels, exposed communication, waiting for another rank, and
time inside a step that nothing explains."""

CLOCK_STEP_MHZ: Final = 15.0
"""Clocks come in whole steps (all recordings)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceModel:
    """A device's simulated physics: parameters of its power and clock, then of its temperature.

    With u the intensity (the shares of `KINDS` weighted by `intensity`, 1 being an endless large matrix product) and
    f the clock: P = P_floor + dynamic_power_w * u * (f / f_max) ** clock_exponent, where P_floor is
    `ready_power_w`, or `idle_power_w` where nothing has run for `idle_hold_s`. Where a lower limit or a
    lock takes the clock below that of `fitted_limit_w`, what lies below follows `wattune.cost.clock.LIMIT_EXPONENT`.

    Temperature has two first-order stages per slot and warm air from the slot upstream. With L(P, tau) the first-order
    lag of power and `up` the slot upstream:
    T = inlet_c + die_c_per_w[slot] * L(P, die_tau_s) + sink_c_per_w * L(P, sink_tau_s)
      + air_c_per_w * L(P_up, sink_tau_s).
    Memory has its own first stage and inlet offset, and the same air. The recordings last 15 s: what warms over minutes
    (recorded temperatures still climb 3 to 9 degC a minute at their end) is not in the model.
    """

    name: str
    source: str
    """The recordings the parameters were fitted to, or the fit they were scaled from."""
    limit_w: float
    """Limit that holds now."""
    fitted_limit_w: float
    """Limit under which `clock_exponent` was fitted."""
    clock_max_mhz: float
    clock_idle_mhz: float
    clock_lock_mhz: float = np.inf
    """Clock that the device is locked to; infinite where it is not."""
    tensor_cores: bool = True
    """True where products run on tensor cores."""
    temp_slowdown_c: float | None = None
    idle_power_w: float
    """Nothing on the device; lowest clock."""
    ready_power_w: float
    """A process holds the device, nothing runs; highest clock."""
    dynamic_power_w: float
    """Added by matrix products without pause at the highest clock."""
    clock_exponent: float
    """Effective, not physical: times are those of the spans, while a real device at a lower clock takes longer for the
    same work and is busier meanwhile, so power falls less with the clock here than the cubic law says."""
    intensity: tuple[float, ...]
    """Power of each of `KINDS` relative to matrix products, at the same clock."""
    noise_frac: float
    """Standard deviation of intensity from one 20 ms slot to the next, relative to its mean."""
    cap_target_frac: float
    """Share of the limit that the cap regulates to."""
    cap_window_s: float
    """The cap acts on the mean of demanded power over this long; shorter bursts pass above the limit."""
    cap_hold_s: float
    """Time after demand last passed the limit for which the cap is still reported and its counter runs."""
    idle_hold_s: float
    """Time after the last work for which a device stays ready."""
    inlet_c: float
    die_c_per_w: tuple[float, ...]
    """By slot; slots beyond the fitted ones repeat the pattern."""
    die_tau_s: float
    sink_c_per_w: float
    sink_tau_s: float
    air_c_per_w: float
    upstream: tuple[int | None, ...]
    """By slot: the slot whose warm air reaches it. Not recorded; hotter slots are assumed behind cooler ones."""
    memory_inlet_c: float
    memory_c_per_w: float
    memory_tau_s: float
    memory_sink_c_per_w: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceTrace:
    """Result of the model, each (devices, cells); a value holds over its cell."""

    power_w: Array
    clock_mhz: Array
    capped: npt.NDArray[np.bool_]
    """True while the cap is reported, see `DeviceModel.cap_hold_s`."""
    idle: npt.NDArray[np.bool_]
    """True where nothing ran for `DeviceModel.idle_hold_s`."""
    gpu_temp_c: Array
    memory_temp_c: Array


_H200 = DeviceModel(
    name="h200_sxm",
    limit_w=700.0,
    fitted_limit_w=700.0,
    clock_max_mhz=1980.0,
    clock_idle_mhz=345.0,
    idle_power_w=77.4,
    ready_power_w=118.4,
    dynamic_power_w=804.8,
    clock_exponent=0.906,
    # memory: 520 W at 1.8 GHz in the optimizer of dp4; link, wait and other are assumed.
    intensity=(1.0, 0.55, 0.15, 0.06, 0.12),
    noise_frac=0.168,
    cap_target_frac=0.99,  # 692.6 W of 700 by the energy counter: bf16 8192^3 products without pause on one H200
    cap_window_s=0.07,
    cap_hold_s=0.45,
    idle_hold_s=1.7,
    inlet_c=26.9,
    die_c_per_w=(0.0338, 0.0350, 0.0347, 0.0352),
    die_tau_s=0.15,
    sink_c_per_w=0.00447,
    sink_tau_s=4.0,
    air_c_per_w=0.00865,
    upstream=(1, None, None, 2),
    memory_inlet_c=29.6,
    memory_c_per_w=0.00953,
    memory_tau_s=0.4,
    memory_sink_c_per_w=0.01044,
    source="fitted to dp4 and square_inphase of tests/golden/h200x4; tested on tp2pp2",
)


def device_model(device: DeviceSpec) -> DeviceModel:
    """The model of a catalog device.

    Only `h200_sxm` is fitted. Another accelerator is that fit scaled, and not checked against any recording: powers by
    the ratio of power limits, thermal resistances by its inverse (so that temperatures at the limit are the same),
    clocks by the ratio of highest clocks. Raises `SensorChoiceError` where the catalog gives the device no power limit
    or clock, as for `cpu`.
    """
    if device.name == _H200.name:
        return replace(_H200, temp_slowdown_c=device.temp_slowdown_c)
    if device.power_limit_w is None or device.sm_clock_max_mhz is None:
        known = [name for name, one in DEVICES.items() if one.power_limit_w and one.sm_clock_max_mhz]
        raise SensorChoiceError(
            f'the sensors of "{device.name}" cannot be simulated: its power limit or clock is not in the catalog; '
            f"set simulate_sensors_of to one of: {', '.join(known)}"
        )
    watts = device.power_limit_w / _H200.limit_w
    clocks = device.sm_clock_max_mhz / _H200.clock_max_mhz
    powers = ("idle_power_w", "ready_power_w", "dynamic_power_w")
    resistances = ("sink_c_per_w", "air_c_per_w", "memory_c_per_w", "memory_sink_c_per_w")
    return replace(
        _H200,
        name=device.name,
        temp_slowdown_c=device.temp_slowdown_c,
        limit_w=device.power_limit_w,
        fitted_limit_w=device.power_limit_w,
        clock_max_mhz=device.sm_clock_max_mhz,
        clock_idle_mhz=_whole_steps(np.asarray(_H200.clock_idle_mhz * clocks)).item(),
        die_c_per_w=tuple(value / watts for value in _H200.die_c_per_w),
        source=f"scaled from the h200_sxm fit by power limit and highest clock; not fitted: {device.source}",
        **{name: watts * getattr(_H200, name) for name in powers},
        **{name: getattr(_H200, name) / watts for name in resistances},
    )


def run(model: DeviceModel, shares: Array, slots: list[int], noise: Array) -> DeviceTrace:
    """Computes power, clock and temperature of the devices of one node.

    `shares` of each cell go to each of `KINDS`, (devices, kinds, cells), with a sum of at most 1; `noise` is the
    relative deviation of intensity, (devices, cells), standard normal: the model scales it.
    """
    intensity = np.einsum("k,dkn->dn", np.asarray(model.intensity), shares)
    idle = ~_within(intensity > 0, model.idle_hold_s)
    floor_w = np.where(idle, model.idle_power_w, model.ready_power_w)
    noisy = intensity * np.maximum(1 + model.noise_frac * noise, 0.0)
    demand_w = model.dynamic_power_w * np.minimum(noisy, 1.0)  # nothing draws more than endless products
    clock_mhz, own_mhz, capped = _clock(model, demand_w, idle)
    clocks = clock_mhz / model.clock_max_mhz, own_mhz / model.clock_max_mhz
    power_w = floor_w + demand_w * slowed_frac(model.clock_exponent, *clocks)
    gpu_temp_c, memory_temp_c = temperatures(model, power_w, slots)
    return DeviceTrace(
        power_w=power_w,
        clock_mhz=clock_mhz,
        capped=capped,
        idle=idle,
        gpu_temp_c=gpu_temp_c,
        memory_temp_c=memory_temp_c,
    )


def _clock(
    model: DeviceModel, demand_w: Array, idle: npt.NDArray[np.bool_]
) -> tuple[Array, Array, npt.NDArray[np.bool_]]:
    """Clock, that under the limit of the fit, and whether the cap is reported, from the power demanded at the highest.

    The cap solves P_floor + mean dynamic power = `cap_target_frac` * limit for f, with the mean over `cap_window_s`
    before. While it is reported the clock stays a step below the highest, as recorded (1,965 of 1,980 MHz).
    """
    fitted_w = max(model.limit_w, model.fitted_limit_w)
    own_w, room_w = (
        max(model.cap_target_frac * limit_w - model.ready_power_w, 1.0) for limit_w in (fitted_w, model.limit_w)
    )
    mean_w = moving_mean(demand_w, model.cap_window_s)
    capped = _within(demand_w > room_w, model.cap_hold_s)
    highest = np.where(capped, model.clock_max_mhz - CLOCK_STEP_MHZ, model.clock_max_mhz)
    own_mhz, clock_mhz = (
        np.minimum(
            highest,
            _whole_steps(model.clock_max_mhz * limited_frac(model.clock_exponent, mean_w, own_w, one_w)),
        )
        for one_w in (own_w, room_w)
    )
    clock_mhz = np.minimum(clock_mhz, model.clock_lock_mhz)
    return np.where(idle, model.clock_idle_mhz, clock_mhz), own_mhz, capped


def temperatures(model: DeviceModel, power_w: Array, slots: list[int]) -> tuple[Array, Array]:
    """Core and memory temperature (devices, cells) of one node, in thermal balance with the first cell at the start."""
    die, sink, memory = lag(power_w, (model.die_tau_s, model.sink_tau_s, model.memory_tau_s))
    air = model.air_c_per_w * upstream_of(model, sink, slots)
    die_c_per_w = np.array([model.die_c_per_w[slot % len(model.die_c_per_w)] for slot in slots])[:, None]
    core_c = model.inlet_c + die_c_per_w * die + model.sink_c_per_w * sink + air
    memory_c = model.memory_inlet_c + model.memory_c_per_w * memory + model.memory_sink_c_per_w * sink + air
    return core_c, memory_c


def upstream_of(model: DeviceModel, heat: Array, slots: list[int]) -> Array:
    """The heat given to the air by each device's upstream neighbour, 0 where there is none; shape of `heat`."""
    period = len(model.upstream)
    rows = {slot: row for row, slot in enumerate(slots)}
    result = np.zeros_like(heat)
    for row, slot in enumerate(slots):
        neighbour = model.upstream[slot % period]
        source = None if neighbour is None else rows.get(slot - slot % period + neighbour)
        if source is not None:
            result[row] = heat[source]
    return result


def lag(power_w: Array, taus_s: tuple[float, ...]) -> Array:
    """First-order lags, exact for power constant over each cell and begun in balance: (taus, devices, cells)."""
    from scipy.signal import lfilter  # spaces that simulate nothing do not wait for it

    keeps = np.exp(-CELL_S / np.asarray(taus_s))
    return np.stack([lfilter([1 - keep], [1, -keep], power_w, zi=keep * power_w[:, :1])[0] for keep in keeps])


def moving_mean(values: Array, window_s: float) -> Array:
    """Mean over the window that ends with each cell; before a whole window has passed, the first cell is repeated."""
    width = max(round(window_s / CELL_S), 1)
    padded = np.concatenate([np.repeat(values[:, :1], width, axis=1), values], axis=1)
    sums = np.cumsum(padded, axis=1)
    return np.asarray((sums[:, width:] - sums[:, :-width]) / width)


def _within(condition: npt.NDArray[np.bool_], hold_s: float) -> npt.NDArray[np.bool_]:
    """Marks the cells in which a condition holds or held at most `hold_s` ago."""
    cells = np.arange(condition.shape[1])
    hold = round(hold_s / CELL_S)
    last = np.maximum.accumulate(np.where(condition, cells, -hold - 1), axis=1)
    return np.asarray(cells - last <= hold)


def _whole_steps(clock_mhz: Array) -> Array:
    return np.asarray(np.floor(clock_mhz / CLOCK_STEP_MHZ + 1e-9) * CLOCK_STEP_MHZ)
