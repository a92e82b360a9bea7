"""Marks: when a rank was in which phase of a step, on the node's monotonic clock with wall time beside it."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

import pyarrow as pa

from wattune.clock import ClockAnchor
from wattune.schema import MARKS, PHASES


@dataclass(frozen=True, slots=True)
class Mark:
    """One interval of one phase on one rank."""

    phase: str
    start_mono_ns: int
    end_mono_ns: int
    micro_batch: int | None = None
    chunk: int | None = None


_NOTE: Final = "in phase "


@contextmanager
def noting(phase: str) -> Iterator[None]:
    """Keeps with an error that leaves the enclosed work the phase it was raised in; the innermost of several stays."""
    try:
        yield
    except BaseException as error:  # raised on to whoever handles it, an interrupt too
        if failed_phase(error) is None:
            error.add_note(f"{_NOTE}{phase}")
        raise


def failed_phase(error: BaseException) -> str | None:
    """The phase an error was raised in, None where it was in none."""
    notes = (note.removeprefix(_NOTE) for note in getattr(error, "__notes__", ()) if note.startswith(_NOTE))
    return next(notes, None)


class PhaseRecorder:
    """Collects the marks of one step on the host clock."""

    def __init__(self) -> None:
        """Starts empty."""
        self.marks: list[Mark] = []

    @contextmanager
    def phase(self, name: str, *, micro_batch: int | None = None, chunk: int | None = None) -> Iterator[None]:
        """Marks the enclosed work as a phase, also when it raises."""
        assert name in PHASES, name
        start_ns = time.monotonic_ns()
        try:
            with noting(name):
                yield
        finally:
            self.marks.append(Mark(name, start_ns, time.monotonic_ns(), micro_batch, chunk))

    def take(self) -> tuple[Mark, ...]:
        """The marks so far, in order of start; the recorder is then empty."""
        marks = tuple(sorted(self.marks, key=lambda mark: (mark.start_mono_ns, -mark.end_mono_ns)))
        self.marks = []
        return marks


def marks_table(
    steps: Sequence[tuple[int, Sequence[Mark]]], *, node: str, device: str, rank: int, anchor: ClockAnchor
) -> pa.Table:
    """One rank's marks as a table of `wattune.schema.MARKS`.

    Args:
        steps: Step number and its marks.
        node: The rank's node, by the name telemetry uses.
        device: The rank's device on that node, by the name telemetry uses.
        rank: Global rank.
        anchor: Both clocks of the node at one moment of the run.
    """
    rows = [
        {
            "node": node,
            "device": device,
            "rank": rank,
            "step": step,
            "micro_batch": mark.micro_batch,
            "chunk": mark.chunk,
            "phase": mark.phase,
            "start_mono_ns": mark.start_mono_ns,
            "end_mono_ns": mark.end_mono_ns,
            "start_wall_ns": anchor.to_wall_ns(mark.start_mono_ns),
            "end_wall_ns": anchor.to_wall_ns(mark.end_mono_ns),
        }
        for step, marks in steps
        for mark in marks
    ]
    return pa.Table.from_pylist(rows, schema=MARKS)
