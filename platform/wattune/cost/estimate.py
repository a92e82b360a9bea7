"""Estimates of candidates: memory, step time, power and temperature joined, each with a 95 % interval.

Every figure has the name of the metric it predicts. An estimate and a result never share a table.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from wattune.arrays import Ints
from wattune.catalog.hardware import ClusterSpec, DeviceSpec
from wattune.cost import power, temperature
from wattune.cost.batch import Batch, batches
from wattune.cost.coefficients import (
    ORIGINS,
    MemoryCoefficients,
    Origin,
    PowerCoefficients,
    StepTimeCoefficients,
    ThermalCoefficients,
)
from wattune.cost.flops import workload_flop_per_token
from wattune.cost.memory.predict import predict as predict_memory
from wattune.cost.step_time.facts import FACTS
from wattune.cost.step_time.predict import predict as predict_step_time
from wattune.cost.tables import FULL_MEMORY_FRAC, FULL_MEMORY_LONGER_FRAC, EstimatedMetric, Memory, StepTime
from wattune.errors import PlanError
from wattune.metrics import METRICS
from wattune.trial import TrialSpec

Reals = npt.NDArray[np.float32]

ROWS: Final = 8192
"""Candidates predicted at once: as many as caches and memory hold."""

_OF_PARTS: Final = {
    "pipeline bubble": "bubble_s",
    **{f"communication {kind}": f"exposed_comm_{kind}_s" for kind in ("tp", "ep", "cp", "dp", "pp")},
    "host": "other_s",
    "slowest rank": "straggler_s",
}

LIMITS: Final = ("matrix units", "memory bandwidth", "power limit", *_OF_PARTS)
"""Largest uses of a step's time, by which it is said to be limited."""

PROFILE_FRACS: Final = (0.1, 0.03)
"""Shares by which a power profile may shorten and lengthen a step on B200 and Hopper (NVIDIA, "Datacenter Energy
Optimized Power Profiles", 2025). Which does what to a plan is not known."""

SLOWED_FRAC: Final = 0.97
"""Clock below which computing counts as limited by power."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Coefficients:
    """All that predictions of one kind of device need beside the catalog."""

    memory: MemoryCoefficients
    step_time: StepTimeCoefficients
    power: PowerCoefficients
    thermal: ThermalCoefficients
    fit: str = ""
    """Name of the stored fit that replaced defaults; empty where none did."""
    unmeasured_links: str = ""
    """Links of the cluster that nobody measured, as `StepTimeCoefficients.unmeasured` names them (by `on`)."""

    @property
    def origins(self) -> dict[str, Origin]:
        """Origin of the coefficients behind each kind of figure."""
        return {
            "memory": self.memory.origin,
            "step time": self.step_time.origin,
            "power": self.power.origin,
            "temperature": self.thermal.origin,
        }

    def on(self, cluster: ClusterSpec) -> "Coefficients":
        """Returns them for a cluster, as far as its nodes and its network were measured."""
        where = cluster.num_domains, cluster.network
        return replace(
            self, step_time=self.step_time.across(*where), unmeasured_links=self.step_time.unmeasured(*where)
        )

    @property
    def origin(self) -> Origin:
        """The least trusted of them."""
        return max(self.origins.values(), key=ORIGINS.index)


Find = Callable[[DeviceSpec], Coefficients]
"""Finds the coefficients of a device, or raises `PlanError` where it cannot be predicted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimates:
    """Predictions of candidates, in their order."""

    columns: Mapping[str, EstimatedMetric]
    """Columns by the names of `wattune.metrics.METRICS`."""
    memory_parts_bytes: Mapping[str, Reals]
    """Bytes of the fullest rank by part; they add up to `memory_peak_bytes`."""
    step_parts_s: Mapping[str, Reals]
    """Seconds of the average rank by part, such as `compute` or `exposed_comm_tp`; they add up to `step_time_s`."""
    stage: npt.NDArray[np.int16]
    """Pipeline stage of that rank."""
    limited_by: npt.NDArray[np.int8]
    """Index in `LIMITS`."""
    origin: npt.NDArray[np.int8]
    """Index in `ORIGINS` of the least trusted coefficient."""

    def __len__(self) -> int:
        return len(self.stage)

    def one(self, position: int) -> dict[str, dict[str, float]]:
        """Returns the figures of one candidate, by metric: `value`, `low`, `high`."""
        return {
            name: {"value": float(c.value[position]), "low": float(c.low[position]), "high": float(c.high[position])}
            for name, c in self.columns.items()
        }

    def whole(self, position: int) -> dict[str, Any]:
        """Returns all of one candidate as plain data: figures, parts that are not 0, limit, origin."""

        def parts(of: Mapping[str, Reals]) -> dict[str, float]:
            return {name: float(part[position]) for name, part in of.items() if part[position]}

        return {
            "estimate": self.one(position),
            "step_parts_s": parts(self.step_parts_s),
            "memory_parts_bytes": parts(self.memory_parts_bytes),
            "limited_by": LIMITS[self.limited_by[position]],
            "origin": ORIGINS[self.origin[position]],
        }

    def take(self, positions: Ints) -> "Estimates":
        """Returns the candidates at these positions, in that order."""
        return Estimates(
            columns={name: column.at(positions) for name, column in self.columns.items()},
            memory_parts_bytes={name: part[positions] for name, part in self.memory_parts_bytes.items()},
            step_parts_s={name: part[positions] for name, part in self.step_parts_s.items()},
            stage=self.stage[positions],
            limited_by=self.limited_by[positions],
            origin=self.origin[positions],
        )

    def table(self) -> pa.Table:
        """Returns all columns as Arrow: `estimate.<metric>`, `.low`, `.high`, parts, limit, origin."""
        columns: dict[str, Any] = {}
        for name, column in self.columns.items():
            columns |= {f"estimate.{name}{end}": getattr(column, end[1:] or "value") for end in ("", ".low", ".high")}
        columns |= {f"estimate.memory.{name}_bytes": part for name, part in self.memory_parts_bytes.items()}
        columns |= {f"estimate.step.{name}_s": part for name, part in self.step_parts_s.items()}
        for name, places, texts in (("limited_by", self.limited_by, LIMITS), ("origin", self.origin, ORIGINS)):
            columns[f"estimate.{name}"] = pa.DictionaryArray.from_arrays(pa.array(places), pa.array(texts))
        return pa.table(columns)


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """Predictions of one batch, part by part, before they are joined."""

    memory: Memory
    step: StepTime
    power: Mapping[str, EstimatedMetric]
    temp_c: EstimatedMetric
    """Of the warmest device in the steady state."""


def estimate(specs: Sequence[TrialSpec], find: Find) -> Estimates:
    """Predicts every effective specification that no rule rejects, in their order and independent of it.

    Raises `PlanError` where a device cannot be predicted: the catalog lacks its peaks.
    """
    total = len(specs)
    columns = {
        name: EstimatedMetric(
            value=np.full(total, np.nan), **{end: np.full(total, np.nan, np.float32) for end in ("low", "high")}
        )
        for name in ESTIMATED
    }
    memory_parts: dict[str, Reals] = {}
    step_parts: dict[str, Reals] = {}
    stage, limited_by, origin = np.zeros(total, np.int16), np.zeros(total, np.int8), np.zeros(total, np.int8)
    for positions, batch in _pieces(specs):
        coefficients = find(batch.device).on(batch.cluster)
        found = predict(batch, coefficients)
        figures = _figures(batch, found)
        for name, column in columns.items():
            for end in ("value", "low", "high"):
                getattr(column, end)[positions] = getattr(figures[name], end)
        for name, size_bytes in found.memory.parts_bytes.items():
            memory_parts.setdefault(name, np.zeros(total, np.float32))[positions] = size_bytes
        for name, seconds in found.step.parts_s.items():
            step_parts.setdefault(name.removesuffix("_s"), np.zeros(total, np.float32))[positions] = seconds
        stage[positions] = found.memory.stage
        limited_by[positions] = _limited_by(batch, found.step)
        origin[positions] = ORIGINS.index(coefficients.origin)
    return Estimates(
        columns=columns,
        memory_parts_bytes=memory_parts,
        step_parts_s=step_parts,
        stage=stage,
        limited_by=limited_by,
        origin=origin,
    )


def predict(batch: Batch, coefficients: Coefficients) -> Parts:
    """Predicts one batch, part by part.

    Raises `PlanError` where the catalog lacks a peak or the power limit of its device.
    """
    if batch.device.power_limit_w is None:
        raise PlanError(unpredictable(batch.device))
    step = predict_step_time(batch, coefficients.step_time, coefficients.power)
    memory = predict_memory(batch, coefficients.memory)
    facts = FACTS[coefficients.step_time.software or batch.engine]
    copies = (batch.dp_replicate > 1) & (batch.sharding >= 2)  # their gradients are reduced into memory of their stream
    full_frac = np.where(copies, FULL_MEMORY_FRAC, facts.full_memory_frac)
    full = memory.peak_bytes >= full_frac * (batch.device.memory_bytes or np.inf)
    longer_frac = np.maximum(step.longer_frac, np.where(full, FULL_MEMORY_LONGER_FRAC, 0.0))
    step = replace(step, longer_frac=longer_frac, fills_memory=full)
    drawn = power.predict(batch, step, coefficients.power)
    hottest, node = drawn["device_power_mean_max_w"], drawn["node_device_power_mean_w"]
    temp_c = temperature.predict(batch, hottest.value, node.value, coefficients.thermal)
    return Parts(memory=memory, step=step, power=drawn, temp_c=temp_c)


def unpredictable(device: DeviceSpec) -> str:
    """Says why a device has no estimates."""
    return (
        f'"{device.name}" has no estimates: its peaks and power limit are not in the catalog; '
        "use an accelerator of `wattune catalog`, or set simulate_sensors_of to one"
    )


def _pieces(specs: Sequence[TrialSpec]) -> Iterator[tuple[Ints, Batch]]:
    """Yields batches of bounded size, with the positions of their candidates."""
    for start in range(0, len(specs), ROWS):
        for positions, batch in batches(specs[start : start + ROWS]):
            yield positions + start, batch


ESTIMATED: Final = (
    *("memory_peak_bytes", "memory_headroom_frac", "step_time_s", "tokens_per_s", "tokens_per_s_per_device"),
    *("mfu_frac", "energy_per_token_j", "device_power_mean_w", "device_power_peak_1s_w", "device_power_peak_100ms_w"),
    *("device_power_peak_20ms_w", "node_device_power_mean_w", "node_device_power_peak_1s_w"),
    *("node_device_power_peak_100ms_w", "device_temp_max_c", "clock_deficit_frac"),
)
"""Metrics that are predicted."""

assert set(ESTIMATED) <= METRICS.keys(), "estimates have the names of metrics"


def _figures(batch: Batch, found: Parts) -> dict[str, EstimatedMetric]:
    """Joins the parts of one batch to figures."""
    world, tokens = batch.cluster.world_size, batch.workload.tokens_per_step
    size = EstimatedMetric.within(found.memory.peak_bytes, found.memory.error_frac)
    s, step_s = found.step, found.step.step_time_s
    shorter, longer = (each * batch.profiled for each in PROFILE_FRACS)
    least_s = step_s * np.maximum(1.0 - s.error_frac - shorter, 0.0)
    step = EstimatedMetric(value=step_s, low=least_s, high=step_s * (1.0 + s.longer_frac + longer))
    figures = {
        "memory_peak_bytes": size,
        "step_time_s": step,
        "tokens_per_s": step.under(tokens),
        "tokens_per_s_per_device": step.under(tokens / world),
        **found.power,
        "device_temp_max_c": found.temp_c,
    }
    peak, room = batch.device.peak_flop_per_s(batch.dtype), batch.device.memory_bytes
    if peak is None or room is None:
        raise PlanError(unpredictable(batch.device))
    flop = tokens * workload_flop_per_token(batch.model, batch.workload)
    figures["mfu_frac"] = step.under(flop / (world * peak))
    left = (1 - one / room for one in (size.value, size.high, size.low))
    figures["memory_headroom_frac"] = EstimatedMetric(**dict(zip(("value", "low", "high"), left, strict=True)))
    return figures


def _limited_by(batch: Batch, step: StepTime) -> npt.NDArray[np.int8]:
    """Finds what most of a step's time goes to; computing is limited by matrix units, memory or the power limit."""
    activity = step.activity
    matrix_s, memory_s = activity.matrix_s.sum(1), activity.memory_s.sum(1)
    of_matrix = matrix_s / np.maximum(matrix_s + memory_s, 1e-12)
    slowest = np.where(activity.matrix_s > 0, activity.clock_frac, 1.0).min(1)
    compute_s = step.parts_s["compute_s"]
    matrix_part_s = compute_s * of_matrix
    is_slowed = slowest < SLOWED_FRAC * batch.locked_frac
    seconds = {
        "matrix units": np.where(is_slowed, 0.0, matrix_part_s),
        "power limit": np.where(is_slowed, matrix_part_s, 0.0),
        "memory bandwidth": compute_s - matrix_part_s,
    }
    zero = np.zeros(len(batch))
    seconds |= {limit: step.parts_s.get(part, zero) for limit, part in _OF_PARTS.items()}
    largest: npt.NDArray[np.int8] = np.argmax(np.stack([seconds[limit] for limit in LIMITS]), axis=0).astype(np.int8)
    return largest
