"""The torch engine trains the models that Hugging Face transformers calls by the same names, from the same weights.

Loss and gradient norm of three optimizer steps in fp32, each engine with its own code: decoder, loss, clipping and
update here; transformers' model and loss there, with torch's clipping and AdamW. All other engines are held to the
torch engine's losses, so this holds them too.

Weights are drawn ten times as wide as in a trial. Attention then tells tokens apart, so that positions, heads and the
router matter; at the usual width the scores are near 0 and a wrong rotation changes the loss by less than rounding.
The controls change one thing in transformers' model and must be seen.
"""

import importlib.util
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from specs import trial_spec

from wattune.catalog.huggingface import read_config
from wattune.catalog.models import ModelSpec
from wattune.engines.model import weights
from wattune.engines.model.tokens import Batches
from wattune.engines.torch.engine import TorchEngine
from wattune.workers.engine import Ranks

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="transformers is not installed"
)

SEED = 5
NUM_STEPS = 3
TOLERANCE = 1e-5
SEEN = 1e-3
"""Least relative change by which a control must differ: a hundred times the tolerance."""
LLAMA = ModelSpec(
    name="llama",
    num_layers=2,
    hidden_size=48,
    ffn_hidden_size=80,
    num_heads=6,
    num_kv_heads=2,
    vocab_size=96,
    rope_base=500_000.0,
)
MIXTRAL = replace(LLAMA, name="mixtral", rope_base=1e6, num_experts=4, num_experts_per_token=2)
GPT2 = replace(
    LLAMA,
    name="gpt2",
    num_kv_heads=6,
    norm="layernorm",
    activation="gelu",
    positions="learned",
    max_positions=32,
    rope_base=10_000.0,
    bias=True,
    tied_embeddings=True,
)
MODELS = {each.name: each for each in (LLAMA, MIXTRAL, GPT2)}
MODELS["llama-tied"] = replace(LLAMA, tied_embeddings=True)
MODELS["llama-multi-head"] = replace(LLAMA, num_kv_heads=6)
MODELS["mixtral-of-3"] = replace(MIXTRAL, num_experts=8, num_experts_per_token=3)


@pytest.fixture(autouse=True)
def wide_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "INIT_STD", 0.2)


def ours(model: ModelSpec, **axes: Any) -> list[tuple[float, float]]:
    spec = trial_spec(model, on="1x1 cpu", seq_len=24, batch=4, **({"dtype": "fp32", "micro_batch_size": 2} | axes))
    engine = TorchEngine()
    engine.build(spec, Ranks(rank=0, world_size=1, local_rank=0, device="cpu"), seed=SEED)
    steps = [engine.step() for _ in range(NUM_STEPS)]
    engine.close()
    return [(step.loss, step.grad_norm) for step in steps]


def theirs(model: ModelSpec, num_steps: int = NUM_STEPS, **changes: Any) -> list[tuple[float, float]]:
    from huggingface_models import model_of, trained

    return trained(model_of(model, SEED, **changes), batches_of(model), num_steps)


def batches_of(model: ModelSpec) -> Batches:
    device = torch.device("cpu")
    return Batches(seed=SEED, vocab_size=model.vocab_size, seq_len=24, replica_batch_size=4, replica=0, device=device)


def deviation(one: list[tuple[float, float]], other: list[tuple[float, float]]) -> float:
    """The largest relative difference of a loss or a norm."""
    pairs = zip(torch.tensor(one).flatten().tolist(), torch.tensor(other).flatten().tolist(), strict=True)
    return max(abs(a / b - 1) for a, b in pairs)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in ("llama", "mixtral", "gpt2") else pytest.mark.slow) for name in MODELS],
)
def test_trains_as_transformers_does(process_group: None, name: str) -> None:
    assert deviation(ours(MODELS[name]), theirs(MODELS[name])) < TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "mixtral"])
def test_either_attention_of_transformers_gives_the_same(process_group: None, name: str) -> None:
    assert deviation(ours(MODELS[name], recompute="full"), theirs(MODELS[name], attention="sdpa")) < TOLERANCE


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("llama", {"rms_norm_eps": 1e-3}),
        ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0}}),
        ("llama", {"hidden_act": "gelu"}),
        ("mixtral", {"num_experts_per_tok": 3}),
        ("gpt2", {"scale_attn_weights": False}),
        ("gpt2", {"layer_norm_epsilon": 1e-3}),
    ],
)
def test_another_model_is_told_apart(name: str, changes: dict[str, Any]) -> None:
    same, other = (theirs(MODELS[name], 1, **each) for each in ({}, changes))
    assert deviation(same, other) > SEEN


def test_pairs_of_a_rotation_and_heads_of_a_group_are_told_apart() -> None:
    """Meta's files pair neighbours; grouped heads may be counted in either order. Both change rows of weights."""
    from huggingface_models import model_of, trained

    same = theirs(LLAMA, 1)
    for change in ("pairs", "groups"):
        made: Any = model_of(LLAMA, SEED)
        with torch.no_grad():
            for layer in made.model.layers:
                rows = layer.self_attn.q_proj.weight
                heads = rows.view(LLAMA.num_heads, LLAMA.head_size, -1)
                moved = heads.roll(1, 0) if change == "groups" else heads.unflatten(1, (-1, 2)).transpose(1, 2)
                rows.copy_(moved.reshape_as(rows))
        assert deviation(same, trained(made, batches_of(LLAMA), 1)) > SEEN


@pytest.mark.parametrize("name", MODELS)
def test_its_own_config_json_is_read_as_the_same_model(tmp_path: Path, name: str) -> None:
    """The file of this version of transformers, and not one that a test of ours made up."""
    from huggingface_models import written_config

    model = MODELS[name]
    found = read_config(written_config(model, tmp_path), model.name)
    assert replace(found, source="") == model
