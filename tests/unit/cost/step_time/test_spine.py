"""Leaf and spine: hops counted as they lie, links that all share, and networks whose spine takes all."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from specs import trial_spec

from wattune.catalog.hardware import DEVICES, ClusterSpec
from wattune.catalog.networks import NETWORKS, NetworkSpec
from wattune.cost.coefficients import PUBLISHED_STEP_TIME, MeasuredCollective
from wattune.cost.defaults import default_coefficients
from wattune.cost.estimate import estimate
from wattune.cost.step_time.links import BUS_FRAC, Links
from wattune.plans.axes import Plan
from wattune.plans.placement import crossing_frac, spine_hops_frac

LINK = replace(PUBLISHED_STEP_TIME.link, in_step_frac=1.0)


def cluster(*, rail=None, oversubscription=1.0, nodes=8, on_node=4, **more):
    own = NetworkSpec(
        name="ours", bandwidth_bytes_per_s=25e9, rail_devices=rail, oversubscription=oversubscription, latency_s=1e-9
    )
    return ClusterSpec(device="h100_sxm", num_nodes=nodes, devices_per_node=on_node, network=own, **more)


def seconds(machines, kind, size, stride=1, order="topology", size_bytes=4e9):
    links = Links.of(machines, LINK, rank_order=order)
    group = links.group(np.array([float(size), 1.0]), np.array([float(stride), 1.0]))
    return float(links.collective_s(kind, group, np.array([size_bytes]))[0])


@given(
    nodes=st.integers(1, 6), on_node=st.integers(1, 4), rail=st.integers(1, 4), size=st.integers(2, 6),
    stride=st.integers(1, 4), data=st.data(),
)  # fmt: skip
def test_hops_over_the_spine_are_counted_as_they_lie(nodes, on_node, rail, size, stride, data):
    world = math.lcm(nodes * on_node, size * stride)
    order = data.draw(st.none() | st.permutations(range(world))) if world <= 48 else None
    slots, worst = list(order or range(world)), 0.0
    for start in range(0, world, size * stride):
        for offset in range(stride):
            own = [slots[start + offset + place * stride] for place in range(size)]
            pairs = list(zip(own, own[1:] + own[:1], strict=True))
            hops = sum(a // on_node != b // on_node for a, b in pairs)
            over = sum(a // (on_node * rail) != b // (on_node * rail) for a, b in pairs)
            worst = max(worst, over / hops if hops else 0.0)
    where = {"domain": on_node, "rail": on_node * rail, "world_size": world}
    assert spine_hops_frac(size, stride, **where, rank_order=tuple(order) if order else "topology") == worst


def test_a_ring_in_order_spares_the_spine_and_an_order_that_crosses_does_not():
    """Eight nodes, four below each leaf: in order two of eight hops cross, by turns all do."""
    turns = tuple(4 * node + device for pair in range(4) for node in (pair, pair + 4) for device in range(4))
    free, bound = cluster(), cluster(rail=16, oversubscription=4.0)
    in_order, crossed = (
        seconds(bound, "all_gather", 32, order=order) / seconds(free, "all_gather", 32) for order in ("topology", turns)
    )
    assert in_order == pytest.approx(1.0, abs=1e-3) and crossed == pytest.approx(4.0, rel=0.02)
    # Replicas of stages that fill a leaf meet over the spine alone.
    assert seconds(bound, "all_reduce", 2, stride=16) > 3.9 * seconds(free, "all_reduce", 2, stride=16)


@pytest.mark.parametrize("oversubscription", [1.5, 2.0, 7.0])
def test_all_to_all_is_bound_by_what_the_spine_takes(oversubscription):
    """Of 28 devices in other nodes 16 are in the other half."""
    slower = seconds(cluster(rail=16, oversubscription=oversubscription), "all_to_all", 32)
    assert slower / seconds(cluster(), "all_to_all", 32) == pytest.approx(max(oversubscription * 16 / 28, 1), rel=0.02)


def test_stages_of_half_a_leaf_share_its_links():
    assert crossing_frac(4, domain=16, world_size=32).tolist() == [0, 1, 0, 1]
    assert crossing_frac(8, domain=16, world_size=96) == pytest.approx([2 / 3, 2 / 3, 2 / 3, 1] * 2)
    links = Links.of(cluster(rail=16, oversubscription=2.0), LINK)
    free, half, all_of_them = links.send_s(np.full(3, 1e9), np.ones(3, bool), np.array([0.0, 0.5, 1.0]))
    assert free == half < all_of_them / 1.9


PLANS = {
    "data": Plan(), "sharded": Plan(sharding="zero3"), "hybrid": Plan(sharding="zero3", dp_replicate=2),
    "stages": Plan(pp=4), "tensor": Plan(tp=8, etp=8), "context": Plan(cp=4), "experts": Plan(ep=8),
}  # fmt: skip


@pytest.mark.parametrize("neutral", [{"rail": 16}, {"oversubscription": 4.0}, {"rail": 32, "oversubscription": 4.0}])
def test_a_spine_that_takes_all_changes_no_estimate(neutral):
    """Neither a leaf without oversubscription does, nor one that holds all devices."""
    specs = [
        replace(trial_spec("mixtral_8x7b" if plan.ep > 1 else "llama3_8b", on="1x8 h100_sxm", batch=32, plan=plan))
        for plan in PLANS.values()
    ]
    before, after = (
        estimate(
            [replace(spec, cluster=machines) for spec in specs], lambda _: default_coefficients(DEVICES["h100_sxm"])
        ).columns["step_time_s"]
        for machines in (cluster(), cluster(**neutral))
    )
    assert np.array_equal(before.value, after.value) and np.array_equal(before.high, after.high)


@pytest.mark.parametrize("kind", BUS_FRAC)
def test_more_oversubscription_is_never_faster(kind):
    times_s = [seconds(cluster(rail=8, oversubscription=one), kind, 32) for one in (1.0, 1.2, 2.0, 8.0, 100.0)]
    assert times_s == sorted(times_s) and times_s[-1] > 2 * times_s[0]


SWEPT = MeasuredCollective(
    kind="all_reduce", group_size=16, num_nodes=2, sizes_bytes=(1e6,), time_ratio=(1.1,), latency_s=1e-5, network="hdr"
)
SWEPT_LINK = replace(LINK, measured=(SWEPT,), origin="measured here")


@pytest.mark.parametrize(
    ("device", "changes", "nodes", "network", "words"),
    [
        ("h200_sxm", {}, 1, None, ""),
        ("h200_sxm", {}, 4, None, "over 4 nodes"),
        ("h200_sxm", {}, 4, "hdr", "over 4 nodes of hdr"),
        ("h200_sxm", {"seen_networks": ("hdr",), "seen_domains": (1, 2)}, 4, "hdr", ""),
        ("h200_sxm", {"link": SWEPT_LINK}, 4, "hdr", ""),
        ("h200_sxm", {"link": SWEPT_LINK}, 4, "ndr", "over 4 nodes of ndr"),
        ("a100_sxm_80gb", {}, 1, None, "in a node"),
        ("a100_sxm_80gb", {}, 2, "efa_p4d", "in a node and over 2 nodes of efa_p4d"),
    ],
)  # fmt: skip
def test_links_that_nobody_measured_are_named(device, changes, nodes, network, words):
    found = default_coefficients(DEVICES[device])
    found = replace(found, step_time=replace(found.step_time, **changes))
    machines = ClusterSpec(device=device, num_nodes=nodes, devices_per_node=8, network=NETWORKS.get(network))
    assert found.on(machines).unmeasured_links == words
