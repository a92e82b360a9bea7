"""Candidates as columns: those that share everything but their plan are predicted together."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from wattune.arrays import Floats, Ints
from wattune.catalog.hardware import ClusterSpec, DeviceSpec
from wattune.catalog.models import ModelSpec
from wattune.plans.axes import AXES, Plan
from wattune.plans.parallel import num_micro_batches, padded_vocab_size
from wattune.plans.placement import RankOrder
from wattune.trial import TrialSpec
from wattune.workload import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Candidates of one model, cluster, engine, workload, data type and order of ranks, a column entry for each."""

    model: ModelSpec
    cluster: ClusterSpec
    engine: str
    workload: Workload
    dtype: str
    rank_order: RankOrder
    """Of candidates whose fast fabrics are smaller than a node, so that the order decides which ranks share one; else
    `topology`."""
    tp: Ints
    pp: Ints
    cp: Ints
    ep: Ints
    etp: Ints
    vpp: Ints
    dp: Ints
    micro_batch_size: Ints
    num_micro_batches: Ints
    """Micro-batches of one replica's step."""
    sharding: Ints
    """Index in `AXES["sharding"].choices`: 0 for none, then the stage of ZeRO."""
    dp_replicate: Ints
    """Copies of what sharding shares."""
    recompute: Ints
    """Index in `AXES["recompute"].choices`: none, selective, full."""
    loss_chunks: Ints
    offload: Ints
    """Index in `AXES["offload"].choices`: none, activations."""
    overlap: Ints
    """Index in `AXES["overlap"].choices`: none, grad, grad_param, tp."""
    vocabulary: Ints
    """Rows of embedding and head, padding included."""
    limit_w: Floats
    """Watts that each device may draw: the plan's limit, else the device's own; infinite where neither is known."""
    clock_mhz: Floats
    """Compute clock that each device is locked to; infinite where it is not."""
    profiled: Floats  # 1 where devices have a power profile that is not the one found, else 0
    layers: Ints
    """Layers of every virtual stage, [candidates, most virtual stages]; virtual stage `chunk * pp + stage` follows the
    model from input to output. 0 behind a candidate's last one."""

    def __len__(self) -> int:
        return len(self.tp)

    @property
    def device(self) -> DeviceSpec:
        """The device whose figures are predicted: the simulated one where sensors are simulated."""
        return self.cluster.sensed_device

    @property
    def locked_frac(self) -> Floats:
        """Highest clock that each device may have over its highest of all: 1 where it is not locked."""
        return np.minimum(self.clock_mhz / (self.device.sm_clock_max_mhz or 1.0), 1.0)

    @property
    def num_virtual(self) -> Ints:
        """Virtual stages of each candidate."""
        return self.pp * self.vpp

    @property
    def local_tokens(self) -> Ints:
        """Tokens of one micro-batch on one context parallel rank, before any split by tensor parallel ranks."""
        return self.micro_batch_size * self.workload.seq_len // self.cp


def batches(specs: Sequence[TrialSpec]) -> list[tuple[Ints, Batch]]:
    """Groups effective specifications that no rule rejects into batches, each with the positions of its candidates."""
    groups: dict[_Key, list[int]] = defaultdict(list)
    for position, spec in enumerate(specs):
        plan, cluster = spec.plan, spec.cluster
        # Ranks move inside a node alone (`wattune.plans.rules.rank_order`).
        order = plan.rank_order if cluster.domain < cluster.devices_per_node else "topology"
        groups[spec.model, cluster, spec.engine, spec.workload, plan.dtype, order].append(position)
    return [
        (np.array(positions, np.int64), _batch(key, [specs[position].plan for position in positions]))
        for key, positions in groups.items()
    ]


_Key = tuple[ModelSpec, ClusterSpec, str, Workload, str, RankOrder]


def _batch(key: _Key, plans: Sequence[Plan]) -> Batch:
    model, cluster, engine, workload, dtype, order = key
    world = cluster.world_size
    rows = {tp: padded_vocab_size(model, engine, tp) for tp in {plan.tp for plan in plans}}

    def count(name: str) -> Ints:
        return np.fromiter((getattr(plan, name) for plan in plans), np.int64, len(plans))

    def choice(name: str) -> Ints:
        places = {value: place for place, value in enumerate(AXES[name].choices)}
        return np.fromiter((places[getattr(plan, name)] for plan in plans), np.int64, len(plans))

    def setting(name: str, found: float | None) -> Floats:
        return np.array([getattr(plan, name) or found or np.inf for plan in plans], np.float64)

    return Batch(
        model=model,
        cluster=cluster,
        engine=engine,
        workload=workload,
        dtype=dtype,
        rank_order=order,
        dp=np.fromiter((plan.dp(world) for plan in plans), np.int64, len(plans)),
        num_micro_batches=np.fromiter(
            (num_micro_batches(plan, world, workload.global_batch_size) for plan in plans), np.int64, len(plans)
        ),
        **{name: count(name) for name, axis in AXES.items() if axis.kind == "count"},
        **{name: choice(name) for name in ("sharding", "recompute", "offload", "overlap")},
        vocabulary=np.array([rows[plan.tp] for plan in plans], np.int64),
        limit_w=setting("power_limit_w", cluster.sensed_device.power_limit_w),
        clock_mhz=setting("clock_mhz", None),
        profiled=np.array([plan.power_profile is not None for plan in plans], np.float64),
        layers=_layers(model, plans),
    )


def _layers(model: ModelSpec, plans: Sequence[Plan]) -> Ints:
    """Counts the layers of every virtual stage, as `wattune.plans.parallel.stage_layers` divides them."""
    most = max(plan.pp * plan.vpp for plan in plans)
    layers = np.zeros((len(plans), most), np.int64)
    for row, plan in enumerate(plans):
        num_virtual = plan.pp * plan.vpp
        layers[row, :num_virtual] = plan.layout or model.num_layers // num_virtual
        layers[row, num_virtual - 1] += model.num_mtp_layers  # they stand before the output
    return layers
