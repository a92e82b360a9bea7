"""Degrees to ranks: coordinates, groups, pipeline stages and micro-batches. Pure arithmetic, no torch."""

from dataclasses import dataclass

from wattune.catalog.models import ModelSpec
from wattune.plan.axes import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Coordinates:
    """Where a rank stands on the dense mesh. Tensor parallel is innermost, the pipeline outermost."""

    tp: int
    cp: int
    dp: int
    pp: int


def coordinates(rank: int, plan: Plan, world_size: int) -> Coordinates:
    """A rank's place on the mesh, in Megatron's default order `tp-cp-ep-dp-pp`.

    Args:
        rank: Global rank, 0 <= rank < world_size.
        plan: Degrees whose product divides `world_size`.
        world_size: All ranks.
    """
    rest, tp = divmod(rank, plan.tp)
    rest, cp = divmod(rest, plan.cp)
    pp, dp = divmod(rest, plan.dp(world_size))
    return Coordinates(tp=tp, cp=cp, dp=dp, pp=pp)


def stage_layers(model: ModelSpec, plan: Plan) -> list[list[range]]:
    """The layers each pipeline stage holds, chunk by chunk.

    Stage and chunk order is interleaved as in Narayanan et al. 2021 (arXiv 2104.04473, section 2.2): virtual stage
    `chunk * pp + stage` follows the model from input to output.

    Returns:
        For every stage a list with one range of layer indices per chunk.
    """
    num_virtual = plan.pp * plan.vpp
    sizes = list(plan.layout) or [model.num_layers // num_virtual] * num_virtual
    starts = [sum(sizes[:index]) for index in range(num_virtual)]
    ranges = [range(start, start + size) for start, size in zip(starts, sizes, strict=True)]
    return [[ranges[chunk * plan.pp + stage] for chunk in range(plan.vpp)] for stage in range(plan.pp)]


def num_micro_batches(plan: Plan, world_size: int, global_batch_size: int) -> int:
    """Micro-batches each replica runs per step: global batch over micro-batch size and data parallel degree."""
    return global_batch_size // (plan.micro_batch_size * plan.dp(world_size))


def pipeline_bubble_frac(plan: Plan, world_size: int, global_batch_size: int) -> float:
    """Idle share of an ideal 1F1B schedule with equal stages.

    (p - 1) / (v m + p - 1) for p stages, v chunks a stage and m micro-batches: Narayanan et al. 2021 (arXiv
    2104.04473), sections 2.1 and 2.2, there given relative to ideal time. With v = 1, p = 16, m = 128: 0.105.
    """
    m = num_micro_batches(plan, world_size, global_batch_size)
    return (plan.pp - 1) / (plan.vpp * m + plan.pp - 1)
