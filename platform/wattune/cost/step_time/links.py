"""Transfers over links: collectives by algorithm, size and fabric, t = latency + bytes c(n) / bandwidth."""

from dataclasses import dataclass
from typing import Final

import numpy as np

from wattune.arrays import Bools, Floats
from wattune.catalog.hardware import ClusterSpec
from wattune.cost.coefficients import LinkCoefficients
from wattune.plans.placement import RankOrder, crossing_frac, spine_hops_frac, spread_of_groups

_SIZES: Final = np.array([1.0, 2.0, 3.0])
"""log2 of the devices of a node that were measured together."""

BUS_FRAC: Final = {
    "all_gather": (0.58, 0.71, 0.77),
    "reduce_scatter": (0.56, 0.70, 0.76),
    "all_reduce": (0.71, 0.78, 0.80),
    "all_to_all": (0.66, 0.71, 0.70),
}
"""Bus bandwidth of 512 MB messages over the link bandwidth of one direction, for 2, 4 and 8 devices: NCCL 2.29.2 on
H100 and H200, AIConfigurator 095f58a. Their message sizes count elements. With 8 devices the table's all-reduce runs
in the switch (NVLink SHARP, 480 GB/s); the value here is that of a ring."""

_PCIE_5: Final = 63e9
_PCIE_4: Final = 31.5e9
_HOST_BYTES_PER_S: Final = {
    **dict.fromkeys(("a100_sxm_80gb", "a100_sxm_40gb", "a100_pcie_80gb"), _PCIE_4),
    "mi250_gcd": _PCIE_4 / 2,
    "gb200": 225e9,
}
HOST_FRAC: Final = 0.8
"""Achieved by large copies to and from pinned memory over the bandwidth of the link: an assumption for all devices. An
H200 reached 0.88 of 63 GB/s (`benchmarks/results/activation_offload.md`)."""


def host_bytes_per_s(device: str) -> float:
    """Returns the rate at which a device of the catalog copies to or from its host, in one direction.

    16 lanes of PCIe 5.0, 32 GT/s each and 128 bits of 130 are data: 63 GB/s, and half of that with PCIe 4.0, which two
    GCDs share (datasheets of the catalog). A Grace CPU and its two GPUs share 450 GB/s a direction (GB200 NVL72
    datasheet). A device of a space's own counts as one with PCIe 5.0.
    """
    return HOST_FRAC * _HOST_BYTES_PER_S.get(device, _PCIE_5)


_RAMPS: Final = ((35e-6, 16e6),)
"""Messages of some MB do not reach the bandwidth of large ones: seconds that they lose, and bytes of those that lose
half of them. Fitted to the same table."""

_HOP_FRAC: Final = 0.14
"""Latency of each further hop of a ring in a node, over that of a first one: the rows of H100 in the same table."""

_FAR_RAMPS: Final = ((70e-6, 0.7e6), (140e-6, 47e6))
"""The same between nodes. These, and the next three, are fitted to NCCL tests of four sites. Those of seven others,
over 2 to 8 nodes, they miss by 7 % (median, `benchmarks/results/collectives.md`)."""
_TREE_HOPS: Final = 3.8
"""Latencies of a network that a tree of nodes takes for each doubling, up and down; NCCL has 3.7 (`tuning.cc`)."""
_RANK_S: Final = 1.3e-6
"""Time that a ring between nodes takes for each rank, thrice as long with bulk messages: 1 or 2 us in NCCL, by the
processor (`tuning.cc`, `netOverhead`). So reduce-scatters grow slowly with their ranks."""
_PAIR_FRAC: Final = 1.2
"""Share of the ports that a tree of two nodes reaches, over that of larger groups: it sends each byte once."""
_SWITCHED_FRAC: Final = 1.05
_SWITCHED_BYTES_PER_S: Final = 450e9
"""Bus over link bandwidth of all-reduces over nodes whose switch adds up: NVLink 4 and later (NVLink SHARP)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankGroups:
    """Groups of ranks that communicate, as columns."""

    size: Floats
    local: Floats
    """Ranks of a group on one node; where its nodes differ, the fewest."""
    nodes: Floats
    """Nodes that it spans; where groups differ, the most. A node is what one fast fabric joins."""
    spine_hops_frac: Floats | float = 0.0
    """Share of its ring's hops between nodes that go over the spine."""
    spine_bytes_frac: Floats | float = 0.0
    """Share of what all send to all in other nodes that does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """The fabric of a cluster."""

    coefficients: LinkCoefficients
    bandwidth_bytes_per_s: float
    """Of one device to others of its node, one direction."""
    domain: int
    """Devices that the fast fabric joins."""
    world_size: int
    rank_order: RankOrder = "topology"

    @property
    def rail(self) -> int:
        """Devices that meet without the spine, all of them where that takes all that they send."""
        return self.coefficients.rail_devices if self.coefficients.oversubscription > 1 else self.world_size

    @classmethod
    def of(cls, cluster: ClusterSpec, coefficients: LinkCoefficients, *, rank_order: RankOrder = "topology") -> "Links":
        """Reads a cluster's fabric and network; the device's link bandwidth must be known."""
        bandwidth = cluster.sensed_device.link_bandwidth_bytes_per_s
        assert bandwidth is not None, "checked by the caller"
        return cls(
            coefficients=coefficients.over(cluster.network),
            bandwidth_bytes_per_s=bandwidth,
            domain=cluster.domain,
            world_size=cluster.world_size,
            rank_order=rank_order,
        )

    def group(self, size: Floats, stride: Floats) -> RankGroups:
        """Places groups of `size` ranks that are `stride` ranks apart, as `spread_of_groups` counts."""
        size, stride = np.broadcast_arrays(size, stride)
        if self.world_size <= self.domain:
            return RankGroups(size=size, local=size, nodes=np.ones_like(size))
        block = size * stride
        local = np.clip(self.domain // stride, 1, size)
        fits = (self.domain % block == 0) | (
            (block % self.domain == 0) & ((self.domain % stride == 0) | (stride % self.domain == 0))
        )
        nodes = size / local
        # Groups that do not lie on nodes alike: few shapes of few candidates.
        odd = np.flatnonzero(~fits.ravel()) if isinstance(self.rank_order, str) else np.arange(size.size)
        if odd.size:
            shapes, of = np.unique(np.stack([size.ravel()[odd], stride.ravel()[odd]]), axis=1, return_inverse=True)
            where = {"domain": self.domain, "world_size": self.world_size, "rank_order": self.rank_order}
            found = np.array([spread_of_groups(int(n), int(apart), **where) for n, apart in shapes.T], float)
            nodes.flat[odd], local.flat[odd] = found[of.ravel()].T
        if self.rail >= self.world_size:
            return RankGroups(size=size, local=local, nodes=nodes)
        hops, sent = np.zeros(size.shape), np.zeros(size.shape)
        where = {"world_size": self.world_size, "rank_order": self.rank_order}
        for n, apart in set(zip(size.ravel(), stride.ravel(), strict=True)):
            rows, shape = (size == n) & (stride == apart), (int(n), int(apart))
            hops[rows] = spine_hops_frac(*shape, domain=self.domain, rail=self.rail, **where)
            near = spread_of_groups(*shape, domain=self.rail, **where)[1]
            sent[rows] = (n - near) / np.maximum(n - local[rows], 1)
        return RankGroups(size=size, local=local, nodes=nodes, spine_hops_frac=hops, spine_bytes_frac=sent)

    def _outside(self, spine_frac: Floats | float) -> Floats:
        """Computes the rate of a device to other nodes, where all send at once and such a share goes over the spine."""
        c = self.coefficients
        return np.asarray(c.network_bytes_per_s * c.network_frac / np.maximum(c.oversubscription * spine_frac, 1.0))

    def latency_s(self, kind: str, group: RankGroups, size_bytes: Floats) -> Floats:
        """Computes what a collective takes beside its bytes on the wire.

        In a node all are rings: it grows with each hop, and an all-reduce goes round twice. Over nodes it grows with
        each doubling in them; an all-reduce is a tree, and grows with each doubling of them, the others with each rank.
        """
        c, far, rounds = self.coefficients, group.nodes > 1, 2 if kind == "all_reduce" else 1
        local = np.maximum(group.local, 2)
        hops, doubled = 1 + _HOP_FRAC * (rounds * (local - 1) - 1), 0.5 + 0.5 * np.log2(local)
        near_s, far_s = (
            sum(lost_s * size_bytes / (size_bytes + half) for lost_s, half in ramps) for ramps in (_RAMPS, _FAR_RAMPS)
        )
        if kind == "all_reduce":
            far_s = far_s + _TREE_HOPS * c.network_latency_s * np.log2(group.nodes)
        else:
            bulk = size_bytes / (size_bytes + _FAR_RAMPS[1][1])
            far_s = far_s + c.network_latency_s * (group.nodes - 1) + _RANK_S * (group.size - 1) * (1 + 2 * bulk)
        return np.asarray(np.where(far, c.latency_s * doubled + far_s, c.latency_s * hops + rounds * near_s))

    def collective_s(self, kind: str, group: RankGroups, size_bytes: Floats) -> Floats:
        """Predicts a collective.

        In seconds, 0 for groups of one. `size_bytes` is the whole message, as NCCL's tests count it: of an all-gather
        the gathered result, of a reduce-scatter the input, of an all-to-all what one rank sends to all.
        """
        c = self.coefficients
        inside = self.bandwidth_bytes_per_s * np.interp(
            np.log2(np.maximum(group.local, 2)), _SIZES, np.array(BUS_FRAC[kind])
        )
        share = (group.size - 1) / group.size
        if kind == "all_to_all":
            away = (group.size - group.local) / group.size
            wire_s = np.maximum(
                size_bytes * (share - away) / inside, size_bytes * away / self._outside(group.spine_bytes_frac)
            )
        else:
            far, outside, on_wire = (
                group.nodes > 1,
                group.local * self._outside(group.spine_hops_frac),
                size_bytes * share,
            )
            if kind == "all_reduce":
                on_wire, switched = 2 * on_wire, self.bandwidth_bytes_per_s >= _SWITCHED_BYTES_PER_S
                pair = outside * min(_PAIR_FRAC, 1 / c.network_frac) * 2 * share
                outside = np.where(group.nodes == 2, pair, outside)
                inside = np.where(far, self.bandwidth_bytes_per_s * _SWITCHED_FRAC, inside) if switched else inside
            wire_s = on_wire / np.where(far, np.minimum(inside, outside), inside)
        found = self.latency_s(kind, group, size_bytes) + wire_s / c.in_step_frac
        return np.where(group.size > 1, found * self._ratio(kind, group.size, group.nodes, size_bytes), 0.0)

    def send_s(self, size_bytes: Floats, crosses: Bools, spine_frac: Floats | float = 0.0) -> Floats:
        """Predicts a message between two ranks, to another node where `crosses`, with a share of all over the spine."""
        c = self.coefficients
        inside = np.logical_not(crosses)
        rate = np.where(inside, self.bandwidth_bytes_per_s * BUS_FRAC["all_to_all"][0], self._outside(spine_frac))
        found = c.latency_s + np.where(inside, 0.0, 2 * c.network_latency_s) + size_bytes / rate / c.in_step_frac
        two = np.full(np.shape(found), 2.0)
        return np.asarray(found * self._ratio("send_recv", two, np.where(inside, 1.0, 2.0), size_bytes))

    def to_next_stage_s(self, num_stages: int, size_bytes: Floats) -> Floats:
        """Predicts a message of each stage to the next one, from where its ranks sit."""
        crosses, over_spine = (
            crossing_frac(num_stages, domain=domain, world_size=self.world_size, rank_order=self.rank_order)
            for domain in (self.domain, self.rail)
        )
        return self.send_s(size_bytes, crosses > 0, over_spine)

    def _ratio(self, kind: str, size: Floats, nodes: Floats, size_bytes: Floats) -> Floats:
        """Returns measured over predicted time: that of the nearest group that was measured, in one node or in several.

        Nearest is the least sum of doublings of its size and of its nodes.
        It is interpolated in the logs of size and ratio, and held beyond the smallest and the largest message. Where
        nothing was measured it is 1.
        """
        shape = np.broadcast_shapes(np.shape(size), np.shape(size_bytes))
        ratio = np.ones(shape)
        if not self.coefficients.measured:
            return ratio
        for several in (False, True):
            own = [one for one in self.coefficients.measured if one.kind == kind and (one.num_nodes > 1) == several]
            if not own:
                continue
            away = sum(
                np.abs(np.log2(np.maximum(np.broadcast_to(here, shape), 1))[..., None] - np.log2(there))
                for here, there in ((size, [one.group_size for one in own]), (nodes, [one.num_nodes for one in own]))
            )
            nearest = np.argmin(away, axis=-1)
            log_bytes = np.log(np.maximum(np.broadcast_to(size_bytes, shape), 1.0))
            here = np.broadcast_to(nodes > 1, shape) == several
            for place, one in enumerate(own):
                rows = here & (nearest == place)
                knots, values = np.log(one.sizes_bytes), np.log(one.time_ratio)
                ratio[rows] = np.exp(np.interp(log_bytes[rows], knots, values))
        return ratio
