"""The ranks of a plan as device meshes, agreeing with `wattune.plans.parallel`."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from wattune.engines.model.experts import ExpertShard
from wattune.engines.model.tensor_ranks import TensorRanks
from wattune.plans.axes import Plan
from wattune.plans.parallel import coordinates
from wattune.workers.process_groups import group_of

_identities: dict[tuple[int, tuple[str, ...]], int] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Meshes:
    """The ranks of one plan. Both meshes count ranks alike, tensor parallel innermost; experts split data parallel."""

    _dense: DeviceMesh
    """(pp, replicate, shard, tp)."""
    _experts: DeviceMesh | None
    """(pp, replicate, shard, ep, tp) where the model has experts."""
    identity: int
    """Equal for two plans of this process where this rank stands alike in groups of the same names."""
    _suffix: str
    """Ends every dimension's name, one for each identity. DTensor caches its decisions, and compiled graphs are reused,
    for all meshes that compare equal; both name groups and hold this rank's place in them."""

    @classmethod
    def create(cls, plan: Plan, *, world_size: int, rank: int, device_type: str, has_experts: bool) -> "Meshes":
        """Takes this meeting's groups, or makes them; all ranks must call it together."""

        def split(size: int) -> dict[str, int]:
            copies = size if plan.sharding == "none" else plan.dp_replicate
            return {"replicate": copies, "shard": size // copies}

        dp = plan.dp(world_size)
        sizes = [{"pp": plan.pp, **split(dp), "tp": plan.tp}]
        sizes += [{"pp": plan.pp, **split(dp // plan.ep), "ep": plan.ep, "tp": plan.tp}] if has_experts else []
        grids = [torch.arange(world_size).view(*each.values()) for each in sizes]
        groups = _groups(sizes, grids, rank)
        identity = _identities.setdefault((rank, tuple(each.group_name for each in chain(*groups))), len(_identities))
        suffix = f"_{identity}"
        dense, *experts = (
            # All under names of their own: what groups are called is known once they exist.
            DeviceMesh.from_group(each, device_type, mesh=grid, mesh_dim_names=tuple(dim + suffix for dim in dims))
            for each, grid, dims in zip(groups, grids, sizes, strict=True)
        )
        here, place = coordinates(rank, plan, world_size), dense.get_coordinate()
        assert place is not None
        assert (place[0], place[1] * split(dp)["shard"] + place[2], place[3]) == (here.pp, here.dp, here.tp)
        return cls(_dense=dense, _experts=experts[0] if experts else None, identity=identity, _suffix=suffix)

    def dense(self, *dims: str) -> DeviceMesh:
        """Dimensions `pp`, `replicate`, `shard`, `tp` of the mesh of everything but experts."""
        return self._dense[tuple(dim + self._suffix for dim in dims)]

    def experts(self, *dims: str) -> DeviceMesh:
        """Dimensions `pp`, `replicate`, `shard`, `ep`, `tp` of the experts' mesh."""
        assert self._experts is not None
        return self._experts[tuple(dim + self._suffix for dim in dims)]

    def tensor_ranks(self) -> TensorRanks:
        """Returns the ranks that share this one's layers."""
        tp = self.dense("tp")
        return TensorRanks(size=tp.size(), rank=tp.get_local_rank(), group=tp.get_group().group_name)

    def expert_shard(self, plan: Plan) -> ExpertShard:
        """Returns the part of the experts that this rank holds."""
        if self._experts is None:
            return ExpertShard()
        ep = self.experts("ep")
        return ExpertShard(
            ep=plan.ep,
            ep_rank=ep.get_local_rank(),
            tp=plan.tp,
            tp_rank=self.experts("tp").get_local_rank(),
            group=ep.get_group() if plan.ep > 1 else None,
        )


def _groups(sizes: Sequence[dict[str, int]], grids: Sequence[Tensor], rank: int) -> list[list[dist.ProcessGroup]]:
    """Returns this rank's group along each dimension of each mesh.

    Those of several ranks are made first, so that they are called alike whichever dimension has ranks.
    """
    found: dict[tuple[int, int], dist.ProcessGroup] = {}
    counts: Counter[tuple[int, ...]] = Counter()
    dims = [
        (size == 1, mesh, dim, name) for mesh, of in enumerate(sizes) for dim, (name, size) in enumerate(of.items())
    ]
    for _, mesh, dim, name in sorted(dims):
        place = (grids[mesh] == rank).nonzero()[0].tolist()
        own = tuple(grids[mesh][(*place[:dim], slice(None), *place[dim + 1 :])].tolist())
        found[mesh, dim] = group_of(own, counts[own], f"mesh_{name}")
        counts[own] += 1
    return [[found[mesh, dim] for dim in range(len(of))] for mesh, of in enumerate(sizes)]
