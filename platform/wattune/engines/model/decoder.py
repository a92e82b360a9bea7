"""A decoder transformer from a `ModelSpec`, in parts that pipeline stages can hold.

Tensor parallel cuts their weights from outside (`wattune.engines.torch.parallel`); the parts join and cut activations
where their `ranks` say so, which alone do nothing. Activations between layers are [batch, sequence, hidden].
"""

import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Final, cast

import torch
import torch.nn.functional as F  # noqa: N812  (its usual name)
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from wattune.catalog.models import ModelSpec
from wattune.engines.model.compiler import EAGER, Compiler
from wattune.engines.model.experts import ExpertShard, FeedForward, MixtureOfExperts
from wattune.engines.model.offload import Offload
from wattune.engines.model.routing import LayerRouting, Routes
from wattune.engines.model.tensor_ranks import ALONE, TensorRanks

DTYPES: Final = {"bf16": torch.bfloat16, "fp32": torch.float32}
"""torch's types by a plan's `dtype`."""

NORM_EPSILON = 1e-5
"""Added to the variance: Llama 3's and Mixtral's `rms_norm_eps`, GPT-2's `layer_norm_epsilon`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rotation:
    """Cosines and sines of rotary positions, each [sequence, half the width of a head that turns]."""

    cos: Tensor
    sin: Tensor

    @classmethod
    def table(cls, model: ModelSpec, seq_len: int, device: torch.device, dtype: torch.dtype) -> "Rotation":
        """Angles m * base^(-2i/d): Su et al. 2021 (arXiv 2104.09864), section 3.2.2."""
        half = (model.rope_head_dim or model.head_size) // 2
        frequency = model.rope_base ** (-torch.arange(half, device=device, dtype=torch.float32) / half)
        angle = torch.outer(torch.arange(seq_len, device=device, dtype=torch.float32), frequency)
        return cls(cos=angle.cos().to(dtype), sin=angle.sin().to(dtype))

    def apply(self, x: Tensor) -> Tensor:
        """Rotates [batch, heads, sequence, head_size]; the two halves of a head are its pairs, as in Llama 3."""
        first, second = x.chunk(2, dim=-1)
        return torch.cat([first * self.cos - second * self.sin, second * self.cos + first * self.sin], dim=-1)


class Embedding(nn.Module):
    """Tokens to vectors, plus learned positions where the model has them."""

    def __init__(self, model: ModelSpec) -> None:
        super().__init__()
        self.tokens = nn.Embedding(model.vocab_size, model.hidden_size)
        learned = model.positions == "learned"
        self.positions = nn.Embedding(model.max_positions, model.hidden_size) if learned else None
        self.ranks = ALONE

    def forward(self, tokens: Tensor) -> Tensor:
        """Embeds int64 [batch, sequence]."""
        x = self._rows(self.tokens, tokens)
        if self.positions is not None:
            x = x + self._rows(self.positions, torch.arange(tokens.shape[1], device=tokens.device).unsqueeze(0))
        return self.ranks.scatter(x)

    def _rows(self, table: nn.Embedding, numbers: Tensor) -> Tensor:
        """Rows of a table by number; zeros for those that another rank holds."""
        if self.ranks.size == 1:
            return cast(Tensor, table(numbers))
        places = numbers - self.ranks.rank * math.ceil(table.num_embeddings / self.ranks.size)
        held = (places >= 0) & (places < table.weight.shape[0])
        rows = F.embedding(torch.where(held, places, 0), table.weight)
        return torch.where(held.unsqueeze(-1), rows, 0.0)


class Attention(nn.Module):
    """Causal self-attention with grouped queries."""

    def __init__(self, model: ModelSpec, rotation: Rotation | None, *, recompute: bool) -> None:
        """Allocates without initialising.

        Without a rotation the embedding holds positions. With `recompute` the part without weights is computed again in
        the backward pass.
        """
        super().__init__()
        self.head_size = model.head_size
        self.is_grouped = model.num_key_heads != model.num_heads
        self.rotation = rotation
        self.recompute = recompute
        self.window = model.sliding_window
        self.norm_heads = model.qk_norm == "head"
        self._project(model)
        self.o = nn.Linear(model.output_width, model.hidden_size, bias=model.has_bias("o"))
        self.ranks = ALONE

    def _project(self, model: ModelSpec) -> None:
        """Allocates what makes queries, keys and values."""
        hidden, keys, biased = model.hidden_size, model.num_kv_heads * model.head_size, model.has_bias("qkv")
        self.q = nn.Linear(hidden, model.query_width, bias=biased)
        self.k = nn.Linear(hidden, keys, bias=biased)
        self.v = nn.Linear(hidden, keys, bias=biased)
        widths = {"head": (self.head_size, self.head_size), "width": (model.query_width, keys)}.get(model.qk_norm)
        self.q_norm = None if widths is None else nn.RMSNorm(widths[0], eps=NORM_EPSILON)
        self.k_norm = None if widths is None else nn.RMSNorm(widths[1], eps=NORM_EPSILON)

    @property
    def columns(self) -> tuple[nn.Module, ...]:
        """The linear layers that tensor parallel cuts by heads."""
        return self.q, self.k, self.v

    def forward(self, x: Tensor) -> Tensor:
        """Attends within each sequence."""
        made = self._made(self.ranks.gather(x))
        return cast(Tensor, self.o(_again(self._attend, *made) if self.recompute else self._attend(*made)))

    def _made(self, x: Tensor) -> tuple[Tensor, ...]:
        """Outputs of linear layers for all tokens, as attention takes them."""
        return self.q(x), self.k(x), self.v(x)

    def _heads(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values by head, [batch, heads, sequence, width], positions told."""
        if self.q_norm is not None and self.k_norm is not None and not self.norm_heads:
            q, k = self.q_norm(q), self.k_norm(k)
        # Heads are counted from the width, since tensor parallel leaves each rank its own ones.
        q, k, v = (each.view(*each.shape[:2], -1, self.head_size).transpose(1, 2) for each in (q, k, v))
        if self.q_norm is not None and self.k_norm is not None and self.norm_heads:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.rotation is not None:
            q, k = self.rotation.apply(q), self.rotation.apply(k)
        return q, k, v

    def _attend(self, *made: Tensor) -> Tensor:
        q, k, v = self._heads(*made)
        length, mask = q.shape[2], None
        if 0 < self.window < length:  # a mask hides what lies before the window; the products are computed all the same
            mask = torch.ones(length, length, dtype=torch.bool, device=q.device).tril().triu(1 - self.window)
        mixed = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=self.is_grouped
        )
        return mixed.transpose(1, 2).flatten(2)


class LatentAttention(Attention):
    """Multi-head latent attention: keys and values of all heads come from one narrow vector of each token.

    DeepSeek-V2 (arXiv 2405.04434), section 2.1: queries may pass through a narrow vector too, both are normed, and one
    key with a position, which all heads share, stands behind each head's own.
    """

    def _project(self, model: ModelSpec) -> None:
        hidden, rank, turned = model.hidden_size, model.q_lora_rank, model.rope_head_dim
        self.widths = model.head_size - turned, turned, model.value_head_size
        """Of a head without a position, with one, and of a value."""
        self.latent = model.kv_lora_rank
        self.q = nn.Linear(rank or hidden, model.query_width, bias=False)
        self.q_a = nn.Linear(hidden, rank, bias=False) if rank else None
        self.q_a_norm = nn.RMSNorm(rank, eps=NORM_EPSILON) if rank else None
        self.kv_a = nn.Linear(hidden, self.latent + turned, bias=False)
        self.kv_a_norm = nn.RMSNorm(self.latent, eps=NORM_EPSILON)
        self.kv = nn.Linear(self.latent, model.num_heads * (self.widths[0] + self.widths[2]), bias=False)

    @property
    def columns(self) -> tuple[nn.Module, ...]:
        """The linear layers that tensor parallel cuts by heads."""
        return self.q, self.kv

    def _made(self, x: Tensor) -> tuple[Tensor, ...]:
        q = self.q(x if self.q_a is None or self.q_a_norm is None else self.q_a_norm(self.q_a(x)))
        latent, key = torch.split(self.kv_a(x), [self.latent, self.widths[1]], -1)
        return q, self.kv(self.kv_a_norm(latent)), key

    def _heads(self, q: Tensor, kv: Tensor, key: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        own, turned, width = self.widths
        q, kv = (
            each.view(*each.shape[:2], -1, size).transpose(1, 2)
            for each, size in ((q, own + turned), (kv, own + width))
        )
        plain, placed = torch.split(q, [own, turned], -1)
        keys, v = torch.split(kv, [own, width], -1)
        key = key.unsqueeze(1)
        if self.rotation is not None:
            placed, key = self.rotation.apply(placed), self.rotation.apply(key)
        return torch.cat([plain, placed], -1), torch.cat([keys, key.expand(-1, keys.shape[1], -1, -1)], -1), v


class Layer(nn.Module):
    """One decoder layer, with norms before its blocks, behind them, or both; or one for blocks beside each other."""

    def __init__(
        self,
        model: ModelSpec,
        rotation: Rotation | None,
        recompute: str,
        experts: ExpertShard,
        routing: LayerRouting | None = None,
    ) -> None:
        """Allocates without initialising.

        `recompute` is `none`, `selective` (attention without its linear layers) or `full`.
        """
        super().__init__()
        before, behind = model.norm_place != "after", model.norm_place in ("after", "both")
        self.attention_norm = _norm(model) if before else None
        kind = LatentAttention if model.is_latent else Attention
        self.attention = kind(model, rotation, recompute=recompute == "selective")
        self.attention_out_norm = _norm(model) if behind else None
        self.shares_norm = model.norm_place == "shared"
        self.ffn_norm = _norm(model) if before and not self.shares_norm else None
        self.ffn_out_norm = _norm(model) if behind else None
        self.ffn: nn.Module = MixtureOfExperts(model, experts, routing) if model.is_moe else FeedForward(model)
        self.routing = routing
        self.recompute = recompute == "full"
        self.compiler = EAGER

    def forward(self, x: Tensor) -> Tensor:
        """Both residual blocks."""
        # Recomputed inside the layer, so that what wraps it (gathering of sharded weights) runs once.
        return _again(self._blocks, x) if self.recompute else self._blocks(x)

    def _blocks(self, x: Tensor) -> Tensor:
        if isinstance(self.ffn, FeedForward):
            return self.compiled(x)
        # Experts exchange tokens in numbers known at run time only, which no whole graph can hold.
        return self.mix_all(x) if self.shares_norm else self.mix_ffn(self.compiled(x))

    def compiled(self, x: Tensor) -> Tensor:
        """The part that is one graph, and runs without other layers: both blocks, or that before experts."""
        part = Layer.mix_all if isinstance(self.ffn, FeedForward) else Layer.mix_tokens
        return self.compiler.run(part, self, x)

    def mix_tokens(self, x: Tensor) -> Tensor:
        """The attention block with its residual."""
        return x + _through(self.attention_norm, self.attention, self.attention_out_norm, x)

    def mix_ffn(self, x: Tensor) -> Tensor:
        """The feed-forward block with its residual."""
        return x + _through(self.ffn_norm, self.ffn, self.ffn_out_norm, x)

    def mix_all(self, x: Tensor) -> Tensor:
        """Both blocks with their residuals."""
        if self.shares_norm and self.attention_norm is not None:
            normed = self.attention_norm(x)
            return cast(Tensor, x + self.attention(normed) + self.ffn(normed))
        return self.mix_ffn(self.mix_tokens(x))


class Head(nn.Module):
    """Final norm, projection to logits and, where targets are known, the loss."""

    def __init__(self, model: ModelSpec) -> None:
        super().__init__()
        self.norm = _norm(model)
        self.output = nn.Linear(model.hidden_size, model.vocab_size, bias=model.has_bias("head"))
        self.compiler = EAGER
        self.loss_chunks = 1
        """Parts of the tokens whose logits and loss are computed one after another, and again in the backward pass."""
        self.last_only = False
        """Set where only the last position of a sequence is asked for, as after a prompt."""
        self.ranks = ALONE
        """Those that hold the pieces of the vocabulary whose logits they compute."""
        self.vocab_size = model.vocab_size
        """Tokens there are. Logits behind the last one are padding and count in no loss."""

    def forward(self, x: Tensor, targets: Tensor | None = None) -> Tensor:
        """Logits [batch, sequence, vocabulary], or with targets [batch, sequence] the sum of their losses, fp32."""
        if targets is None:
            return self.logits(x)
        # Of a sequence that tensor parallel has cut, every rank gives its last position.
        if self.loss_chunks > 1 and not self.last_only:
            return self._loss_by_chunks(x, targets)
        method = Head.last_loss if self.last_only else Head.loss
        return self.compiler.run(method, self, x, targets)

    def _loss_by_chunks(self, x: Tensor, targets: Tensor) -> Tensor:
        """Cross-entropy summed over all tokens, with the logits of one part of them at a time.

        As the chunked losses of torchtune and Liger-Kernel (Hsu et al. 2024, arXiv 2410.10989). Tokens are joined
        from tensor parallel ranks once, before they are cut.
        """
        rows = self.compiler.run(Head.normed, self, x).flatten(0, 1)
        parts = zip(rows.chunk(self.loss_chunks), targets.flatten().chunk(self.loss_chunks), strict=True)
        return torch.stack([_again(self._loss_of_rows, *part) for part in parts]).sum()

    def _loss_of_rows(self, rows: Tensor, targets: Tensor) -> Tensor:
        return self.compiler.run(Head.loss_of_rows, self, rows, targets)

    def normed(self, x: Tensor) -> Tensor:
        """The inputs of the projection, [batch, sequence, hidden] on every tensor parallel rank."""
        return self.ranks.gather(self.norm(x))

    def loss_of_rows(self, rows: Tensor, targets: Tensor) -> Tensor:
        """Cross-entropy summed over some tokens, whose inputs of the projection are [tokens, hidden]."""
        return summed_loss(self.output(rows), targets, self.ranks, self.vocab_size)

    def logits(self, x: Tensor) -> Tensor:
        """Logits [batch, sequence, vocabulary], of this rank's piece of the vocabulary."""
        return cast(Tensor, self.output(self.normed(x)))

    def loss(self, x: Tensor, targets: Tensor) -> Tensor:
        """Cross-entropy summed over all tokens; one graph, so that logits are read once and never stored in fp32."""
        return summed_loss(self.logits(x), targets, self.ranks, self.vocab_size)

    def last_loss(self, x: Tensor, targets: Tensor) -> Tensor:
        """Cross-entropy of the token after each sequence, summed over sequences."""
        return summed_loss(self.logits(x[:, -1:])[:, -1], targets[:, -1], self.ranks, self.vocab_size)


class Decoder(nn.Module):
    """Consecutive layers of a model, with the embedding before the first and the head after the last of them all."""

    def __init__(
        self,
        model: ModelSpec,
        layers: range,
        *,
        rotation: Rotation | None,
        recompute: str,
        experts: ExpertShard,
        routes: Routes | None = None,
    ) -> None:
        """Allocates without initialising; parameters are named as in the whole model."""
        super().__init__()
        self.embedding = Embedding(model) if layers.start == 0 else None
        routing = {index: routes.layer(index) for index in layers if routes is not None}
        self.layers = nn.ModuleDict(
            {str(n): Layer(model.kind_of(n), rotation, recompute, experts, routing.get(n)) for n in layers}
        )
        self.head = Head(model) if layers.stop == model.num_layers else None
        self.offload: Offload | None = None
        """Moves activations of layers to host memory; None keeps them on the device."""

    def forward(self, x: Tensor, targets: Tensor | None = None) -> Tensor:
        """Tokens or activations in, activations or logits out, by what this part of the model holds.

        Where this part holds the embedding, `x` is int64 [batch, sequence], else [batch, sequence, hidden]. `targets`
        are next tokens; where it holds the head, the sum of their losses is the result.
        """
        if self.embedding is not None:
            x = self.embedding(x)
        if self.offload is not None:
            self.offload.begin()
        for layer in self.layers.values():
            with nullcontext() if self.offload is None else self.offload.layer(layer):
                x = layer(x)
        return x if self.head is None else self.head(x, targets)

    def compile_with(self, compiler: Compiler) -> None:
        """Has layers, and the head with its loss, run as compiled graphs."""
        for part in (*self.layers.values(), self.head):
            if isinstance(part, Layer | Head):
                part.compiler = compiler


def summed_loss(logits: Tensor, targets: Tensor, ranks: TensorRanks = ALONE, vocab_size: int | None = None) -> Tensor:
    """Computes the cross-entropy in fp32, summed over all tokens, alike on every tensor parallel rank.

    Shoeybi et al. 2019 (arXiv 1909.08053), section 3: ranks exchange three numbers a token, and no logits. Logits are
    [..., vocabulary], where `ranks` hold equal pieces of the vocabulary, and targets int64 [...]. Logits behind
    `vocab_size` are padding; with None there is none.
    """
    mine = logits.flatten(0, -2).float()
    if ranks.size == 1:
        return F.cross_entropy(mine, targets.flatten(), reduction="sum")
    first_token = ranks.rank * mine.shape[-1]
    if vocab_size is not None and first_token + mine.shape[-1] > vocab_size:
        # The lowest number, not -inf: of a rank with nothing but padding the largest logit is taken away from itself.
        tokens = first_token + torch.arange(mine.shape[-1], device=mine.device)
        mine = torch.where(tokens < vocab_size, mine, torch.finfo(mine.dtype).min)
    places = targets.flatten() - first_token
    held = (places >= 0) & (places < mine.shape[-1])
    shifted = mine - ranks.largest(mine.amax(-1)).unsqueeze(-1)
    chosen = shifted.gather(-1, torch.where(held, places, 0).unsqueeze(-1)).squeeze(-1)
    total, of_target = ranks.sum(torch.stack([shifted.exp().sum(-1), torch.where(held, chosen, 0.0)]))
    loss: Tensor = (total.log() - of_target).sum()
    return loss


def _norm(model: ModelSpec) -> nn.Module:
    if model.norm == "rmsnorm":
        return nn.RMSNorm(model.hidden_size, eps=NORM_EPSILON)
    return nn.LayerNorm(model.hidden_size, eps=NORM_EPSILON, bias=model.has_bias("norm"))


def _through(before: nn.Module | None, block: nn.Module, behind: nn.Module | None, x: Tensor) -> Tensor:
    """A block between the norms that it has."""
    out = block(x if before is None else before(x))
    return cast(Tensor, out if behind is None else behind(out))


def _again(function: Callable[..., Tensor], *args: Tensor) -> Tensor:
    """Runs a function whose activations are computed again in the backward pass; nothing in it is random."""
    return cast(Tensor, checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False))
