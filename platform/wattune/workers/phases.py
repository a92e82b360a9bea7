"""Spans: when a rank was in which phase of a step, on the node's monotonic clock with wall time beside it."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

import pyarrow as pa

from wattune.clock import ClockAnchor
from wattune.schema import PHASES, SPANS


@dataclass(frozen=True, slots=True)
class Span:
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
    """Collects the spans of one step on the host clock."""

    def __init__(self) -> None:
        """Starts empty."""
        self.spans: list[Span] = []

    @contextmanager
    def phase(self, name: str, *, micro_batch: int | None = None, chunk: int | None = None) -> Iterator[None]:
        """Spans the enclosed work as a phase, also when it raises."""
        assert name in PHASES, name
        start_ns = time.monotonic_ns()
        try:
            with noting(name):
                yield
        finally:
            self.spans.append(Span(name, start_ns, time.monotonic_ns(), micro_batch, chunk))

    def take(self) -> tuple[Span, ...]:
        """The spans so far, in order of start; the recorder is then empty."""
        spans = tuple(sorted(self.spans, key=lambda span: (span.start_mono_ns, -span.end_mono_ns)))
        self.spans = []
        return spans


def spans_table(
    steps: Sequence[tuple[int, Sequence[Span]]], *, node: str, device: str, rank: int, anchor: ClockAnchor
) -> pa.Table:
    """One rank's spans, by step number, as a table of `wattune.schema.SPANS`; names are those that telemetry uses."""
    rows = [
        {
            "node": node,
            "device": device,
            "rank": rank,
            "step": step,
            "micro_batch": span.micro_batch,
            "chunk": span.chunk,
            "phase": span.phase,
            "start_mono_ns": span.start_mono_ns,
            "end_mono_ns": span.end_mono_ns,
            "start_wall_ns": anchor.to_wall_ns(span.start_mono_ns),
            "end_wall_ns": anchor.to_wall_ns(span.end_mono_ns),
        }
        for step, spans in steps
        for span in spans
    ]
    return pa.Table.from_pylist(rows, schema=SPANS)
