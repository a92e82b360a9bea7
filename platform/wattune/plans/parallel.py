"""From degrees to ranks: coordinates, pipeline stages, micro-batches, padded vocabularies. Arithmetic without torch."""

from dataclasses import dataclass
from typing import Final

from wattune.catalog.models import ModelSpec
from wattune.plans.axes import Plan
from wattune.plans.engines import CAPABILITIES, Configuration, runs_program


@dataclass(frozen=True, slots=True, kw_only=True)
class Coordinates:
    """The place of a rank on the dense mesh. Tensor parallel is innermost, the pipeline outermost."""

    tp: int
    cp: int
    dp: int
    pp: int


def coordinates(rank: int, plan: Plan, world_size: int) -> Coordinates:
    """Computes a rank's place on the mesh, in Megatron's default order `tp-cp-ep-dp-pp`.

    The degrees' product divides `world_size`.
    """
    rest, tp = divmod(rank, plan.tp)
    rest, cp = divmod(rest, plan.cp)
    pp, dp = divmod(rest, plan.dp(world_size))
    return Coordinates(tp=tp, cp=cp, dp=dp, pp=pp)


def expert_place(rank: int, plan: Plan, world_size: int) -> tuple[int, int]:
    """Computes a rank's place among experts: which experts it holds, and which slice of each.

    Experts have a mesh of their own inside a stage, with expert tensor parallel innermost, then expert parallel, as
    both engines and Megatron's order `tp-cp-ep-dp-pp` have it. Inside a stage `etp * ep` divide the ranks. Returns the
    expert parallel and the expert tensor parallel index.
    """
    in_stage = rank % (world_size // plan.pp)
    return in_stage // plan.etp % plan.ep, in_stage % plan.etp


def stage_layers(model: ModelSpec, plan: Plan) -> list[list[range]]:
    """Computes the layers that each pipeline stage holds, chunk by chunk.

    Stage and chunk order is interleaved as in Narayanan et al. 2021 (arXiv 2104.04473, section 2.2): virtual stage
    `chunk * pp + stage` follows the model from input to output. Returns for every stage a list with one range of layer
    indices per chunk.
    """
    num_virtual = plan.pp * plan.vpp
    sizes = list(plan.layout) or [model.num_layers // num_virtual] * num_virtual
    starts = [sum(sizes[:index]) for index in range(num_virtual)]
    ranges = [range(start, start + size) for start, size in zip(starts, sizes, strict=True)]
    return [[ranges[chunk * plan.pp + stage] for chunk in range(plan.vpp)] for stage in range(plan.pp)]


def num_micro_batches(plan: Plan, world_size: int, global_batch_size: int) -> int:
    """Computes the micro-batches of a replica's step: global batch over micro-batch size and data parallel degree."""
    return global_batch_size // (plan.micro_batch_size * plan.dp(world_size))


PIECE_MULTIPLE: Final = 128
"""Tokens that a rank's piece of a padded vocabulary is a multiple of. Megatron-LM's own script pads so
(`--make-vocab-size-divisible-by 128`, times the tensor parallel degree: `training/tokenizer/tokenizer.py`). The torch
engine does the same, so that matrix products have aligned rows and both engines do equal work."""


def padded_vocab_size(model: ModelSpec, engine: str, tp: int) -> int:
    """Computes the rows that embedding and output projection have over all tensor parallel ranks.

    A vocabulary that the degree divides stays as it is, as Megatron-Core takes it. GPT-3's 50,257 tokens become 50,432
    at tp=2 and 51,200 at tp=8. An engine that leaves the ends of a model whole pads nothing.
    """
    size = model.vocab_size
    if size % tp == 0 or not CAPABILITIES[engine].splits_ends:
        return size
    multiple = PIECE_MULTIPLE * tp
    return -(-size // multiple) * multiple


def padding_of(c: Configuration) -> int:
    """Computes the rows of padding of a configuration; 0 where it needs none."""
    if runs_program(c.engine):  # what its code pads is its own matter
        return 0
    return padded_vocab_size(c.model, c.engine, c.plan.tp) - c.model.vocab_size
