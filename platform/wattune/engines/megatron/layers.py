"""Megatron-Core's GPT model with the parts its local layers lack or are slow at, on both supported versions.

Without TransformerEngine or Apex, Megatron's norms refuse sequence parallelism, its attention stores every score, and
its experts run one after another. Those three are ours here, and its routers take the torch engine's routes; linear
layers, embedding, head, exchange of tokens, data parallelism, pipeline and optimizer are Megatron's.

With TransformerEngine all layers are its own.

Legend for shapes: S sequence held here, B micro-batch, N query heads and G key-value heads held here, D head size, H
hidden size, e experts held here, F inner width held here, R tokens received for the experts held here.
"""

import functools
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, Final, cast

import torch
import torch.nn.functional as F  # noqa: N812  (its usual name)
from torch import Tensor, nn

from wattune.engines.model.routing import LayerRouting, Routes

with warnings.catch_warnings():  # that there is neither Apex nor TransformerEngine: what this file is about
    warnings.simplefilter("ignore")
    from megatron.core import parallel_state
    from megatron.core.fusions.fused_bias_swiglu import weighted_bias_swiglu_impl
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt import gpt_layer_specs as specs
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.moe import moe_utils
    from megatron.core.transformer.moe.router import TopKRouter
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from wattune.catalog.models import ModelSpec
from wattune.engines.megatron.config import uses_transformer_engine
from wattune.engines.megatron.lora import adapt
from wattune.engines.model.compiler import EAGER, Compiler
from wattune.engines.model.decoder import Rotation
from wattune.engines.model.experts import expert_product
from wattune.errors import EngineError
from wattune.plans.parallel import padded_vocab_size, padding_of, stage_layers
from wattune.trial import TrialSpec

_POSITIONS = {"rope": "none", "learned": "learned_absolute"}
"""Our attention rotates; so `rope` is nothing to Megatron."""


class Norm(nn.Module):
    """RMSNorm or LayerNorm, whose weights say that tensor-parallel ranks see different tokens."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__()
        self.eps = eps
        self.centres = config.normalization == "LayerNorm"
        device = torch.device("cuda", torch.cuda.current_device())
        self.weight = nn.Parameter(torch.empty(hidden_size, dtype=config.params_dtype, device=device))
        has_bias = self.centres and config.add_bias_linear
        self.bias = nn.Parameter(torch.empty_like(self.weight)) if has_bias else None
        for parameter in self.parameters():  # Megatron then sums their gradients over tensor-parallel ranks
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self.compiler = EAGER

    def forward(self, x: Tensor) -> Tensor:
        """Normalises the last dimension: [S, B, H], or heads of queries or keys [S, B, N, D]."""
        if self.centres:
            return self.compiler.run(_layer_norm, x, self.weight, self.bias, self.eps)
        return self.compiler.run(_rms_norm, x, self.weight, self.eps)


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x, weight.shape, weight, eps)


def _layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    return F.layer_norm(x, weight.shape, weight, bias, eps)


class FusedAttention(nn.Module):
    """Causal attention by torch's fused kernels, with the rotation of queries and keys in the same graph."""

    def __init__(self, config: TransformerConfig, layer_number: int, *_: Any, **__: Any) -> None:
        """Takes what Megatron gives to every core attention; the softmax is scaled by the root of the head size."""
        super().__init__()
        self.layer_number = layer_number
        self.is_grouped = config.num_query_groups != config.num_attention_heads
        self.rotation: Rotation | None = None
        self.compiler = EAGER

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
        """Attends within each sequence: query [S, B, N, D], key and value [S, B, G, D] to [S, B, N * D]."""
        turned = (None, None) if self.rotation is None else (self.rotation.cos, self.rotation.sin)
        return self.compiler.run(_attend, query, key, value, *turned, self.is_grouped)


def _attend(q: Tensor, k: Tensor, v: Tensor, cos: Tensor | None, sin: Tensor | None, is_grouped: bool) -> Tensor:
    q, k, v = q.permute(1, 2, 0, 3), k.permute(1, 2, 0, 3), v.permute(1, 2, 0, 3)
    if cos is not None and sin is not None:
        q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
    mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=is_grouped)
    return mixed.permute(2, 0, 1, 3).flatten(2)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """As `Rotation.apply`, which no graph can hold an object of."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class GroupedExperts(nn.Module):
    """The experts one rank holds, all in one grouped matrix product per weight."""

    def __init__(self, num_local_experts: int, config: TransformerConfig, *, pg_collection: Any, **_: Any) -> None:
        """Allocates without initialising: `fc1` [e, F or 2 F, H] with the gate first, `fc2` [e, H, F]."""
        super().__init__()
        self.ep_rank, self.etp_rank = pg_collection.ep.rank(), pg_collection.expt_tp.rank()
        self.etp = pg_collection.expt_tp.size()
        self.is_gated = config.gated_linear_unit
        num, hidden, inner = num_local_experts, config.hidden_size, config.moe_ffn_hidden_size // self.etp
        wide = 2 * inner if self.is_gated else inner
        device = torch.device("cuda", torch.cuda.current_device())

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape, dtype=config.params_dtype, device=device))

        self.fc1, self.fc2 = parameter(num, wide, hidden), parameter(num, hidden, inner)
        self.fc1_bias = parameter(num, wide) if config.add_bias_linear else None
        self.fc2_bias = parameter(num, hidden // self.etp) if config.add_bias_linear else None
        apart = config.expert_model_parallel_size > 1 or self.etp != config.tensor_model_parallel_size
        for each in self.parameters():
            # What Megatron reduces over the experts' own replicas, and what its norm counts on every rank.
            each.allreduce = not apart  # type: ignore[attr-defined]
            each.tensor_model_parallel = True  # type: ignore[attr-defined]

    def forward(self, tokens: Tensor, tokens_per_expert: Tensor, probs: Tensor, **_: Any) -> tuple[Tensor, None]:
        """Runs each expert over its tokens.

        Tokens [R, H] are grouped by expert; `tokens_per_expert` [e] sums to R, and Megatron may have brought it to the
        host; `probs` [R] are the router's weights. The result [R, H] is weighted: under expert tensor parallelism this
        rank's addend, without a bias still to add.
        """
        counts = tokens_per_expert.to(tokens.device, non_blocking=True)
        ends = counts.cumsum(0).to(torch.int32)
        owners = None
        if self.fc1_bias is not None:
            numbers = torch.arange(counts.numel(), device=tokens.device)
            owners = numbers.repeat_interleave(counts, output_size=tokens.shape[0])
        wide = expert_product(tokens, self.fc1, ends)
        if self.fc1_bias is not None:
            wide = wide + self.fc1_bias[owners]
        weights = probs.unsqueeze(-1)
        if self.is_gated:
            inner = cast(Tensor, weighted_bias_swiglu_impl(wide, None, weights))
        else:
            inner = (F.gelu(wide) * weights).to(wide.dtype)
        out = expert_product(inner, self.fc2, ends)
        if self.fc2_bias is None:
            return out, None
        # Each expert-tensor-parallel rank adds its own piece of the bias, so that the sum over ranks adds it once.
        piece = (self.fc2_bias[owners] * weights).to(out.dtype)
        start = self.etp_rank * piece.shape[-1]
        return out + F.pad(piece, (start, out.shape[-1] - start - piece.shape[-1])), None


def chunk(spec: TrialSpec, config: TransformerConfig, number: int | None, *, first: bool, last: bool) -> nn.Module:
    """One model chunk of this rank, not initialised.

    `number` is the chunk among those of this pipeline stage, None without interleaving; the first holds the embedding,
    the last head and loss. Raises `EngineError` where the cluster says it has TransformerEngine, and here it cannot be
    imported.
    """
    model, engine = spec.model, uses_transformer_engine(spec)
    held = stage_layers(model, spec.plan)[parallel_state.get_pipeline_model_parallel_rank()][number or 0]
    made = [layer_specs(spec, config, model.kind_of(layer)) for layer in held]
    rope = engine and model.positions == "rope"
    built = GPTModel(
        config=config,
        transformer_layer_spec=TransformerBlockSubmodules(
            layer_specs=[layer for layer, _ in made], layer_norm=made[0][1]
        ),
        vocab_size=padded_vocab_size(model, spec.engine, spec.plan.tp),
        max_sequence_length=model.max_positions or spec.workload.seq_len,
        pre_process=first,
        post_process=last,
        parallel_output=True,
        share_embeddings_and_output_weights=model.tied_embeddings,
        position_embedding_type="rope" if rope else _POSITIONS[model.positions],
        rotary_base=model.rope_base,
        vp_stage=number,
    )
    for module in built.modules():
        if isinstance(module, TopKRouter):
            module.bias = None  # Megatron gives routers one where linear layers have them; models of the catalog do not
        if isinstance(module, _CUT) and module.weight is not None:
            # 0.16.1 says so where it initialises; without it the norm of the gradient counts one rank's piece only.
            module.weight.tensor_model_parallel = True
    if spec.workload.lora is not None:
        adapt(built, model, spec.workload.lora, config)
    if last and padding_of(spec):
        _mask_padding(built.output_layer, model.vocab_size)
    if last and spec.workload.mode == "prefill":
        _judge_last_token(built.output_layer)
    return cast(nn.Module, built)


def _mask_padding(head: nn.Module, vocab_size: int) -> None:
    """Gives padding the lowest logit, so that it has no part in the loss; Megatron's own training would count it.

    The probability behind it is 0, and so is its gradient: autograd need not know. A finite number, since a fused loss
    takes the largest logit of a rank away from all, and a rank may hold nothing but padding.
    """
    rank = parallel_state.get_tensor_model_parallel_rank()

    def mask(_head: nn.Module, _inputs: Any, outputs: tuple[Tensor, Any]) -> None:
        logits = outputs[0]
        held = max(vocab_size - rank * logits.shape[-1], 0)
        if held < logits.shape[-1]:
            with torch.no_grad():
                logits[..., held:] = torch.finfo(logits.dtype).min

    head.register_forward_hook(mask)


def _judge_last_token(head: nn.Module) -> None:
    """Has a head give logits at the last position only, of [S, B, H] those of the sequence's last token.

    Of a sequence that tensor parallelism has cut every rank gives its last position, and the last of them is kept.
    """
    head.register_forward_pre_hook(lambda _, inputs: (inputs[0][-1:], *inputs[1:]))
    head.register_forward_hook(lambda _, __, outputs: (outputs[0][-1:], *outputs[1:]))


_CUT: Final = (ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding)
"""Megatron's own layers whose weight tensor parallelism cuts."""


def finish(chunks: list[nn.Module], rotation: Rotation | None, compiler: Compiler) -> None:
    """Gives our modules what no argument of Megatron's can carry."""
    for module in (module for part in chunks for module in part.modules()):
        if isinstance(module, Norm | FusedAttention):
            module.compiler = compiler
        if isinstance(module, FusedAttention):
            module.rotation = rotation


def layer_specs(spec: TrialSpec, config: TransformerConfig, kind: ModelSpec) -> tuple[Any, Any]:
    """Returns the parts of a layer of one kind, and the final norm: TransformerEngine's, or Megatron's and ours.

    Raises `EngineError` where the cluster says it has TransformerEngine, and here it cannot be imported.
    """
    return _engine_layer(spec, config, kind) if uses_transformer_engine(spec) else _local_layer(config, kind)


def _local_layer(config: TransformerConfig, kind: ModelSpec) -> tuple[Any, Any]:
    layer = specs.get_gpt_layer_local_spec(
        num_experts=kind.num_experts or None, moe_grouped_gemm=False, normalization=config.normalization
    )
    parts = layer.submodules
    parts.input_layernorm = parts.pre_mlp_layernorm = Norm
    attention = parts.self_attention.submodules
    attention.core_attention = FusedAttention
    if kind.qk_norm == "head":
        attention.q_layernorm = attention.k_layernorm = Norm
    if kind.is_moe:
        mlp = parts.mlp  # 0.16.1 gives a ModuleSpec, 0.19.2 a partial call
        inside = mlp.keywords["submodules"] if isinstance(mlp, functools.partial) else mlp.submodules
        inside.experts = GroupedExperts
        if not hasattr(moe_utils, "te_general_gemm"):  # 0.16.1 reads the name where TransformerEngine is missing too
            moe_utils.te_general_gemm = None
    return layer, Norm


def _engine_layer(spec: TrialSpec, config: TransformerConfig, kind: ModelSpec) -> tuple[Any, Any]:
    if not specs.HAVE_TE:
        raise EngineError(
            f"{spec.cluster.label} says transformer_engine: true and transformer_engine cannot be imported here; "
            "install it on every node, or set transformer_engine: false"
        )
    layer = specs.get_gpt_layer_with_transformer_engine_spec(
        num_experts=kind.num_experts or None,
        moe_grouped_gemm=config.moe_grouped_gemm,
        qk_layernorm=kind.qk_norm == "head",
    )
    return layer, specs.TENorm


def route(chunks: list[nn.Module], routes: Routes) -> None:
    """Has every router of this rank's chunks choose as its layer's routing says, and count what it chose.

    Where the router chooses itself, the auxiliary loss is Megatron's own: see `megatron.config`.
    """
    for router in [module for part in chunks for module in part.modules() if isinstance(module, TopKRouter)]:
        routing = routes.layer(router.layer_number - 1)
        chooses = router.routing if routing.forced is None else partial(_forced, router.config, routing)
        router.routing = partial(_counted, chooses, routing)


RoutingFunction = Callable[..., tuple[Tensor, Tensor]]
"""`TopKRouter.routing`: weights [T, E], zero where a token is not sent, and where it is sent [T, E]."""


def _counted(
    chooses: RoutingFunction, routing: LayerRouting, logits: Tensor, padding_mask: Any = None
) -> tuple[Tensor, Tensor]:
    weights, sent = chooses(logits, padding_mask=padding_mask)
    routing.record(sent.sum(0))
    return weights, sent


def _forced(config: Any, routing: LayerRouting, logits: Tensor, padding_mask: Any = None) -> tuple[Tensor, Tensor]:
    """Sends the tokens of the router's outputs [S, B, E] to the experts of their places."""
    assert routing.forced is not None and padding_mask is None
    batch, num_experts = logits.shape[1:]
    logits = logits.reshape(-1, num_experts)
    experts = routing.forced.repeat_interleave(batch, 0)  # Megatron keeps a place of all sequences together
    gates = routing.weigh(logits.float(), experts).type_as(logits)
    weights = torch.zeros_like(logits).scatter(1, experts, gates)
    sent = torch.zeros_like(logits, dtype=torch.bool).scatter(1, experts, True)
    if config.moe_expert_capacity_factor is None:
        return weights, sent
    return cast(
        tuple[Tensor, Tensor],
        moe_utils.apply_router_token_dropping(
            weights,
            sent,
            router_topk=routing.num_per_token,
            capacity_factor=config.moe_expert_capacity_factor,
            drop_policy=config.moe_token_drop_policy,
        ),
    )
