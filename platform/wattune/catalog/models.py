"""Decoder transformers by their published configurations, their parameter counts, and scaled-down slices of them."""

from dataclasses import dataclass, field, replace
from typing import Annotated, Final

from wattune.catalog.hardware import ClusterSpec
from wattune.errors import PlanError, closest
from wattune.field_types import Count, CountOrZero, OneOf, Positive, Size

NORMS: Final = ("rmsnorm", "layernorm")
ACTIVATIONS: Final = ("swiglu", "gelu")
POSITIONS: Final = ("rope", "learned")


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
    source: str = field(default="", compare=False)
    """Origin of the numbers. Models with equal numbers are equal: a study's file keeps the numbers alone."""

    @property
    def is_known(self) -> bool:
        """False where a command trains something that its space does not describe (`OWN_MODEL`)."""
        return self.name != OWN_CODE

    @property
    def is_moe(self) -> bool:
        """True where the feed-forward blocks are mixtures of experts."""
        return self.num_experts > 0

    @property
    def head_size(self) -> int:
        """Width of one attention head."""
        return self.hidden_size // self.num_heads

    @property
    def layer_parameters(self) -> int:
        """Parameters of one decoder layer, all experts included."""
        h, kv = self.hidden_size, self.num_kv_heads * self.head_size
        attention = 2 * h * h + 2 * h * kv + (2 * h + 2 * kv if self.bias else 0)
        return attention + self._ffn_parameters(self.num_experts) + 2 * self._norm_parameters

    @property
    def embedding_parameters(self) -> int:
        """Parameters of the token embedding, and of the positions where they are learned."""
        return (self.vocab_size + (self.max_positions if self.positions == "learned" else 0)) * self.hidden_size

    @property
    def num_parameters(self) -> int:
        """Number of all parameters, computed from the fields."""
        output = 0 if self.tied_embeddings else self.vocab_size * self.hidden_size
        return self.num_layers * self.layer_parameters + self.embedding_parameters + self._norm_parameters + output

    @property
    def num_active_parameters(self) -> int:
        """Parameters that one token meets: all of a dense model, with the chosen experts only of a mixture."""
        if not self.is_moe:
            return self.num_parameters
        idle = self._ffn_parameters(self.num_experts) - self._ffn_parameters(self.num_experts_per_token)
        router = (self.num_experts - self.num_experts_per_token) * self.hidden_size
        return self.num_parameters - self.num_layers * (idle - router)

    @property
    def _norm_parameters(self) -> int:
        return self.hidden_size * (2 if self.norm == "layernorm" and self.bias else 1)

    def _ffn_parameters(self, num_experts: int) -> int:
        matrices = 3 if self.activation == "swiglu" else 2
        inner_biases = (matrices - 1) * self.ffn_hidden_size
        one = matrices * self.hidden_size * self.ffn_hidden_size + (inner_biases + self.hidden_size if self.bias else 0)
        return one if not self.is_moe else num_experts * (one + self.hidden_size)  # the router has a row an expert


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

_GPT_OSS: Final = (
    "{name} config.json; gpt-oss model card (arXiv 2508.10925), table 1. In place of 64 heads of 64, wider than the "
    "hidden size: 40 heads of 72. Every layer attends to all tokens; half of them have a window of 128. Left out: all "
    "biases, attention sinks, the clamp of SwiGLU, the scaling of rotary frequencies, and 4-bit storage of experts"
)
_WIDE: Final = (
    "its {heads} heads of 128 are {width} wide together, its hidden size is {hidden}; the decoder has heads that "
    "divide the hidden size"
)

MODELS: Final[dict[str, ModelSpec]] = {
    model.name: model
    for model in (
        ModelSpec(
            name="gpt3_175b",
            num_layers=96,
            hidden_size=12288,
            ffn_hidden_size=49152,
            num_heads=96,
            num_kv_heads=96,
            vocab_size=50257,
            norm="layernorm",
            activation="gelu",
            positions="learned",
            max_positions=2048,
            bias=True,
            tied_embeddings=True,
            source="Brown et al. 2020 (arXiv 2005.14165), table 2.1; vocabulary of the GPT-2 tokenizer",
        ),
        ModelSpec(
            name="llama3_70b",
            num_layers=80,
            hidden_size=8192,
            ffn_hidden_size=28672,
            num_heads=64,
            num_kv_heads=8,
            vocab_size=128256,
            rope_base=500_000.0,
            source="Meta-Llama-3-70B config.json; Llama 3 report (arXiv 2407.21783), table 3",
        ),
        ModelSpec(
            name="llama3_8b",
            num_layers=32,
            hidden_size=4096,
            ffn_hidden_size=14336,
            num_heads=32,
            num_kv_heads=8,
            vocab_size=128256,
            rope_base=500_000.0,
            source="Meta-Llama-3-8B config.json; Llama 3 report (arXiv 2407.21783), table 3",
        ),
        ModelSpec(
            name="mixtral_8x7b",
            num_layers=32,
            hidden_size=4096,
            ffn_hidden_size=14336,
            num_heads=32,
            num_kv_heads=8,
            vocab_size=32000,
            num_experts=8,
            num_experts_per_token=2,
            rope_base=1_000_000.0,
            source="Mixtral-8x7B-v0.1 config.json; Jiang et al. 2024 (arXiv 2401.04088), table 1",
        ),
        ModelSpec(
            name="mixtral_8x22b",
            num_layers=56,
            hidden_size=6144,
            ffn_hidden_size=16384,
            num_heads=48,
            num_kv_heads=8,
            vocab_size=32768,
            num_experts=8,
            num_experts_per_token=2,
            rope_base=1_000_000.0,
            source="Mixtral-8x22B-v0.3 config.json (v0.1 has 32,000 tokens)",
        ),
        ModelSpec(
            name="llama3_1_405b",
            num_layers=126,
            hidden_size=16384,
            ffn_hidden_size=53248,
            num_heads=128,
            num_kv_heads=8,
            vocab_size=128256,
            rope_base=500_000.0,
            source="Meta-Llama-3.1-405B config.json; Llama 3 report (arXiv 2407.21783), table 3. Left out: the scaling "
            "of rotary frequencies, which changes no weight and no work. Llama 3.1 8B is llama3_8b, 70B is llama3_70b",
        ),
        ModelSpec(
            name="qwen2_5_7b_like",
            num_layers=28,
            hidden_size=3584,
            ffn_hidden_size=18944,
            num_heads=28,
            num_kv_heads=4,
            vocab_size=152064,
            rope_base=1_000_000.0,
            source="Qwen2.5-7B config.json; Qwen2.5 report (arXiv 2412.15115), table 1. Left out: the biases of q, k "
            "and v (129,024 of 7.6 B parameters)",
        ),
        ModelSpec(
            name="qwen2_5_72b_like",
            num_layers=80,
            hidden_size=8192,
            ffn_hidden_size=29568,
            num_heads=64,
            num_kv_heads=8,
            vocab_size=152064,
            rope_base=1_000_000.0,
            source="Qwen2.5-72B config.json; Qwen2.5 report (arXiv 2412.15115), table 1. Left out: the biases of q, k "
            "and v (819,200 of 72.7 B parameters)",
        ),
        ModelSpec(
            name="qwen3_8b_like",
            num_layers=36,
            hidden_size=4096,
            ffn_hidden_size=12288,
            num_heads=32,
            num_kv_heads=8,
            vocab_size=151936,
            rope_base=1_000_000.0,
            source="Qwen3-8B config.json; Qwen3 report (arXiv 2505.09388), table 1. Left out: the norms of queries and "
            "keys (9,216 of 8.2 B parameters)",
        ),
        ModelSpec(
            name="qwen3_14b_like",
            num_layers=40,
            hidden_size=5120,
            ffn_hidden_size=17408,
            num_heads=40,
            num_kv_heads=8,
            vocab_size=151936,
            rope_base=1_000_000.0,
            source="Qwen3-14B config.json; Qwen3 report (arXiv 2505.09388), table 1. Left out: the norms of queries "
            "and keys (10,240 of 14.8 B parameters)",
        ),
        ModelSpec(
            name="deepseek_v3_like",
            num_layers=58,
            hidden_size=7168,
            ffn_hidden_size=2048,
            num_heads=128,
            num_kv_heads=128,
            vocab_size=129280,
            num_experts=256,
            num_experts_per_token=8,
            source="DeepSeek-V3 config.json; DeepSeek-V3 report (arXiv 2412.19437), section 4.2. Its 58 layers of "
            "experts only. Left out: the 3 dense layers, the shared expert of each layer, multi-token prediction, "
            "groups and bias of the router. In place of multi-head latent attention: 128 heads of 56 (205.5 M "
            "parameters a layer for 187.1 M)",
        ),
        ModelSpec(
            name="gpt_oss_20b_like",
            num_layers=24,
            hidden_size=2880,
            ffn_hidden_size=2880,
            num_heads=40,
            num_kv_heads=8,
            vocab_size=201088,
            num_experts=32,
            num_experts_per_token=4,
            rope_base=150_000.0,
            source=_GPT_OSS.format(name="gpt-oss-20b"),
        ),
        ModelSpec(
            name="gpt_oss_120b_like",
            num_layers=36,
            hidden_size=2880,
            ffn_hidden_size=2880,
            num_heads=40,
            num_kv_heads=8,
            vocab_size=201088,
            num_experts=128,
            num_experts_per_token=4,
            rope_base=150_000.0,
            source=_GPT_OSS.format(name="gpt-oss-120b"),
        ),
    )
}
"""Every model by name. A name that ends in `_like` is of a model that the decoder cannot represent wholly: its source
says what is left out and what stands in its place."""

NOT_REPRESENTED: Final[dict[str, str]] = {
    "qwen3_0_6b": _WIDE.format(heads=16, width=2048, hidden=1024),
    "qwen3_4b": _WIDE.format(heads=32, width=4096, hidden=2560),
    "qwen3_32b": _WIDE.format(heads=64, width=8192, hidden=5120),
    "qwen3_30b_a3b": _WIDE.format(heads=32, width=4096, hidden=2048),
    "qwen3_235b_a22b": _WIDE.format(heads=64, width=8192, hidden=4096),
}
"""Published models that are left out on purpose, each with the reason."""


def model(name: str) -> ModelSpec:
    """Returns the model of that name.

    Raises:
        PlanError: The catalog has no such model.
    """
    try:
        return MODELS[name]
    except KeyError:
        if name in NOT_REPRESENTED:
            raise PlanError(f'model "{name}" is left out of the catalog: {NOT_REPRESENTED[name]}') from None
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
    layers is a multiple of the world size where that many fit.

    Raises:
        PlanError: The device's memory is unknown, or no layer fits.
    """
    memory_bytes = cluster.sensed_device.memory_bytes
    if memory_bytes is None:
        raise PlanError(f'scale_to: the memory of "{cluster.device}" is not in the catalog; give num_layers instead')
    budget = STATE_MEMORY_FRAC * memory_bytes * cluster.world_size / STATE_BYTES_PER_PARAMETER
    outside_layers = full.num_parameters - full.num_layers * full.layer_parameters
    num_layers = min(full.num_layers, int((budget - outside_layers) // full.layer_parameters))
    if num_layers < 1:
        raise PlanError(f"scale_to: not one layer of {full.name} fits {cluster.label}; use a larger cluster")
    if num_layers > cluster.world_size:
        num_layers -= num_layers % cluster.world_size
    return replace(full, num_layers=num_layers)
