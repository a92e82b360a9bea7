"""Imbalance of experts: tokens of the busiest expert parallel rank against the mean rank."""

from collections.abc import Sequence

import numpy as np


def expert_imbalance_frac(tokens: Sequence[Sequence[Sequence[int]]], ep: int) -> float | None:
    """Tokens of the busiest expert parallel rank over those of the mean one, minus 1, averaged over layers.

    0 is an even load; at ep=1 it is 0, since one rank has all experts. The ranks of a layer wait for the busiest one,
    so that the average over layers is the share by which uneven experts lengthen their part of a step. Ranks that hold
    the same experts in several replicas count together.

    Args:
        tokens: What each rank sent in the measured steps, by layer and expert.
        ep: Expert parallel degree; a rank holds a run of consecutive experts.

    Returns:
        The fraction, None where no token was sent to an expert.
    """
    sent = [rank for rank in tokens if rank]
    if not sent:
        return None
    by_layer = np.sum(np.asarray(sent, dtype=np.float64), axis=0)
    by_rank = by_layer.reshape(by_layer.shape[0], ep, -1).sum(axis=2)
    by_rank = by_rank[by_rank.sum(axis=1) > 0]
    if not by_rank.size:
        return None
    return float(np.mean(by_rank.max(axis=1) / by_rank.mean(axis=1)) - 1)
