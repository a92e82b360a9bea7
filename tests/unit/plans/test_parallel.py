"""Degrees to ranks, stages and micro-batches."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from wattune.catalog.models import MODELS
from wattune.cost.step_time.pipeline import bubble_ratio
from wattune.plans.axes import AXES, Plan
from wattune.plans.parallel import coordinates, expert_place, num_micro_batches, stage_layers

DEGREE = st.integers(1, 4)


@given(tp=DEGREE, pp=DEGREE, cp=DEGREE, dp=DEGREE)
def test_every_rank_has_a_place_of_its_own_on_the_mesh(tp, pp, cp, dp):
    plan, world_size = Plan(tp=tp, pp=pp, cp=cp), tp * pp * cp * dp
    places = [coordinates(rank, plan, world_size) for rank in range(world_size)]

    assert plan.dp(world_size) == dp
    assert len(set(places)) == world_size
    for place in places:
        assert place.tp < tp and place.cp < cp and place.dp < dp and place.pp < pp


def test_tensor_parallel_is_innermost_and_the_pipeline_outermost():
    plan = Plan(tp=2, pp=2)
    assert [coordinates(rank, plan, 8).tp for rank in range(8)] == [0, 1] * 4
    assert [coordinates(rank, plan, 8).pp for rank in range(8)] == [0] * 4 + [1] * 4


@given(etp=DEGREE, ep=DEGREE, replicas=DEGREE, pp=DEGREE)
def test_replicas_of_experts_are_spread_evenly_over_every_stage(etp, ep, replicas, pp):
    plan, in_stage = Plan(tp=etp, etp=etp, ep=ep, pp=pp), etp * ep * replicas
    places = [expert_place(rank, plan, in_stage * pp) for rank in range(in_stage * pp)]
    for stage in range(pp):
        own = places[stage * in_stage : (stage + 1) * in_stage]
        assert sorted(own) == sorted((one, part) for one in range(ep) for part in range(etp) for _ in range(replicas))


def test_expert_tensor_parallel_is_innermost_then_expert_parallel():
    places = [expert_place(rank, Plan(tp=2, etp=2, ep=2), 8) for rank in range(8)]
    assert places == [(0, 0), (0, 1), (1, 0), (1, 1)] * 2
    # Without slices of experts, neighbours that share a tensor hold different experts.
    assert [expert_place(rank, Plan(tp=2, etp=1, ep=4), 4)[0] for rank in range(4)] == [0, 1, 2, 3]


@given(pp=DEGREE, vpp=DEGREE, per_chunk=st.integers(1, 3), data=st.data())
def test_stages_hold_every_layer_once_in_order_of_virtual_stages(pp, vpp, per_chunk, data):
    even = data.draw(st.booleans())
    sizes = data.draw(st.lists(st.integers(1, 5), min_size=pp * vpp, max_size=pp * vpp))
    num_layers = pp * vpp * per_chunk if even else sum(sizes)
    plan = Plan(pp=pp, vpp=vpp, layout=() if even else tuple(sizes))
    stages = stage_layers(_with_layers(num_layers), plan)

    in_model_order = [layer for chunk in range(vpp) for stage in stages for layer in stage[chunk]]
    assert in_model_order == list(range(num_layers))
    assert [len(stage) for stage in stages] == [vpp] * pp


def _with_layers(num_layers):
    from dataclasses import replace

    return replace(MODELS["llama3_8b"], num_layers=num_layers)


def test_micro_batches_share_the_global_batch():
    assert num_micro_batches(Plan(micro_batch_size=2, pp=2), world_size=4, global_batch_size=16) == 4


@pytest.mark.parametrize(("size", "bubble"), [(1, 0.105), (2, 0.190), (4, 0.319), (8, 0.484)])
def test_bubble_of_sixteen_stages_grows_with_the_micro_batch(size, bubble):
    """The worked numbers of TP2-PP16 on 32 devices with a global batch of 128, as shares of the whole step."""
    plan = Plan(tp=2, pp=16, micro_batch_size=size)
    ratio = bubble_ratio(plan.pp, plan.vpp, np.array(num_micro_batches(plan, 32, 128)))
    assert ratio / (1 + ratio) == pytest.approx(bubble, abs=5e-4)


@pytest.mark.parametrize("number", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("vpp", [1, 2, 3])
@pytest.mark.parametrize("pp", [1, 4, 8])
def test_the_bubble_is_what_a_schedule_slot_by_slot_idles(pp, vpp, number):
    """Chunk by chunk over rounds of `pp` micro-batches, each as soon as the stage is free and its input is there."""
    end = {}
    for first in range(0, number, pp):
        for virtual in range(pp * vpp):
            for micro_batch in range(first, min(first + pp, number)):
                free = max((at for (v, _), at in end.items() if v % pp == virtual % pp), default=0)
                end[virtual, micro_batch] = max(free, end.get((virtual - 1, micro_batch), 0)) + 1
    idle = max(end.values()) - vpp * number
    assert bubble_ratio(pp, vpp, np.array(number)) == pytest.approx(idle / (vpp * number))


def test_the_axis_table_gives_names_for_every_choice():
    for axis in AXES.values():
        assert axis.neutral and axis.meaning
        assert bool(axis.choices) == (axis.kind != "count") or axis.kind == "setting"
        if axis.kind == "choice" and axis.name != "dtype":
            assert axis.neutral == axis.choices[0]
