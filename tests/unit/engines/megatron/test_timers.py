"""Megatron's timers as phases."""

import pytest

from wattune.engines.megatron.timers import Marks
from wattune.workers.phases import PhaseRecorder, failed_phase

TABLE = [(0, 0), (1, 0), (0, 1), (1, 1)]
"""Two micro-batches through two chunks, as Megatron's schedule table has them."""


def passes(marks: Marks, name: str, count: int) -> None:
    for _ in range(count):
        marks(name, log_level=2).start()
        marks(name).stop()


def test_passes_are_numbered_by_the_schedule_and_backwards_by_the_last_chunk_first():
    recorder = PhaseRecorder()
    marks = Marks(recorder, TABLE, 2)
    for _ in range(2):  # a second step counts from the start again
        with marks.step():
            passes(marks, "forward-compute", 4)
            passes(marks, "backward-compute", 4)
        step, *found = recorder.take()
        assert step.phase == "step"
        assert [(mark.phase, mark.micro_batch, mark.chunk) for mark in found] == [
            *(("forward", batch, chunk) for batch, chunk in TABLE),
            *(("backward", batch, 1 - chunk) for batch, chunk in TABLE),
        ]


def test_without_interleaving_there_are_no_chunks():
    recorder = PhaseRecorder()
    marks = Marks(recorder, [(0, 0), (1, 0)], 1)
    with marks.step():
        passes(marks, "forward-compute", 2)
    _, *found = recorder.take()
    assert [(mark.micro_batch, mark.chunk) for mark in found] == [(0, None), (1, None)]


def test_other_timers_are_no_phases():
    recorder = PhaseRecorder()
    marks = Marks(recorder, [(0, 0)], 1)
    with marks.step():
        marks("forward-backward", log_level=1).start(barrier=False)
        marks("all-grads-sync").stop()
    assert [mark.phase for mark in recorder.take()] == ["step"]


def test_an_error_ends_the_phase_it_came_out_of():
    recorder = PhaseRecorder()
    marks = Marks(recorder, [(0, 0)], 1)
    with pytest.raises(RuntimeError) as caught, marks.step():
        marks("backward-compute", log_level=2).start()
        raise RuntimeError("out of memory")
    assert failed_phase(caught.value) == "backward"
    assert [mark.phase for mark in recorder.take()] == ["step", "backward"]
    with marks.step():  # the next one begins with nothing open
        passes(marks, "backward-compute", 1)
    assert [mark.phase for mark in recorder.take()] == ["step", "backward"]


def test_more_passes_than_the_schedule_has_are_an_error():
    marks = Marks(PhaseRecorder(), [(0, 0)], 1)
    with pytest.raises(IndexError), marks.step():
        passes(marks, "forward-compute", 2)
