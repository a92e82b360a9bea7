"""Model FLOPs against published formulas."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wattune.catalog.models import MODELS
from wattune.cost.flops import adapted, forward_flop_per_token, model_flop_per_token, workload_flop_per_token
from wattune.workload import Lora, Workload


def test_gpt3_agrees_with_narayanan_equation_3_less_recomputation_and_half_its_attention():
    model = MODELS["gpt3_175b"]
    batch, s, l, h, v = 1536, 2048, model.num_layers, model.hidden_size, model.vocab_size  # noqa: E741
    expected = 72 * batch * s * l * h**2 * (1 + s / (12 * h) + v / (12 * l * h))
    assert batch * s * model_flop_per_token(model, s) == pytest.approx(expected, rel=1e-12)
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


def test_a_head_of_more_tokens_has_the_attention_of_a_layer():
    def attention(model):
        return model_flop_per_token(model, 8192) - model_flop_per_token(model, 0)

    model = MODELS["llama3_8b"]
    assert attention(replace(model, num_mtp_layers=2)) == pytest.approx(attention(model) * 34 / 32, rel=1e-9)


def workload(mode, seq_len=1024, lora=None):
    return Workload(mode=mode, seq_len=seq_len, global_batch_size=8, lora=lora)


def test_frozen_weights_lack_their_gradients_and_attention_keeps_its():
    """Counted by hand; adapters of rank r beside a matrix have r (inputs + outputs) weights."""
    model, seq_len, rank = MODELS["llama3_8b"], 1024, 16
    h, kv, layers = 4096, 1024, 32
    weights = layers * (2 * h * h + 2 * h * kv + 3 * h * 14336) + h * 128256
    attention = layers * 2 * h * seq_len
    adapters = layers * rank * ((h + h) + (h + kv))
    found = workload_flop_per_token(model, workload("lora", seq_len, Lora(rank=rank, targets=("q", "v"))))
    assert found == pytest.approx(2 * 2 * weights + 3 * attention + 3 * 2 * adapters, rel=1e-12)
    trained = workload_flop_per_token(model, workload("pretrain", seq_len))
    assert trained == model_flop_per_token(model, seq_len) == pytest.approx(3 * (2 * weights + attention), rel=1e-12)
    assert 0.66 < found / trained < 0.69


def test_all_targets_of_a_layer_count():
    model = MODELS["llama3_8b"]
    names = ("q", "k", "v", "o", "gate", "up", "down")
    each = [workload_flop_per_token(model, workload("lora", lora=Lora(rank=4, targets=(name,)))) for name in names]
    none = workload_flop_per_token(model, workload("lora", lora=Lora(rank=0, targets=("q",))))
    together = workload_flop_per_token(model, workload("lora", lora=Lora(rank=4, targets=names)))
    assert together - none == pytest.approx(sum(one - none for one in each), rel=1e-6)


def test_queries_of_latent_attention_are_adapted_behind_their_narrow_vector():
    latent = replace(MODELS["llama3_8b"], kv_lora_rank=512, rope_head_dim=64)
    assert adapted(latent)["q"] == (4096, 4096)
    assert adapted(replace(latent, q_lora_rank=1536))["q"] == (1536, 4096)


def test_a_prompt_asks_for_one_position_of_the_output():
    model = MODELS["llama3_8b"]
    found = workload_flop_per_token(model, workload("prefill"))
    head = 2 * 4096 * 128256
    assert forward_flop_per_token(model, 1024) - found == pytest.approx(head * 1023 / 1024, rel=1e-12)


@given(st.integers(1, 64), st.integers(1, 32_768))
def test_a_token_is_linear_in_layers(layers, seq_len):
    model = replace(MODELS["mixtral_8x7b"], num_layers=layers)
    none = model_flop_per_token(replace(model, num_layers=0), seq_len)
    double = model_flop_per_token(replace(model, num_layers=2 * layers), seq_len)
    assert double - none == pytest.approx(2 * (model_flop_per_token(model, seq_len) - none))


@given(st.integers(1, 8))
def test_only_the_chosen_experts_count(chosen):
    model = replace(MODELS["mixtral_8x7b"], num_experts_per_token=chosen)
    dense = replace(model, num_experts=0, num_experts_per_token=0, ffn_hidden_size=chosen * model.ffn_hidden_size)
    router = 2 * model.num_layers * model.num_experts * model.hidden_size
    assert forward_flop_per_token(model, 64) == pytest.approx(forward_flop_per_token(dense, 64) + router)
