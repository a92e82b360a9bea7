"""Adapters against a plain loop that adds the product of thin matrices to the weights itself."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from specs import trial_spec
from tiny_models import LLAMA
from torch import nn

from wattune.engines.model.decoder import Decoder, Rotation
from wattune.engines.model.experts import ExpertShard
from wattune.engines.model.hyperparameters import BETAS, CLIP_NORM, LEARNING_RATE, WEIGHT_DECAY
from wattune.engines.model.lora import AdaptedLinear, adapt, freeze, lower_frozen
from wattune.engines.model.tokens import Batches, stable_seed
from wattune.engines.model.weights import INIT_STD, initialise
from wattune.engines.torch.engine import TorchEngine
from wattune.trial import TrialSpec
from wattune.workers.engine import Ranks, StepSpans
from wattune.workload import Lora

SEED, SEQ_LEN, BATCH = 11, 8, 4
RANKS = Ranks(rank=0, world_size=1, local_rank=0, device="cpu")
ALL = ("q", "k", "v", "o", "gate", "up", "down")


def spec(mode: str, lora: Lora | None = None, **axes: object) -> TrialSpec:
    return trial_spec(
        LLAMA, on="1x1 cpu", seq_len=SEQ_LEN, batch=BATCH, mode=mode, lora=lora, **({"dtype": "fp32"} | axes)
    )


def run(wanted: TrialSpec, num_steps: int) -> list[StepSpans]:
    engine = TorchEngine()
    engine.build(wanted, RANKS, seed=SEED)
    steps = [engine.step() for _ in range(num_steps)]
    engine.close()
    return steps


def whole_model() -> Decoder:
    rotation = Rotation.table(LLAMA, SEQ_LEN, torch.device("cpu"), torch.float32)
    whole = Decoder(LLAMA, range(LLAMA.num_layers), rotation=rotation, recompute="none", experts=ExpertShard())
    initialise(whole.embedding, "embedding", LLAMA, SEED)
    initialise(whole.head, "head", LLAMA, SEED)
    for index, layer in whole.layers.items():
        initialise(layer, f"layers.{index}", LLAMA, SEED)
    return whole


def batches() -> Batches:
    return Batches(
        seed=SEED,
        vocab_size=LLAMA.vocab_size,
        seq_len=SEQ_LEN,
        replica_batch_size=BATCH,
        replica=0,
        device=torch.device("cpu"),
    )


def adapters_of(whole: Decoder, lora: Lora) -> dict[str, tuple[nn.Parameter, nn.Parameter]]:
    """A and B by the full name of their layer: A drawn as its name says, B zero."""
    found = {}
    for name, layer in whole.named_modules():
        if isinstance(layer, nn.Linear) and name.split(".")[-1] in lora.targets:
            generator = torch.Generator().manual_seed(stable_seed(SEED, f"{name}.lora_a.weight"))
            a = torch.empty(lora.rank, layer.in_features).normal_(std=INIT_STD, generator=generator)
            found[name] = nn.Parameter(a), nn.Parameter(torch.zeros(layer.out_features, lora.rank))
    return found


@pytest.mark.parametrize("targets", [("q", "v"), ALL])
def test_adapters_train_as_a_sum_of_matrices(process_group: None, targets: tuple[str, ...]) -> None:
    lora = Lora(rank=3, targets=targets)
    whole, data = whole_model(), batches()
    adapters = adapters_of(whole, lora)
    frozen = {name: parameter.detach() for name, parameter in whole.named_parameters()}
    optimizer = torch.optim.AdamW(
        [each for pair in adapters.values() for each in pair], lr=LEARNING_RATE, betas=BETAS, weight_decay=WEIGHT_DECAY
    )
    expected = []
    for step in range(4):
        tokens, targets_ = data.at(step)
        weights = frozen | {f"{name}.weight": frozen[f"{name}.weight"] + b @ a for name, (a, b) in adapters.items()}
        logits = torch.func.functional_call(whole, weights, (tokens,))
        loss = F.cross_entropy(logits.flatten(0, 1), targets_.flatten())
        optimizer.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_([each for pair in adapters.values() for each in pair], CLIP_NORM)
        optimizer.step()
        expected.append((loss.item(), norm.item()))
    found = run(spec("lora", lora, micro_batch_size=2), 4)
    assert [step.loss for step in found] == pytest.approx([loss for loss, _ in expected], rel=1e-5)
    assert [step.grad_norm for step in found] == pytest.approx([norm for _, norm in expected], rel=1e-4)


def test_training_starts_from_the_frozen_model(process_group: None) -> None:
    adapted, trained = run(spec("lora", Lora(rank=4)), 1), run(spec("pretrain"), 1)
    assert adapted[0].loss == trained[0].loss
    assert 0 < adapted[0].grad_norm < trained[0].grad_norm


def test_only_adapters_are_trained_and_the_rest_is_kept_in_the_type_it_is_used_in() -> None:
    whole = whole_model()
    adapt(whole, Lora(rank=2, targets=("q", "up")))
    freeze(whole, "lora")
    lower_frozen(whole, torch.bfloat16)
    assert isinstance(whole.layers["0"].attention.q, AdaptedLinear)
    assert not isinstance(whole.layers["0"].attention.k, AdaptedLinear)
    trained = {name for name, parameter in whole.named_parameters() if parameter.requires_grad}
    assert trained == {
        f"layers.{index}.{layer}.lora_{half}.weight"
        for index in range(2)
        for layer in ("attention.q", "ffn.up")
        for half in "ab"
    }
    for name, parameter in whole.named_parameters():
        assert parameter.dtype == (torch.float32 if name in trained else torch.bfloat16)


def test_a_prompt_is_judged_by_the_token_after_it(process_group: None) -> None:
    whole, data = whole_model(), batches()
    expected = []
    for step in range(2):
        tokens, targets = data.at(step)
        with torch.no_grad():
            expected.append(F.cross_entropy(whole(tokens)[:, -1], targets[:, -1]).item())
    found = run(spec("prefill", micro_batch_size=2), 2)
    assert [step.loss for step in found] == pytest.approx(expected, rel=1e-6)
    assert [step.grad_norm for step in found] == [0.0, 0.0]
    assert {span.phase for span in found[0].spans} == {"step", "forward"}


def test_a_prompt_leaves_the_weights_alone(process_group: None) -> None:
    """The same tokens give the same loss however many steps came before."""
    engine = TorchEngine()
    engine.build(spec("prefill"), RANKS, seed=SEED)
    engine.step()
    engine._running._step, engine._running._next = 0, engine._running._batches.at(0)  # type: ignore[union-attr]
    again = engine.step()
    engine.close()
    assert again.loss == run(spec("prefill"), 1)[0].loss


def test_tokens_of_a_file_are_trained_on(process_group: None, tmp_path: object) -> None:
    from pathlib import Path

    import numpy as np

    from wattune.workload import TokenFile

    path = Path(str(tmp_path)) / "tokens.bin"
    np.full(4 * SEQ_LEN + 1, 7, dtype="uint16").tofile(path)
    wanted = spec("pretrain")
    filed = replace(wanted, workload=replace(wanted.workload, tokens=TokenFile(path=str(path))))
    losses = [step.loss for step in run(filed, 8)]
    assert losses[-1] < losses[0] - 0.05  # one token for ever is soon learned
