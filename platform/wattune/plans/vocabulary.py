"""Padding of the vocabulary, so that tensor parallel ranks share it in equal pieces."""

from typing import Final

from wattune.catalog.models import ModelSpec
from wattune.plans.engines import CAPABILITIES, Configuration, runs_program

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
