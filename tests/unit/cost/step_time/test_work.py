"""Work of layers and ends: its floating-point operations are those of the model."""

from dataclasses import replace

import numpy as np
import pytest
from kernel_shapes import shapes

from wattune.catalog.hardware import device
from wattune.catalog.models import model
from wattune.cost.coefficients import PUBLISHED_STEP_TIME
from wattune.cost.flops import forward_flop_per_token
from wattune.cost.step_time.facts import FACTS
from wattune.cost.step_time.work import Machine, ends_work, layer_work
from wattune.errors import PlanError
from wattune.workload import Lora, Workload

MACHINE = Machine.of(device("h200_sxm"), "bf16", PUBLISHED_STEP_TIME)
WORKLOAD = Workload(seq_len=4096, global_batch_size=8)


def layer(name="llama3_70b", engine="torch", workload=WORKLOAD, machine=MACHINE, **degrees):
    return layer_work(machine, model(name), workload, shapes(**degrees), FACTS[engine])


def narrow(**kernel):
    """The machine with linear layers in a type of half the width."""
    published = PUBLISHED_STEP_TIME
    kernel = replace(published.kernel, linear_speedup=2.0, **kernel)
    return Machine.of(device("h200_sxm"), "bf16", replace(published, kernel=kernel))


@pytest.mark.parametrize("engine", FACTS)
@pytest.mark.parametrize("name", ["llama3_70b", "gpt3_175b", "mixtral_8x7b"])
def test_operations_are_those_of_the_model(name, engine):
    found, spec = layer(name, engine), model(name)
    last = ends_work(MACHINE, np.array([spec.vocab_size]), spec.hidden_size, WORKLOAD, shapes(), FACTS[engine])[1]
    forward = float((found.forward.flop * spec.num_layers + last.forward.flop)[0])
    assert forward == pytest.approx(4096 * forward_flop_per_token(spec, 4096), rel=0.002)
    # Fused attention computes the scores again in its backward pass.
    assert 2.0 <= float(found.backward.flop[0] / found.forward.flop[0]) < 2.1


@pytest.mark.parametrize("engine", FACTS)
def test_tensor_parallel_shares_the_operations(engine):
    one, four = layer(engine=engine), layer(engine=engine, tp=4, etp=4)
    assert four.forward.flop[0] == pytest.approx(one.forward.flop[0] / 4)
    assert 0.22 < four.forward.matrix_s[0] / one.forward.matrix_s[0] < 0.4


def test_full_recomputation_adds_a_forward_pass():
    none, selective, full = (layer(recompute=mode).backward.flop[0] for mode in (0, 1, 2))
    forward = layer().forward.flop[0]
    assert full == pytest.approx(none + forward)
    assert none < selective < full


def test_what_is_kept_is_not_computed_again(monkeypatch):
    none, all_again = (layer(recompute=mode).backward.flop[0] for mode in (0, 2))
    monkeypatch.setitem(FACTS, "torch", replace(FACTS["torch"], recomputed_frac=0.65))
    assert layer(recompute=2).backward.flop[0] - none == pytest.approx(0.65 * (all_again - none))


def test_a_narrower_type_is_faster_moves_more_and_draws_less_an_operation():
    wide, half = layer(engine="megatron"), layer(engine="megatron", machine=narrow())
    assert 0.5 < half.forward.matrix_s[0] / wide.forward.matrix_s[0] < 0.65  # attention stays
    assert half.forward.memory_s[0] > wide.forward.memory_s[0]
    # Twice the rate at 0.71 of the energy: more power, not twice as much.
    power = (half.forward.flop / half.forward.matrix_s)[0] / (wide.forward.flop / wide.forward.matrix_s)[0]
    assert 1.2 < power < 1.5


def test_writing_a_narrower_type_by_hand():
    """The inputs of the output and the down projection, and the gradients of all outputs; 2 bytes read, 2 written."""
    wide, half = (layer(engine="megatron", machine=one) for one in (MACHINE, narrow()))
    h, kv, f, rate = 8192, 1024, 28672, 4.8e12 * PUBLISHED_STEP_TIME.kernel.memory_frac
    forward_s, backward_s = (4096 * 4 * numbers / rate for numbers in (h + f, 3 * h + 2 * kv + 2 * f))
    assert (half.forward.memory_s - wide.forward.memory_s)[0] == pytest.approx(forward_s)
    assert (half.backward.memory_s - wide.backward.memory_s)[0] == pytest.approx(backward_s)


def test_fp8_runs_linear_layers_at_its_own_peak_and_casts_all_that_they_multiply():
    fp8, wide, twice = Machine.of(device("h200_sxm"), "fp8", PUBLISHED_STEP_TIME), MACHINE, narrow()
    kinds = [layer(machine=machine) for machine in (fp8, wide, twice)]
    ratio = kinds[0].forward.matrix_s[0] / kinds[1].forward.matrix_s[0]
    assert 0.5 < ratio < 0.65  # attention stays
    assert kinds[0].forward.matrix_s[0] == pytest.approx(kinds[2].forward.matrix_s[0], rel=1e-3)
    weights, rate = 8192 * (2 * 8192 + 2 * 1024 + 3 * 28672), 4.8e12 * PUBLISHED_STEP_TIME.kernel.memory_frac
    inputs, gradients = 4096 * (3 * 8192 + 28672), 4096 * (3 * 8192 + 2 * 1024 + 2 * 28672)
    for way, numbers in (("forward", weights + inputs), ("backward", weights + inputs + gradients)):
        cast_s = getattr(kinds[0], way).memory_s[0] - getattr(kinds[1], way).memory_s[0]
        assert cast_s == pytest.approx(5 * numbers / rate)
        assert getattr(kinds[0], way).host_s[0] == 1.6 * getattr(kinds[1], way).host_s[0]
    vocabulary = np.array([128256])
    heads = [
        ends_work(machine, vocabulary, 8192, WORKLOAD, shapes(), FACTS["torch"])[1].forward.matrix_s[0]
        for machine in (fp8, wide)
    ]
    assert heads[0] == heads[1]


def test_fp8_casts_the_whole_sequence_where_tensor_parallel_cuts_only_weights():
    """Gathered inputs of the first products, and gradients of the last ones' sums, have the full width on each rank."""
    fp8, wide = (
        layer(machine=machine, tp=4, etp=4)
        for machine in (Machine.of(device("h200_sxm"), "fp8", PUBLISHED_STEP_TIME), MACHINE)
    )
    weights, rate = 8192 * (2 * 8192 + 2 * 1024 + 3 * 28672) / 4, 4.8e12 * PUBLISHED_STEP_TIME.kernel.memory_frac
    inputs = 4096 * (2 * 8192 + (8192 + 28672) / 4)
    gradients = 4096 * (2 * 8192 + (8192 + 2 * 1024 + 2 * 28672) / 4)
    for way, numbers in (("forward", weights + inputs), ("backward", weights + inputs + gradients)):
        cast_s = getattr(fp8, way).memory_s[0] - getattr(wide, way).memory_s[0]
        assert cast_s == pytest.approx(5 * numbers / rate)


def test_fp8_without_a_peak_is_not_predicted():
    with pytest.raises(PlanError, match='the peaks of "a100_sxm_80gb" are not in the catalog'):
        Machine.of(device("a100_sxm_80gb"), "fp8", PUBLISHED_STEP_TIME)


def test_frozen_weights_need_no_transposed_copy():
    lora = Workload(mode="lora", seq_len=4096, global_batch_size=8, lora=Lora(rank=16))
    frozen, trained = (
        [layer(workload=workload, machine=one).backward.memory_s[0] for one in (MACHINE, narrow())]
        for workload in (lora, WORKLOAD)
    )
    assert (frozen[1] - frozen[0]) / (trained[1] - trained[0]) == pytest.approx(3 / 4)


def test_one_expert_is_a_plain_product():
    grouped = replace(PUBLISHED_STEP_TIME, kernel=replace(PUBLISHED_STEP_TIME.kernel, grouped_frac=0.4))
    slow = Machine.of(device("h200_sxm"), "bf16", grouped)
    one, two = (
        layer("mixtral_8x7b", machine=slow, ep=ep).forward.matrix_s[0]
        / layer("mixtral_8x7b", ep=ep).forward.matrix_s[0]
        for ep in (8, 4)
    )
    assert one == pytest.approx(1.0) and two > 1.6


def test_experts_of_other_ranks_cost_nothing_here():
    one, four = layer("mixtral_8x7b"), layer("mixtral_8x7b", ep=4)
    assert four.forward.flop[0] == pytest.approx(one.forward.flop[0])  # as many tokens arrive as leave
    assert four.forward.matrix_s[0] == pytest.approx(one.forward.matrix_s[0], rel=0.2)  # fewer and larger products


def test_frozen_weights_have_no_gradient():
    lora = Workload(mode="lora", seq_len=4096, global_batch_size=8, lora=Lora(rank=16))
    assert layer(workload=lora).backward.flop[0] < 0.6 * layer().backward.flop[0]
    assert layer(workload=lora).forward.memory_s[0] > layer().forward.memory_s[0]


def test_a_layer_outside_a_graph_moves_more_bytes():
    cut, whole = layer(engine="deepspeed", tp=2, etp=2), layer(engine="torch", tp=2, etp=2)
    assert cut.forward.memory_s[0] > whole.forward.memory_s[0]


def test_the_host_waits_before_it_issues_exchanged_tokens():
    assert layer("mixtral_8x7b").forward.stall_s[0] == 0
    assert layer("mixtral_8x7b", ep=2).forward.stall_s[0] > 0
    assert layer("mixtral_8x7b", "megatron").forward.stall_s[0] > 0


def test_a_prompt_needs_logits_of_its_last_token_only():
    spec, prompt = model("llama3_8b"), Workload(mode="prefill", seq_len=4096, global_batch_size=8)
    vocabulary = np.array([spec.vocab_size])
    few, all_of_them = (
        ends_work(MACHINE, vocabulary, spec.hidden_size, workload, shapes(), FACTS["torch"])[1].forward.flop[0]
        for workload in (prompt, WORKLOAD)
    )
    assert few * 4096 == pytest.approx(all_of_them)
