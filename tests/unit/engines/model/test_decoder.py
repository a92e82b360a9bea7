from dataclasses import replace

import pytest
import torch

from wattune.catalog.models import MODELS, ModelSpec
from wattune.engines.model.compiler import Compiler
from wattune.engines.model.decoder import Decoder, Layer, Rotation
from wattune.engines.model.experts import ExpertShard
from wattune.engines.model.weights import initialise

TINY = ModelSpec(
    name="tiny", num_layers=2, hidden_size=16, ffn_hidden_size=24, num_heads=4, num_kv_heads=2, vocab_size=40
)
LEARNED = replace(
    TINY, num_kv_heads=4, norm="layernorm", activation="gelu", positions="learned", max_positions=8, bias=True
)
VARIANTS = {
    "llama": TINY,
    "gpt": LEARNED,
    "mixtral": replace(TINY, num_experts=4, num_experts_per_token=2),
    "biased-experts": replace(LEARNED, num_experts=4, num_experts_per_token=2),
    "biased-gated-experts": replace(TINY, num_experts=4, num_experts_per_token=2, bias=True),
}


def decoder(model: ModelSpec, recompute: str = "none") -> Decoder:
    rotation = None
    if model.positions == "rope":
        rotation = Rotation.table(model, 8, torch.device("cpu"), torch.float32)
    whole = Decoder(model, range(model.num_layers), rotation=rotation, recompute=recompute, experts=ExpertShard())
    initialise(whole, "model", model, seed=3)
    return whole


@pytest.mark.parametrize("model", [*VARIANTS.values(), *MODELS.values()], ids=[*VARIANTS, *MODELS])
def test_the_catalog_counts_the_parameters_there_are(model: ModelSpec) -> None:
    with torch.device("meta"):
        whole = Decoder(model, range(model.num_layers), rotation=None, recompute="none", experts=ExpertShard())
    tied = model.vocab_size * model.hidden_size if model.tied_embeddings else 0
    assert sum(parameter.numel() for parameter in whole.parameters()) - tied == model.num_parameters


@pytest.mark.parametrize("model", VARIANTS.values(), ids=VARIANTS)
def test_no_token_sees_a_later_one(model: ModelSpec) -> None:
    whole = decoder(model)
    tokens = torch.arange(8).view(1, 8)
    changed = tokens.clone()
    changed[0, 5] = 39
    before, after = whole(tokens), whole(changed)
    assert torch.allclose(before[:, :5], after[:, :5], atol=1e-6)
    assert not torch.allclose(before[:, 5:], after[:, 5:], atol=1e-6)


@pytest.mark.parametrize("model", VARIANTS.values(), ids=VARIANTS)
def test_order_of_tokens_matters(model: ModelSpec) -> None:
    """Positions reach the last token, whose logits would otherwise not depend on the order of those before it."""
    whole = decoder(model)
    tokens = torch.tensor([[1, 2, 3, 4, 5, 6, 7, 8], [2, 1, 3, 4, 5, 6, 7, 8]])
    first, second = whole(tokens)[:, -1]
    assert not torch.allclose(first, second, atol=1e-7)


@pytest.mark.parametrize("model", [TINY, VARIANTS["mixtral"]], ids=["dense", "experts"])
def test_blocks_beside_each_other_take_the_same_norm(model: ModelSpec) -> None:
    (layer, _) = decoder(replace(model, norm_place="shared")).layers.values()
    assert isinstance(layer, Layer) and layer.attention_norm is not None
    x = torch.randn(2, 8, 16, generator=torch.Generator().manual_seed(1))
    normed = layer.attention_norm(x)
    assert torch.allclose(layer(x), x + layer.attention(normed) + layer.ffn(normed), atol=1e-6)


@pytest.mark.parametrize("recompute", ["selective", "full"])
@pytest.mark.parametrize("model", VARIANTS.values(), ids=VARIANTS)
def test_recomputation_keeps_less_and_changes_no_gradient(model: ModelSpec, recompute: str) -> None:
    tokens = torch.arange(16).view(2, 8)
    kept, gradients = [], []
    for whole in (decoder(model), decoder(model, recompute)):
        saved: list[int] = []

        def pack(tensor: torch.Tensor, saved: list[int] = saved) -> torch.Tensor:
            saved.append(tensor.numel())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = whole(tokens).square().mean()
        kept.append(sum(saved))
        loss.backward()
        gradients.append([parameter.grad for parameter in whole.parameters()])
    assert kept[1] < kept[0]
    for one, other in zip(*gradients, strict=True):
        assert torch.equal(one, other)


def test_rotation_keeps_lengths_and_depends_on_distance_alone() -> None:
    rotation = Rotation.table(TINY, 8, torch.device("cpu"), torch.float32)
    x, y = torch.randn(2, 1, 1, 1, TINY.head_size, generator=torch.Generator().manual_seed(0)).expand(2, 1, 1, 8, -1)
    turned_x, turned_y = rotation.apply(x), rotation.apply(y)
    assert torch.allclose(turned_x.norm(dim=-1), x.norm(dim=-1), atol=1e-5)
    products = (turned_x @ turned_y.transpose(-1, -2))[0, 0]
    for offset in range(-7, 8):
        diagonal = products.diagonal(offset)
        assert torch.allclose(diagonal, diagonal[:1].expand_as(diagonal), atol=1e-5)


@pytest.mark.parametrize("backend", [None, "aot_eager"])
@pytest.mark.parametrize("chunks", [2, 8])
def test_a_loss_in_parts_is_the_loss_with_its_gradients_and_keeps_no_logits(chunks: int, backend: str | None) -> None:
    tokens, targets = torch.arange(16).view(2, 8), (torch.arange(16).view(2, 8) * 7) % 40
    found = {}
    for parts in (1, chunks):
        whole = decoder(TINY)
        whole.head.loss_chunks = parts
        whole.compile_with(Compiler(backend=backend))
        kept = []
        with torch.autograd.graph.saved_tensors_hooks(lambda each, kept=kept: kept.append(each) or each, lambda x: x):
            loss = whole(tokens, targets)
        loss.backward()
        rows = sum(each.numel() // TINY.vocab_size for each in kept if each.ndim and each.shape[-1] == TINY.vocab_size)
        found[parts] = loss, [each.grad for each in whole.parameters()], rows
    (loss, gradients, rows), (again, others, fewer) = found[1], found[chunks]
    assert torch.allclose(loss, again, rtol=1e-6, atol=0)
    for one, other in zip(gradients, others, strict=True):
        assert torch.allclose(one, other, rtol=1e-6, atol=1e-6)
    assert rows >= tokens.numel() and fewer == 0
