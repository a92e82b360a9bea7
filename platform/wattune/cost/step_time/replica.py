"""Communication between replicas: weights gathered and gradients reduced, by sharding, overlap and engine.

| sharding | gathers | reduces | hidden behind |
|---|---|---|---|
| none | - | all-reduce once | overlap grad: the last backward pass; DeepSpeed: nothing |
| zero1 | once | reduce-scatter once | grad: the last backward pass; grad_param: gathers beside the first forward pass |
| zero2 | once | reduce-scatter each micro-batch | grad: each backward pass; grad_param as above |
| zero3 | in each forward and backward pass | reduce-scatter each micro-batch | grad_param: gathers; grad: reduces |

Hybrid sharding does so inside groups of dp/dp_replicate ranks, and sums the shards of the groups once a step: an
all-reduce of 1/(dp/dp_replicate) of the gradients between them (FSDP2's HSDP; hidden like the last reduction).

Below zero3 DeepSpeed gathers in the update and reduces after the backward pass, beside nothing, whatever is asked for
(measured on H200: `benchmarks/data/dense_gpt_h200x4.parquet`). Gradients travel in fp32, weights in the batch's type.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from wattune.arrays import Floats
from wattune.cost.step_time.links import Links, RankGroups


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """Parameters on one rank in columns of any one shape, experts apart, and the ranks that share them."""

    dense: Floats
    experts: Floats
    units: Floats
    """Parts that are gathered and reduced together: layers, and both ends."""
    first_frac: Floats
    """Share of all in the part that is gathered first and reduced last."""
    dense_group: RankGroups
    expert_group: RankGroups
    dense_copies: RankGroups
    """Ranks that hold the same shard; one where no shard has a copy."""
    expert_copies: RankGroups

    def gather_s(self, links: Links, item_bytes: int) -> tuple[Floats, Floats]:
        """Predicts gathering all of them once: dense ones, and experts."""
        return self._collectives_s(links, "all_gather", item_bytes)

    def reduce_s(self, links: Links, *, scatter: npt.NDArray[np.bool_], item_bytes: float) -> tuple[Floats, Floats]:
        """Predicts reducing all gradients once, to shards where `scatter` is true: dense ones, and experts'."""
        kinds = [self._collectives_s(links, kind, item_bytes) for kind in ("reduce_scatter", "all_reduce")]
        dense_s, experts_s = (np.where(scatter, *both) for both in zip(*kinds, strict=True))
        return dense_s, experts_s

    def sum_copies_s(self, links: Links, *, item_bytes: float) -> Floats:
        """Predicts summing the gradients of shards over their copies, once."""
        dense, experts = self.dense / self.dense_group.size, self.experts / self.expert_group.size
        held = (self.dense_copies, dense), (self.expert_copies, experts)
        return sum((self._in_units(links, "all_reduce", *each, item_bytes) for each in held), np.zeros_like(dense))

    def _collectives_s(self, links: Links, kind: str, item_bytes: float) -> tuple[Floats, Floats]:
        return (
            self._in_units(links, kind, self.dense_group, self.dense, item_bytes),
            self._in_units(links, kind, self.expert_group, self.experts, item_bytes),
        )

    def _in_units(self, links: Links, kind: str, group: RankGroups, count: Floats, item_bytes: float) -> Floats:
        units = np.maximum(self.units, 1)
        return np.where(count > 0, links.collective_s(kind, group, count * item_bytes / units) * units, 0.0)


def beside(communication_s: Floats, window_s: Floats, hides: Floats, first_s: Floats) -> tuple[Floats, Floats]:
    """Divides communication that may run beside compute into exposed and overlapped seconds.

    Where `hides` is 0 all of it is exposed. `first_s` is the part that nothing can hide: the first gathering, or the
    last reduction.
    """
    left_s = np.minimum(np.maximum(communication_s - window_s, first_s), communication_s)
    exposed_s = np.where(hides > 0, left_s, communication_s)
    return exposed_s, communication_s - exposed_s
