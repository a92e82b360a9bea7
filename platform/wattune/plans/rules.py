"""Validity. Each rule is one function: its name is the rule's stable name, its text has numbers and a remedy."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from wattune.plans.axes import AXES, ITEM_BYTES
from wattune.plans.engines import CAPABILITIES, ROUTINGS, Configuration, exclusions_of, matches
from wattune.plans.parallel import num_micro_batches
from wattune.plans.placement import order_problem
from wattune.plans.settings import device_settings

_MOST_LISTED: Final = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Violation:
    """A rule that a configuration breaks."""

    rule: str
    """Name of a function of `RULES`."""
    reason: str
    """The condition that does not hold, its numbers, and what to use instead."""


Rule = Callable[[Configuration], str | None]


def violations(configuration: Configuration, *, of_sizes: bool = False) -> Iterator[Violation]:
    """Yields every rule that an effective configuration breaks, in the order of `RULES`; `of_sizes` alone if asked.

    Degrees that do not fit the world size leave no data parallel degree. Then nothing else is judged. Rules of a model
    or a workload are left out where a command runs whose space describes none.
    """
    for rule in _asked(configuration.model.is_known, configuration.workload.is_known, of_sizes):
        if (reason := rule(configuration)) is not None:
            yield Violation(rule=rule.__name__, reason=reason)
            if rule is world_size:
                return


def world_size(c: Configuration) -> str | None:
    """Tensor, pipeline and context degrees divide the ranks; data parallel is what is left."""
    plan, world = c.plan, c.cluster.world_size
    if world % (plan.tp * plan.pp * plan.cp) == 0:
        return None
    return (
        f"tp*pp*cp={plan.tp}*{plan.pp}*{plan.cp}={plan.tp * plan.pp * plan.cp} does not divide world_size={world} "
        f"of {c.cluster.label}; use degrees whose product is in {_divisors(world)}"
    )


def adapters(c: Configuration) -> str | None:
    """Adapters stand beside layers the model has, and tensor parallel ranks share their rank evenly."""
    lora = c.workload.lora
    if lora is None:
        return None if c.workload.mode != "lora" else "mode=lora has no workload.lora; give its rank and targets"
    if c.model.is_moe and (wrong := [name for name in lora.targets if name in ("gate", "up", "down")]):
        return f"lora targets {_listed(wrong)} are inside experts of {c.model.name}, which take none; use q, k, v or o"
    if c.model.is_latent and (wrong := [name for name in lora.targets if name in ("k", "v")]):
        return f"lora targets {_listed(wrong)} are none of {c.model.name}, whose attention is latent; use q or o"
    if "gate" in lora.targets and not c.model.is_gated:
        return f"lora target gate is none of {c.model.name}, whose activation is {c.model.activation}; leave it out"
    if lora.rank % c.plan.tp and CAPABILITIES[c.engine].splits_adapters:
        return f"tp={c.plan.tp} does not divide lora.rank={lora.rank}; use a rank that is a multiple of tp"
    return None


def routing(c: Configuration) -> str | None:
    """Routing is of models with experts, and one of those there are."""
    chosen = c.workload.routing
    if chosen is None:
        return None
    if not c.model.is_moe:
        return f"workload.routing={chosen} sends tokens to experts and {c.model.name} has none; leave it out"
    if chosen.by not in ROUTINGS:
        return f"workload.routing={chosen} is none of {_listed(ROUTINGS)}; use one of them"
    if chosen.by == "skew" and not 0 <= chosen.skew < math.inf:
        return f"workload.routing.skew={chosen.skew} is no exponent of Zipf's law; use 0 or more"
    return None


def forward_only(c: Configuration) -> str | None:
    """Stages run one after another, without interleaving, in work that trains nothing."""
    if c.workload.mode != "prefill" or c.plan.vpp == 1 or CAPABILITIES[c.engine].interleaves_prompts:
        return None
    return (
        f"vpp={c.plan.vpp} orders forward and backward passes in engine {c.engine}, and mode=prefill has no backward "
        "ones; use vpp=1"
    )


def engine_device(c: Configuration) -> str | None:
    """The engine runs on this kind of device."""
    vendors, vendor = CAPABILITIES[c.engine].vendors, c.cluster.rank_device.vendor
    if vendor in vendors:
        return None
    return f"engine {c.engine} does not run on {c.cluster.device} ({vendor}); use a device of {_listed(vendors)}"


def dtype(c: Configuration) -> str | None:
    """Engine and device train in this data type."""
    of_engine, cluster = CAPABILITIES[c.engine].dtypes, c.cluster
    # Simulated sensors are those of a device that ran the plan.
    devices = [cluster.rank_device, cluster.sensed_device] if cluster.simulate_sensors_of else [cluster.rank_device]
    lacking = [one for one in devices if c.plan.dtype not in one.trains_in]
    if c.plan.dtype in of_engine and not lacking:
        return None
    both = _listed([name for name in c.cluster.rank_device.dtypes if name in of_engine])
    text = f"dtype={c.plan.dtype} does not run on {c.cluster.label.split(maxsplit=1)[1]} with engine {c.engine}"
    if c.plan.dtype != "fp8":
        return f"{text}; use {both}"
    if lacking:
        return (
            f"{text}: no fp8 peak of {lacking[0].name} is known; use {both}, or where your own device has one give its "
            "peak_fp8_flop_per_s"
        )
    able = _listed([name for name, engine in CAPABILITIES.items() if "fp8" in engine.dtypes])
    return f"{text}, which has no linear layers in it; use {both}, or engine in {able}"


def engine_combination(c: Configuration) -> str | None:
    """The engine can combine these settings."""
    for exclusion in exclusions_of(c.engine, c.cluster.transformer_engine, c.workload.mode, c.model.is_moe):
        if matches(exclusion.setting, c.plan):
            parts = [f"{axis}={getattr(c.plan, axis)}" for axis in exclusion.setting]
            parts += [f"mode={exclusion.mode}"] if exclusion.mode else []
            parts += [f"the experts of {c.model.name}"] if exclusion.of_experts else []
            parts += ["transformer_engine"] if exclusion.transformer_engine else []
            setting = " with ".join(parts)
            remedies = [
                f"{axis} in {_listed([name for name in AXES[axis].choices if name not in values])}"
                if AXES[axis].kind == "choice"
                else f"{axis}=1"
                for axis, values in exclusion.setting.items()
            ]
            if exclusion.transformer_engine is not None:
                remedies.append(f"a cluster with{'out' if exclusion.transformer_engine else ''} transformer_engine")
            return f"engine {c.engine} cannot run {setting}: {exclusion.why}; use {' or '.join(remedies)}"
    return None


def expert_tensor_parallel(c: Configuration) -> str | None:
    """The engine can split experts otherwise than the rest."""
    if c.plan.etp == c.plan.tp or not CAPABILITIES[c.engine].etp_is_tp:
        return None
    return f"engine {c.engine} splits experts as the rest: etp={c.plan.etp} is not tp={c.plan.tp}; use etp={c.plan.tp}"


def expert_layer(c: Configuration) -> str | None:
    """The engine's expert layer is made for this model's experts, and for this way of splitting them."""
    why, plan, model = CAPABILITIES[c.engine].experts_why, c.plan, c.model
    if not model.is_moe:
        return None
    if model.num_experts_per_token < (least := CAPABILITIES[c.engine].least_experts_per_token):
        return (
            f"engine {c.engine} sends a token to at least {least} experts, since the weight of a single one is always "
            f"1, and {model.name} has num_experts_per_token={model.num_experts_per_token}; use {least} or more"
        )
    if model.bias and plan.etp > 1 and not CAPABILITIES[c.engine].splits_expert_bias:
        return (
            f"engine {c.engine} splits no experts with biases: {model.name} has bias=true and the plan etp={plan.etp}; "
            "use etp=1"
        )
    if not why:
        return None
    problem = ""
    if model.activation != "swiglu" or model.bias:
        form = f"activation={model.activation}, bias={str(model.bias).lower()}"
        problem = f"{model.name} has {form}; use SwiGLU experts without bias"
    elif model.expert_capacity_factor is not None:
        problem = (
            f"it drops no tokens and {model.name} has expert_capacity_factor={model.expert_capacity_factor}; "
            "leave the factor out"
        )
    elif plan.etp > 1:
        problem = f"it splits no expert over etp={plan.etp} ranks; use etp=1"
    elif plan.tp > 1 and plan.ep == 1:
        problem = f"with tp={plan.tp} it needs ep of at least 2, and ep=1; use tp=1 or a larger ep"
    return (problem and f"engine {c.engine} cannot run these experts, {why}: {problem}") or None


def heads(c: Configuration) -> str | None:
    """Tensor parallel ranks hold whole attention heads, and the engine can split norms over all of them."""
    if c.plan.tp > 1 and c.model.qk_norm == "width" and not CAPABILITIES[c.engine].splits_wide_norms:
        return (
            f"tp={c.plan.tp} would split the norms over all queries and keys of {c.model.name}, which engine "
            f"{c.engine} cannot; use tp=1"
        )
    return _indivisible(c, "tp", c.plan.tp, "num_heads", c.model.num_heads)


def kv_heads(c: Configuration) -> str | None:
    """Tensor parallel ranks hold whole key and value heads."""
    return _indivisible(c, "tp", c.plan.tp, "num_kv_heads", c.model.num_kv_heads)


def feed_forward(c: Configuration) -> str | None:
    """Feed-forward blocks, or experts, split evenly, and so do those beside experts and heads of Mamba2."""
    axis, degree = ("etp", c.plan.etp) if c.model.is_moe else ("tp", c.plan.tp)
    if reason := _indivisible(c, axis, degree, "ffn_hidden_size", c.model.ffn_hidden_size):
        return reason
    for name in ("dense_ffn_hidden_size", "shared_ffn_hidden_size", "ssm_num_heads", "ssm_num_groups"):
        if reason := _indivisible(c, "tp", c.plan.tp, name, getattr(c.model, name)):
            return reason
    return None


def expert_rows(c: Configuration) -> str | None:
    """Experts are as wide as the engine's grouped matrix products want them."""
    if not c.model.is_moe:
        return None
    multiple = max(CAPABILITIES[c.engine].expert_row_bytes // ITEM_BYTES[c.plan.dtype], 1)
    for name, width in (
        ("hidden_size", c.model.hidden_size),
        (f"ffn_hidden_size/etp={c.model.ffn_hidden_size}/{c.plan.etp}", c.model.ffn_hidden_size // c.plan.etp),
    ):
        if width % multiple:
            return (
                f"{name}={width} of {c.model.name} is not a multiple of {multiple}, as engine {c.engine} needs for "
                f"experts in {c.plan.dtype}; change the width, or use a smaller etp"
            )
    return None


def fp8_widths(c: Configuration) -> str | None:
    """Weights of linear layers are as wide on every rank as the engine's products in fp8 want them."""
    multiple, model, tp = CAPABILITIES[c.engine].fp8_multiple, c.model, c.plan.tp
    if c.plan.dtype != "fp8" or multiple == 1:
        return None
    for name, width in (
        ("hidden_size", model.hidden_size),
        ("num_kv_heads*head_size", model.num_kv_heads * model.head_size),
        ("ffn_hidden_size", model.ffn_hidden_size),
    ):
        if width % (multiple * tp):
            shown = f"{name}/tp={width}/{tp}" if tp > 1 else f"{name}={width}"
            smaller = ", or a smaller tp" if tp > 1 else ""
            return (
                f"{shown} of {model.name} is not a multiple of {multiple}, as products in fp8 need it on every rank; "
                f"use dtype=bf16{smaller}"
            )
    return None


def fp8_tokens(c: Configuration) -> str | None:
    """A micro-batch has as many tokens as the engine's gradients of weights in fp8 want: they sum over them."""
    multiple, tokens = CAPABILITIES[c.engine].fp8_multiple, c.plan.micro_batch_size * c.workload.seq_len
    if c.plan.dtype != "fp8" or c.workload.mode == "prefill" or tokens % multiple == 0:
        return None
    return (
        f"micro_batch_size*seq_len={c.plan.micro_batch_size}*{c.workload.seq_len}={tokens} is not a multiple of "
        f"{multiple}, as gradients of weights in fp8 need; use dtype=bf16, or another micro_batch_size or seq_len"
    )


def positions(c: Configuration) -> str | None:
    """A model with learned positions has one for every token of a sequence."""
    if c.model.positions != "learned" or c.workload.seq_len <= c.model.max_positions:
        return None
    return (
        f"seq_len={c.workload.seq_len} exceeds the max_positions={c.model.max_positions} learned by {c.model.name}; "
        f"use seq_len of at most {c.model.max_positions}"
    )


def sequence(c: Configuration) -> str | None:
    """Context parallel splits the sequence, and tensor parallel (its sequence parallel half) splits each part.

    A context parallel rank has an early and a late piece, since late tokens attend to more than early ones: `own_part`
    in `engines/megatron/engine.py`.
    """
    if not CAPABILITIES[c.engine].splits_ends:
        return None
    cp, tp, seq_len = c.plan.cp, c.plan.tp, c.workload.seq_len
    ways, text = cp * tp, f"cp*tp={cp}*{tp}={cp * tp}"
    if cp > 1 and tp % 2:
        ways, text = 2 * ways, f"2*cp*tp=2*{cp}*{tp}={2 * ways}"
    if seq_len % ways == 0:
        return None
    return (
        f"{text} does not divide seq_len={seq_len}; "
        f"use degrees whose product does, or a seq_len that is a multiple of {ways}"
    )


def interleaving(c: Configuration) -> str | None:
    """More than one chunk a stage needs more than one stage."""
    if c.plan.vpp == 1 or c.plan.pp > 1:
        return None
    return f"vpp={c.plan.vpp} interleaves pipeline stages and pp=1 has none; use vpp=1, or pp of at least 2"


def layers(c: Configuration) -> str | None:
    """Without a layout every chunk of every stage has equally many layers."""
    if c.plan.layout:
        return None
    num_layers, pp, vpp = c.model.num_layers, c.plan.pp, c.plan.vpp
    each, more = divmod(num_layers, pp * vpp)
    if not more:
        return None
    sizes = [each + 1] * more + [each] * (pp * vpp - more)
    uneven = f", or a layout such as {sizes}" if each and len(sizes) <= _MOST_LISTED else ""
    if num_layers % pp:
        reason = _indivisible(c, "pp", pp, "num_layers", num_layers)
        return reason and f"{reason}{uneven}"
    return (
        f"pp*vpp={pp}*{vpp}={pp * vpp} does not divide num_layers={num_layers} of {c.model.name}; "
        f"use vpp in {_divisors(num_layers // pp)} at pp={pp}{uneven}"
    )


def layout(c: Configuration) -> str | None:
    """A layout names every chunk of every stage, leaves none empty and uses all layers."""
    sizes, chunks = c.plan.layout, c.plan.pp * c.plan.vpp
    if not sizes:
        return None
    if len(sizes) != chunks:
        return f"layout={list(sizes)} has {len(sizes)} entries for pp*vpp={c.plan.pp}*{c.plan.vpp}; list {chunks}"
    if min(sizes) < 1:
        return f"layout={list(sizes)} leaves a stage empty; give each at least 1 layer"
    if c.model.is_known and sum(sizes) != c.model.num_layers:
        return (
            f"layout={list(sizes)} has {sum(sizes)} layers and {c.model.name} has num_layers={c.model.num_layers}; "
            "make them equal"
        )
    return None


def experts(c: Configuration) -> str | None:
    """Expert parallel ranks hold whole experts of a model that has some."""
    if c.plan.ep > 1 and not c.model.is_moe:
        return f"ep={c.plan.ep} splits experts and {c.model.name} has none; use ep=1"
    return _indivisible(c, "ep", c.plan.ep, "num_experts", c.model.num_experts)


def expert_groups(c: Configuration) -> str | None:
    """Experts are spread over the ranks of one pipeline stage."""
    ep, etp = c.plan.ep, c.plan.etp
    ranks = c.cluster.world_size // c.plan.pp
    if ranks % (ep * etp) == 0:
        return None
    use = f"ep in {_divisors(ranks // etp)}" if ranks % etp == 0 else f"etp in {_divisors(ranks)}"
    return (
        f"ep*etp={ep}*{etp}={ep * etp} does not divide dp*cp*tp={ranks}, the ranks of a pipeline stage at "
        f"pp={c.plan.pp}; use {use}"
    )


def copies(c: Configuration) -> str | None:
    """Every copy of what is sharded has the same number of ranks, of dense weights and of experts."""
    copies, plan = c.plan.dp_replicate, c.plan
    if copies == 1:
        return None
    dp = plan.dp(c.cluster.world_size)
    if dp % copies:
        return f"dp_replicate={copies} does not divide dp={dp}; use dp_replicate in {_divisors(dp)}"
    replicas = c.cluster.world_size // (plan.pp * plan.ep * plan.etp)
    if c.model.is_moe and replicas % copies:
        return (
            f"dp_replicate={copies} does not divide dp*cp*tp/(ep*etp)={replicas}, the ranks that share an expert; use "
            f"dp_replicate in {_divisors(math.gcd(dp, replicas))}, or a smaller ep"
        )
    return None


def batch(c: Configuration) -> str | None:
    """The global batch is a whole number of micro-batches on every replica."""
    size, dp, global_batch = c.plan.micro_batch_size, c.plan.dp(c.cluster.world_size), c.workload.global_batch_size
    if global_batch % (size * dp) == 0:
        return None
    if global_batch % dp:
        remedy = f"use a global_batch_size that is a multiple of dp={dp}"
    else:
        remedy = f"use micro_batch_size in {_divisors(global_batch // dp)}"
    return f"micro_batch_size*dp={size}*{dp}={size * dp} does not divide global_batch_size={global_batch}; {remedy}"


def loss_chunks(c: Configuration) -> str | None:
    """Parts of the loss have equally many tokens, so that one compiled graph serves them all."""
    tokens = c.plan.micro_batch_size * c.workload.seq_len // c.plan.cp
    if tokens % c.plan.loss_chunks == 0:
        return None
    return (
        f"loss_chunks={c.plan.loss_chunks} does not divide the {tokens} tokens of a micro-batch; use loss_chunks in "
        f"{_divisors(tokens)}"
    )


def micro_batches(c: Configuration) -> str | None:
    """Pipeline schedules have the micro-batches they are made of: whole rounds where chunks interleave."""
    pp, vpp, engine = c.plan.pp, c.plan.vpp, CAPABILITIES[c.engine]
    number = num_micro_batches(c.plan, c.cluster.world_size, c.workload.global_batch_size)
    rounds = max(1, number // pp)
    if vpp > 1 and engine.rounds_of_pp and number % pp:
        return (
            f"{number} micro-batches are not a multiple of pp={pp}, which vpp={vpp} needs; "
            "use vpp=1, or another micro_batch_size or global_batch_size"
        )
    if vpp > 1 and number % rounds:
        return (
            f"{number} micro-batches do not make {rounds} equal rounds of at least pp={pp}, which vpp={vpp} needs; "
            "use vpp=1, or another micro_batch_size or global_batch_size"
        )
    if vpp == 1 and number < pp and engine.fills_pipeline and c.workload.mode != "prefill":
        return (
            f"{number} micro-batches do not fill pp={pp} stages, as engine {c.engine} needs; "
            "use a smaller pp or micro_batch_size, or a larger global_batch_size"
        )
    return None


def rank_order(c: Configuration) -> str | None:
    """A rank order gives every rank a device slot of its own, on the node the topology gives it."""
    order, size = c.plan.rank_order, c.cluster.devices_per_node
    problem = order_problem(order, c.cluster.world_size)
    if problem or isinstance(order, str):
        return problem
    moved = next((rank for rank, slot in enumerate(order) if slot // size != rank // size), None)
    if moved is None:
        return None
    return (
        f"rank_order={list(order)} moves rank {moved} from node {moved // size} to node {order[moved] // size}; "
        "reorder ranks inside a node only"
    )


RULES: Final[tuple[Rule, ...]] = (
    world_size,
    adapters,
    routing,
    engine_device,
    dtype,
    engine_combination,
    heads,
    kv_heads,
    experts,
    expert_groups,
    expert_tensor_parallel,
    expert_layer,
    feed_forward,
    expert_rows,
    fp8_widths,
    fp8_tokens,
    positions,
    sequence,
    interleaving,
    forward_only,
    layout,
    layers,
    copies,
    batch,
    micro_batches,
    loss_chunks,
    rank_order,
    device_settings,
)
"""Every rule, in the order of judging. A rejected configuration names the first that it breaks."""

_OF_MODEL: Final = frozenset(
    (heads, kv_heads, experts, expert_layer, feed_forward, expert_rows, fp8_widths, positions, layers)
)
"""Rules that need a model."""

_OF_WORKLOAD: Final = frozenset(
    (adapters, routing, fp8_tokens, positions, sequence, forward_only, batch, micro_batches, loss_chunks)
)
"""Rules that need a workload: others see no more of one than its mode."""

BEFORE_SIZES: Final = frozenset(rule.__name__ for rule in RULES[: RULES.index(fp8_tokens)])
"""Rules of which none, and none before them, asks for a workload's sizes."""


@lru_cache(maxsize=8)
def _asked(of_model: bool, of_workload: bool, of_sizes: bool) -> tuple[Rule, ...]:
    left_out = (frozenset() if of_model else _OF_MODEL) | (frozenset() if of_workload else _OF_WORKLOAD)
    return tuple(rule for rule in RULES if rule not in left_out and (not of_sizes or rule in _OF_WORKLOAD))


def _indivisible(c: Configuration, axis: str, degree: int, field: str, total: int) -> str | None:
    if total % degree == 0:
        return None
    allowed = _divisors(total, c.cluster.world_size)
    return f"{axis}={degree} does not divide {field}={total} of {c.model.name}; use {axis} in {allowed}"


@lru_cache(maxsize=4096)
def _divisors(total: int, largest: int | None = None) -> str:
    """The divisors of a number up to `largest`, as a set in a message."""
    small = [i for i in range(1, int(total**0.5) + 1) if total % i == 0]
    found = sorted({*small, *(total // i for i in small)})
    return _listed([i for i in found if largest is None or i <= largest])


def _listed(values: Sequence[object]) -> str:
    shown = [str(value) for value in values[:_MOST_LISTED]]
    return "{" + ", ".join([*shown, *(["..."] if len(values) > _MOST_LISTED else [])]) + "}"
