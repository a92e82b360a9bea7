"""Communication beside compute, and what replicas gather and reduce."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from wattune.catalog.hardware import parse_cluster_label
from wattune.cost.coefficients import PUBLISHED_STEP_TIME
from wattune.cost.step_time.links import Links
from wattune.cost.step_time.replica import Weights, hidden

SECONDS = st.floats(0.0, 10.0)


@given(SECONDS, SECONDS, st.floats(0.0, 1.0))
def test_exposed_and_overlapped_are_all_of_it(communication_s, window_s, first_share):
    all_s = np.array([communication_s])
    exposed_s, overlapped_s = hidden(all_s, np.array([window_s]), first_s=first_share * all_s)
    assert exposed_s + overlapped_s == pytest.approx(all_s)
    assert 0 <= overlapped_s[0] <= window_s + 1e-12
    assert exposed_s[0] >= communication_s - window_s - 1e-12


def weights(size, dense, experts=0.0):
    links = Links.of(parse_cluster_label("1x8 h200_sxm"), PUBLISHED_STEP_TIME.link)
    group = links.group(np.array([float(size)]), np.array([1.0]))
    held = Weights(
        dense=np.array([dense]),
        experts=np.array([experts]),
        units=np.array([4.0]),
        dense_group=group,
        expert_group=group,
    )
    return links, held


def test_reducing_moves_more_than_gathering():
    links, held = weights(8, 1e9)
    gather_s, scatter_s = held.gather_s(links, 2)[0], held.reduce_s(links, scatter=np.array([True]))[0]
    whole_s = held.reduce_s(links, scatter=np.array([False]))[0]
    assert 1.8 < scatter_s / gather_s < 2.1  # fp32 gradients, bf16 weights
    assert 1.8 < whole_s / scatter_s < 2.1  # an all-reduce is a reduce-scatter and an all-gather


def test_a_single_replica_sends_nothing():
    links, held = weights(1, 1e9, 1e9)
    assert held.gather_s(links, 2)[0] == 0
    assert held.reduce_s(links, scatter=np.array([True]))[0] == 0


def test_experts_add_to_the_rest():
    links, dense = weights(8, 1e9)
    _, both = weights(8, 1e9, 1e9)
    assert both.gather_s(links, 2)[0] == pytest.approx(2 * dense.gather_s(links, 2)[0])
