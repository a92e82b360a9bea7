"""Activity of simulated devices: work by plan, phases, and shares of time."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from specs import trial_spec

from wattune.catalog.hardware import device
from wattune.catalog.models import MODELS
from wattune.cost.flops import forward_flop_per_token
from wattune.simulation.activity import (
    GEMM_OF_PEAK_FRAC,
    DeviceActivity,
    Part,
    phase_shares,
    planned_phases,
    stage_work,
)
from wattune.simulation.device_model import KINDS, device_model

S = 1_000_000_000


H200 = device_model(device("h200_sxm"))


MODEL = replace(MODELS["llama3_8b"], num_layers=8)


def make_spec(*, model=MODEL, devices=4, nodes=1, batch=16, sensed="h200_sxm", mode="pretrain", **plan):
    return trial_spec(model, on=f"{nodes}x{devices} cpu", simulate_sensors_of=sensed, batch=batch, mode=mode, **plan)


def intensity(spec, phase="backward", stage=0):
    return float(np.dot(H200.intensity, phase_shares(stage_work(spec, stage))[phase]))


def test_intensity_follows_the_plan():
    dense = make_spec()
    assert intensity(make_spec(micro_batch_size=4)) > intensity(dense)
    hidden = {"overlap": "grad"}  # so that only tensor-parallel traffic is left
    assert intensity(make_spec(tp=4, **hidden)) < intensity(make_spec(tp=2, **hidden)) < intensity(make_spec(**hidden))
    assert intensity(make_spec(tp=4, overlap="tp")) > intensity(make_spec(tp=4))
    assert intensity(make_spec(overlap="grad")) > intensity(dense)
    assert intensity(make_spec(recompute="full")) > intensity(dense)
    assert intensity(make_spec(recompute="selective")) > intensity(dense)
    experts = MODELS["mixtral_8x7b"]
    assert intensity(make_spec(model=experts, ep=4), "forward") < intensity(make_spec(model=experts), "forward")
    sharded, hybrid = (make_spec(sharding="zero3", dp_replicate=copies) for copies in (1, 2))
    assert intensity(hybrid) > intensity(sharded)  # less traffic
    assert stage_work(hybrid, 0)["optimizer"][1] == 2 * stage_work(sharded, 0)["optimizer"][1]
    assert intensity(dense, "optimizer") == H200.intensity[KINDS.index("memory")]


@pytest.mark.parametrize("plan", [{}, {"tp": 2, "pp": 2}, {"pp": 4}, {"pp": 2, "vpp": 2}, {"cp": 2}])
def test_matrix_products_of_all_stages_are_the_models_flops(plan):
    spec = make_spec(**plan)
    per_flop_s = 1 / (GEMM_OF_PEAK_FRAC * 989.4e12)
    seconds = sum(stage_work(spec, stage)["forward"][0] for stage in range(spec.plan.pp)) * spec.plan.tp * spec.plan.cp
    assert seconds / per_flop_s == pytest.approx(4096 * forward_flop_per_token(MODEL, 4096), rel=1e-9)


def test_a_rank_updates_the_parts_that_it_owns_whatever_splits_its_context():
    """Sharding is over the ranks of a context too, so cp changes who holds which tokens and not who updates what."""
    whole = stage_work(make_spec(), 0)["optimizer"].sum()
    for sharding, cp, parts in (("zero3", 1, 4), ("zero3", 2, 4), ("zero1", 4, 4), ("none", 2, 1)):
        assert stage_work(make_spec(sharding=sharding, cp=cp), 0)["optimizer"].sum() == pytest.approx(whole / parts)
    hybrid = stage_work(make_spec(sharding="zero3", cp=2, dp_replicate=2), 0)["optimizer"].sum()
    assert hybrid == pytest.approx(whole / 2)


def test_fp8_halves_the_time_of_linear_layers_and_of_nothing_else():
    """Layers' products at twice the rate; attention, the output projection and traffic as in bf16."""
    wide, narrow = stage_work(make_spec(), 0), stage_work(make_spec(dtype="fp8"), 0)
    layers_flop = 2 * 4096 * (forward_flop_per_token(MODEL, 0) / 2 - MODEL.vocab_size * MODEL.hidden_size)
    saved_s = layers_flop / GEMM_OF_PEAK_FRAC * (1 / 989.4e12 - 1 / 1978.9e12)
    assert wide["forward"][0] - narrow["forward"][0] == pytest.approx(saved_s, rel=1e-6)
    assert (narrow["forward"][1:] == wide["forward"][1:]).all()
    assert (narrow["optimizer"] == wide["optimizer"]).all()


def test_prefill_has_no_backward_and_lora_no_weight_gradients():
    prefill, lora, pretrain = (stage_work(make_spec(mode=mode), 0) for mode in ("prefill", "lora", "pretrain"))
    assert prefill["backward"].sum() == prefill["optimizer"].sum() == lora["optimizer"].sum() == 0
    # Scores and values of attention have no weights: both gradients of theirs are needed in any case.
    weights_frac = forward_flop_per_token(MODEL, 0) / forward_flop_per_token(MODEL, 4096)
    assert pretrain["backward"][0] == pytest.approx(2 * prefill["forward"][0])
    assert lora["backward"][0] == pytest.approx((2 - weights_frac) * prefill["forward"][0])


def test_steps_without_phases_are_laid_out_by_the_plan():
    spec = make_spec(pp=4)
    work = [stage_work(spec, stage) for stage in range(4)]
    start_ns, end_ns = np.array([0, 2 * S]), np.array([S, 3 * S])
    waited = []
    for stage in range(4):
        parts = list(planned_phases(spec, work, stage, start_ns, end_ns))
        covered_ns = sum(int((part.end_ns - part.start_ns).sum()) for part in parts)
        assert covered_ns == pytest.approx(2 * S, abs=1000)
        activity = DeviceActivity(device="gpu0", steps=None, phases=tuple(parts))
        shares = activity.shares(np.arange(0, 3 * S + 1, S // 100))
        assert not shares[:, 100:200].any()  # between the steps
        waited.append(shares[KINDS.index("wait")].mean() * 3 / 2)
    bubble_frac = 3 / (16 + 3)
    assert waited[-1] == pytest.approx(bubble_frac, abs=0.01)  # the output projection makes the last stage the slowest
    assert min(waited[:-1]) > waited[-1]


intervals = st.lists(st.tuples(st.integers(0, 900), st.integers(1, 300)), max_size=8)


@settings(max_examples=50, deadline=None)
@given(phases=st.lists(st.tuples(intervals, st.sampled_from(range(4))), min_size=1, max_size=4), steps=intervals)
def test_shares_of_any_intervals_are_shares(phases, steps):
    def part(times, shares):
        start = np.array([start for start, _ in times], np.int64)
        return Part(start_ns=start, end_ns=start + np.array([length for _, length in times], np.int64), shares=shares)

    activity = DeviceActivity(
        device="gpu0",
        steps=part(steps, np.zeros(len(KINDS))),
        phases=tuple(part(times, np.eye(len(KINDS))[kind]) for times, kind in phases),
    )
    shares = activity.shares(np.arange(0, 1201, 100))
    assert shares.min() >= 0
    assert shares.sum(axis=0).max() <= 1 + 1e-9
    wait_only = [part for part in activity.phases if part.shares[KINDS.index("wait")]]
    covered = np.zeros(1200, bool)
    for start, end in [(s, e) for part in wait_only for s, e in zip(part.start_ns, part.end_ns, strict=True)]:
        covered[start:end] = True
    expected = covered.reshape(12, 100).mean(axis=1)
    assert np.all(shares[KINDS.index("wait")] >= expected - 1e-9)  # a wait is never counted as anything else
