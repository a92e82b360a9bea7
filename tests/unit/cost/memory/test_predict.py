"""Predicted peaks: held to measured trials, and to what must hold of any of them."""

from collections.abc import Sequence
from dataclasses import replace

import measured_tables
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from specs import trial_spec

from wattune.catalog.hardware import ClusterSpec
from wattune.catalog.models import ModelSpec, model
from wattune.cost.batch import batches
from wattune.cost.coefficients import MemoryCoefficients
from wattune.cost.defaults import ELSEWHERE_ERROR_FACTOR, H200, memory_coefficients
from wattune.cost.memory.moments import PARTS
from wattune.cost.memory.predict import FP8_ERROR_FRAC, SKEWED_ERROR_FRAC, predict
from wattune.cost.memory.shapes import shapes
from wattune.cost.memory.torch_engine import moments
from wattune.cost.tables import Memory
from wattune.plans.axes import Plan
from wattune.trial import TrialSpec
from wattune.workload import Lora, Routing, Workload

ENGINES = ("torch", "megatron", "deepspeed")
LLAMA = replace(model("llama3_8b"), num_layers=8)
MIXTRAL = replace(model("mixtral_8x7b"), num_layers=8)
MODELS = (LLAMA, MIXTRAL, replace(model("gpt3_175b"), num_layers=8, vocab_size=50_304))


def spec_of(
    plan: Plan,
    *,
    engine: str = "torch",
    of: ModelSpec = LLAMA,
    dp: int = 2,
    seq_len: int = 2048,
    workload: Workload | None = None,
) -> TrialSpec:
    cluster = ClusterSpec(device="h200_sxm", devices_per_node=plan.tp * plan.pp * dp)
    routing = Routing(by="balanced") if of.is_moe else None
    work = workload or Workload(seq_len=seq_len, global_batch_size=64, routing=routing)
    return trial_spec(of, on=cluster, engine=engine, workload=work, plan=replace(plan, etp=plan.tp))


def predicted(*specs: TrialSpec) -> Memory:
    ((_, batch),) = batches(specs)
    return predict(batch, H200)


def peak(spec: TrialSpec) -> float:
    return float(predicted(spec).peak_bytes[0])


def measured_trials() -> Sequence[tuple[TrialSpec, float]]:
    aside = [measured_tables.trials_of(measured_tables.DATA / f"{name}.parquet") for name in measured_tables.KEPT_ASIDE]
    later = measured_tables.trials_of(measured_tables.DATA / "nodes" / "h200x4" / "slice.parquet")
    every = [*measured_tables.trials(), *later, *(one for table in aside for one in table)]
    found = {spec.trial_id: (spec, run.metrics.get("memory_peak_bytes")) for spec, run in every}
    return [(spec, peak) for spec, peak in found.values() if peak]


def test_measured_peaks_are_predicted_within_5_percent_and_never_2_below() -> None:
    errors = np.array([peak(spec) / measured - 1 for spec, measured in measured_trials()])
    assert len(errors) >= 111
    assert np.median(np.abs(errors)) <= 0.005
    assert errors.max() <= 0.05
    assert errors.min() >= -0.02


def test_a_state_of_18_bytes_a_parameter_is_megatrons() -> None:
    memory = predicted(spec_of(Plan(recompute="full"), engine="megatron", seq_len=128))
    state = sum(memory.parts_bytes[name][0] for name in ("weights", "optimizer"))
    assert state == pytest.approx(14 * LLAMA.num_parameters, rel=1e-6)
    assert memory.parts_bytes["gradients"][0] >= 4 * LLAMA.num_parameters


def test_parts_add_up_to_the_peak_and_have_their_names() -> None:
    memory = predicted(spec_of(Plan(tp=2, pp=2, vpp=2)))
    assert tuple(memory.parts_bytes) == PARTS
    assert memory.peak_bytes[0] == sum(values[0] for values in memory.parts_bytes.values())


plans = st.builds(
    Plan,
    pp=st.sampled_from((1, 2, 4)),
    micro_batch_size=st.sampled_from((1, 2, 4)),
    sharding=st.sampled_from(("none", "zero1")),
    recompute=st.sampled_from(("none", "selective", "full")),
    overlap=st.sampled_from(("none", "grad")),
)


@given(plan=plans, engine=st.sampled_from(ENGINES), of=st.sampled_from(MODELS))
@settings(deadline=None, max_examples=60)
def test_more_tensor_parallel_ranks_never_hold_more_weights_each(plan: Plan, engine: str, of: ModelSpec) -> None:
    weights = [
        predicted(spec_of(replace(plan, tp=tp), engine=engine, of=of)).parts_bytes["weights"][0] for tp in (1, 2, 4, 8)
    ]
    assert weights == sorted(weights, reverse=True)


@given(plan=plans, engine=st.sampled_from(ENGINES), of=st.sampled_from(MODELS))
@settings(deadline=None, max_examples=60)
def test_longer_sequences_and_larger_micro_batches_never_take_less(plan: Plan, engine: str, of: ModelSpec) -> None:
    lengths = [peak(spec_of(plan, engine=engine, of=of, seq_len=length)) for length in (512, 1024, 2048, 4096)]
    assert lengths == sorted(lengths)
    routing = Routing(by="balanced") if of.is_moe else None
    sizes = [
        # As many micro-batches a step, so that only their size differs.
        peak(
            spec_of(
                replace(plan, micro_batch_size=size),
                engine=engine,
                of=of,
                workload=Workload(seq_len=1024, global_batch_size=32 * size, routing=routing),
            )
        )
        for size in (1, 2, 4)
    ]
    assert sizes == sorted(sizes)


@given(engine=st.sampled_from(("torch", "deepspeed")), of=st.sampled_from(MODELS), dp=st.sampled_from((1, 2, 4, 8)))
@settings(deadline=None, max_examples=30)
def test_more_sharding_never_keeps_more_state(engine: str, of: ModelSpec, dp: int) -> None:
    states = []
    for sharding in ("none", "zero1", "zero2", "zero3"):
        parts = predicted(spec_of(Plan(sharding=sharding), engine=engine, of=of, dp=dp)).parts_bytes
        states.append(parts["weights"][0] + parts["optimizer"][0])
    assert states == sorted(states, reverse=True)


def test_offloaded_layers_take_the_memory_of_two() -> None:
    """However many layers there are, and also where micro-batches are in flight."""
    of = [replace(MODELS[0], num_layers=layers) for layers in (2, 8)]
    kept = [predicted(spec_of(Plan(), engine="torch", of=model)).parts_bytes["activations"][0] for model in of]
    plan = Plan(offload="activations")
    moved = [predicted(spec_of(plan, engine="torch", of=model)).parts_bytes["activations"][0] for model in of]
    assert kept[0] == moved[0] == moved[1] < kept[1] / 2
    staged = [Plan(pp=2, micro_batch_size=4, offload=offload) for offload in ("none", "activations")]
    first, second = (predicted(spec_of(plan, engine="torch", of=of[1], seq_len=4096)).parts_bytes for plan in staged)
    assert second["activations"][0] < first["activations"][0]


@pytest.mark.parametrize("sharding", ["zero1", "zero2", "zero3"])
def test_copies_hold_the_shards_of_as_many_ranks_as_share_one(sharding: str) -> None:
    """Two copies over eight ranks keep what four ranks keep of one."""
    of = MODELS[0]
    state = {}
    for dp, copies in ((8, 1), (8, 2), (4, 1)):
        parts = predicted(
            spec_of(Plan(sharding=sharding, dp_replicate=copies), engine="torch", of=of, dp=dp)
        ).parts_bytes
        state[dp, copies] = (parts["weights"][0], parts["optimizer"][0])
    assert state[8, 2] == state[4, 1]
    assert state[8, 1] < state[8, 2]


def test_a_padded_vocabulary_takes_its_rows() -> None:
    ((_, batch),) = batches([spec_of(Plan(), engine="megatron")])
    padded = predict(replace(batch, vocabulary=batch.vocabulary + 1000), H200).parts_bytes
    plain = predict(batch, H200).parts_bytes
    # bf16 and fp32 weights of an embedding and a head
    assert padded["weights"][0] - plain["weights"][0] == 6 * 2 * 1000 * LLAMA.hidden_size


def test_adapters_and_prompts_take_less_than_training_all_weights() -> None:
    for engine in ENGINES:
        whole = peak(spec_of(Plan(), engine=engine))
        lora = Workload(mode="lora", seq_len=2048, global_batch_size=64, lora=Lora(rank=16))
        prompts = Workload(mode="prefill", seq_len=2048, global_batch_size=64)
        adapted = peak(spec_of(Plan(), engine=engine, workload=lora))
        prompted = predicted(spec_of(Plan(), engine=engine, workload=prompts))
        assert prompted.peak_bytes[0] < adapted < whole / 2
        assert prompted.parts_bytes["optimizer"][0] == prompted.parts_bytes["gradients"][0] == 0
        assert prompted.parts_bytes["weights"][0] >= 2 * LLAMA.num_parameters


def test_experts_that_get_more_tokens_take_more_and_are_known_less_well() -> None:
    plan = Plan(ep=2)
    balanced = predicted(spec_of(plan, of=MIXTRAL))
    skewed = Workload(seq_len=2048, global_batch_size=64, routing=Routing(by="skew", skew=1.0))
    memory = predicted(spec_of(plan, of=MIXTRAL, workload=skewed))
    assert memory.parts_bytes["activations"][0] > balanced.parts_bytes["activations"][0]
    assert memory.error_frac[0] == SKEWED_ERROR_FRAC > balanced.error_frac[0]


def test_fp8_keeps_fewer_activations_and_is_known_less_well() -> None:
    wide, narrow = predicted(spec_of(Plan())), predicted(spec_of(Plan(dtype="fp8")))
    parts = {name: (value[0], narrow.parts_bytes[name][0]) for name, value in wide.parts_bytes.items()}
    assert {name for name, (one, other) in parts.items() if one != other} == {"activations"}
    assert 0.6 < parts["activations"][1] / parts["activations"][0] < 0.7
    assert narrow.error_frac[0] == FP8_ERROR_FRAC > wide.error_frac[0]


def test_one_micro_batch_recomputed_peaks_in_the_first_layer() -> None:
    """Gradients of all later layers are there, which a second micro-batch finds in the last layer's pass already."""
    plan = Plan(recompute="full", micro_batch_size=8)
    (one,), (two,) = (
        predicted(spec_of(plan, dp=1, workload=Workload(seq_len=2048, global_batch_size=size))).peak_bytes
        for size in (8, 16)
    )
    weights = LLAMA.num_layers * LLAMA.layer_parameters + LLAMA.vocab_size * LLAMA.hidden_size  # the head's
    later = weights - LLAMA.layer_parameters
    constant = 14 * (weights + LLAMA.vocab_size * LLAMA.hidden_size)  # shards, optimizer's state, bf16 weights
    assert constant + 4 * later < one < two


@pytest.mark.parametrize("sharding", ["zero2", "zero3"])
@pytest.mark.parametrize("ep", [1, 2, 4])
def test_the_first_layer_leaves_out_the_shards_of_its_own_experts(ep: int, sharding: str) -> None:
    """Gradients of experts are cut over their own replicas, of which expert parallel leaves fewer."""
    work = Workload(seq_len=2048, global_batch_size=4, routing=Routing(by="balanced"))
    plan = Plan(ep=ep, sharding=sharding, recompute="full")
    ((_, batch),) = batches([spec_of(plan, of=MIXTRAL, dp=4, workload=work)])
    sizes = shapes(batch, splits_ends=True, rounds_of_pp=False)
    layer, experts = sizes.trained.layer, sizes.trained.experts
    later = (MIXTRAL.num_layers - 1) * np.array([layer / 4, experts / (4 / ep)]).sum(axis=0) + sizes.trained.head / 4
    early = moments(sizes)[7]  # after three of the head and four of the last layer
    assert early["gradients"] == pytest.approx(4 * later + 2 * experts / 3)


def test_the_excess_of_measured_trials_is_carried_over_to_their_engine_and_model() -> None:
    def peaks(excess_bytes: dict[str, float]) -> list[float]:
        specs = [spec_of(Plan()), spec_of(Plan(), of=MIXTRAL)]
        coefficients = replace(memory_coefficients("h200_sxm"), excess_bytes=excess_bytes)
        return [float(predict(batch, coefficients).peak_bytes[0]) for one in specs for _, batch in batches([one])]

    key = MemoryCoefficients.excess_key("torch", spec_of(Plan()).model.name)
    plain, more, none = peaks({}), peaks({key: 1e9}), peaks({key: -1e15})
    assert more[0] - plain[0] == pytest.approx(1e9)
    assert more[1] == plain[1]
    assert 0 < none[0] <= plain[0]  # what libraries hold is never negative


def test_devices_without_a_measured_peak_have_wider_intervals() -> None:
    there = memory_coefficients("h100_sxm")
    assert memory_coefficients("h200_sxm").origin == "measured here" and there.origin == "datasheet"
    for name, engine in there.engines.items():
        assert engine.error_frac == ELSEWHERE_ERROR_FACTOR * H200.engines[name].error_frac
