"""Model FLOPs against published formulas."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wattune.catalog.models import MODELS
from wattune.cost.flops import PASSES, forward_flop_per_token, model_flop_per_step, model_flop_per_token


def test_gpt3_agrees_with_narayanan_equation_3_less_recomputation_and_half_its_attention():
    model = MODELS["gpt3_175b"]
    batch, s, l, h, v = 1536, 2048, model.num_layers, model.hidden_size, model.vocab_size  # noqa: E741
    expected = 72 * batch * s * l * h**2 * (1 + s / (12 * h) + v / (12 * l * h))
    assert model_flop_per_step(model, seq_len=s, global_batch_size=batch) == pytest.approx(expected, rel=1e-12)
    assert expected == pytest.approx(3.34e18, rel=1e-3)


@pytest.mark.parametrize("name", ["llama3_8b", "llama3_70b", "mixtral_8x7b", "mixtral_8x22b"])
def test_models_agree_with_palm_appendix_b_within_what_it_leaves_out(name):
    """6 N per token, N without the embedding look-up, plus 12 L H Q T of attention, halved."""
    model, seq_len = MODELS[name], 8192
    parameters = model.num_active_parameters - model.embedding_parameters
    expected = 6 * parameters + 6 * model.num_layers * model.hidden_size * seq_len
    assert model_flop_per_token(model, seq_len) == pytest.approx(expected, rel=1e-4)


def test_the_worked_numbers_of_the_docstrings():
    model = MODELS["llama3_8b"]
    assert forward_flop_per_token(model, 8192) == pytest.approx(17.16e9, rel=1e-3)
    assert model_flop_per_token(model, 8192) == pytest.approx(51.5e9, rel=1e-3)
    assert model_flop_per_token(model, 8192) - model_flop_per_token(model, 0) == pytest.approx(6.4e9, rel=1e-2)


def test_workloads_differ_by_their_passes():
    model = MODELS["llama3_8b"]
    forward = forward_flop_per_token(model, 1024)
    found = {mode: model_flop_per_token(model, 1024, mode) / forward for mode in PASSES}
    assert found == {"pretrain": 3.0, "lora": 2.0, "prefill": 1.0}


@given(st.integers(1, 8), st.integers(1, 64), st.integers(1, 32_768))
def test_a_step_is_linear_in_batch_and_layers(factor, layers, seq_len):
    model = replace(MODELS["mixtral_8x7b"], num_layers=layers)
    one = model_flop_per_step(model, seq_len=seq_len, global_batch_size=1)
    assert model_flop_per_step(model, seq_len=seq_len, global_batch_size=factor) == pytest.approx(factor * one)
    none = model_flop_per_token(replace(model, num_layers=0), seq_len)
    double = model_flop_per_token(replace(model, num_layers=2 * layers), seq_len)
    assert double - none == pytest.approx(2 * (model_flop_per_token(model, seq_len) - none))


@given(st.integers(1, 8))
def test_only_the_chosen_experts_count(chosen):
    model = replace(MODELS["mixtral_8x7b"], num_experts_per_token=chosen)
    dense = replace(model, num_experts=0, num_experts_per_token=0, ffn_hidden_size=chosen * model.ffn_hidden_size)
    router = 2 * model.num_layers * model.num_experts * model.hidden_size
    assert forward_flop_per_token(model, 64) == pytest.approx(forward_flop_per_token(dense, 64) + router)
