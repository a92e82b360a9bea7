"""A run as data, and the findings in it: every figure, verdict and picture begins with `RunData`."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Final, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from wattune.analysis.metrics.doubts import OF_POWER, OF_TEMPERATURE, doubts
from wattune.analysis.metrics.energy import Powers, PowerTrace, enforced_limit_w, total_energy_j
from wattune.analysis.metrics.exposed_comm import kernel_metrics, parts, running_s
from wattune.analysis.metrics.outlier import Outlier, outliers
from wattune.analysis.metrics.phases import Segments, segments, traces_by_device
from wattune.analysis.metrics.power import powers_together
from wattune.analysis.metrics.saturation import Saturation, link_peaks, saturation
from wattune.analysis.metrics.settled import Settled, settled_temperatures
from wattune.analysis.metrics.speed import step_times_s
from wattune.analysis.metrics.step_breakdown import UNDIVIDED_WAIT, Division, divide, host_bound_frac, replayed_shares
from wattune.analysis.metrics.thermal import CoreTemperature, temperature
from wattune.analysis.metrics.throttle import Throttle, clock_max_mhz, device_throttle, with_caps
from wattune.analysis.signals.align import Aligned, align, clock_anchors_ns
from wattune.analysis.signals.clock_check import clock_problems
from wattune.analysis.signals.readings import HOST, Tables, TierSource, as_source
from wattune.analysis.signals.schema_check import schema_problems
from wattune.analysis.signals.steady_state import steady_from
from wattune.arrays import Floats
from wattune.catalog.hardware import DeviceSpec
from wattune.errors import PlanError
from wattune.metrics import METRICS
from wattune.plans.parallel import num_micro_batches
from wattune.run import NO_NUMBERS, Numbers
from wattune.schema import BOUNDS, TELEMETRY, DeviceKey
from wattune.steps.files import MOST_TOKENS
from wattune.storage.digests import NO_DIGESTS, FileCheck
from wattune.storage.measured import RecordingFolder
from wattune.storage.study import TrialFolder
from wattune.trial import TrialSpec
from wattune.units import ns_to_s

NOTHING_TOLD: Final[Mapping[str, float]] = {}

WINDOW_NODE: Final = "window_node"
"""Tag of a trial whose window is the run of its command: the first node, on whose clock the window is."""

_HOST_GAUGES: Final = tuple(one.name for one in TELEMETRY[HOST] if (one.metadata or {}).get(b"kind") == b"gauge")


@dataclass(frozen=True, kw_only=True)
class RunData:
    """Measurements of one run, of a trial or of a recording, and facts that the run told of itself."""

    tables: Tables = field(default_factory=dict)
    """Telemetry by tier, all nodes together; a tier that was not recorded is absent."""
    spans: pa.Table | None = None
    """Spans of all ranks; None where there are none."""
    kernels: pa.Table | None = None
    """Kernels of the profiled steps (`wattune.schema.KERNELS`): they divide a step if its spans cannot."""
    manifests: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """The manifest of each node's sampler, by node."""
    spec: TrialSpec | None = None
    """Specification; None for a recording, which then has no MFU, shares of link peaks or decomposition."""
    window: tuple[int, int] | None = None
    """Start and end of the command in nanoseconds of the reference node's wall clock. With spans it is theirs."""
    chosen: bool = False
    """True where the steps from 0 on were chosen as the window already, by a person or by the recorder. All of them
    count then; else those in front of the steady state are left out."""
    told_tokens_per_step: float | None = None
    """Tokens of a step over all ranks, where the program told them."""
    memory_peak_bytes: Sequence[int] = ()
    """Every rank's highest memory, or that of the rank that used most."""
    told: Mapping[str, float] = field(default_factory=dict)
    """Metrics that only its processes know, by name."""
    tags: Mapping[str, str] = field(default_factory=dict)
    """Tags of a trial, which say how much of it was measured (`wattune.fidelity`)."""
    numbers: Numbers = NO_NUMBERS
    """Numbers that a trial told of itself."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """A recording's own manifest."""
    files: FileCheck = NO_DIGESTS
    """Agreement of the folder's files with their digests."""

    @classmethod
    def of(cls, path: Path) -> Self:
        """Reads the folder of a trial or of a recording that is closed; its tables are read as they are needed.

        Raises `PlanError`: its specification cannot be read, `TelemetryError`: a table or manifest in it cannot be
        read, `ImpossibleValueError`: a value in it cannot be.
        """
        folder, facts = TrialFolder(path), RecordingFolder(path).facts()
        data = cls(
            tables=folder.stored(),
            spans=folder.spans(),
            kernels=folder.kernels(),
            manifests=folder.manifests(),
            spec=folder.spec() if (path / "spec.json").exists() else None,
        ).of_recording(facts)
        with suppress(PlanError):  # what the ranks told is unknown where the result cannot be read
            result = folder.result()
            if result is not None and result.recorded is None:
                peak_bytes = result.metrics.get("memory_peak_bytes")
                return data.of_trial(
                    result.tags,
                    result.numbers,
                    memory_peak_bytes=data.memory_peak_bytes if peak_bytes is None else [int(peak_bytes)],
                    told=result.metrics,
                )
        return data

    def of_recording(self, facts: Mapping[str, Any], *, read_until_ns: int | None = None) -> Self:
        """Returns the same with what a recording's manifest says.

        No window passes `read_until_ns`, up to which all sensors of an open recording were read.
        """
        told = facts.get("steps") or {}
        tokens, peak = told.get("tokens_per_step"), told.get("memory_peak_bytes")
        if not (isinstance(tokens, int | float) and 0 < tokens < MOST_TOKENS):
            tokens = None
        most_bytes = BOUNDS["memory_used_bytes"].most
        return replace(
            self,
            facts=facts,
            window=None if self.problems else _command_window(self, facts, read_until_ns),
            chosen=bool(facts.get("window_why")),
            told_tokens_per_step=None if tokens is None else float(tokens),
            memory_peak_bytes=[peak] if isinstance(peak, int) and 0 < peak < most_bytes else [],
        )

    def of_trial(
        self,
        tags: Mapping[str, str],
        numbers: Numbers,
        *,
        memory_peak_bytes: Sequence[int] = (),
        told: Mapping[str, float] = NOTHING_TOLD,
    ) -> Self:
        """Returns the same with what a trial's ranks told."""
        tokens, window = numbers.told_tokens_per_step, self.window
        start_ns, end_ns = numbers.window_start_mono_ns, numbers.window_end_mono_ns
        if not self.problems and WINDOW_NODE in tags and start_ns is not None and end_ns is not None:
            window = self._in_common_time(tags[WINDOW_NODE], start_ns, end_ns)
        return replace(
            self,
            tags=tags,
            numbers=numbers,
            window=window,
            told_tokens_per_step=self.told_tokens_per_step if tokens is None else tokens,
            memory_peak_bytes=memory_peak_bytes,
            told={name: value for name, value in told.items() if name in METRICS and METRICS[name].is_told},
        )

    def _in_common_time(self, node: str, start_mono_ns: int, end_mono_ns: int) -> tuple[int, int] | None:
        anchor_ns = clock_anchors_ns(self.sources, None, self.manifests).get(node)
        return None if anchor_ns is None else (start_mono_ns + anchor_ns, end_mono_ns + anchor_ns)

    @cached_property
    def problems(self) -> Mapping[str, str]:
        """Problems of unusable tables, by code (`wattune.analysis.signals.schema_check`, `clock_check`); else empty."""
        return schema_problems(self.tables, self.spans) or clock_problems(self.sources, self.spans)

    @property
    def tokens_per_step(self) -> float | None:
        """Tokens of a step over all ranks, by the workload, else as the program told them; None where unknown."""
        known = None if self.spec is None else self.spec.tokens_per_step
        return self.told_tokens_per_step if known is None else known

    @property
    def simulated(self) -> bool:
        """True if any part of the telemetry was simulated instead of measured."""
        return (
            any(is_simulated(table) for table in self.tables.values())
            or any(manifest.get("simulated") is True for manifest in self.manifests.values())
            or self.read_by("simulated")
        )

    def read_by(self, backend: str) -> bool:
        """Tells whether a backend of that name read any device."""
        manifests = self.manifests.values()
        return any(one.get("backend") == backend for each in manifests for one in each.get("devices", {}).values())

    @property
    def devices(self) -> list[DeviceKey]:
        """Every device that was sampled, the hosts left out."""
        found = [(node, name) for node, manifest in self.manifests.items() for name in manifest.get("devices", {})]
        return sorted(device for device in found if device[1] != HOST)

    @property
    def window_s(self) -> float | None:
        """Length of the command's window."""
        return None if self.window is None else ns_to_s(self.window[1] - self.window[0])

    @cached_property
    def sources(self) -> Mapping[str, TierSource]:
        """Telemetry by tier, to be read a device at a time."""
        return {tier: as_source(table) for tier, table in self.tables.items()}

    def rows(self, tier: str, device: DeviceKey) -> pa.Table | None:
        """Returns a device's rows of one tier, in the order they were written; None without any."""
        source = self.sources.get(tier)
        if source is None or device not in source.devices:
            return None
        return pa.concat_tables(source.parts(device, source.schema.names))

    @property
    def first_step(self) -> int:
        """The number of the step that had the first batch of the stream of data: negative if it was warm-up."""
        return 0 if self.spans is None or not self.spans.num_rows else min(int(pc.min(self.spans["step"]).as_py()), 0)

    @property
    def first_step_time_s(self) -> float | None:
        """Time of the very first step on its slowest rank; None unless it was warm-up."""
        if self.spans is None or self.first_step >= 0:
            return None
        phase = self.spans["phase"].cast(pa.string())
        first = self.spans.filter(pc.and_(pc.equal(self.spans["step"], self.first_step), pc.equal(phase, "step")))
        longest_ns = pc.max(pc.subtract(first["end_mono_ns"], first["start_mono_ns"])).as_py()
        return None if longest_ns is None else ns_to_s(longest_ns)

    @cached_property
    def examined(self) -> "Examined | None":
        """Findings in it, its tables aligned once; None without a window, or where tables have `problems`.

        Steps in front of the steady state (`wattune.analysis.signals.steady_state.steady_from`) are left out, and the
        window begins after them; not where the steps were `chosen`. Raises `ImpossibleValueError`: a value in a table
        cannot be.
        """
        aligned = None if self.problems else align(self.sources, self.spans, self.manifests, window=self.window)
        if aligned is None or aligned.steps is None:
            return None if aligned is None else Examined(data=self, aligned=aligned, num_unsteady_steps=0)
        unsteady = steady_from(step_times_s(aligned.steps))
        if unsteady and self.chosen:
            unsteady = 0
        elif unsteady:
            aligned = self._over(aligned.steps.number[unsteady:].tolist()) or aligned
        return Examined(data=self, aligned=aligned, num_unsteady_steps=unsteady)

    def over(self, first: int, last: int) -> "Examined | None":
        """Examines some of its steps, by their places in the stream of data, the last included; None without them."""
        aligned = self._over(range(first + self.first_step, last + self.first_step + 1))
        return None if aligned is None else Examined(data=self, aligned=aligned, num_unsteady_steps=0)

    def _over(self, steps: Sequence[int]) -> Aligned | None:
        return align(self.sources, self.spans, self.manifests, measured_steps=steps)


def is_simulated(table: pa.Table | TierSource) -> bool:
    """Tells whether any row of a table was simulated instead of measured."""
    return (table.schema.metadata or {}).get(b"wattune.simulated") == b"true"


def last_mono_ns(tables: Tables) -> list[int]:
    """Returns the time of the last reading of every device in every tier that has any."""
    found = []
    for source in map(as_source, tables.values()):
        for device in source.devices:
            parts = [part["mono_ns"] for part in source.parts(device, ["mono_ns"]) if part.num_rows]
            found += [max(pc.max(part).as_py() for part in parts)] if parts else []
    return found


def _command_window(data: RunData, facts: Mapping[str, Any], read_until_ns: int | None) -> tuple[int, int] | None:
    """Returns the command's window in common time; where its end was not seen, up to the last reading."""
    known = facts.get("window")
    if known is None:
        return None
    start_ns = int(known["start_mono_ns"])
    end_ns = int(known.get("end_mono_ns") or max(last_mono_ns(data.sources), default=0))
    if read_until_ns is not None:
        end_ns = min(end_ns, read_until_ns)
        if end_ns <= start_ns:  # it has only begun
            return None
    return data._in_common_time(facts.get("node", ""), start_ns, end_ns)


@dataclass(frozen=True, kw_only=True)
class Examined:
    """Findings in a run, each part computed once and where it is asked for."""

    data: RunData
    aligned: Aligned
    num_unsteady_steps: int | None
    """Steps left out before the steady state; None if no steady state was found, in which case none were left out."""

    def only(self, device: DeviceKey) -> "Examined":
        """The same of one device over the same window, as if it had been sampled alone."""
        # Tokens and memory are those of all devices together.
        data = replace(self.data, spec=None, told_tokens_per_step=None, memory_peak_bytes=(), told={})
        return replace(self, data=data, aligned=self.aligned.only(device))

    @property
    def sensed(self) -> DeviceSpec | None:
        """The device that telemetry describes; None for a recording."""
        return None if self.data.spec is None else self.data.spec.cluster.sensed_device

    @cached_property
    def _powers(self) -> Powers:
        return powers_together(self.aligned)

    @cached_property
    def doubts(self) -> Mapping[str, str]:
        """Readings that cannot be, a sentence a code (`wattune.analysis.metrics.doubts`)."""
        return doubts(self.aligned, self._powers)

    @property
    def powers(self) -> Powers:
        """The power traces, with every figure of their samples; not usable where one of them is doubted."""
        return self._powers if self.doubts.keys().isdisjoint(OF_POWER) else replace(self._powers, doubted=True)

    @cached_property
    def traces(self) -> Mapping[DeviceKey, tuple[PowerTrace, int]]:
        """The power trace of each device (`traces_by_device`)."""
        return traces_by_device(self.aligned, self.powers)

    @cached_property
    def ways(self) -> Mapping[DeviceKey, Segments]:
        """The timeline of each device's rank."""
        return {} if self.data.spans is None else segments(self.aligned, self.data.spans)

    @cached_property
    def _clocks(self) -> tuple[Mapping[DeviceKey, CoreTemperature], Mapping[DeviceKey, Throttle]]:
        clock_mhz = None if self.sensed is None else self.sensed.sm_clock_max_mhz
        return clocks_and_temperatures(self.aligned, clock_mhz, self.powers, self.ways)

    @property
    def temperatures(self) -> Mapping[DeviceKey, CoreTemperature]:
        """Temperature of every device; empty unless all have it, and where one is doubted."""
        return self._clocks[0] if self.doubts.keys().isdisjoint(OF_TEMPERATURE) else {}

    @cached_property
    def settled(self) -> Mapping[DeviceKey, Settled]:
        """Settled temperature of every device; empty unless all have temperature and power."""
        limits_w = [(enforced_limit_w(self.aligned, trace), trace.share) for trace in self.powers.traces]
        known_w = [limit_w / share for limit_w, share in limits_w if limit_w]
        if not self.doubts.keys().isdisjoint(OF_TEMPERATURE):
            return {}
        return settled_temperatures(self.aligned, self.powers, self.sensed, min(known_w, default=None))

    @property
    def throttles(self) -> Mapping[DeviceKey, Throttle]:
        """Clock lost by every device; empty unless all have it."""
        return self._clocks[1]

    @cached_property
    def division(self) -> Division | None:
        """Parts of every step by its spans; None where they cannot divide it."""
        spec, spans, steps = self.data.spec, self.data.spans, self.aligned.steps
        if spans is None or steps is None or spec is None or not spec.workload.is_known:
            return None
        count = num_micro_batches(spec.plan, spec.cluster.world_size, spec.workload.global_batch_size)
        return divide(spans, steps, spec.plan, num_micro_batches=count)

    @cached_property
    def _profile(self) -> tuple[Mapping[str, float], Mapping[str, float]]:
        return ({}, {}) if self.division is not None else _profiled(self.data, self.aligned)

    @property
    def profiled(self) -> Mapping[str, float]:
        """Share of rank-time by part from a profiled pass; empty without one, or if spans could divide the steps."""
        return self._profile[0]

    @property
    def profiled_metrics(self) -> Mapping[str, float]:
        """The same as metrics."""
        return self._profile[1]

    def host_bound_frac(self, step_time_s: float) -> float | None:
        """Share of a step in which devices wait for a host, theirs or a peer's; None without a profiled pass."""
        running = None if self.data.kernels is None else running_s(self.data.kernels)
        if running is None or not step_time_s:
            return None
        busy, own, waits = running
        return host_bound_frac(max(busy - waits, own), own, step_time_s, self.division)

    @cached_property
    def outliers(self) -> tuple[Outlier, ...]:
        """Every device compared with its peers, the largest deviation first."""
        return outliers(self.aligned, self.powers, self.data.spec, self.division)

    @cached_property
    def saturation(self) -> tuple[Saturation, ...]:
        """Saturation of each resource, and for how long."""
        peaks = link_peaks(self.aligned, self.sensed)
        return saturation(self.aligned, peaks, self.ways, divided=self.division is not None)

    @property
    def num_steps(self) -> int | None:
        """Number of measured steps; None without spans."""
        return None if self.aligned.steps is None else len(self.aligned.steps.number)

    @property
    def duration_s(self) -> float:
        """Length of the window."""
        return self.aligned.duration_s

    @property
    def first_step_time_s(self) -> float | None:
        """Time of the very first step on its slowest rank."""
        return self.data.first_step_time_s

    @property
    def tokens_per_step(self) -> float | None:
        """Tokens of a step over all ranks."""
        return self.data.tokens_per_step

    @property
    def device_outlier_frac(self) -> float | None:
        """Distance of the oddest device to the median of its peers."""
        return self.outliers[0].deviation_frac if self.outliers else None

    @property
    def energy_j(self) -> float | None:
        """Energy of all devices over the window; None unless every power sensor covers it."""
        return total_energy_j(self.powers, self.aligned.duration_s) if self.powers.usable else None

    def host_means(self) -> dict[str, float]:
        """Mean of every gauge of the `host` table in the window, over all nodes; what was not read is not in it."""
        found: dict[str, list[Floats]] = {}
        for readings in self.aligned.tiers.get(HOST, {}).values():
            for name in _HOST_GAUGES:
                time_s, value = readings.inside(name, 0.0, self.aligned.duration_s)
                found.setdefault(name, []).append(value[time_s > 0.0])
        whole = {name: np.concatenate(values) for name, values in found.items()}
        return {name: float(values.mean()) for name, values in whole.items() if values.size}


def _profiled(data: RunData, aligned: Aligned) -> tuple[dict[str, float], dict[str, float]]:
    """Returns shares of a step by its kernels, compute as one and communication by axis, and the same as metrics.

    The waiting of a pipeline that cannot be replayed is one part, `wait`, and its metrics are absent.
    """
    kernels, spans, spec = data.kernels, data.spans, data.spec
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
    ways: Mapping[DeviceKey, Segments] | None = None,
) -> tuple[dict[DeviceKey, CoreTemperature], dict[DeviceKey, Throttle]]:
    """Returns temperature and throttling of every device in one pass; each is empty unless all devices have it.

    `otherwise_mhz` is the maximum clock of devices whose manifest does not say it. Without power traces nobody knows
    when power was near the cap, without `ways` when a device computed.
    """
    core: dict[DeviceKey, CoreTemperature] = {}
    throttles: dict[DeviceKey, Throttle] = {}
    traces = {} if powers is None else traces_by_device(aligned, powers)
    for where, readings in aligned.readings("fast"):
        warm = temperature(readings, aligned.duration_s)
        maximum_mhz = clock_max_mhz(aligned, where, otherwise_mhz)
        lost = None
        if maximum_mhz:
            caused = with_caps(aligned, traces.get(where, (None, 0))[0], readings)
            lost = device_throttle(caused, maximum_mhz, aligned.duration_s, (ways or {}).get(where))
        core |= {} if warm is None else {where: warm}
        throttles |= {} if lost is None else {where: lost}
    whole = len(aligned.devices)
    return core if len(core) == whole else {}, throttles if len(throttles) == whole else {}
