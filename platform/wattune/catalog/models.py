"""Decoder transformers by their published configurations, their parameter counts, and scaled-down slices of them."""

import json
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import lru_cache
from importlib import resources
from typing import Annotated, Final, NamedTuple

from wattune.catalog.hardware import ClusterSpec
from wattune.errors import PlanError, closest
from wattune.field_types import Count, CountOrZero, OneOf, Positive, Size

NORMS: Final = ("rmsnorm", "layernorm")
ACTIVATIONS: Final = ("swiglu", "gelu", "geglu", "relu2")
POSITIONS: Final = ("rope", "learned")
FEATURES: Final[dict[str, Callable[["ModelSpec"], object]]] = {
    "head widths of its own": lambda m: m.head_dim,
    "values of another width": lambda m: not m.is_latent and m.value_head_size != m.head_size,
    "norms of queries and keys": lambda m: m.qk_norm != "none" and not _has_other_qk_norm(m),
    "other norms of queries and keys": lambda m: _has_other_qk_norm(m),
    "biases of queries, keys and values": lambda m: "qkv" in m.biased_parts.split(),
    "biases of single parts": lambda m: set(m.biased_parts.split()) - {"qkv"},
    "norms in other places": lambda m: m.norm_place != "before",
    "sliding windows": lambda m: m.sliding_window,
    "attention sinks": lambda m: m.attention_sinks,
    "latent attention": lambda m: m.is_latent,
    "other norms or biases of latent attention": lambda m: m.is_latent and (m.qk_norm != "none" or m.has_bias("qkv")),
    "dense layers in a mixture": lambda m: m.num_dense_layers or "D" in m.layer_kinds,
    "shared experts": lambda m: m.shared_ffn_hidden_size,
    "biases of shared experts": lambda m: m.shared_ffn_hidden_size and m.has_bias("ffn"),
    "Mamba2": lambda m: set(m.layer_kinds) & set("Mm"),
    "layers of one block": lambda m: set(m.layer_kinds) & set("fde"),
    "other weights of experts": lambda m: m.router_scores != "chosen" or m.router_scale != 1.0,
    "another activation": lambda m: m.activation not in ("swiglu", "gelu"),
    "multi-token heads": lambda m: m.num_mtp_layers,
}
"""Words for what models have beyond a plain decoder, and engines can train or cannot; each tells whether one has it."""
ROUTER_SCORES: Final = ("chosen", "all", "sigmoid")
QK_NORMS: Final = ("none", "head", "width")
NORM_PLACES: Final = {"before": 2, "after": 2, "both": 4, "shared": 1}
"""Places of a layer's norms, and how many they are: of each block's input, of its output, of both, or one for two
blocks that run beside each other."""
BIASED: Final = ("qkv", "o", "ffn", "norm", "router", "head")
"""Parts of a model that `biased_parts` can name."""
LAYER_KINDS: Final = {
    "F": "full attention and feed-forward",
    "S": "attention with a sliding window, and feed-forward",
    "D": "full attention and a dense feed-forward block, in a mixture",
    "M": "Mamba2 and feed-forward",
    "f": "full attention alone",
    "m": "Mamba2 alone",
    "d": "dense feed-forward alone",
    "e": "experts alone",
}
"""Kinds of layers by the letter that stands for them in `layer_kinds`."""
ONE_BLOCK: Final = frozenset("fmde")
"""Those of one block, where others have two."""


class Projection(NamedTuple):
    """Weight of a linear layer."""

    name: str
    inputs: int
    outputs: int
    cut: str
    """Side that tensor parallel ranks share: `outputs`, `inputs`, or neither (empty)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """One decoder transformer. Its fields have the names of Hugging Face configurations."""

    name: str
    """Catalog name, also where other fields are overridden; or the name that a space gives a model of its own."""
    num_layers: Size
    """Decoder layers."""
    hidden_size: Count
    """Width between layers."""
    ffn_hidden_size: Count
    """Inner width of the feed-forward block, or of one expert."""
    num_heads: Count
    """Attention heads. They divide `hidden_size`."""
    num_kv_heads: Count
    """Heads of keys and values. They divide `num_heads`; fewer are grouped-query attention."""
    vocab_size: Count
    """Tokens of the vocabulary."""
    num_experts: CountOrZero = 0
    """Experts of each layer; 0 is a dense model."""
    num_experts_per_token: CountOrZero = 0
    """Experts that each token is sent to."""
    expert_capacity_factor: Positive | None = None
    """Tokens that an expert takes, as a multiple of its even share; the rest is dropped. None drops none."""
    norm: Annotated[str, OneOf(NORMS)] = "rmsnorm"
    """Norm before each block."""
    activation: Annotated[str, OneOf(ACTIVATIONS)] = "swiglu"
    """Activation of the feed-forward block; `swiglu` has a third matrix."""
    positions: Annotated[str, OneOf(POSITIONS)] = "rope"
    """Rotary or learned positions."""
    rope_base: Positive = 10_000.0
    """Base of the rotary frequencies."""
    max_positions: CountOrZero = 0
    """Number of learned positions; 0 with rotary ones."""
    bias: bool = False
    """True where every linear layer, and LayerNorm, has a bias."""
    tied_embeddings: bool = False
    """True where the output shares the embedding's weight."""
    head_dim: CountOrZero = 0
    """Width of a head of queries and keys. 0 is `hidden_size` / `num_heads`."""
    value_head_dim: CountOrZero = 0
    """Width of a head of values. 0 is that of queries and keys."""
    qk_norm: Annotated[str, OneOf(QK_NORMS)] = "none"
    """RMSNorm of queries and keys: of each `head` (Qwen3), or of all heads' `width` together (OLMo 2)."""
    biased_parts: str = ""
    """Parts with a bias beside those of `bias`, as words: `qkv`, `o`, `ffn`, `norm` (LayerNorm), `router`, `head`."""
    norm_place: Annotated[str, OneOf(tuple(NORM_PLACES))] = "before"
    """Norms of a layer: `before` each block, `after` it (OLMo 2), `both` (Gemma 2), or one `shared` by attention and a
    feed-forward block beside it (Falcon 7B)."""
    layer_kinds: str = ""
    """Pattern of layer kinds, repeated over the layers, a letter each: `F` full attention, `S` sliding window, `D`
    dense in a mixture, `M` Mamba2, and for one block alone `f` attention, `m` Mamba2, `d` dense feed-forward, `e`
    experts. Gemma 3 is `SSSSSF`. Empty: all are alike."""
    sliding_window: CountOrZero = 0
    """Tokens that a token attends to at most, itself included, in layers `S`, or in all without kinds. 0: all."""
    attention_sinks: bool = False
    """True where the softmax of each attention head has a learned addend (GPT-OSS)."""
    q_lora_rank: CountOrZero = 0
    """Width that queries pass through in multi-head latent attention. 0: none."""
    kv_lora_rank: CountOrZero = 0
    """Width that keys and values pass through together: not 0 is multi-head latent attention (DeepSeek-V2, arXiv
    2405.04434, section 2.1)."""
    rope_head_dim: CountOrZero = 0
    """Of `head_dim` the part that positions turn in multi-head latent attention. All heads share its keys."""
    num_dense_layers: CountOrZero = 0
    """First layers of a mixture that have a dense feed-forward block."""
    dense_ffn_hidden_size: CountOrZero = 0
    """Inner width of dense feed-forward blocks in a mixture. 0 is `ffn_hidden_size`."""
    shared_ffn_hidden_size: CountOrZero = 0
    """Inner width of all shared experts of a layer together, which every token meets. 0: none."""
    router_scores: Annotated[str, OneOf(ROUTER_SCORES)] = "chosen"
    """Weights of experts: a softmax over the `chosen` ones, one over `all`, or `sigmoid`s whose sum is 1 (DeepSeek-V3,
    arXiv 2412.19437, equations 12 to 16)."""
    router_scale: Positive = 1.0
    """Factor of the weights of experts."""
    shared_expert_gate: bool = False
    """True where a gate weighs the shared experts (Qwen2-MoE)."""
    ssm_num_heads: CountOrZero = 0
    """Heads of a Mamba2 layer (Dao and Gu 2024, arXiv 2405.21060)."""
    ssm_head_dim: CountOrZero = 0
    """Width of a head of Mamba2."""
    ssm_state_size: CountOrZero = 0
    """Numbers that Mamba2 keeps for each channel."""
    ssm_num_groups: CountOrZero = 0
    """Groups of heads of Mamba2 that share inputs and outputs of their states."""
    ssm_conv_size: CountOrZero = 0
    """Tokens that the convolution before Mamba2 sees."""
    num_mtp_layers: CountOrZero = 0
    """Multi-token heads: layers after the last one that predict further tokens, with the same embedding and output
    (DeepSeek-V3, arXiv 2412.19437, section 2.2)."""
    source: str = field(default="", compare=False)
    """Origin of the numbers. Models with equal numbers are equal: a study's file keeps the numbers alone."""

    def __hash__(self) -> int:
        """Takes what tells models apart: trials ask for it tens of thousands of times."""
        return hash((self.name, self.num_layers, self.hidden_size))

    @property
    def is_known(self) -> bool:
        """False where a command trains something that its space does not describe (`OWN_MODEL`)."""
        return self.name != OWN_CODE

    @property
    def is_moe(self) -> bool:
        """True where the feed-forward blocks are mixtures of experts."""
        return self.num_experts > 0

    @property
    def is_gated(self) -> bool:
        """True where feed-forward blocks have a third matrix, whose output multiplies the inner one."""
        return self.activation in ("swiglu", "geglu")

    @property
    def is_latent(self) -> bool:
        """True where attention is multi-head latent attention."""
        return self.kv_lora_rank > 0

    @property
    def features(self) -> tuple[str, ...]:
        """Words of `FEATURES` for all that the model has beyond the plain decoder that every engine trains."""
        return tuple(word for word, has in FEATURES.items() if has(self))

    @property
    def kinds(self) -> "tuple[tuple[ModelSpec, int], ...]":
        """Kinds of layers and their numbers, each as a model whose layers are all of that kind.

        Properties of one layer (`mixer`, `query_width`, `layer_parameters` and the like) are those of such a model.
        """
        return _kinds(self)

    def kind_of(self, layer: int) -> "ModelSpec":
        """Returns the kind of one layer, as a model whose layers are all of that kind."""
        if not self.layer_kinds and not self.num_dense_layers:
            return self
        pattern = self.layer_kinds or ("S" if self.sliding_window else "F")
        return _kind(self, pattern[layer % len(pattern)], is_dense=layer < self.num_dense_layers, count=1)

    @property
    def shares(self) -> "tuple[tuple[ModelSpec, float], ...]":
        """Kinds of layers and their shares of all layers."""
        return tuple((kind, count / self.num_layers) for kind, count in _kinds(self))

    @property
    def has_attention(self) -> bool:
        """True where the layers of this kind have attention."""
        return self.layer_kinds not in ("M", "m", "d", "e")

    @property
    def has_ssm(self) -> bool:
        """True where the layers of this kind have Mamba2."""
        return self.layer_kinds in ("M", "m")

    @property
    def has_ffn(self) -> bool:
        """True where the layers of this kind have a feed-forward block or experts."""
        return self.layer_kinds not in ("f", "m")

    @property
    def head_size(self) -> int:
        """Width of a head of queries and keys."""
        return self.head_dim or self.hidden_size // self.num_heads

    @property
    def value_head_size(self) -> int:
        """Width of a head of values."""
        return self.value_head_dim or self.head_size

    @property
    def num_key_heads(self) -> int:
        """Heads of keys and values as attention computes with them: latent attention has as many as of queries."""
        return self.num_heads if self.is_latent else self.num_kv_heads

    @property
    def query_width(self) -> int:
        """Width of all queries; of Mamba2 that of its inner channels."""
        if self.has_ssm:
            return self.ssm_num_heads * self.ssm_head_dim
        return self.num_heads * self.head_size if self.has_attention else 0

    @property
    def kv_width(self) -> int:
        """Width of all keys and values together; of Mamba2 that of all else that its input projection gives."""
        if self.has_ssm:
            inner, states = self.query_width, 2 * self.ssm_num_groups * self.ssm_state_size
            return inner + states + self.ssm_num_heads
        return self.num_key_heads * (self.head_size + self.value_head_size) if self.has_attention else 0

    @property
    def output_width(self) -> int:
        """Width of the mixer's output, before its projection."""
        if self.has_attention:
            return self.num_heads * self.value_head_size
        return self.query_width

    @property
    def mixer(self) -> tuple[Projection, ...]:
        """Linear layers of attention, or of Mamba2."""
        h, q, kv = self.hidden_size, self.query_width, self.kv_width
        if self.has_ssm:
            return Projection("in", h, q + kv, "outputs"), Projection("out", q, h, "inputs")
        if not self.has_attention:
            return ()
        o = Projection("o", self.output_width, h, "inputs")
        if not self.is_latent:
            k = self.num_kv_heads * self.head_size
            return (
                Projection("q", h, q, "outputs"),
                Projection("k", h, k, "outputs"),
                Projection("v", h, kv - k, "outputs"),
                o,
            )
        rank, nope = self.q_lora_rank, self.head_size - self.rope_head_dim
        queries: tuple[Projection, ...] = (Projection("q", h, q, "outputs"),)
        if rank:
            queries = (Projection("q_a", h, rank, ""), Projection("q_b", rank, q, "outputs"))
        return (
            *queries,
            Projection("kv_a", h, self.kv_lora_rank + self.rope_head_dim, ""),
            Projection("kv_b", self.kv_lora_rank, self.num_heads * (nope + self.value_head_size), "outputs"),
            o,
        )

    @property
    def mixer_rest(self) -> int:
        """Parameters of the mixer that are in no matrix, biases apart: norms, sinks, and what Mamba2 has of its own."""
        if self.has_ssm:  # convolution with bias, the step's bias, A and D of each head, and the norm of its output
            q, convolved = self.query_width, self.query_width + 2 * self.ssm_num_groups * self.ssm_state_size
            return convolved * (self.ssm_conv_size + 1) + 3 * self.ssm_num_heads + q
        if not self.has_attention:
            return 0
        keys = self.num_kv_heads * self.head_size
        norms = {"none": 0, "head": 2 * self.head_size, "width": self.query_width + keys}[self.qk_norm]
        sinks = self.num_heads if self.attention_sinks else 0
        return norms + sinks + self.q_lora_rank + self.kv_lora_rank

    def has_bias(self, part: str) -> bool:
        """Tells whether a part of `BIASED` has a bias."""
        return part in self.biased_parts.split() or (self.bias and part not in ("router", "head"))

    @property
    def mixer_biases(self) -> tuple[int, int]:
        """Biases of attention's first linear layers, and of its last one."""
        first = self.query_width + self.kv_width if self.has_bias("qkv") else 0
        return (first, self.hidden_size if self.has_bias("o") else 0) if self.has_attention else (0, 0)

    @property
    def every_ffn_width(self) -> int:
        """Inner width of the block that every token meets: a dense one's, or that of shared experts; 0 without."""
        return (self.shared_ffn_hidden_size if self.is_moe else self.ffn_hidden_size) * self.has_ffn

    @property
    def ffn_matrices(self) -> int:
        """Matrices of a feed-forward block, or of one expert."""
        return 3 if self.is_gated else 2

    @property
    def layer_parameters(self) -> int:
        """Parameters of a layer, all experts included; of several kinds those of the largest."""
        return max(_layer_parameters(kind, kind.num_experts) for kind, _ in self.kinds)

    @property
    def embedding_parameters(self) -> int:
        """Parameters of the token embedding, and of the positions where they are learned."""
        return (self.vocab_size + (self.max_positions if self.positions == "learned" else 0)) * self.hidden_size

    @property
    def num_parameters(self) -> int:
        """Number of all parameters, computed from the fields."""
        return _num_parameters(self, active=False)

    @property
    def num_active_parameters(self) -> int:
        """Parameters that one token meets: all of a dense model, with the chosen experts only of a mixture."""
        return _num_parameters(self, active=True)

    @property
    def norm_parameters(self) -> int:
        """Parameters of one norm between blocks."""
        return self.hidden_size * (2 if self.norm == "layernorm" and self.has_bias("norm") else 1)

    @property
    def num_norms(self) -> int:
        """Norms between blocks of a layer of this kind."""
        return 1 if self.layer_kinds in ONE_BLOCK else NORM_PLACES[self.norm_place]

    @property
    def shared_parameters(self) -> int:
        """Parameters of a layer's shared experts and their gate."""
        shared = self.shared_ffn_hidden_size
        return (self.ffn_parameters(shared) if shared else 0) + self.shared_expert_gate * self.hidden_size

    def ffn_parameters(self, width: int) -> int:
        """Counts parameters of a dense block, or of one expert, of that inner width."""
        biases = (self.ffn_matrices - 1) * width + self.hidden_size if self.has_bias("ffn") else 0
        return self.ffn_matrices * self.hidden_size * width + biases


@lru_cache(maxsize=64)
def _kinds(model: ModelSpec) -> tuple[tuple[ModelSpec, int], ...]:
    pattern = model.layer_kinds
    if not pattern and not model.num_dense_layers:
        return ((model, model.num_layers),)
    pattern = pattern or ("S" if model.sliding_window else "F")
    found: Counter[tuple[str, bool]] = Counter(
        (pattern[layer % len(pattern)], layer < model.num_dense_layers) for layer in range(model.num_layers)
    )
    return tuple(
        (_kind(model, letter, is_dense=is_dense, count=count), count) for (letter, is_dense), count in found.items()
    )


def _kind(model: ModelSpec, letter: str, *, is_dense: bool, count: int) -> ModelSpec:
    """Returns a model with layers of one kind only."""
    kind = replace(
        model,
        num_layers=count,
        layer_kinds="" if letter in "FSD" else letter,
        sliding_window=model.sliding_window if letter == "S" else 0,
        num_dense_layers=0,
        num_mtp_layers=0,
    )
    if not (is_dense or letter in "Ddfm"):
        return kind
    width = model.dense_ffn_hidden_size or model.ffn_hidden_size
    return replace(
        kind,
        ffn_hidden_size=width,
        num_experts=0,
        num_experts_per_token=0,
        expert_capacity_factor=None,
        dense_ffn_hidden_size=0,
        shared_ffn_hidden_size=0,
        shared_expert_gate=False,
    )


def _layer_parameters(kind: ModelSpec, num_experts: int) -> int:
    """Counts parameters of a layer of one kind, with so many of its experts."""
    mixer = sum(each.inputs * each.outputs for each in kind.mixer) + sum(kind.mixer_biases) + kind.mixer_rest
    rest = mixer + kind.num_norms * kind.norm_parameters
    if not kind.has_ffn:
        return rest
    one = kind.ffn_parameters(kind.ffn_hidden_size)
    if not kind.is_moe:
        return rest + one
    router = kind.num_experts * (kind.hidden_size + kind.has_bias("router"))
    return rest + num_experts * one + router + kind.shared_parameters


def _has_other_qk_norm(model: ModelSpec) -> bool:
    """Tells whether queries and keys are normed over more than a head, or where the rest has another norm."""
    return model.qk_norm == "width" or (model.qk_norm == "head" and model.norm != "rmsnorm")


@lru_cache(maxsize=128)
def _num_parameters(model: ModelSpec, *, active: bool) -> int:
    h = model.hidden_size
    sizes = [
        (_layer_parameters(kind, kind.num_experts_per_token if active else kind.num_experts), count)
        for kind, count in model.kinds
    ]
    layers = sum(size * count for size, count in sizes)
    # A multi-token head has a layer, norms of both its inputs and of its output, and a projection of both to one.
    layers += model.num_mtp_layers * (sizes[-1][0] + 3 * model.norm_parameters + 2 * h * h)
    output = (0 if model.tied_embeddings else model.vocab_size * h) + model.has_bias("head") * model.vocab_size
    return layers + model.embedding_parameters + model.norm_parameters + output


OWN_CODE: Final = "own code"
"""Name of `OWN_MODEL`; no model of a space can have it."""

OWN_MODEL: Final = ModelSpec(
    name=OWN_CODE,
    num_layers=1,
    hidden_size=1,
    ffn_hidden_size=1,
    num_heads=1,
    num_kv_heads=1,
    vocab_size=1,
    source="stands for what a command trains and nobody described; its sizes mean nothing",
)
"""Stands for the model of a command that its space does not describe."""

_FILE: Final = resources.files(__package__).joinpath("models.json").read_text(encoding="utf-8")

MODELS: Final[dict[str, ModelSpec]] = {fields["name"]: ModelSpec(**fields) for fields in json.loads(_FILE)}
"""Every model by name, of `models.json`. A name that ends in `_like` is of a model that is not represented wholly: its
source says what is left out and what stands in its place."""


def model(name: str) -> ModelSpec:
    """Returns the model of that name. Raises `PlanError` where the catalog has no such model."""
    try:
        return MODELS[name]
    except KeyError:
        raise PlanError(f'unknown model "{name}"; {closest(name, MODELS)}') from None


STATE_BYTES_PER_PARAMETER: Final = 18
"""bf16 weight 2, fp32 gradient 4, fp32 master weight and two Adam moments 12 bytes (Rajbhandari et al. 2020, arXiv
1910.02054, section 3.1, with the gradient kept in fp32 as Megatron-Core does)."""

STATE_MEMORY_FRAC: Final = 0.6
"""Share of device memory that the training state of a slice may fill. The rest is for activations and buffers."""


def scale_model(full: ModelSpec, cluster: ClusterSpec) -> ModelSpec:
    """Cuts a model to the most layers whose training state fits a smaller cluster.

    Only layers are dropped. Widths, heads, experts and vocabulary stay. So every matrix product, message size and
    arithmetic intensity of a layer is that of the full model. The embedding's share of the step grows. The number of
    layers is a multiple of the world size where that many fit, and all of them where those do. Raises `PlanError` where
    the device's memory is unknown, or no layer fits.
    """
    memory_bytes = cluster.sensed_device.memory_bytes
    if memory_bytes is None:
        raise PlanError(f'the memory of "{cluster.device}" is not in the catalog; give num_layers instead')
    budget = STATE_MEMORY_FRAC * memory_bytes * cluster.world_size / STATE_BYTES_PER_PARAMETER
    sizes = range(1, full.num_layers + 1)
    num_layers = bisect_right(sizes, budget, key=lambda size: replace(full, num_layers=size).num_parameters)
    if num_layers < 1:
        raise PlanError(f"not one layer of {full.name} fits {cluster.label}; use a larger cluster")
    if cluster.world_size < num_layers < full.num_layers:
        num_layers -= num_layers % cluster.world_size
    return replace(full, num_layers=num_layers)
