"""Spans: their order, their clocks, their table."""

import pytest

from wattune.clock import ClockAnchor
from wattune.schema import SPANS
from wattune.workers.phases import PhaseRecorder, Span, spans_table


def test_spans_come_in_order_of_start_outer_first() -> None:
    recorder = PhaseRecorder()
    with recorder.phase("step"):
        with recorder.phase("forward", micro_batch=0):
            pass
        with recorder.phase("backward", micro_batch=0):
            pass
    assert [span.phase for span in recorder.take()] == ["step", "forward", "backward"]
    assert recorder.take() == ()


def test_a_phase_that_raises_is_marked() -> None:
    recorder = PhaseRecorder()
    with pytest.raises(ValueError), recorder.phase("step"):
        raise ValueError
    assert [span.phase for span in recorder.take()] == ["step"]


def test_the_table_has_the_schema_and_both_clocks() -> None:
    anchor = ClockAnchor(mono_ns=1_000, wall_ns=5_000)
    steps = [(-1, [Span("step", 1_000, 1_010)]), (0, [Span("forward", 1_020, 1_030, micro_batch=2, chunk=1)])]
    table = spans_table(steps, node="n0", device="gpu1", rank=3, anchor=anchor)
    assert table.schema.equals(SPANS)
    rows = table.to_pylist()
    assert [row["step"] for row in rows] == [-1, 0]
    assert (rows[0]["micro_batch"], rows[1]["micro_batch"], rows[1]["chunk"]) == (None, 2, 1)
    assert (rows[1]["start_wall_ns"], rows[1]["end_wall_ns"]) == (5_020, 5_030)


def test_an_anchor_sits_between_its_readings() -> None:
    first, second = ClockAnchor.now(), ClockAnchor.now()
    assert first.mono_ns <= second.mono_ns
    assert abs(first.to_wall_ns(second.mono_ns) - second.wall_ns) < 1_000_000_000
