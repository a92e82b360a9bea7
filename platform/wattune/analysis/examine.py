"""Examination of one trial or recording: intermediate results for metrics, verdict and detail, computed once."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa

from wattune.analysis.metrics.energy import Powers, enforced_limit_w
from wattune.analysis.metrics.exposed_comm import busy_s, kernel_metrics, parts
from wattune.analysis.metrics.outlier import Outlier, outliers
from wattune.analysis.metrics.phases import Segments, segments, traces_by_device
from wattune.analysis.metrics.power import Synchronous, powers_together
from wattune.analysis.metrics.saturation import Saturation, link_peaks, saturation
from wattune.analysis.metrics.speed import step_times_s
from wattune.analysis.metrics.step_breakdown import UNDIVIDED_WAIT, Division, divide, replayed_shares
from wattune.analysis.metrics.thermal import Temperature, temperature
from wattune.analysis.metrics.throttle import CAP_WINDOW_S, Throttle, clock_max_mhz, device_throttle, with_cap_causes
from wattune.analysis.signals.align import Aligned, align
from wattune.analysis.signals.energy_grid import resolves
from wattune.analysis.signals.readings import Device, Readings, Tables
from wattune.analysis.signals.steady_state import steady_from
from wattune.catalog.hardware import DeviceSpec
from wattune.plans.parallel import num_micro_batches
from wattune.trial import TrialSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Examined:
    """Intermediate results of one trial or recording."""

    spec: TrialSpec | None
    spans: pa.Table | None
    tokens_per_step: float | None
    """Tokens of a step over all ranks; None where unknown."""
    aligned: Aligned
    num_unsteady_steps: int | None
    """Steps left out before the steady state; None if no steady state was found, in which case none were left out."""
    powers: Powers
    together: Synchronous
    temperatures: Mapping[Device, Temperature]
    throttles: Mapping[Device, Throttle]
    division: Division | None
    profiled: Mapping[str, float]
    """Share of rank-time by part from a profiled pass; empty without one, or if spans could divide the steps."""
    profiled_metrics: Mapping[str, float]
    """The same as metrics."""
    busy_s: float | None
    """Mean time of a step in which a device runs anything, from a profiled pass; None without one."""
    own_busy_s: float | None
    """The same without collectives."""
    ways: Mapping[Device, Segments]
    outliers: tuple[Outlier, ...]
    saturation: tuple[Saturation, ...]

    @property
    def sensed(self) -> DeviceSpec | None:
        """The device that telemetry describes; None for a recording."""
        return None if self.spec is None else self.spec.cluster.sensed_device


def examine(
    spec: TrialSpec | None,
    spans: pa.Table | None,
    tables: Tables,
    manifests: Mapping[str, Mapping[str, Any]],
    *,
    kernels: pa.Table | None = None,
    window: tuple[int, int] | None = None,
    chosen: bool = False,
    tokens_per_step: float | None = None,
) -> Examined | None:
    """Examines a trial or recording; see `wattune.analysis.summary.summarize` for the arguments.

    Steps in front of the steady state (`wattune.analysis.signals.steady_state.steady_from`) are left out, and the
    window begins after them; not where the steps were chosen before.

    Returns:
        The intermediate results, None where neither spans nor `window` give a window.
    """
    aligned = align(tables, spans, manifests, window=window)
    if aligned is None:
        return None
    unsteady: int | None = 0
    if aligned.steps is not None:
        unsteady = steady_from(step_times_s(aligned.steps))
        if unsteady and chosen:
            unsteady = 0
        elif unsteady:
            steady = aligned.steps.number[unsteady:].tolist()
            aligned = align(tables, spans, manifests, measured_steps=steady) or aligned
    traces, together = powers_together(aligned)
    sensed = None if spec is None else spec.cluster.sensed_device
    ways = {} if spans is None else segments(aligned, spans)
    clock_mhz = None if sensed is None else sensed.sm_clock_max_mhz
    core, throttles = clocks_and_temperatures(aligned, clock_mhz, traces, ways)
    division = _division(aligned, spans, spec)
    profiled, profiled_metrics = ({}, {}) if division is not None else _profiled(kernels, aligned, spans, spec)
    return Examined(
        spec=spec,
        spans=spans,
        tokens_per_step=spec.tokens_per_step if tokens_per_step is None and spec is not None else tokens_per_step,
        aligned=aligned,
        num_unsteady_steps=unsteady,
        powers=traces,
        together=together,
        temperatures=core,
        throttles=throttles,
        division=division,
        profiled=profiled,
        profiled_metrics=profiled_metrics,
        busy_s=None if kernels is None else busy_s(kernels),
        own_busy_s=None if kernels is None else busy_s(kernels, collectives=False),
        ways=ways,
        outliers=outliers(aligned, traces, spec, division),
        saturation=saturation(aligned, link_peaks(aligned, sensed), ways, divided=division is not None),
    )


def _profiled(
    kernels: pa.Table | None, aligned: Aligned, spans: pa.Table | None, spec: TrialSpec | None
) -> tuple[dict[str, float], dict[str, float]]:
    """Returns shares of a step by its kernels, compute as one and communication by axis, and the same as metrics.

    The waiting of a pipeline that cannot be replayed is one part, `wait`, and its metrics are absent.
    """
    if kernels is None or spec is None:
        return {}, {}
    plan = spec.plan
    count = num_micro_batches(plan, spec.cluster.world_size, spec.workload.global_batch_size)
    replay = None
    if plan.pp > 1 and spans is not None and aligned.steps is not None:
        replay = replayed_shares(spans, aligned.steps, plan, num_micro_batches=count)
        if replay is not None and not set(kernels["rank"].unique().to_pylist()) <= replay.keys():
            replay = None
    shares: dict[str, float] = {}
    for part, share in parts(kernels, plan, num_micro_batches=count, replay=replay).items():
        kind, _, rest = part.partition("_")
        name = {"compute": "compute", "comm": f"exposed_comm:{rest.partition('_')[0]}"}.get(kind, part)
        if plan.pp > 1 and replay is None and name in _UNTOLD:
            name = UNDIVIDED_WAIT
        shares[name] = shares.get(name, 0.0) + share
    order = sorted(shares, key=lambda name: (name != "compute", not name.startswith("exposed_comm")))
    metrics = kernel_metrics(kernels, plan, num_micro_batches=count, replay=replay)
    if plan.pp > 1 and replay is None:
        gone = ("exposed_comm_frac", "exposed_comm_pp_frac", "bubble_frac", "straggler_frac")
        metrics = {name: value for name, value in metrics.items() if name not in gone}
    return {name: shares[name] for name in order}, metrics


_UNTOLD: Final = ("exposed_comm:pp", "bubble", "straggler")
"""Parts of a profiled step that only a replay can tell apart."""


def clocks_and_temperatures(
    aligned: Aligned,
    otherwise_mhz: float | None,
    powers: Powers | None = None,
    ways: Mapping[Device, Segments] | None = None,
) -> tuple[dict[Device, Temperature], dict[Device, Throttle]]:
    """Returns temperature and throttling of every device in one pass; each is empty unless all devices have it.

    Args:
        aligned: The trial.
        otherwise_mhz: Maximum clock of devices whose manifest does not say it.
        powers: Its power traces; without them nobody knows when power was near the cap.
        ways: Its `segments`; without them nobody knows when a device computed.
    """
    core: dict[Device, Temperature] = {}
    throttles: dict[Device, Throttle] = {}
    for where, readings in zip(aligned.devices, aligned.readings("fast") or (), strict=False):
        warm = temperature(readings, aligned.duration_s)
        maximum_mhz = clock_max_mhz(aligned, where, otherwise_mhz)
        lost = None
        if maximum_mhz:
            caused = with_caps(aligned, powers, where, readings)
            lost = device_throttle(caused, maximum_mhz, aligned.duration_s, (ways or {}).get(where))
        core |= {} if warm is None else {where: warm}
        throttles |= {} if lost is None else {where: lost}
    whole = len(aligned.devices)
    return core if len(core) == whole else {}, throttles if len(throttles) == whole else {}


def with_caps(aligned: Aligned, powers: Powers | None, device: Device, readings: Readings) -> Readings:
    """Returns a device's readings with the power cause active only where its power is near the enforced limit."""
    trace, _ = traces_by_device(aligned, powers).get(device, (None, 0)) if powers is not None else (None, 0)
    if trace is None or not resolves(CAP_WINDOW_S, trace.sensor_period_s):
        return with_cap_causes(readings, None, None)
    return with_cap_causes(readings, trace.series, enforced_limit_w(aligned, trace))


def _division(aligned: Aligned, spans: pa.Table | None, spec: TrialSpec | None) -> Division | None:
    if spans is None or aligned.steps is None or spec is None or not spec.workload.is_known:
        return None
    count = num_micro_batches(spec.plan, spec.cluster.world_size, spec.workload.global_batch_size)
    return divide(spans, aligned.steps, spec.plan, num_micro_batches=count)
