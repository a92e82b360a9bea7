"""Time of a pipeline of unequal stages, by replaying the passes of every stage."""

from typing import Any, Final

import numpy as np

from wattune.arrays import Floats, Ints
from wattune.plans.schedule import passes, replay

STEADY_ROUNDS: Final = 4
"""Rounds of as many micro-batches as stages after which each further round takes as long as the one before,
to 1 % where chunks differ threefold."""


def pipeline_s(forward_s: Floats, backward_s: Floats, num_micro_batches: Ints, *, trains: bool) -> Floats:
    """Predicts the time from the first pass to the end of the last one, on any stage.

    More micro-batches than `STEADY_ROUNDS` rounds add whole rounds of the steady state. Times are of every stage and
    chunk, [candidates, chunks, stages].
    """
    _, _, num_stages = forward_s.shape
    if num_stages == 1:
        one_s: Floats = (forward_s + backward_s if trains else forward_s).sum(axis=(1, 2))
        return one_s * num_micro_batches
    most = STEADY_ROUNDS * num_stages
    replayed = np.minimum(num_micro_batches, most)
    total_s = np.empty(len(forward_s))
    for count in np.unique(replayed).tolist():
        rows = np.flatnonzero(replayed == count)
        stages = forward_s[rows], backward_s[rows]
        ends_s = replay_s(*stages, count, trains=trains)
        further = num_micro_batches[rows] - count
        if count == most and further.any():
            round_s = ends_s - replay_s(*stages, count - num_stages, trains=trains)
            slowest_s = (stages[0] + stages[1] if trains else stages[0]).sum(axis=1).max(axis=1)
            ends_s = ends_s + np.maximum(round_s / num_stages, slowest_s) * further
        total_s[rows] = ends_s
    return total_s


def bubble_ratio(num_stages: int, num_chunks: int, num_micro_batches: Ints) -> Floats:
    """Computes idle over busy time with equal stages: (p - 1) / (v m), Narayanan et al. 2021 (arXiv 2104.04473), 2.2.

    With m < p a micro-batch comes back for its next chunk after p slots, of which m are filled.
    """
    p, v, m = num_stages, num_chunks, num_micro_batches
    return (p - 1 + (v - 1) * np.maximum(p - m, 0)) / (v * m)


def replay_s(forward_s: Floats, backward_s: Floats, count: int, *, trains: bool, **beside: Any) -> Floats:
    """Replays as many micro-batches, see `pipeline_s` and, of what is beside, `wattune.plans.schedule.replay`."""
    _, num_chunks, num_stages = forward_s.shape
    # Copies, so that each pass reads memory in order.
    by_stage = [np.ascontiguousarray(np.moveaxis(one, 0, -1)) for one in (forward_s, backward_s)]
    orders = [
        passes(stage, num_stages=num_stages, num_chunks=num_chunks, num_micro_batches=count, trains=trains)
        for stage in range(num_stages)
    ]
    durations = [{one: by_stage[one.backward][one.chunk, stage] for one in order} for stage, order in enumerate(orders)]
    return replay(orders, durations, **beside)
