"""Traffic where its ranks sit: against a simulator of messages, against counting, and against the network's rate."""

import math
from collections import defaultdict
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kernel_shapes import shapes
from specs import trial_spec

from wattune.catalog.hardware import ClusterSpec, device
from wattune.catalog.models import model
from wattune.catalog.networks import NetworkSpec
from wattune.cost.batch import batches
from wattune.cost.coefficients import PUBLISHED_STEP_TIME
from wattune.cost.power import H200 as POWER
from wattune.cost.step_time.facts import FACTS
from wattune.cost.step_time.links import BUS_FRAC, Links
from wattune.cost.step_time.predict import predict
from wattune.cost.step_time.traffic import layer_traffic
from wattune.cost.step_time.work import Machine
from wattune.plans.axes import Plan
from wattune.plans.parallel import coordinates, expert_place
from wattune.plans.placement import crossing_frac, place, spread_of_groups

SHAPES = ((8, 1), (4, 2), (2, 4), (1, 8))
GIGABITS = (25, 50, 100, 200, 400)
LINK = PUBLISHED_STEP_TIME.link


def cluster(shape, gigabits, **changes):
    own = NetworkSpec(name="ours", bandwidth_bytes_per_s=gigabits * 1e9 / 8)
    return ClusterSpec(device="h100_sxm", num_nodes=shape[0], devices_per_node=shape[1], network=own, **changes)


# A simulator of messages: every byte on the link or the port that its sender has.


def nodes_of(plan, machines):
    """Returns the fast fabric that each rank sits in."""
    slots = place(plan, machines)
    return [(slot.node * machines.devices_per_node + slot.device) // machines.domain for slot in slots]


def groups(plan, machines, key):
    found = defaultdict(list)
    for rank in range(machines.world_size):
        found[key(rank)].append(rank)
    return list(found.values())


class Wires:
    def __init__(self, node_of, machines):
        self.node_of, self.machines = node_of, machines
        self.link, self.port = defaultdict(float), defaultdict(float)

    def send(self, sender, receiver, size_bytes):
        wire = self.link if self.node_of[sender] == self.node_of[receiver] else self.port
        wire[sender] += size_bytes

    def busy_s(self, inside):
        rate = self.machines.network.bandwidth_bytes_per_s * 0.8
        return max(
            [*(size / inside for size in self.link.values()), *(size / rate for size in self.port.values()), 0.0]
        )


def simulated_s(kind, group, size_bytes, node_of, machines):
    """Sends what NCCL sends: rings with one way into and out of a node for each rank there, or all to all."""
    by_node = defaultdict(list)
    for rank in group:
        by_node[node_of[rank]].append(rank)
    fewest, n = min(map(len, by_node.values())), len(group)
    wires = Wires(node_of, machines)
    for channel in range(fewest) if kind != "all_to_all" else ():
        ring = [rank for ranks in by_node.values() for rank in ranks[channel:] + ranks[:channel]]
        for _ in range((n - 1) * (2 if kind == "all_reduce" else 1)):
            for sender, receiver in zip(ring, ring[1:] + ring[:1], strict=True):
                wires.send(sender, receiver, size_bytes / n / fewest)
    for sender in group if kind == "all_to_all" else ():
        for receiver in group:
            if receiver != sender:
                wires.send(sender, receiver, size_bytes / n)
    inside = 450e9 * float(np.interp(math.log2(max(fewest, 2)), [1, 2, 3], BUS_FRAC[kind]))
    if kind == "all_reduce" and len(by_node) > 1:
        inside = 450e9 * 1.05  # its switches add up
    if kind == "all_reduce" and len(by_node) == 2:  # a tree: each node sends what it has added up once, to the other
        wires.port = dict.fromkeys(group, size_bytes / fewest / 1.2)
    return start_s(kind, n, len(by_node), fewest, size_bytes) + wires.busy_s(inside) / LINK.in_step_frac


def start_s(kind, n, nodes, fewest, size_bytes):
    """Latencies and what messages of some MB lose: by NCCL's trees and rings, with what was fitted to its tests."""
    if nodes == 1:
        rounds = 2 if kind == "all_reduce" else 1
        further_hops = rounds * (n - 1) - 1
        return LINK.latency_s * (1 + 0.14 * further_hops) + rounds * 35e-6 * size_bytes / (size_bytes + 16e6)
    found = LINK.latency_s * (0.5 + 0.5 * math.log2(max(fewest, 2)))
    found += 70e-6 * size_bytes / (size_bytes + 0.7e6) + 140e-6 * size_bytes / (size_bytes + 47e6)
    if kind == "all_reduce":
        return found + 3.8 * LINK.network_latency_s * math.log2(nodes)
    return found + LINK.network_latency_s * (nodes - 1) + 1.3e-6 * (n - 1) * (1 + 2 * size_bytes / (size_bytes + 47e6))


def message_s(sender, receiver, size_bytes, node_of, machines):
    wires = Wires(node_of, machines)
    wires.send(sender, receiver, size_bytes)
    start_s = LINK.latency_s + (0 if node_of[sender] == node_of[receiver] else 2 * LINK.network_latency_s)
    return start_s + wires.busy_s(450e9 * BUS_FRAC["all_to_all"][0]) / LINK.in_step_frac


def dense(plan, machines, *kept):
    def key(rank):
        own = coordinates(rank, plan, machines.world_size)
        return tuple(getattr(own, name) for name in kept)

    return groups(plan, machines, key)


COLLECTIVES = {  # plan, size and stride of its groups, and the groups by the mesh of the engines
    "tensor": (Plan(tp=8, etp=8), 8, 1, lambda p, c: dense(p, c, "pp", "dp", "cp")),
    "tensor of 4": (Plan(tp=4, etp=4), 4, 1, lambda p, c: dense(p, c, "pp", "dp", "cp")),
    "data": (Plan(), 8, 1, lambda p, c: dense(p, c, "pp", "tp")),
    "data over tensor": (Plan(tp=2, etp=2), 4, 2, lambda p, c: dense(p, c, "pp", "tp")),
    "data in stages": (Plan(pp=2), 4, 1, lambda p, c: dense(p, c, "pp", "tp")),
    "experts": (Plan(ep=8), 8, 1, lambda p, c: groups(p, c, lambda r: r // 8)),
    "experts in slices": (
        Plan(tp=2, ep=4, etp=2), 4, 2, lambda p, c: groups(p, c, lambda r: expert_place(r, p, 8)[1]),
    ),
    "experts' replicas": (Plan(ep=2), 4, 2, lambda p, c: groups(p, c, lambda r: expert_place(r, p, 8))),
}  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", COLLECTIVES)
def test_collectives_take_what_their_messages_take(name, shape):
    plan, size, stride, members = COLLECTIVES[name]
    for gigabits in GIGABITS:
        machines = cluster(shape, gigabits)
        links, node_of = Links.of(machines, LINK), nodes_of(plan, machines)
        group = links.group(np.array([float(size)]), np.array([float(stride)]))
        for kind in BUS_FRAC:
            slowest = max(simulated_s(kind, one, 5e7, node_of, machines) for one in members(plan, machines))
            found = float(links.collective_s(kind, group, np.array([5e7]))[0])
            assert found == pytest.approx(slowest, rel=1e-9), (kind, gigabits)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("plan", [Plan(cp=8), Plan(tp=2, etp=2, cp=4), Plan(cp=2)], ids=lambda plan: plan.label)
def test_the_ring_of_context_parallel_waits_for_its_slowest_hop(plan, shape):
    llama = model("llama3_8b")
    for gigabits in GIGABITS:
        machines = cluster(shape, gigabits)
        node_of = nodes_of(plan, machines)
        kv_bytes = 2 * 4096 * llama.num_kv_heads * llama.head_size * 2 / plan.tp
        hop_s = max(
            message_s(sender, receiver, kv_bytes, node_of, machines)
            for ring in dense(plan, machines, "pp", "dp", "tp")
            for sender, receiver in zip(ring, ring[1:] + ring[:1], strict=True)
        )
        found = layer_traffic(
            Machine.of(device("h100_sxm"), "bf16", PUBLISHED_STEP_TIME),
            Links.of(machines, LINK),
            llama,
            shapes(tp=plan.tp, cp=plan.cp),
            FACTS["torch"],
            np.zeros(1),
            np.zeros(1),
        )
        assert found.cp_forward_s[0] == pytest.approx((plan.cp - 1) * hop_s + 0.2 * hop_s, rel=1e-9)


def parts(plan, machines, *, name="llama3_8b", engine="torch"):
    spec = replace(trial_spec(name, on="1x8 h100_sxm", engine=engine, batch=32, plan=plan), cluster=machines)
    ((_, batch),) = batches([spec])
    found = predict(batch, PUBLISHED_STEP_TIME, POWER)
    return {kind: float(seconds[0]) for kind, seconds in found.parts_s.items()}


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(
    "plan", [Plan(pp=8), Plan(pp=4, tp=2, etp=2), Plan(pp=2), Plan(pp=4, vpp=2)], ids=lambda plan: plan.label
)
def test_stages_send_where_they_sit(plan, shape):
    """A stage pays for what it receives: activations from the one before, and gradients from the one behind."""
    llama = model("llama3_8b")
    for gigabits in GIGABITS:
        machines = cluster(shape, gigabits)
        node_of, of_stage = nodes_of(plan, machines), 8 // plan.pp
        size_bytes = 4096 * llama.hidden_size * 2 / plan.tp
        total_s = 0.0
        for chunk in range(plan.vpp):
            for stage in range(plan.pp):
                ranks = [rank for rank in range(8) if coordinates(rank, plan, 8).pp == stage]
                before = [message_s((r - of_stage) % 8, r, size_bytes, node_of, machines) for r in ranks]
                behind = [message_s((r + of_stage) % 8, r, size_bytes, node_of, machines) for r in ranks]
                total_s += max(before) if (chunk, stage) != (0, 0) else 0
                total_s += max(behind) if (chunk, stage) != (plan.vpp - 1, plan.pp - 1) else 0
        micro_batches = 32 // (8 // plan.pp // plan.tp)
        assert parts(plan, machines)["exposed_comm_pp_s"] == pytest.approx(micro_batches * total_s / plan.pp, rel=1e-9)


def test_four_nodes_of_two_feel_their_network():
    """Three of seven boundaries of eight stages cross; sends cost the same at 25 and 400 Gb/s before."""
    slow, fast = (parts(Plan(pp=8), cluster((4, 2), gigabits))["exposed_comm_pp_s"] for gigabits in (25, 400))
    all_slow = parts(Plan(pp=8), cluster((8, 1), 25))["exposed_comm_pp_s"]
    assert fast < slow / 3 and slow / all_slow == pytest.approx(3 / 7, abs=0.02)


KINDS = {
    "pipeline": Plan(pp=8),
    "interleaved": Plan(pp=4, vpp=2, tp=2, etp=2),
    "tensor": Plan(tp=8, etp=8),
    "context": Plan(cp=8),
    "data": Plan(),
    "sharded": Plan(sharding="zero3"),
    "hybrid": Plan(sharding="zero3", dp_replicate=2),
    "hidden": Plan(sharding="zero1", overlap="grad_param"),
    "experts": Plan(ep=8),
    "slices of experts": Plan(tp=2, ep=4, etp=2),
    "all": Plan(tp=2, etp=2, pp=2, cp=2),
}


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_a_faster_network_is_never_slower_and_faster_wherever_it_is_crossed(kind, shape):
    plan = KINDS[kind]
    name = "mixtral_8x7b" if plan.ep > 1 else "llama3_8b"
    times_s = [sum(parts(plan, cluster(shape, gigabits), name=name).values()) for gigabits in GIGABITS]
    if shape == (1, 8):
        assert len(set(times_s)) == 1
    elif kind == "hidden":  # compute may hide it
        assert all(faster <= slower for slower, faster in pairwise(times_s))
    else:
        assert all(faster < slower for slower, faster in pairwise(times_s))


@given(
    nodes=st.integers(1, 5), on_node=st.integers(1, 9), size=st.integers(1, 8), stride=st.integers(1, 6), data=st.data()
)
def test_groups_are_counted_as_they_lie(nodes, on_node, size, stride, data):
    world = math.lcm(nodes * on_node, size * stride)
    order = data.draw(st.none() | st.permutations(range(world))) if world <= 60 else None
    sits = [slot // on_node for slot in (order or range(world))]
    members = defaultdict(list)
    for rank in range(world):
        members[rank // (size * stride), rank % stride].append(sits[rank])
    most = max(len(set(one)) for one in members.values())
    fewest = min(one.count(node) for one in members.values() for node in one)
    assert (most, fewest) == spread_of_groups(
        size, stride, domain=on_node, world_size=world, rank_order=tuple(order) if order else "topology"
    )
    machines = ClusterSpec(device="h100_sxm", num_nodes=world // on_node, devices_per_node=on_node)
    group = Links.of(machines, LINK).group(np.array([float(size), 1.0]), np.array([float(stride), 1.0]))
    if not order:
        assert (group.nodes[0], group.local[0]) == (most, fewest)
    assert (group.nodes[1], group.local[1]) == (1, 1)


@given(nodes=st.integers(1, 6), on_node=st.integers(1, 8), pp=st.integers(1, 6))
def test_boundaries_are_counted_as_they_lie(nodes, on_node, pp):
    world = math.lcm(nodes * on_node, pp)
    step = world // pp
    expected = [
        any(rank // on_node != (rank + step) % world // on_node for rank in range(stage * step, (stage + 1) * step))
        for stage in range(pp)
    ]
    assert (crossing_frac(pp, domain=on_node, world_size=world) > 0).tolist() == expected


def test_an_order_of_ranks_decides_where_a_node_has_several_fabrics():
    """Pairs of boards with a bridge: neighbours of tensor parallel share one, or none does."""
    pairs = cluster((1, 4), 100, nvlink_domain_size=2)
    near = parts(Plan(tp=2, etp=2), pairs)["exposed_comm_tp_s"]
    far = parts(Plan(tp=2, etp=2, rank_order=(0, 2, 1, 3)), pairs)["exposed_comm_tp_s"]
    assert far > 3 * near
    whole = cluster((1, 4), 100)
    same = [parts(Plan(tp=2, etp=2, rank_order=order), whole) for order in ("topology", (0, 2, 1, 3))]
    assert same[0] == same[1]
