"""The torch engine's model as DeepSpeed takes it: whole on every rank, or as the layers of a pipeline."""

import itertools
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import deepspeed
import torch
import torch.nn.functional as F  # noqa: N812  (its usual name)
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from torch import Tensor, nn

from wattune.catalog.models import ModelSpec
from wattune.engines.deepspeed.context import muted
from wattune.engines.model.compiler import EAGER, Compiler, compiler_for
from wattune.engines.model.decoder import DTYPES, Decoder, Embedding, Head, Layer, Rotation
from wattune.engines.model.experts import ExpertShard
from wattune.engines.model.lora import adapt, adapt_layer, freeze
from wattune.engines.model.routing import LayerRouting, Routes
from wattune.engines.model.weights import initialise
from wattune.plans.parallel import stage_layers
from wattune.trial import TrialSpec


class Trained(nn.Module):
    """The whole model and its loss."""

    def __init__(self, decoder: Decoder, model: ModelSpec) -> None:
        super().__init__()
        self.decoder = decoder
        # Where automatic expert parallelism looks for numbers, as in Hugging Face's Mixtral.
        self.config = SimpleNamespace(num_local_experts=model.num_experts) if model.is_moe else None

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Mean loss of a micro-batch of int64 [micro_batch_size, seq_len].

        DeepSpeed itself divides by micro-batches and replicas.
        """
        assert self.decoder.head is not None
        return cast(Tensor, self.decoder(tokens, targets)) / _num_losses(self.decoder.head, targets)


def _num_losses(head: Head, targets: Tensor) -> int:
    """Counts the tokens of int64 [micro_batch_size, seq_len] that a head judges."""
    return targets.shape[0] if head.last_only else targets.numel()


def compiler_of(spec: TrialSpec, device: torch.device) -> Compiler:
    """Chooses the compiler of layers: the torch engine's, where DeepSpeed leaves layers whole graphs.

    Automatic tensor parallel puts collectives into layers, ZeRO-3 hooks into those that `whole_model` cannot make one.
    """
    cut = spec.plan.tp > 1 or (_shards_weights(spec) and spec.model.is_moe)
    return EAGER if cut else compiler_for(device)


def whole_model(
    spec: TrialSpec, device: torch.device, seed: int, config: dict[str, Any], compiler: Compiler, routes: Routes | None
) -> Trained:
    """The initial model in the training data type, the same on every rank.

    Under ZeRO-3 each layer is sharded before the next one is allocated, so that a rank never holds a whole model;
    automatic tensor and expert parallelism cut whole layers only, and tied weights belong to two parts.
    """
    model, plan = spec.model, spec.plan
    with torch.device("meta"):
        turned = rotation(spec, device)
        decoder = Decoder(
            model,
            range(model.num_layers),
            rotation=turned,
            recompute=plan.recompute,
            experts=ExpertShard(),
            routes=routes,
        )
        if spec.workload.lora is not None:
            adapt(decoder, spec.workload.lora)
    assert decoder.head is not None
    decoder.head.last_only = spec.workload.mode == "prefill"
    parts: list[tuple[str, nn.Module | None]] = [("embedding", decoder.embedding)]
    parts += [(f"layers.{index}", layer) for index, layer in decoder.layers.items()]
    parts += [("head", decoder.head)]
    uncut = plan.tp == 1 and not model.is_moe
    shards = _shards_weights(spec) and uncut and not model.tied_embeddings
    for name, part in parts:
        assert part is not None
        _fill(part, name, spec, device, seed)
        if shards:
            deepspeed.zero.Init(module=part, config_dict_or_path=config, dtype=DTYPES[plan.dtype])
    if model.tied_embeddings:
        assert decoder.embedding is not None
        decoder.head.output.weight = decoder.embedding.tokens.weight
    decoder.compile_with(compiler)
    if _shards_weights(spec) and uncut:
        # One unit a layer, as in the torch engine: one gathering instead of one for every matrix, and no hooks within.
        deepspeed.utils.set_z3_leaf_modules(decoder, [Layer, Head])
        if spec.workload.mode == "lora":
            decoder.layers["0"].register_forward_pre_hook(_with_gradient)
    return Trained(decoder, model)


def route(model: nn.Module) -> None:
    """Has the routers DeepSpeed put into a model's layers follow the layers' own routing.

    Its own choose as a learned routing does, and know neither a forced choice nor an auxiliary loss.
    """
    for layer in [module for module in model.modules() if isinstance(module, Layer)]:
        router = getattr(layer.ffn, "router", None)
        if router is not None:
            assert layer.routing is not None
            router.forward = partial(_routed, router.gate, layer.routing)


def _routed(
    gate: nn.Module, routing: LayerRouting, x: Tensor, expert_bias: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Answers AutoEP as a router: weights and experts of tokens [T, H], and the number of tokens of each expert."""
    assert expert_bias is None, "no configuration of ours has one"
    experts, gates, counts = routing(gate(x))
    return gates, experts, counts.to(torch.int32)


def _with_gradient(_layer: nn.Module, inputs: tuple[Tensor]) -> None:
    """Asks for the gradient of what a frozen embedding gives, although nobody needs it.

    ZeRO-3 frees the weights of a unit when the gradient of its input is known (a full backward hook); where no input
    has one torch calls such hooks before the backward pass.
    """
    inputs[0].requires_grad_(torch.is_grad_enabled())


def _shards_weights(spec: TrialSpec) -> bool:
    return spec.plan.sharding == "zero3"


def rotation(spec: TrialSpec, device: torch.device) -> Rotation | None:
    """Rotary positions where the model has them."""
    if spec.model.positions != "rope":
        return None
    return Rotation.table(spec.model, spec.workload.seq_len, device, DTYPES[spec.plan.dtype])


def _fill(part: nn.Module, name: str, spec: TrialSpec, device: torch.device, seed: int) -> nn.Module:
    """Allocates and draws a part; the values are those of the torch engine, rounded to the training data type."""
    part.to_empty(device=device)
    initialise(part, name, spec.model, seed)
    freeze(part, spec.workload.mode)
    return part.to(DTYPES[spec.plan.dtype])


class Stages(PipelineModule):  # type: ignore[misc]
    """The model as a sequence of layers, split as the plan says."""

    def __init__(
        self, spec: TrialSpec, device: torch.device, seed: int, compiler: Compiler, routes: Routes | None
    ) -> None:
        """Builds this rank's stage on its device."""
        self._sizes = [len(chunks[0]) for chunks in stage_layers(spec.model, spec.plan)]
        self.config = SimpleNamespace(num_local_experts=spec.model.num_experts) if spec.model.is_moe else None
        with muted():
            super().__init__(
                layers=_layers(spec, device, seed, routes),
                num_stages=spec.plan.pp,
                loss_fn=_loss if spec.model.tied_embeddings else None,
            )
        for part in self.modules():
            if isinstance(part, Layer | Head):
                part.compiler = compiler
            if isinstance(part, Head):
                part.last_only = spec.workload.mode == "prefill"

    def expect(self, targets: Tensor | None) -> None:
        """Tells the last stage which tokens its next micro-batch should give, where it computes the loss itself."""
        last = self.forward_funcs[-1]
        if isinstance(last, LastPart):
            last.targets = targets

    def get_tied_weights_and_groups(self) -> list[tuple[nn.Parameter, Any]]:
        """Weights that two stages train, with their groups: the gradients of frozen ones are nobody's to sum."""
        found: list[tuple[nn.Parameter, Any]] = super().get_tied_weights_and_groups()
        return [(weight, group) for weight, group in found if weight.requires_grad]

    def _partition_layers(self, method: str = "parameters") -> None:  # noqa: ARG002 - DeepSpeed's methods know no layout
        """Whole layers by the plan's layout; what comes before and after them goes to the first and the last stage."""
        first = next(index for index, part in enumerate(self._layer_specs) if part.typename is Layer)
        inner = itertools.accumulate(self._sizes[:-1], initial=first)
        self.parts = [0, *list(inner)[1:], len(self._layer_specs)]
        stage = self._topo.get_coord(self.global_rank).pipe
        self._set_bounds(start=self.parts[stage], stop=self.parts[stage + 1])


def _layers(spec: TrialSpec, device: torch.device, seed: int, routes: Routes | None) -> list[LayerSpec]:
    """Every part of the model in order; each is built only on the rank whose stage holds it."""
    model = spec.model
    whole = spec, device, seed
    turned = rotation(spec, device)
    layers = [
        _Part(
            f"layers.{index}",
            Layer,
            (model, turned, spec.plan.recompute, ExpertShard(), None if routes is None else routes.layer(index)),
            *whole,
        )
        for index in range(model.num_layers)
    ]
    if not model.tied_embeddings:
        return [_Part("embedding", Embedding, (model,), *whole), *layers, _Part("", LastPart, (model,), *whole)]
    first = [_TiedTokens(None, *whole)]
    if model.positions == "learned":
        first.append(_Part("embedding", Positions, (model,), *whole))
    logits = _last_logits if spec.workload.mode == "prefill" else _logits
    return [*first, *layers, _Part("head", FinalNorm, (model,), *whole), _TiedTokens(logits, *whole)]


class LastPart(nn.Module):
    """The head with its loss, which reads logits once and never stores them in fp32: see `Head.loss`.

    DeepSpeed would compute the loss from what the last layer gives. By the time a gradient arrives there its bf16
    optimizer clears all gradients, so nothing with parameters may come after: the loss is inside.
    """

    def __init__(self, model: ModelSpec) -> None:
        super().__init__()
        self.head = Head(model)
        self.targets: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Mean loss of a micro-batch [batch, sequence, hidden]."""
        targets, self.targets = self.targets, None
        assert targets is not None, "expect comes first"
        return cast(Tensor, self.head(x, targets)) / _num_losses(self.head, targets)


def _loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean loss of the positions there are logits of: all, or after a prompt the last one."""
    return F.cross_entropy(logits.flatten(0, 1).float(), targets[:, -logits.shape[1] :].flatten())


class Positions(nn.Module):
    """The half of `Embedding` that adds learned positions to embedded tokens [batch, sequence, hidden]."""

    def __init__(self, model: ModelSpec) -> None:
        super().__init__()
        self.positions = Embedding(model).positions

    def forward(self, x: Tensor) -> Tensor:
        """Adds the first positions."""
        assert self.positions is not None
        return cast(Tensor, x + self.positions(torch.arange(x.shape[1], device=x.device).unsqueeze(0)))


class FinalNorm(nn.Module):
    """The half of `Head` before the projection to logits."""

    def __init__(self, model: ModelSpec) -> None:
        super().__init__()
        self.norm = Head(model).norm

    def forward(self, x: Tensor) -> Tensor:
        """Normalises [batch, sequence, hidden]."""
        return cast(Tensor, self.norm(x))


def _logits(tokens: nn.Embedding, x: Tensor) -> Tensor:
    return F.linear(x, tokens.weight)


def _last_logits(tokens: nn.Embedding, x: Tensor) -> Tensor:
    return F.linear(x[:, -1:], tokens.weight)


class _Part(LayerSpec):  # type: ignore[misc]
    """A layer of the pipeline, not yet allocated."""

    def __init__(
        self,
        name: str,
        typename: type[nn.Module],
        arguments: tuple[Any, ...],
        spec: TrialSpec,
        device: torch.device,
        seed: int,
    ) -> None:
        super().__init__(typename, *arguments)
        self._name, self._whole = name, (spec, device, seed)

    def build(self, log: bool = False) -> nn.Module:  # noqa: ARG002 - as in LayerSpec
        with torch.device("meta"):
            part: nn.Module = self.typename(*self.module_args)
            lora = self._whole[0].workload.lora
            if lora is not None and isinstance(part, Layer):
                adapt_layer(part, lora)
        return _fill(part, self._name, *self._whole)


class _TiedTokens(TiedLayerSpec):  # type: ignore[misc]
    """The table that embeds tokens in the first stage and gives logits in the last."""

    def __init__(self, forward: Any, spec: TrialSpec, device: torch.device, seed: int) -> None:
        super().__init__("tokens", nn.Embedding, forward_fn=forward)
        self._arguments = spec, device, seed

    def build(self, log: bool = False) -> nn.Module:  # noqa: ARG002 - as in LayerSpec
        spec, device, seed = self._arguments
        with torch.device("meta"):
            tokens = nn.Embedding(spec.model.vocab_size, spec.model.hidden_size)
        return _fill(tokens, "embedding.tokens", spec, device, seed)
