"""Activity of each simulated device over time: spans give the phase, the plan gives the use of a phase's time.

Wall time does not decide the split: a tiny model on CPUs may stand in for a large one on GPUs. Inside a phase the split
is that of the estimated step on the simulated device. Waiting comes from the spans. Where a rank
has only `step` spans (recordings), waiting comes from the plan too: pipeline bubble and the imbalance of stages.

Where ranks run on processors, the spans give nothing but when a step ran: its phases are the plan's, repeated every
`PLANNED_STEP_S`. Else a slow host would raise the power of a plan: a step of seconds puts a window of 1 s inside
one phase, and nothing of the bubble is averaged.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from wattune.arrays import Ints
from wattune.cost.batch import batches
from wattune.cost.defaults import default_coefficients
from wattune.cost.step_time.facts import FACTS
from wattune.cost.step_time.predict import StepModel, StepPipeline
from wattune.errors import PlanError, TelemetryError
from wattune.plans.parallel import coordinates, num_micro_batches
from wattune.plans.program import is_command
from wattune.simulation.device_model import KINDS, Array
from wattune.trial import TrialSpec
from wattune.units import s_to_ns

GEMM_OF_PEAK_FRAC: Final = 0.9
"""Share of the device's peak that large products reach at the highest clock: 890 TFLOP/s of 989.4. Bf16 8192^3 products
without pause reached 670 on one H200, at 1,491 of 1,980 MHz under its power limit."""

PLANNED_STEP_S: Final = 0.2
"""Longest planned step that stands in for a host's, so that a mean over 1 s holds whole steps. The 1 s peak of a plan
stays within 5 % for hosts from 0.1 to 10 times as slow, which tests/unit/simulation/test_sensors.py holds."""

OWN_CODE_SHARES: Final = np.array([0.6, 0.3, 0.1, 0.0, 0.0])
"""Shares of `KINDS` in every step of a command: nobody knows its kernels. Assumed, and the same for every command, so
that simulated power of two commands differs by their duty alone."""


StageWork = Mapping[str, Array]
"""Work of one rank of a pipeline stage: device time by `KINDS` of a micro-batch's `forward` and `backward`,
recomputation included, and of a step's `optimizer`; meaningful relative to one another, nothing overlapping."""


def seconds_of(kind: str, seconds: float) -> Array:
    """Returns device time of one of `KINDS` alone."""
    return np.array([seconds * (each == kind) for each in KINDS])


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Intervals of one device that share one use of time."""

    start_ns: Ints
    end_ns: Ints
    shares: Array
    """Shares of `KINDS` while inside."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceActivity:
    """Everything one device did, on its node's monotonic clock."""

    device: str
    steps: Part | None
    """Whole steps: what no phase covers inside them is `other`."""
    phases: tuple[Part, ...]

    def shares(self, edges_ns: Ints) -> Array:
        """Share of each cell between neighbouring edges that goes to each of `KINDS`, (kinds, cells).

        Where phases overlap a wait counts as a wait, and the rest shares what is left of the cell.
        """
        waiting = KINDS.index("wait")
        result = np.zeros((len(KINDS), len(edges_ns) - 1))
        for part in self.phases:
            result += part.shares[:, None] * coverage(part, edges_ns)
        wait = np.minimum(result[waiting], 1.0)
        result[waiting] = 0.0
        result *= np.minimum(1.0, (1.0 - wait) / np.maximum(result.sum(axis=0), 1e-12))
        result[waiting] = wait
        if self.steps is not None:
            inside = np.minimum(coverage(self.steps, edges_ns), 1.0)
            result[KINDS.index("other")] += np.maximum(inside - result.sum(axis=0), 0.0)
        return result


def coverage(part: Part, edges_ns: Ints) -> Array:
    """Computes the share of each cell that the intervals cover, exactly 0 outside them; overlaps count twice."""
    origin_ns = edges_ns[0]
    at_ns = edges_ns - origin_ns
    covered_ns = _elapsed_ns(part.start_ns - origin_ns, at_ns) - _elapsed_ns(part.end_ns - origin_ns, at_ns)
    return np.asarray(np.diff(covered_ns) / np.diff(at_ns))


def _elapsed_ns(moments_ns: Ints, at_ns: Ints) -> Ints:
    """Sums, at each time, the time since every earlier moment; in integers, so that differences are exact."""
    moments_ns = np.sort(moments_ns)
    before = np.searchsorted(moments_ns, at_ns)
    sums_ns = np.concatenate([np.zeros(1, np.int64), np.cumsum(moments_ns)])
    return np.asarray(before * at_ns - sums_ns[before])


def step_work(spec: TrialSpec) -> list[StageWork]:
    """Time of the parts of a step on a rank of each pipeline stage, as estimates of step times count it.

    At the highest clock, and with the coefficients that are shipped. Kernels and messages are as fast as large ones,
    whatever the size of the model: what launches, waits for the host and latencies take is left out. Products of a
    narrower type count by their energy, communication once a step to the optimizer. Raises `TelemetryError`: a peak of
    the device is unknown.
    """
    ((_, batch),) = batches([spec])
    try:
        known = default_coefficients(batch.device)
    except PlanError:
        raise TelemetryError(
            f'the sensors of "{batch.device.name}" cannot be simulated: a peak is not in the catalog; '
            "set simulate_sensors_of to an accelerator, such as h200_sxm"
        ) from None
    large = replace(
        known.step_time,
        overhead=replace(known.step_time.overhead, launch_s=0.0),
        link=replace(known.step_time.link, latency_s=0.0, network_latency_s=0.0),
        software="" if spec.engine in FACTS else "torch",  # an engine of one's own has no habits that are known
    )
    step = StepPipeline(StepModel(batch, large, known.power), np.zeros(1, np.int64))
    parts = {"optimizer": (0 * step.update_s[0], step.update_s[0], step.once_s[0])}
    for direction, work in (("forward", step.forward), ("backward", step.backward)):
        _, traffic_s, _, _ = step.pass_s(direction, np.ones(1))
        tensor_s = work.flop / (GEMM_OF_PEAK_FRAC * step.model.machine.flop_per_s)
        parts[direction] = tuple(each[0].sum(axis=0) for each in (tensor_s, work.memory_s, traffic_s))
    none = np.zeros(2)
    return [
        {phase: np.concatenate([[each[stage] for each in seconds], none]) for phase, seconds in parts.items()}
        for stage in range(spec.plan.pp)
    ]


def node_activities(spec: TrialSpec, spans: pa.Table) -> dict[str, list[DeviceActivity]]:
    """Derives the activity of every device in the spans, by node, devices in order of their names.

    Raises `TelemetryError` where two ranks share a device, or the simulated device's peaks are unknown.
    """
    work = [] if is_command(spec) else step_work(spec)
    text = {name: spans[name].cast(pa.string()) for name in ("node", "device", "phase")}
    plain = spans.select(["rank", "step", "start_mono_ns", "end_mono_ns"])
    for name, column in text.items():
        plain = plain.append_column(name, column)
    found: list[tuple[str, str, int, pa.Table]] = []
    for node in sorted(pc.unique(plain["node"]).to_pylist()):
        on_node = plain.filter(pc.equal(plain["node"], node))
        for name in sorted(pc.unique(on_node["device"]).to_pylist()):
            rows = on_node.filter(pc.equal(on_node["device"], name))
            ranks = pc.unique(rows["rank"]).to_pylist()
            if len(ranks) > 1:
                raise TelemetryError(
                    f"ranks {sorted(ranks)} have spans on {name} of {node}, one rank a device is allowed; "
                    "name a device for each rank"
                )
            found.append((node, name, coordinates(ranks[0], spec.plan, spec.cluster.world_size).pp, rows))
    if spec.cluster.device == "cpu" and work:
        planned = _planned_steps([rows for *_, rows in found])
        made = [
            DeviceActivity(device=name, steps=None, phases=tuple(planned_phases(spec, work, stage, *steps)))
            for (_, name, stage, _), steps in zip(found, planned, strict=True)
        ]
    else:
        made = [_device_activity(spec, work, stage, name, rows) for _, name, stage, rows in found]
    nodes: dict[str, list[DeviceActivity]] = {}
    for (node, *_), activity in zip(found, made, strict=True):
        nodes.setdefault(node, []).append(activity)
    return nodes


def _steps(rows: pa.Table) -> tuple[list[int], Ints, Ints]:
    """Numbers, starts and ends of a rank's steps; one that still runs ends with its latest span."""
    steps = rows.group_by("step").aggregate([("start_mono_ns", "min"), ("end_mono_ns", "max")]).sort_by("step")
    return steps["step"].to_pylist(), steps["start_mono_ns_min"].to_numpy(), steps["end_mono_ns_max"].to_numpy()


def _planned_steps(ranks: Sequence[pa.Table]) -> Iterable[tuple[Ints, Ints]]:
    """Cuts the steps of each rank into planned ones; a step has as many on every rank, so that they align."""
    steps = [_steps(rows) for rows in ranks]
    counts: dict[int, int] = {}
    for names, start_ns, end_ns in steps:
        for name, length_ns in zip(names, end_ns - start_ns, strict=True):
            counts[name] = max(counts.get(name, 1), math.ceil(length_ns / s_to_ns(PLANNED_STEP_S)))
    for names, start_ns, end_ns in steps:
        parts = np.array([counts[name] for name in names], np.int64)
        index = np.arange(parts.sum()) - np.repeat(np.cumsum(parts) - parts, parts)
        first_ns, length_ns, of = (np.repeat(each, parts) for each in (start_ns, end_ns - start_ns, parts))
        yield first_ns + length_ns * index // of, first_ns + length_ns * (index + 1) // of


def _device_activity(
    spec: TrialSpec, work: Sequence[StageWork], stage: int, name: str, rows: pa.Table
) -> DeviceActivity:
    shares = phase_shares(work[stage]) if work else {}
    times = {}
    for phase in pc.unique(rows["phase"]).to_pylist():
        chosen = rows.filter(pc.equal(rows["phase"], phase))
        times[phase] = (chosen["start_mono_ns"].to_numpy(), chosen["end_mono_ns"].to_numpy())
    steps = times.pop("step", None)
    if steps is not None and not times and work:
        return DeviceActivity(device=name, steps=None, phases=tuple(planned_phases(spec, work, stage, *steps)))
    if steps is not None and not work:
        times, shares, steps = {"step": steps}, {"step": OWN_CODE_SHARES}, None
    return DeviceActivity(
        device=name,
        steps=None if steps is None else Part(start_ns=steps[0], end_ns=steps[1], shares=np.zeros(len(KINDS))),
        phases=tuple(
            Part(start_ns=start_ns, end_ns=end_ns, shares=shares[phase]) for phase, (start_ns, end_ns) in times.items()
        ),
    )


def phase_shares(work: StageWork) -> dict[str, Array]:
    """Shares of `KINDS` inside each phase but `step`."""
    shares = {phase: seconds / (seconds.sum() or 1.0) for phase, seconds in work.items()}
    return shares | {"wait": seconds_of("wait", 1.0)}


def planned_phases(
    spec: TrialSpec, work: Sequence[StageWork], stage: int, start_ns: Ints, end_ns: Ints
) -> Iterable[Part]:
    """Phases of steps that have no spans inside, laid out by the plan and stretched to each step's time.

    1F1B: every stage waits (p - 1) slots of the slowest stage's micro-batch in all (over v chunks a stage); stage s
    waits s forwards before its first and as many backwards after its last, the rest between its first forwards and
    the steady part. A stage faster than the slowest also waits in every micro-batch.
    """
    plan, own, shares = spec.plan, work[stage], phase_shares(work[stage])
    num_micro = num_micro_batches(plan, spec.cluster.world_size, spec.workload.global_batch_size)
    own_s, *each_s = ({phase: float(seconds.sum()) for phase, seconds in one.items()} for one in (own, *work))
    slowest_s = max(each_s, key=lambda one: one["forward"] + one["backward"])
    ahead, behind = stage / plan.vpp, (plan.pp - 1 - stage) / plan.vpp
    slow_f, slow_b = slowest_s["forward"], slowest_s["backward"]
    slack = slow_f + slow_b - own_s["forward"] - own_s["backward"]
    layout = [("wait", ahead * slow_f)]
    for micro in range(num_micro):
        layout += [("forward", own_s["forward"]), ("wait", behind * (slow_f + slow_b) if micro == 0 else 0.0)]
        layout += [("backward", own_s["backward"]), ("wait", slack)]
    layout += [("wait", ahead * slow_b), ("optimizer", own_s["optimizer"])]
    ends = np.cumsum([length for _, length in layout])
    starts = np.concatenate([[0.0], ends[:-1]])
    duration_ns = (end_ns - start_ns)[:, None]
    for phase, phase_share in shares.items():
        chosen = [index for index, (name, length) in enumerate(layout) if name == phase and length > 0]
        if chosen:
            at = (start_ns[:, None] + duration_ns * starts[chosen] / ends[-1]).astype(np.int64)
            to = (start_ns[:, None] + duration_ns * ends[chosen] / ends[-1]).astype(np.int64)
            yield Part(start_ns=at.ravel(), end_ns=to.ravel(), shares=phase_share)
