"""A first search space for a model and a cluster, with comments: valid as it stands, and small enough to read."""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import yaml

from wattune.catalog.hardware import ClusterSpec, device, parse_cluster_label
from wattune.catalog.models import ModelSpec, scale_model
from wattune.errors import PlanError
from wattune.objective import parse_constraint, parse_objective
from wattune.plans.engines import CAPABILITIES, runs_program
from wattune.search.plausible import implausible
from wattune.search.prune import Candidates, prune
from wattune.search.reference import schema_line
from wattune.search.space import parse_space
from wattune.storage.documents import yaml_line

CPU_SENSORS: Final = "h200_sxm"
"""Device whose sensors a draft for processors simulates: the one whose model is fitted."""

MOST_TRIALS: Final = 20
"""Trials of a draft's first search."""

_BOUND_FRAC: Final = 0.9
"""Share of the power limits that the draft proposes as a bound."""


def draft(
    full: ModelSpec,
    *,
    study: str,
    model: str,
    cluster: str,
    schema: str,
    engine: str = "torch",
    objective: str = "maximize tokens_per_s",
    bounds: Sequence[str] = (),
    from_config: str | None = None,
    leave_out: Sequence[str] = (),
) -> str:
    """Writes a search space as YAML with comments. It plans: at least one combination is kept.

    `model` is the catalog's name of the full model, or its own where `from_config` is the path of a `config.json`;
    `cluster` is a text such as `1x4 h200_sxm`. Raises `PlanError`, `SpaceError`: a name or bound cannot be used, or not
    one layer fits the cluster.
    """
    place = parse_cluster_label(cluster)
    on_cpu = device(place.device).vendor == "cpu"
    trained = _trained(full, place, on_cpu=on_cpu)
    batch = _batch(place.world_size)
    entry: dict[str, Any] = {"name": model}
    entry |= {"from_config": from_config} if from_config is not None else {}
    entry |= {"leave_out": list(leave_out)} if leave_out else {}
    axes = _axes(trained, place, engine, batch)
    lines = [
        schema_line(schema),
        "# Editors with a YAML language server complete and check this file by that line.",
        "#",
        "#   wattune plan FILE              what would run, and why the rest would not",
        "#   wattune plan FILE --estimate   predicted time, memory and power; needs no GPU",
        "#   wattune run  FILE              measure it",
        f"study: {yaml_line(study)}",
        "",
        *_model_lines(entry, full, trained, on_cpu=on_cpu),
        *_cluster_lines(place, on_cpu=on_cpu),
        f"engine: {engine}  # {' | '.join(CAPABILITIES)}; a list compares them",
        *(_command_lines(place, list(axes)) if runs_program(engine) else ()),
        *_workload_lines(trained, place, routed=not runs_program(engine)),
        "",
        "# Every combination is kept, rejected by a named rule, or equivalent to another.",
        "# dp follows: ranks / (tp * pp * cp).",
        "space:",
        *(f"  {name}: {yaml_line(values)}  # {comment}" for name, (values, comment) in axes.items()),
        "",
        "# Steps at least, and seconds at least, whichever is longer. `timeout_s` ends a trial that hangs.",
        f"measure: {{min_steps: {8 if on_cpu else 20}, min_seconds: {4 if on_cpu else 15}}}",
        f"objective: {objective}  # `wattune metrics` lists what can be asked",
        *_bound_lines(bounds, place),
        f"search: {{strategy: random, num_trials: {MOST_TRIALS}, seed: 0}}  # strategy: grid tries every combination",
    ]
    return "\n".join(lines) + "\n"


def planned(text: str, folder: Path) -> Candidates:
    """Sorts every combination of a draft, whose relative paths start in the folder of the file it will be.

    Raises `SpaceError` where it is no valid space. Raises `NothingToTryError` where every combination is rejected.
    """
    candidates = prune(parse_space(yaml.safe_load(text), "the draft", folder))
    candidates.require_kept()
    return candidates


def _batch(world_size: int) -> int:
    """Returns the least batch of 16 sequences or more that every rank gets in micro-batches of one and of two."""
    return 2 * world_size * math.ceil(16 / (2 * world_size))


def _small(full: ModelSpec) -> dict[str, Any]:
    """Returns the size of a model that trains on processors in seconds."""
    sizes = {"num_layers": 4, "hidden_size": 256, "ffn_hidden_size": 512, "num_heads": 4, "num_kv_heads": 2}
    experts = {"num_experts": 4, "num_experts_per_token": 2} if full.is_moe else {}
    return {**sizes, "vocab_size": 512, **experts}


def _trained(full: ModelSpec, cluster: ClusterSpec, *, on_cpu: bool) -> ModelSpec:
    """Returns the model that is trained: small on processors, else with as many layers as fit."""
    if on_cpu:
        return replace(full, **_small(full))
    return scale_model(full, cluster)


def _model_lines(entry: dict[str, Any], full: ModelSpec, trained: ModelSpec, *, on_cpu: bool) -> list[str]:
    size, name = f"{full.num_parameters / 1e9:.1f} B parameters", entry["name"]
    comment = f"# {name}: {size}, {full.num_layers} layers. Fields can be overridden; a list compares models."
    if on_cpu:
        entry |= _small(full)
        comment = f"# The shape of {name}, small enough for processors."
    elif trained.num_layers < full.num_layers:
        entry["num_layers"] = trained.num_layers
        comment = (
            f"# {name} has {size}. {trained.num_layers} of its {full.num_layers} layers fit; every matrix and "
            "message keeps its size."
        )
    return [comment, f"model: {yaml_line(entry)}", ""]


def _cluster_lines(cluster: ClusterSpec, *, on_cpu: bool) -> list[str]:
    entry: dict[str, object] = {
        "device": cluster.device,
        "num_nodes": cluster.num_nodes,
        "devices_per_node": cluster.devices_per_node,
    }
    if not on_cpu:
        return [f"cluster: {yaml_line(entry)}"]
    entry["simulate_sensors_of"] = CPU_SENSORS
    return ["# Power and temperature are computed, and every result says so.", f"cluster: {yaml_line(entry)}"]


def _command_lines(cluster: ClusterSpec, axes: list[str]) -> list[str]:
    """Writes a command that uses every axis, to be replaced by one's own."""
    nodes = " --nnodes {num_nodes}" if cluster.num_nodes > 1 else ""
    # A port of the trial's own, also on one node: torchrun's usual one may be in use there.
    launcher = (
        f"torchrun --nproc-per-node {{devices_per_node}}{nodes} --rdzv-backend c10d --rdzv-endpoint {{rendezvous}}"
    )
    arguments = " ".join(f"--{name.replace('_', '-')} {{{name}}}" for name in axes)
    return [
        "# Your own training command, filled with each trial's values. Axes that it lacks are refused.",
        f'command: "{launcher} train.py {arguments}"',
        "steps: auto  # the best source that is there: wattune.spans, hooks of libraries, known lines of output",
    ]


def usual_workload(model: ModelSpec, cluster: ClusterSpec) -> dict[str, int]:
    """Returns sizes of a step that every rank has a part in; short ones on processors."""
    longest = model.max_positions or 4096
    seq_len = min(128 if cluster.device == "cpu" else 4096, longest)
    return {"seq_len": seq_len, "global_batch_size": _batch(cluster.world_size)}


def _workload_lines(model: ModelSpec, cluster: ClusterSpec, *, routed: bool) -> list[str]:
    entry: dict[str, object] = {"mode": "pretrain", **usual_workload(model, cluster)}
    if model.is_moe and routed:
        entry["routing"] = "balanced"
    return [f"workload: {yaml_line(entry)}  # lists of seq_len and global_batch_size compare them"]


def _axes(model: ModelSpec, cluster: ClusterSpec, engine: str, batch: int) -> dict[str, tuple[list[object], str]]:
    """Chooses values that divide the model and the cluster, so that few combinations are rejected."""
    world, node = cluster.world_size, cluster.devices_per_node
    powers = [2**k for k in range(11)]
    tp = [p for p in powers if node % p == 0 and model.num_heads % p == 0 and model.num_kv_heads % p == 0][:4]
    pp = [p for p in powers if world % p == 0 and model.num_layers % p == 0][:3]
    micro = [p for p in powers if p * world <= batch][:2] or [1]
    axes: dict[str, tuple[list[object], str]] = {}
    if len(tp) > 1:
        axes["tp"] = [*tp], "tensor parallel degree, inside a node"
    if len(pp) > 1:
        axes["pp"] = [*pp], "pipeline stages"
    if model.is_moe:
        ep = [p for p in powers if world % p == 0 and model.num_experts % p == 0][:3]
        axes["ep"] = [*ep], "expert parallel degree"
    axes["micro_batch_size"] = [*micro], "sequences per micro-batch and replica"
    if world > 1:
        alone = [
            one.setting["sharding"]
            for one in CAPABILITIES[engine].exclusions
            if set(one.setting) == {"sharding"} and not one.mode
        ]
        kept = [name for name in ("none", "zero1", "zero3") if not any(name in excluded for excluded in alone)]
        axes["sharding"] = [*kept], "what data-parallel ranks share"
    axes["recompute"] = ["none", "selective"], "activations computed again in the backward pass"
    return axes


def _bound_lines(bounds: Sequence[str], cluster: ClusterSpec) -> list[str]:
    if bounds:
        return ["constraints:", *(f"  - {bound}" for bound in bounds)]
    limit_w = (cluster.sensed_device if cluster.device != "cpu" else device(CPU_SENSORS)).power_limit_w
    if limit_w is None:
        return ["# constraints: [METRIC <= NUMBER]"]
    bound_w = _BOUND_FRAC * limit_w * cluster.devices_per_node
    return [
        f"# The limits of a node's devices are {limit_w * cluster.devices_per_node:,.0f} W together. A bound would be:",
        f"# constraints: [node_device_power_peak_1s_w <= {bound_w:.0f}]",
    ]


def check_bound(text: str, cluster: str) -> str:
    """Returns a bound that can be held to on a cluster.

    Raises `PlanError` where it cannot, with the problem that a space with it would have.
    """
    bound, place = parse_constraint(text), parse_cluster_label(cluster)
    if place.device == "cpu":
        place = replace(place, simulate_sensors_of=CPU_SENSORS)
    problems = implausible(parse_objective("maximize tokens_per_s"), [bound], None, [place])
    if problems:
        raise PlanError(problems[0][1])
    return str(bound)
