"""Steps of a node's ranks as a table of spans (`wattune.schema.SPANS`)."""

from collections.abc import Mapping, Sequence

import pyarrow as pa

from wattune.clock import ClockAnchor
from wattune.schema import SPANS
from wattune.steps.files import Step


def spans_of(
    steps: Mapping[int, Sequence[Step]],
    *,
    node: str,
    devices: Mapping[int, str],
    anchor: ClockAnchor,
    first_index: int = 0,
    end_index: int | None = None,
) -> pa.Table:
    """Makes one `step` span of every step.

    A rank that told no steps is given those of the lowest rank that did: the ranks of a training step wait for each
    other. The step before `first_index` is numbered -1, as the last of warm-up; those from `end_index` on are left out.
    Spans are by rank and step; empty without steps.
    """
    told = {rank: each for rank, each in steps.items() if each}
    lowest = told[min(told)] if told else ()
    rows = [
        (device, rank, step)
        for rank, device in sorted(devices.items())
        for step in told.get(rank, lowest)
        if end_index is None or step.index < end_index
    ]
    starts_ns = [step.start_mono_ns for _, _, step in rows]
    ends_ns = [step.end_mono_ns for _, _, step in rows]
    nothing = [None] * len(rows)
    return pa.table(
        {
            "node": [node] * len(rows),
            "device": [device for device, _, _ in rows],
            "rank": [rank for _, rank, _ in rows],
            "step": [step.index - first_index for _, _, step in rows],
            "micro_batch": nothing,
            "chunk": nothing,
            "phase": ["step"] * len(rows),
            "start_mono_ns": starts_ns,
            "end_mono_ns": ends_ns,
            "start_wall_ns": [anchor.to_wall_ns(each) for each in starts_ns],
            "end_wall_ns": [anchor.to_wall_ns(each) for each in ends_ns],
        },
        schema=SPANS,
    )


def tokens_per_step(
    steps: Mapping[int, Sequence[Step]], *, first_index: int = 0, end_index: int | None = None
) -> float:
    """Computes the mean tokens of a step from `first_index` to `end_index` over all ranks; 0 where none tells any."""
    total = 0.0
    for each in steps.values():
        known = [
            step.tokens
            for step in each
            if step.tokens is not None and step.index >= first_index and (end_index is None or step.index < end_index)
        ]
        total += sum(known) / len(known) if known else 0.0
    return total
