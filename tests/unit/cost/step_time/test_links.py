"""Collectives against NCCL's measured times, and across nodes."""

import numpy as np
import pytest

from wattune.catalog.hardware import parse_cluster_label
from wattune.cost.coefficients import PUBLISHED_STEP_TIME
from wattune.cost.step_time.links import BUS_FRAC, Links


def links(label):
    return Links.of(parse_cluster_label(label), PUBLISHED_STEP_TIME.link)


def seconds(fabric, kind, size, size_bytes, stride=1):
    group = fabric.group(np.array([float(size)]), np.array([float(stride)]))
    return float(fabric.collective_s(kind, group, np.array([float(size_bytes)]))[0])


@pytest.mark.parametrize(
    ("kind", "size", "measured_s"),
    [  # 268,435,456 bf16 numbers on H200, AIConfigurator 095f58a; alone, so that the share inside a step is taken out
        ("all_gather", 8, 1395.0e-6),
        ("all_gather", 2, 1041.9e-6),
        ("reduce_scatter", 4, 1294.1e-6),
        ("all_reduce", 4, 2311.2e-6),
        ("all_to_all", 8, 1509.9e-6),
    ],
)
def test_large_messages_take_what_was_measured(kind, size, measured_s):
    found = seconds(links("1x8 h200_sxm"), kind, size, 2 * 268_435_456) * PUBLISHED_STEP_TIME.link.in_step_frac
    assert found == pytest.approx(measured_s, rel=0.06)


def test_small_messages_take_their_latency():
    assert 4e-6 < seconds(links("1x8 h200_sxm"), "all_gather", 8, 512) < 15e-6  # measured: 12.2 us


@pytest.mark.parametrize("kind", BUS_FRAC)
def test_a_group_of_one_does_nothing(kind):
    assert seconds(links("1x8 h200_sxm"), kind, 1, 1e9) == 0


@pytest.mark.parametrize("kind", BUS_FRAC)
def test_other_nodes_are_slower(kind):
    near, far = (seconds(links(label), kind, 8, 1e9) for label in ("1x8 h200_sxm", "8x1 h200_sxm"))
    assert far > 3 * near


def test_a_ring_of_whole_nodes_uses_all_ports():
    fabric = links("4x8 h200_sxm")
    whole, one_each = seconds(fabric, "all_gather", 32, 1e9), seconds(fabric, "all_gather", 4, 1e9, stride=8)
    assert whole < one_each


def test_a_fabric_of_several_nodes_is_one_domain():
    wide = Links(coefficients=PUBLISHED_STEP_TIME.link, bandwidth_bytes_per_s=450e9, domain=64, world_size=128)
    group = wide.group(np.array([32.0]), np.array([2.0]))
    assert group.local[0] == 32 and group.nodes[0] == 1


def test_a_message_to_another_node_takes_longer():
    fabric = links("2x8 h200_sxm")
    near, far = (float(fabric.send_s(np.array([1e8]), np.array([crosses]))[0]) for crosses in (False, True))
    assert far > 3 * near
