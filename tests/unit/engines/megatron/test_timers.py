"""Megatron's timers as phases."""

import pytest

from wattune.engines.megatron.timers import PhaseTimers
from wattune.workers.phases import PhaseRecorder, failed_phase

TABLE = [(0, 0), (1, 0), (0, 1), (1, 1)]
"""Two micro-batches through two chunks, as Megatron's schedule table has them."""


def passes(timers: PhaseTimers, name: str, count: int) -> None:
    for _ in range(count):
        timers(name, log_level=2).start()
        timers(name).stop()


def test_passes_are_numbered_by_the_schedule_and_backwards_by_the_last_chunk_first():
    recorder = PhaseRecorder()
    timers = PhaseTimers(recorder, TABLE, 2)
    for _ in range(2):  # a second step counts from the start again
        with timers.step():
            passes(timers, "forward-compute", 4)
            passes(timers, "backward-compute", 4)
        step, *found = recorder.take()
        assert step.phase == "step"
        assert [(span.phase, span.micro_batch, span.chunk) for span in found] == [
            *(("forward", batch, chunk) for batch, chunk in TABLE),
            *(("backward", batch, 1 - chunk) for batch, chunk in TABLE),
        ]


def test_without_interleaving_there_are_no_chunks():
    recorder = PhaseRecorder()
    timers = PhaseTimers(recorder, [(0, 0), (1, 0)], 1)
    with timers.step():
        passes(timers, "forward-compute", 2)
    _, *found = recorder.take()
    assert [(span.micro_batch, span.chunk) for span in found] == [(0, None), (1, None)]


def test_other_timers_are_no_phases():
    recorder = PhaseRecorder()
    timers = PhaseTimers(recorder, [(0, 0)], 1)
    with timers.step():
        timers("forward-backward", log_level=1).start(barrier=False)
        timers("all-grads-sync").stop()
    assert [span.phase for span in recorder.take()] == ["step"]


def test_an_error_ends_the_phase_it_came_out_of():
    recorder = PhaseRecorder()
    timers = PhaseTimers(recorder, [(0, 0)], 1)
    with pytest.raises(RuntimeError) as caught, timers.step():
        timers("backward-compute", log_level=2).start()
        raise RuntimeError("out of memory")
    assert failed_phase(caught.value) == "backward"
    assert [span.phase for span in recorder.take()] == ["step", "backward"]
    with timers.step():  # the next one begins with nothing open
        passes(timers, "backward-compute", 1)
    assert [span.phase for span in recorder.take()] == ["step", "backward"]


def test_more_passes_than_the_schedule_has_are_an_error():
    timers = PhaseTimers(PhaseRecorder(), [(0, 0)], 1)
    with pytest.raises(IndexError), timers.step():
        passes(timers, "forward-compute", 2)
