"""Rank to node and device slot."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wattune.catalog.hardware import ClusterSpec
from wattune.errors import PlanError
from wattune.plans.axes import Plan
from wattune.plans.placement import Slot, order_problem, place

CLUSTER = ClusterSpec(device="h200_sxm", num_nodes=2, devices_per_node=2)


def test_topology_fills_one_node_after_another():
    assert place(Plan(), CLUSTER) == (
        Slot(node=0, device=0),
        Slot(node=0, device=1),
        Slot(node=1, device=0),
        Slot(node=1, device=1),
    )


def test_a_listed_order_is_the_slot_of_every_rank():
    slots = place(Plan(rank_order=(3, 0, 2, 1)), CLUSTER)
    assert [(slot.node, slot.device) for slot in slots] == [(1, 1), (0, 0), (1, 0), (0, 1)]


@given(order=st.permutations(range(6)))
def test_every_permutation_uses_each_slot_once(order):
    cluster = ClusterSpec(device="cpu", num_nodes=3, devices_per_node=2)
    slots = place(Plan(rank_order=tuple(order)), cluster)
    assert {slot.node * 2 + slot.device for slot in slots} == set(range(6))
    assert order_problem(tuple(order), 6) is None


@pytest.mark.parametrize(
    ("order", "words"),
    [
        ((0, 1, 2), "lists 3 slots for world_size=4"),
        ((0, 1, 1, 2), "leaves out slot 3"),
        ((0, 1, 2, 7), "leaves out slot 3"),
        ("fastest", 'unknown rank_order "fastest"'),
    ],
)
def test_what_is_no_permutation_is_an_error_with_numbers(order, words):
    with pytest.raises(PlanError, match=words) as caught:
        place(Plan(rank_order=order), CLUSTER)
    assert "2x2 h200_sxm" in str(caught.value)
