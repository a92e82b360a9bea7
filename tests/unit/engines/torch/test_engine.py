"""The engine on one rank against a plain training loop that shares only the model, the data and the initial weights."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from specs import trial_spec
from tiny_models import GPT, LLAMA, MIXTRAL
from torch import nn

from wattune.catalog.models import ModelSpec
from wattune.engines.model.decoder import Decoder, Layer, Rotation
from wattune.engines.model.experts import ExpertShard
from wattune.engines.model.hyperparameters import BETAS, CLIP_NORM, LEARNING_RATE, WEIGHT_DECAY
from wattune.engines.model.tokens import Batches
from wattune.engines.model.weights import initialise
from wattune.engines.torch.engine import TorchEngine
from wattune.trial import TrialSpec
from wattune.workers.engine import Ranks
from wattune.workers.phases import failed_phase

SEED = 11
RANKS = Ranks(rank=0, world_size=1, local_rank=0, device="cpu")


def spec(model: ModelSpec, **axes: object) -> TrialSpec:
    return trial_spec(model, on="1x1 cpu", seq_len=8, batch=4, **({"dtype": "fp32"} | axes))


def plain_loop(model: ModelSpec, num_steps: int) -> list[tuple[float, float]]:
    device = torch.device("cpu")
    rotation = Rotation.table(model, 8, device, torch.float32) if model.positions == "rope" else None
    whole = Decoder(model, range(model.num_layers), rotation=rotation, recompute="none", experts=ExpertShard())
    for name, part in {"embedding": whole.embedding, "head": whole.head}.items():
        initialise(part, name, model, SEED)
    for index, layer in whole.layers.items():
        initialise(layer, f"layers.{index}", model, SEED)
    if model.tied_embeddings:
        whole.head.output.weight = whole.embedding.tokens.weight
    optimizer = torch.optim.AdamW(whole.parameters(), lr=LEARNING_RATE, betas=BETAS, weight_decay=WEIGHT_DECAY)
    batches = Batches(seed=SEED, vocab_size=model.vocab_size, seq_len=8, replica_batch_size=4, replica=0, device=device)
    results = []
    for step in range(num_steps):
        tokens, targets = batches.at(step)
        loss = F.cross_entropy(whole(tokens).flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(whole.parameters(), CLIP_NORM)
        optimizer.step()
        results.append((loss.item(), norm.item()))
    return results


@pytest.mark.parametrize("model", [LLAMA, GPT, MIXTRAL], ids=["llama", "gpt", "mixtral"])
def test_one_rank_trains_as_a_plain_loop(process_group: None, model: ModelSpec) -> None:
    engine = TorchEngine()
    engine.build(spec(model, micro_batch_size=2), RANKS, seed=SEED)
    steps = [engine.step() for _ in range(4)]
    engine.close()
    expected = plain_loop(model, 4)
    assert [step.loss for step in steps] == pytest.approx([loss for loss, _ in expected], rel=1e-5)
    assert [step.grad_norm for step in steps] == pytest.approx([norm for _, norm in expected], rel=1e-5)


def test_another_seed_is_another_run(process_group: None) -> None:
    losses = []
    for seed in (1, 1, 2):
        engine = TorchEngine()
        engine.build(spec(LLAMA), RANKS, seed=seed)
        losses.append(engine.step().loss)
        engine.close()
    assert losses[0] == losses[1] != losses[2]


def test_no_global_seed_is_touched(process_group: None) -> None:
    state = torch.get_rng_state()
    engine = TorchEngine()
    engine.build(spec(MIXTRAL), RANKS, seed=SEED)
    engine.step()
    engine.close()
    assert torch.equal(torch.get_rng_state(), state)


def test_a_trial_for_the_processor_leaves_a_gpu_alone_that_is_there_too(
    process_group: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda *_: True)
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda *_: pytest.fail("that would start the GPU"))
    engine = TorchEngine()
    engine.build(spec(LLAMA, sharding="zero3", micro_batch_size=4), RANKS, seed=SEED)
    assert engine.step().loss > 0
    engine.close()


class _Exhausted(torch.autograd.Function):
    """The identity, whose gradient finds no memory."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError("no memory left")


def _fail(*_: object) -> torch.Tensor:
    raise torch.OutOfMemoryError("no memory left")


@pytest.mark.parametrize(("phase", "layer"), [("forward", _fail), ("backward", lambda _, x: _Exhausted.apply(x))])
def test_memory_that_runs_out_stays_recognisable(
    process_group: None, monkeypatch: pytest.MonkeyPatch, phase: str, layer: Callable[..., torch.Tensor]
) -> None:
    """torch's pipeline wraps what either pass raises; the measuring loop has to see the original."""
    engine = TorchEngine()
    engine.build(spec(LLAMA), RANKS, seed=SEED)
    monkeypatch.setattr(Layer, "forward", layer)
    with pytest.raises(torch.OutOfMemoryError, match="no memory left") as found:
        engine.step()
    assert failed_phase(found.value) == phase
    engine.close()


def test_close_may_come_first_and_twice() -> None:
    engine = TorchEngine()
    engine.close()
    engine.close()
