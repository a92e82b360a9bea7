"""Activity of each simulated device over time: spans give the phase, the plan gives the use of a phase's time.

Wall time does not decide the split: a tiny model on CPUs may stand in for a large one on GPUs. Inside a phase the split
comes from a roofline of the specification's shapes on the simulated device. Waiting comes from the spans. Where a rank
has only `step` spans (recordings), waiting comes from the plan too: pipeline bubble and the imbalance of stages.

Where ranks run on processors, the spans give nothing but when a step ran: its phases are the plan's, repeated every
`PLANNED_STEP_S`. Else a slow host would raise the power of a plan: a step of seconds puts a window of 1 s inside
one phase, and nothing of the bubble is averaged.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from wattune.arrays import Ints
from wattune.catalog.hardware import DeviceSpec
from wattune.cost.flops import FROZEN_PASSES, TRAINING_PASSES, held_weights, mixing_flop
from wattune.errors import TelemetryError
from wattune.plans.axes import HELD_IN, ITEM_BYTES
from wattune.plans.parallel import coordinates, num_micro_batches, stage_layers
from wattune.plans.program import is_command
from wattune.simulation.device_model import KINDS, Array
from wattune.trial import TrialSpec
from wattune.units import s_to_ns

GEMM_OF_PEAK_FRAC: Final = 0.677
"""Share of the device's peak that kernels reach, as the next two; only their ratios matter: they split a phase's time.
670 TFLOP/s of 989.4: bf16 8192^3 products without pause on one H200, power-capped."""

BANDWIDTH_OF_PEAK_FRAC: Final = 0.9
"""Assumed; `ACTIVATION_PASSES` is fitted on top of it."""

LINK_OF_PEAK_FRAC: Final = 0.6
"""Assumed for messages of some ten megabytes; not fitted."""

ACTIVATION_PASSES: Final = 10.1
"""Times forward reads or writes each activation of a layer; backward does so twice as often. Fitted to dp4, whose
kernels are not fused."""

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


def stage_work(spec: TrialSpec, stage: int) -> StageWork:
    """Time of the parts of a step on a rank of a pipeline stage, at the simulated device's peaks.

    Per layer and micro-batch of n tokens, forward:

    - tensor: 2 n active parameters, and 2 n seq_len hidden_size for causal attention, over tp (Narayanan et al. 2021,
      arXiv 2104.04473, appendix A, halved for the causal mask); the last stage adds the output projection;
    - memory: weights once, and `ACTIVATION_PASSES` times the widths a token passes (4 hidden, 3 feed-forward a chosen
      expert) over tp: a larger micro-batch reads weights less often for the same tokens;
    - link: tensor parallel with sequence parallel two all-gathers and two reduce-scatters (Korthikanti et al. 2022,
      arXiv 2205.05198, section 4.2.2), experts one dispatch and one combine, context parallel the ring of keys and
      values, the pipeline one activation.

    Backward: twice the products and activations, gradients read and written in fp32, tensor-parallel traffic 1.5 times
    (inputs gathered again), other traffic as forward; `full` recomputation adds a forward, `selective` its attention.
    Data-parallel traffic that no overlap hides is spread over backward. The optimizer is memory-bound: 30 bytes a
    parameter it owns (gradient 4, three fp32 states read and written 24, bf16 weight 2). LoRA trains next to nothing:
    no weight gradients, no traffic for them. All links count as fast as those inside a node: the catalog knows no
    slower network.
    """
    model, plan, device = spec.model, spec.plan, spec.cluster.sensed_device
    chunks = stage_layers(model, plan)[stage]
    num_layers = sum(len(chunk) for chunk in chunks)
    is_last = stage == plan.pp - 1
    tokens = plan.micro_batch_size * spec.workload.seq_len / plan.cp
    hidden, kv = model.hidden_size, sum(share * kind.kv_width for kind, share in model.shares)
    experts = max(model.num_experts_per_token, 1)
    ffn = sum(share * kind.ffn_matrices * hidden * kind.ffn_hidden_size * kind.is_moe for kind, share in model.shares)
    attention = sum(share * sum(held_weights(kind)) for kind, share in model.shares)
    output = model.vocab_size * hidden if is_last else 0

    mixed = sum(share * mixing_flop(kind, spec.workload.seq_len) for kind, share in model.shares)
    attention_flop = tokens * mixed * num_layers / plan.tp
    layers_flop = 2 * tokens * num_layers * (attention + experts * ffn) / plan.tp
    output_flop = 2 * tokens * output / plan.tp
    held_ffn = ffn * max(model.num_experts, 1) / (plan.ep * (plan.etp if model.is_moe else plan.tp))
    parameters = num_layers * (attention / plan.tp + held_ffn) + output / plan.tp
    width = num_layers * (4 * hidden + 3 * experts * model.ffn_hidden_size) / plan.tp

    rates = _Rates(device, plan.dtype)
    activations = rates.memory(rates.item_bytes * ACTIVATION_PASSES * tokens * width)
    weights = rates.memory(rates.item_bytes * parameters)
    products = rates.narrow(layers_flop) + rates.tensor(output_flop)
    attends = rates.tensor(attention_flop)

    sent = rates.item_bytes * tokens * hidden * num_layers
    tensor_link = rates.link(0.0 if plan.overlap == "tp" else 4 * sent * (plan.tp - 1) / plan.tp)
    expert_link = rates.link(2 * experts * sent * (plan.ep - 1) / plan.ep / plan.tp if model.is_moe else 0.0)
    ring = rates.item_bytes * tokens * kv * num_layers * (plan.cp - 1) / plan.tp
    hop = rates.item_bytes * tokens * hidden * len(chunks) / plan.tp if plan.pp > 1 else 0.0
    other_link = expert_link + rates.link(ring + hop)

    forward = products + attends + activations + weights + tensor_link + other_link
    if spec.workload.mode == "prefill":
        return {"forward": forward, "backward": 0 * forward, "optimizer": 0 * forward}
    trained = parameters if spec.workload.mode == "pretrain" else 0.0
    num_micro = num_micro_batches(plan, spec.cluster.world_size, spec.workload.global_batch_size)
    passes = FROZEN_PASSES if spec.workload.mode == "lora" else TRAINING_PASSES
    backward = (
        products * (passes - 1)
        + attends * (TRAINING_PASSES - 1)
        + (activations + weights) * 2
        + tensor_link * 1.5
        + other_link
    )
    backward += rates.memory(8 * trained)
    backward += {"none": 0 * forward, "selective": attends, "full": forward}[plan.recompute]
    backward += rates.link(_exposed_data_parallel_bytes(spec, trained, num_micro) / num_micro)
    shards = plan.dp(spec.cluster.world_size) * plan.cp // plan.dp_replicate  # ranks of one context hold parts too
    owned = trained / (shards if plan.sharding != "none" else 1)
    return {"forward": forward, "backward": backward, "optimizer": rates.memory(30 * owned)}


class _Rates:
    """Turns work into device time."""

    def __init__(self, device: DeviceSpec, dtype: str) -> None:
        flop_per_s, narrow_flop_per_s = device.peak_flop_per_s(HELD_IN[dtype]), device.peak_flop_per_s(dtype)
        bandwidth, link = device.memory_bandwidth_bytes_per_s, device.link_bandwidth_bytes_per_s
        if flop_per_s is None or narrow_flop_per_s is None or bandwidth is None or link is None:
            raise TelemetryError(
                f'the sensors of "{device.name}" cannot be simulated: a peak is not in the catalog; '
                "set simulate_sensors_of to an accelerator, such as h200_sxm"
            )
        self._flop_per_s = GEMM_OF_PEAK_FRAC * flop_per_s
        self._narrow_flop_per_s = GEMM_OF_PEAK_FRAC * narrow_flop_per_s
        self._bytes_per_s = BANDWIDTH_OF_PEAK_FRAC * bandwidth
        self._link_bytes_per_s = LINK_OF_PEAK_FRAC * link
        self.item_bytes = ITEM_BYTES[dtype]

    def narrow(self, work_flop: float) -> Array:
        """Products of the layers, in the plan's data type; all others are in the type that numbers are held in."""
        return seconds_of("tensor", work_flop / self._narrow_flop_per_s)

    def tensor(self, work_flop: float) -> Array:
        return seconds_of("tensor", work_flop / self._flop_per_s)

    def memory(self, moved_bytes: float) -> Array:
        return seconds_of("memory", moved_bytes / self._bytes_per_s)

    def link(self, sent_bytes: float) -> Array:
        return seconds_of("link", sent_bytes / self._link_bytes_per_s)


def _exposed_data_parallel_bytes(spec: TrialSpec, parameters: float, num_micro: int) -> float:
    """Counts the bytes of data parallelism a rank sends per step that nothing hides: fp32 gradients, dtype parameters.

    Ring volumes (Rajbhandari et al. 2020, arXiv 1910.02054, section 7): (n - 1) / n of the data for each reduce-scatter
    and each all-gather; zero3 gathers parameters twice a micro-batch. Under hybrid sharding n are the ranks of a copy,
    and the shards of the copies are all-reduced once.
    """
    plan = spec.plan
    group = plan.dp(spec.cluster.world_size) * plan.cp // plan.dp_replicate
    gathers = {"none": 0, "zero1": 1, "zero2": 1, "zero3": 2 * num_micro}[plan.sharding]
    gradients = 4 * (2 if plan.sharding == "none" else 1)
    gathered = gathers * ITEM_BYTES[plan.dtype]
    hidden = {"none": 0, "tp": 0, "grad": gradients, "grad_param": gradients + gathered}[plan.overlap]
    inside = (gradients + gathered - hidden) * parameters * (group - 1) / group
    if plan.overlap in ("grad", "grad_param"):
        return inside
    return inside + 2 * 4 * parameters / group * (plan.dp_replicate - 1) / plan.dp_replicate


def node_activities(spec: TrialSpec, spans: pa.Table) -> dict[str, list[DeviceActivity]]:
    """Derives the activity of every device in the spans, by node, devices in order of their names.

    Raises `TelemetryError` where two ranks share a device, or the simulated device's peaks are unknown.
    """
    work = [] if is_command(spec) else [stage_work(spec, stage) for stage in range(spec.plan.pp)]
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
