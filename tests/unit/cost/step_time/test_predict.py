"""Properties of predicted step times that hold whatever the coefficients."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from known_fit import POWER
from specs import trial_spec

from wattune.catalog.models import model
from wattune.cost.batch import batches
from wattune.cost.coefficients import PUBLISHED_STEP_TIME
from wattune.cost.flops import model_flop_per_token
from wattune.cost.step_time.facts import FACTS
from wattune.cost.step_time.predict import FP8_ERROR_FRAC, PARTS, predict
from wattune.cost.tables import StepTime
from wattune.errors import PlanError
from wattune.plans.axes import Plan
from wattune.workload import Routing

PLANS = tuple(
    Plan(tp=tp, etp=tp, pp=pp, micro_batch_size=mbs, sharding=sharding, recompute=recompute, overlap=overlap)
    for tp, pp, mbs, sharding, recompute, overlap in (
        (1, 1, 1, "zero3", "full", "grad_param"),
        (1, 1, 2, "zero2", "selective", "grad"),
        (2, 1, 1, "zero1", "none", "none"),
        (8, 2, 4, "none", "full", "none"),
        (4, 2, 1, "zero3", "none", "none"),
        (2, 4, 2, "zero1", "selective", "grad_param"),
    )
)


def of(
    plans, *, engine="torch", name="llama3_70b", limit_w=700.0, global_batch_size=64, coefficients=PUBLISHED_STEP_TIME
):
    specs = [trial_spec(name, on="2x8 h200_sxm", engine=engine, batch=global_batch_size, plan=plan) for plan in plans]
    ((_, batch),) = batches(specs)
    return predict(replace(batch, limit_w=np.full(len(batch), limit_w)), coefficients, POWER)


def assert_adds_up(found: StepTime) -> None:
    parts = found.parts_s
    assert set(parts) == set(PARTS)
    assert all((seconds >= 0).all() for seconds in parts.values())
    assert np.isfinite(found.step_time_s).all() and (found.step_time_s > 0).all()
    activity = found.activity
    spent = activity.matrix_s + activity.memory_s + activity.collective_s + activity.idle_s
    exists = spent > 0
    assert exists[:, 0].all()
    assert (spent[exists] >= np.broadcast_to(found.step_time_s[:, None], spent.shape)[exists] * (1 - 1e-9)).all()
    assert (activity.clock_frac[exists] > 0).all() and (activity.clock_frac <= 1).all()
    assert (activity.matrix_frac <= 1.05).all()
    assert (activity.overlapped_s <= activity.matrix_s + activity.memory_s + 1e-12).all()


@pytest.mark.parametrize("engine", ["torch", "megatron", "deepspeed"])
def test_parts_are_the_measured_ones_and_add_up(engine):
    assert_adds_up(of(PLANS, engine=engine))


@given(st.floats(120.0, 1500.0), st.floats(1.0, 2.0))
@settings(max_examples=30, deadline=None)
def test_a_lower_limit_never_makes_a_step_faster(limit_w, factor):
    low, high, none = (of(PLANS, limit_w=limit) for limit in (limit_w, limit_w * factor, math.inf))
    assert (low.step_time_s >= high.step_time_s * (1 - 1e-12)).all()
    assert (high.step_time_s >= none.step_time_s * (1 - 1e-12)).all()


def test_without_a_limit_the_clock_is_the_highest():
    free, wide = of(PLANS, limit_w=math.inf), of(PLANS, limit_w=1e6)
    assert np.array_equal(free.step_time_s, wide.step_time_s)
    exists = free.activity.matrix_s > 0
    assert (free.activity.clock_frac[exists] == 1).all()


@given(st.integers(1, 5))
@settings(deadline=None)
def test_the_bubble_falls_with_micro_batches(doublings):
    plan = Plan(tp=2, etp=2, pp=8, sharding="zero1")
    few, many = (of([plan], global_batch_size=8 * 2**power) for power in (doublings, doublings + 1))
    share = [found.parts_s["bubble_s"][0] / found.step_time_s[0] for found in (few, many)]
    assert share[1] < share[0]


def test_no_step_is_faster_than_its_model_flops_at_the_peak():
    found = of(PLANS, limit_w=math.inf)
    least_s = 64 * 4096 * model_flop_per_token(model("llama3_70b"), 4096) / (16 * 989.4e12)
    assert (found.step_time_s > least_s).all()


def test_fp8_is_faster_by_less_than_its_peak_and_known_less_well():
    plan = Plan(tp=8, etp=8, micro_batch_size=2)
    wide, narrow = of([plan]), of([replace(plan, dtype="fp8")])
    assert 0.5 < float(narrow.step_time_s[0] / wide.step_time_s[0]) < 0.9
    assert narrow.error_frac[0] == FP8_ERROR_FRAC > wide.error_frac[0]


def test_recomputing_costs_time():
    none, selective, full = of(
        [
            Plan(tp=8, etp=8, micro_batch_size=2, sharding="zero1", recompute=mode)
            for mode in ("none", "selective", "full")
        ]
    ).step_time_s
    assert none < selective < full
    assert full < 1.45 * none


def test_offloading_costs_time_where_copies_take_longer_than_passes():
    """Everything a layer keeps is more than PCIe carries beside it; a layer's input alone is not."""
    plain, moved, full, full_moved = of(
        [
            Plan(micro_batch_size=2, sharding="zero3", overlap="grad_param", recompute=recompute, offload=offload)
            for recompute in ("none", "full")
            for offload in ("none", "activations")
        ]
    ).step_time_s
    assert 1.2 * plain < moved
    assert full_moved == full


@pytest.mark.parametrize("sharding", ["zero1", "zero2", "zero3"])
def test_overlap_exposes_less(sharding):
    times = of(
        [Plan(sharding=sharding, micro_batch_size=2, overlap=overlap) for overlap in ("none", "grad", "grad_param")]
    )
    exposed = times.parts_s["exposed_comm_dp_s"]
    assert exposed[0] > exposed[1] > exposed[2]


def test_software_that_hides_replicas_beside_tensor_parallel_exposes_less(monkeypatch):
    plans = [Plan(tp=4, etp=4, sharding="zero1", overlap=overlap) for overlap in ("tp", "none", "grad_param")]
    exposed = of(plans, engine="megatron").parts_s["exposed_comm_dp_s"]
    assert exposed[0] == exposed[1] > 2 * exposed[2]
    monkeypatch.setitem(FACTS, "megatron", replace(FACTS["megatron"], hides_replicas_beside_tp=True))
    assert of(plans, engine="megatron").parts_s["exposed_comm_dp_s"][0] == pytest.approx(exposed[2])


def test_deepspeed_reduces_beside_nothing_below_zero3():
    plans = [Plan(sharding="zero2", overlap=overlap) for overlap in ("none", "grad")]
    serial, asked = of(plans, engine="deepspeed").step_time_s
    assert serial == asked
    assert np.diff(of(plans, engine="torch").step_time_s)[0] < 0


def test_a_skewed_routing_waits_for_the_busiest_experts():
    def times(routing):
        spec = trial_spec("mixtral_8x7b", on="1x8 h200_sxm", batch=64, routing=routing, ep=8, sharding="zero1")
        ((_, batch),) = batches([spec])
        return predict(batch, PUBLISHED_STEP_TIME, POWER)

    even, skewed = times(Routing(by="balanced")), times(Routing(by="skew", skew=1.2))
    assert skewed.parts_s["straggler_s"][0] > 2 * even.parts_s["straggler_s"][0]


def test_experts_of_two_matrices_wait_as_those_of_three_that_are_as_large():
    def waits_s(**fields):
        own = replace(model("mixtral_8x7b"), **fields)
        spec = trial_spec(
            own, on="1x8 h200_sxm", batch=64, routing=Routing(by="skew", skew=1.2), ep=8, sharding="zero1"
        )
        ((_, batch),) = batches([spec])
        return predict(batch, PUBLISHED_STEP_TIME, POWER).parts_s["straggler_s"][0]

    two, three = waits_s(activation="gelu", ffn_hidden_size=12288), waits_s(ffn_hidden_size=8192)
    assert two == pytest.approx(three, rel=0.05)


def test_a_padded_vocabulary_costs_time():
    spec = trial_spec(on="1x8 h200_sxm", batch=64)
    ((_, batch),) = batches([spec])
    plain, padded = (
        predict(each, PUBLISHED_STEP_TIME, POWER) for each in (batch, replace(batch, vocabulary=np.array([256_512])))
    )
    assert padded.step_time_s[0] > plain.step_time_s[0]


def test_the_least_trusted_part_is_the_origin():
    mixed = replace(PUBLISHED_STEP_TIME, link=replace(PUBLISHED_STEP_TIME.link, origin="datasheet"))
    assert mixed.origin == "datasheet"
    assert PUBLISHED_STEP_TIME.origin == "published kernels"


def test_unknown_peaks_are_refused():
    spec = trial_spec(on="1x2 cpu", seq_len=128, batch=2, dtype="fp32")
    ((_, batch),) = batches([spec])
    with pytest.raises(PlanError, match='the peaks of "cpu" are not in the catalog'):
        predict(batch, PUBLISHED_STEP_TIME, POWER)


def test_experts_hide_their_weights_beside_attention_alone():
    """Their FSDP unit is gathered while attention runs, which is shorter than they are: little is hidden."""
    plans = [Plan(sharding="zero3", micro_batch_size=1, overlap=overlap) for overlap in ("none", "grad_param")]
    alone, hidden = of(plans, name="mixtral_8x7b", global_batch_size=16).parts_s["exposed_comm_dp_s"]
    dense_alone, dense_hidden = of(plans, name="llama3_8b", global_batch_size=64).parts_s["exposed_comm_dp_s"]
    assert 0.5 * alone < hidden < alone and dense_hidden < 0.2 * dense_alone


def test_a_host_is_ahead_after_a_backward_pass():
    """A second micro-batch waits less than the first, whose step begins when the one before has ended."""
    plans = [Plan(sharding="zero3", micro_batch_size=size, overlap="grad_param") for size in (1, 2)]
    step = of(plans, name="llama3_8b", global_batch_size=64)
    assert (step.parts_s["other_s"] < step.longer_frac * step.step_time_s).all()
