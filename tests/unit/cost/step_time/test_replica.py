"""Communication beside compute, and what replicas gather and reduce."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from wattune.catalog.hardware import parse_cluster_label
from wattune.cost.coefficients import PUBLISHED_STEP_TIME
from wattune.cost.step_time.links import Links
from wattune.cost.step_time.replica import Weights, beside

SECONDS = st.floats(0.0, 10.0)


@given(SECONDS, SECONDS, st.floats(0.0, 1.0))
def test_exposed_and_overlapped_are_all_of_it(communication_s, window_s, first_share):
    all_s = np.array([communication_s])
    exposed_s, overlapped_s = beside(all_s, np.array([window_s]), np.ones(1), first_share * all_s)
    assert exposed_s + overlapped_s == pytest.approx(all_s)
    assert 0 <= overlapped_s[0] <= window_s + 1e-12
    assert exposed_s[0] >= communication_s - window_s - 1e-12


def weights(size, dense, experts=0.0, copies=1, cluster="1x8 h200_sxm"):
    links = Links.of(parse_cluster_label(cluster), PUBLISHED_STEP_TIME.link)
    group = links.group(np.array([float(size)]), np.array([1.0]))
    between = links.group(np.array([float(copies)]), np.array([float(size)]))
    held = Weights(
        dense=np.array([dense]),
        experts=np.array([experts]),
        units=np.array([4.0]),
        first_frac=np.array([0.25]),
        dense_group=group,
        expert_group=group,
        dense_copies=between,
        expert_copies=between,
    )
    return links, held


def test_reducing_moves_more_than_gathering():
    links, held = weights(8, 1e9)
    gather_s, scatter_s = held.gather_s(links, 2)[0], held.reduce_s(links, scatter=np.array([True]), item_bytes=4)[0]
    whole_s = held.reduce_s(links, scatter=np.array([False]), item_bytes=4)[0]
    assert 1.8 < scatter_s / gather_s < 2.1  # fp32 gradients, bf16 weights
    assert 1.8 < whole_s / scatter_s < 2.1  # an all-reduce is a reduce-scatter and an all-gather


def test_gradients_in_half_the_bytes_take_half_as_long():
    links, held = weights(8, 1e9)
    wide_s, narrow_s = (held.reduce_s(links, scatter=np.array([True]), item_bytes=each)[0] for each in (4, 2))
    assert 1.9 < wide_s / narrow_s < 2.0  # latency stays


def test_a_single_replica_sends_nothing():
    links, held = weights(1, 1e9, 1e9)
    assert sum(held.gather_s(links, 2)) == 0
    assert sum(held.reduce_s(links, scatter=np.array([True]), item_bytes=4)) == 0


def test_experts_add_to_the_rest():
    links, dense = weights(8, 1e9)
    _, both = weights(8, 1e9, 1e9)
    assert both.gather_s(links, 2)[1][0] == pytest.approx(dense.gather_s(links, 2)[0][0])
    assert sum(both.gather_s(links, 2))[0] == pytest.approx(2 * sum(dense.gather_s(links, 2))[0])


def test_copies_are_summed_by_shards_and_only_where_there_are_some():
    links, alone = weights(8, 1e9, 1e9)
    assert alone.sum_copies_s(links, item_bytes=4)[0] == 0
    links, between_nodes = weights(8, 1e9, copies=2, cluster="2x8 h200_sxm")
    _, in_a_node = weights(4, 1e9, copies=2, cluster="2x8 h200_sxm")
    assert (
        in_a_node.sum_copies_s(links, item_bytes=4)[0] < between_nodes.sum_copies_s(links, item_bytes=4)[0]
    )  # although shards are twice as large
    _, twice = weights(8, 2e9, copies=2, cluster="2x8 h200_sxm")
    assert 1.8 < twice.sum_copies_s(links, item_bytes=4)[0] / between_nodes.sum_copies_s(links, item_bytes=4)[0] < 2.0


def test_hybrid_sharding_keeps_most_traffic_inside_a_node():
    """Four micro-batches over a network of few adapters, gathered over all ranks or in each node."""
    links, over_all = weights(16, 1e9, cluster="8x2 h200_sxm")
    _, in_each = weights(2, 1e9, copies=8, cluster="8x2 h200_sxm")
    step_s = [
        4 * (2 * one.gather_s(links, 2)[0] + one.reduce_s(links, scatter=np.array([True]), item_bytes=4)[0])
        + one.sum_copies_s(links, item_bytes=4)
        for one in (over_all, in_each)
    ]
    assert step_s[1][0] < 0.8 * step_s[0][0]
