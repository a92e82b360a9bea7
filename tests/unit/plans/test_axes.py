"""The axes, and plans as one value on each of them."""

from dataclasses import fields, replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from wattune.plans.axes import AXES, DEGREES, FOUND, HELD_IN, ITEM_BYTES, Plan

COUNT = st.integers(1, 12)
PLANS = st.builds(
    Plan,
    **dict.fromkeys((*DEGREES, "micro_batch_size", "dp_replicate", "loss_chunks"), COUNT),
    **{name: st.sampled_from(AXES[name].choices) for name in ("sharding", "recompute", "offload", "overlap", "dtype")},
    layout=st.lists(COUNT, max_size=3).map(tuple),
    rank_order=st.one_of(st.just("topology"), st.permutations(range(4)).map(tuple)),
    power_limit_w=st.none() | st.integers(1, 10_000),
    clock_mhz=st.none() | st.integers(1, 10_000),
    power_profile=st.none() | st.sampled_from(AXES["power_profile"].choices),
)


def test_every_axis_is_a_field_of_plans_with_its_neutral_value() -> None:
    neutral = Plan()
    assert [field.name for field in fields(Plan)] == list(AXES)
    for name, axis in AXES.items():
        assert axis.name == name and axis.meaning and axis.neutral
        value = getattr(neutral, name)
        if axis.kind == "count":
            assert value == 1 and axis.choices == ()
        elif axis.kind == "setting":
            assert value is None and axis.neutral == FOUND
        elif axis.kind == "layout":
            assert value == () and axis.neutral in axis.choices
        else:
            assert value in axis.choices


def test_degrees_are_counts_and_data_types_have_sizes() -> None:
    assert {AXES[name].kind for name in DEGREES} == {"count"}
    assert set(ITEM_BYTES) == set(HELD_IN) == set(AXES["dtype"].choices)
    assert ITEM_BYTES == {"bf16": 2, "fp8": 2, "fp32": 4}, "fp8 is held in bf16"
    assert [Plan(dtype=name).held_dtype for name in ("bf16", "fp8", "fp32")] == ["bf16", "bf16", "fp32"]


@given(plan=PLANS, dp=COUNT)
def test_degrees_make_the_world(plan: Plan, dp: int) -> None:
    assert plan.dp(plan.tp * plan.pp * plan.cp * dp) == dp


@given(one=PLANS, other=PLANS)
def test_plans_of_one_data_type_have_different_labels(one: Plan, other: Plan) -> None:
    other = replace(other, dtype=one.dtype)
    assume(one != other)
    assert one.label != other.label


@given(plan=PLANS, axis=st.sampled_from(sorted(AXES)), data=st.data())
def test_a_label_changes_with_every_axis_but_between_bf16_and_fp32(plan: Plan, axis: str, data: st.DataObject) -> None:
    changed = replace(plan, **{axis: getattr(data.draw(PLANS), axis)})
    assume(changed != plan)
    assert (changed.label == plan.label) == (axis == "dtype" and "fp8" not in (plan.dtype, changed.dtype))


@pytest.mark.parametrize(
    ("plan", "label"),
    [
        (Plan(), "mbs1"),
        (Plan(dtype="fp32"), "mbs1"),
        (Plan(dtype="fp8", recompute="full"), "mbs1 recompute=full fp8"),
        (Plan(tp=2, etp=2), "tp2 mbs1"),
        (Plan(tp=2, etp=1, pp=2, micro_batch_size=4, sharding="zero1"), "tp2 pp2 etp1 mbs4 zero1"),
        (Plan(sharding="zero3", dp_replicate=2), "mbs1 zero3 dp_replicate=2"),
        (Plan(recompute="full", offload="activations"), "mbs1 recompute=full offload=activations"),
        (Plan(micro_batch_size=4, loss_chunks=8), "mbs4 loss_chunks=8"),
        (Plan(recompute="full", overlap="grad"), "mbs1 recompute=full overlap=grad"),
        (Plan(power_limit_w=500, clock_mhz=1500, power_profile="max_q"), "mbs1 500W 1500MHz max_q"),
        (Plan(pp=2, layout=(3, 1), rank_order=(1, 0)), "pp2 mbs1 layout=3-1 order=(1, 0)"),
    ],
)
def test_a_label_says_what_is_not_neutral(plan: Plan, label: str) -> None:
    assert plan.label == label
