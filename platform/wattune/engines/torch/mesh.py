"""The ranks of a plan as device meshes, agreeing with `wattune.plans.parallel`."""

from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from wattune.engines.model.experts import ExpertShard
from wattune.engines.model.tensor_ranks import TensorRanks
from wattune.plans.axes import Plan
from wattune.plans.parallel import coordinates

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
        """Makes the process groups; all ranks must call it together."""

        def mesh(**sizes: int) -> DeviceMesh:
            return init_device_mesh(device_type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))

        def split(size: int) -> dict[str, int]:
            copies = size if plan.sharding == "none" else plan.dp_replicate
            return {"replicate": copies, "shard": size // copies}

        dp = plan.dp(world_size)
        dense = mesh(pp=plan.pp, **split(dp), tp=plan.tp)
        here = coordinates(rank, plan, world_size)
        place = dense.get_coordinate()
        assert place is not None
        assert (place[0], place[1] * split(dp)["shard"] + place[2], place[3]) == (here.pp, here.dp, here.tp)
        experts = mesh(pp=plan.pp, **split(dp // plan.ep), ep=plan.ep, tp=plan.tp) if has_experts else None
        groups = [group for each in (dense, experts) if each is not None for group in each.get_all_groups()]
        identity = _identities.setdefault((rank, tuple(group.group_name for group in groups)), len(_identities))
        suffix = f"_{identity}"
        return cls(
            _dense=_renamed(dense, suffix),
            _experts=None if experts is None else _renamed(experts, suffix),
            identity=identity,
            _suffix=suffix,
        )

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

    def close(self) -> None:
        """Destroys the process groups made for the meshes; the default group stays."""
        for mesh in (self._dense, self._experts):
            for group in mesh.get_all_groups() if mesh is not None else []:
                if group is not dist.group.WORLD:
                    dist.destroy_process_group(group)


def _renamed(mesh: DeviceMesh, suffix: str) -> DeviceMesh:
    """The same groups under other names of dimensions: what the groups are called is known once they exist."""
    assert mesh.mesh_dim_names is not None
    return DeviceMesh.from_group(
        mesh.get_all_groups(),
        mesh.device_type,
        mesh=mesh.mesh,
        mesh_dim_names=tuple(name + suffix for name in mesh.mesh_dim_names),
    )
