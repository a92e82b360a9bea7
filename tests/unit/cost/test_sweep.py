"""Cases of a sweep: their order, the groups, and the counts that bandwidths stand on."""

import json

import pytest

from wattune.catalog.models import MODELS
from wattune.cost.sweep import COLLECTIVES, COLUMNS, Case, bus_factor, cases, groups, read_rows


def test_groups_are_inside_a_node_across_nodes_and_all() -> None:
    assert groups(2, 2) == [(2, 1)]
    assert groups(16, 8) == [(2, 1), (4, 1), (8, 1), (2, 8), (16, 1)]
    assert groups(6, 6) == [(2, 1), (4, 1), (6, 1)]
    assert groups(1, 1) == []


def test_a_sweep_that_is_cut_short_has_something_of_everything() -> None:
    wanted = cases(8, 8, graphs=True)
    first = wanted[: len(wanted) // 2]
    assert {one.kind for one in first} == {one.kind for one in wanted}
    assert {one.group_size for one in first if one.is_collective} == {2, 4, 8}
    named = {one.model for one in wanted if one.model}
    assert {one.model for one in first if one.model} == named
    # The shapes of the larger model are those of the smaller one: none is measured twice.
    assert set(MODELS) - named <= {"gpt_oss_120b_like"}


def test_graphs_come_last_since_they_may_fail() -> None:
    in_graph = [one.in_graph for one in cases(2, 2, graphs=True)]
    assert in_graph == sorted(in_graph)
    assert any(in_graph)
    assert not any(one.in_graph for one in cases(2, 2, graphs=False))


def test_no_case_is_measured_twice() -> None:
    wanted = cases(8, 8, graphs=True)
    keys = [(one.kind, one.size_bytes, one.group_size, one.stride, one.in_graph, *one.shape.items()) for one in wanted]
    assert len(set(keys)) == len(keys)


def test_a_shape_that_models_share_is_measured_where_the_first_of_them_has_it() -> None:
    """Else a short sweep has nothing of a model whose layers are another one's at a higher tensor parallelism."""
    shipped = cases(8, 8, graphs=True)
    texts = [one.text for one in shipped]
    between = next(place for place, one in enumerate(shipped) if one.is_collective and one.size_bytes == 4**7)
    for model in MODELS.values():
        width = model.query_width + model.kv_width
        assert texts.index(f"matmul m=4096 n={width} k={model.hidden_size}") < between, model.name


def test_every_collective_is_measured_from_4_kib_to_1_gib() -> None:
    wanted = cases(2, 2, graphs=False)
    for kind in COLLECTIVES:
        sizes = [one.size_bytes for one in wanted if one.kind == kind]
        assert (min(sizes), max(sizes), len(sizes)) == (4 * 2**10, 2**30, 10)


def test_bus_bandwidth_is_that_of_nccl_tests() -> None:
    assert bus_factor("all_reduce", 4) == 1.5
    assert bus_factor("all_gather", 4) == bus_factor("reduce_scatter", 4) == bus_factor("all_to_all", 4) == 0.75
    assert bus_factor("send_recv", 4) == 1.0


def test_causal_attention_counts_half_of_its_scores() -> None:
    shape = {"seq_len": 1000, "num_heads": 2, "num_kv_heads": 1, "head_size": 10}
    dense = 2 * 2 * 1000 * 1000 * 20  # two products
    assert Case(kind="attention_forward", shape=shape).flop == pytest.approx(dense / 2)
    assert Case(kind="attention_backward", shape=shape).flop == pytest.approx(2.5 * dense / 2)


def test_rows_of_a_killed_sweep_are_read_without_the_last_line() -> None:
    row = json.dumps({"kind": "all_reduce", "time_s": 1.0, "unknown": 3})
    table = read_rows(f"{row}\n{row}\n{row[:10]}")
    assert table.num_rows == 2
    assert table.schema == COLUMNS
    assert table["m"].null_count == 2
    assert read_rows("").num_rows == 0
