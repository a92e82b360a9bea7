"""Cuts of a trial to fewer devices: depth, replicas and experts shrink, shapes never do.

Hidden size, heads, sequence, micro-batch, tp and cp stay, so every product and message of a layer is the large model's.
`L' = (L / pp) pp'` keeps the layers a stage, and `m' = m (pp' - 1) / (pp - 1)` the bubble. A stage with fewer layers
has as much less of the vocabulary, so that the head keeps its share. `E' = E ep' / ep` keeps the tokens an expert.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any, Final, NamedTuple

from wattune.catalog.hardware import ClusterSpec, device
from wattune.catalog.models import ModelSpec
from wattune.errors import PlanError
from wattune.plans.effective import effective
from wattune.plans.parallel import num_micro_batches
from wattune.plans.rules import violations
from wattune.trial import TrialSpec

ALLOWED_PERCENT: Final = 5.0
"""Most distance of a small run from its large one, in percent of a step, unless a space allows more."""

_TARGET: Final = re.compile(r"([1-9]\d{0,5})x([1-9]\d{0,5})(?:(?:\s*:\s*|\s+)(\S+))?", re.ASCII)
_ROWS: Final = 64
"""A cut vocabulary is a multiple of as many rows for each tensor parallel rank."""
DEPTHS: Final = tuple(share / 2**halvings for halvings in range(6) for share in (0.75, 0.5))
"""Shares of a stage's layers that are tried."""


class Target(NamedTuple):
    """The small cluster that trials run on."""

    num_nodes: int
    devices_per_node: int
    device: str
    """Catalog name; empty is the large cluster's own device."""
    allowed_percent: float = ALLOWED_PERCENT

    @property
    def text(self) -> str:
        """The target as a space writes it."""
        return f"{self.num_nodes}x{self.devices_per_node} {self.device}".strip()


def parse_target(text: str, allowed_percent: float = ALLOWED_PERCENT) -> Target:
    """Reads a target: `1x2 h100_sxm`, `1x2:h100_sxm`, or `1x2` of the large cluster's device; else a `PlanError`."""
    match = _TARGET.fullmatch(text.strip())
    if match is None:
        form = 'write NODESxDEVICES, each 1 or more, and a device, such as "1x2 h100_sxm"'
        raise PlanError(f'"{text[:60]}" does not name a cluster; {form}')
    return Target(int(match[1]), int(match[2]), device(match[3]).name if match[3] else "", allowed_percent)


def cluster_of(target: Target, large: ClusterSpec) -> ClusterSpec:
    """Returns the target as a cluster like the large one; `PlanError` for another vendor, or for more devices."""
    name = target.device or large.device
    if name != large.device and device(name).vendor != large.rank_device.vendor:
        both = f"{name} is of {device(name).vendor} and {large.device} of {large.rank_device.vendor}"
        raise PlanError(f"{both}: no run on one stands for the other; use a device of the same vendor")
    world, domain = target.num_nodes * target.devices_per_node, large.nvlink_domain_size
    if world > large.world_size:
        both = f"{target.text} has {world} devices and {large.label} has {large.world_size}"
        raise PlanError(f"{both}; a cut needs as many or fewer")
    return replace(
        large,
        device=name,
        own_device=large.own_device if large.own_device and name == large.device else None,
        num_nodes=target.num_nodes,
        devices_per_node=target.devices_per_node,
        nvlink_domain_size=domain if domain and domain < world and domain % target.devices_per_node == 0 else None,
    )


def whole_stages(large: TrialSpec, place: ClusterSpec) -> Iterator[TrialSpec]:
    """Yields every cut to some devices of a place whose stages have as many layers as those of the large trial."""
    plan, dp = large.plan, large.plan.dp(large.cluster.world_size)
    room = place.world_size // (plan.tp * plan.cp)
    for pp in _steps(min(plan.pp, room)):
        if pp == 1 < min(plan.pp, room):  # a pipeline needs two stages
            continue
        changed: dict[str, Any] = {} if pp == plan.pp else {"layout": ()} | ({"vpp": 1} if pp == 1 else {})
        for copies in _steps(min(dp, room // pp)):
            cluster = _part(place, plan.tp * plan.cp * pp * copies)
            if cluster is None or (plan.dp_replicate > 1 and copies % min(plan.dp_replicate, copies)):
                continue
            for ep, some in product(range(1, plan.ep + 1), _micro_batches(large, pp, copies)):
                experts, rest = divmod(large.model.num_experts * ep, plan.ep)
                if plan.ep % ep or rest or experts < large.model.num_experts_per_token:
                    continue
                yield TrialSpec(
                    model=_layers(replace(large.model, num_experts=experts), large.model.num_layers * pp // plan.pp),
                    cluster=cluster,
                    engine=large.engine,
                    workload=replace(large.workload, global_batch_size=some * plan.micro_batch_size * copies),
                    plan=replace(plan, pp=pp, ep=ep, dp_replicate=min(plan.dp_replicate, copies), **changed),
                    stands_for=large,
                )


def depths(small: TrialSpec) -> Iterator[TrialSpec]:
    """Yields a cut with its stages as deep as they are, and then ever shallower ones, in whole periods of layers."""
    model, plan = small.model, small.plan
    yield small
    unit = math.lcm(plan.pp * plan.vpp, len(model.layer_kinds) or 1)
    most, rest = divmod(model.num_layers, unit)
    if plan.layout or rest or small.stands_for is None:
        return
    for count in dict.fromkeys(round(most * share) for share in DEPTHS):
        if 0 < count < most:
            yield replace(small, model=_vocabulary(_layers(model, count * unit), small, count / most))


def runnable(small: TrialSpec) -> TrialSpec | None:
    """Returns a cut as it runs, without settings that do nothing on fewer devices; None where a rule forbids it."""
    spec = replace(small, plan=effective(small)[0])
    return spec if next(violations(spec), None) is None else None


def _steps(most: int) -> list[int]:
    """Returns powers of two up to a number, and the number."""
    return sorted({*(2**power for power in range(most.bit_length())), most} - {0})


def _part(place: ClusterSpec, world: int) -> ClusterSpec | None:
    """Returns as much of a place as holds some ranks: a part of one node, or whole nodes."""
    if world <= place.devices_per_node:
        return replace(place, num_nodes=1, devices_per_node=world)
    nodes, rest = divmod(world, place.devices_per_node)
    return None if rest or nodes > place.num_nodes else replace(place, num_nodes=nodes)


def _micro_batches(large: TrialSpec, pp: int, copies: int) -> list[int]:
    """Returns numbers of micro-batches that keep the bubble, or what a rank sends to replicas for each of its own."""
    dp, ratios = large.plan.dp(large.cluster.world_size), [1.0]
    micro_batches = num_micro_batches(large.plan, large.cluster.world_size, large.workload.global_batch_size)
    if large.plan.pp > 1 and pp > 1:
        ratios.append((pp - 1) / (large.plan.pp - 1))
    if dp > 1 and copies > 1:
        ratios.append((copies - 1) / copies * dp / (dp - 1))
    least = pp if large.plan.vpp > 1 else 1
    found = {max(least, round(micro_batches * ratio / least) * least) for ratio in ratios}
    return sorted(one for one in found if one <= micro_batches) or [micro_batches]


def _layers(model: ModelSpec, num_layers: int) -> ModelSpec:
    """Returns a model with fewer layers; of those of a mixture that are dense it keeps their share."""
    dense = round(model.num_dense_layers * num_layers / model.num_layers)
    return replace(model, num_layers=num_layers, num_dense_layers=dense)


def _vocabulary(model: ModelSpec, small: TrialSpec, depth_frac: float) -> ModelSpec:
    """Cuts the vocabulary as stages are cut, so that the head keeps its share; tokens of a file need all of it."""
    if small.workload.tokens is not None:
        return model
    rows = _ROWS * small.plan.tp
    return replace(model, vocab_size=max(rows, round(model.vocab_size * depth_frac / rows) * rows))
