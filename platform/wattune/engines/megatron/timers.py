"""Phases out of Megatron's schedules: what they call to time themselves spans a recorder instead.

`config.timers` is Megatron's own hook (`core/pipeline_parallel/schedules.py`): it is started and stopped around the
forward and the backward pass of each micro-batch and chunk, and around much else that is no phase.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Final

from wattune.workers.recorder import Recorder

PHASE_OF: Final = {"forward-compute": "forward", "backward-compute": "backward"}
"""Megatron's timers that are phases."""

ChunkSlot = tuple[int, int | None]
"""Micro-batch and chunk; no chunk without interleaving."""


class PhaseTimers:
    """Stands where Megatron has its timers; waits for no device."""

    def __init__(self, recorder: Recorder, schedule: list[tuple[int, int]], num_chunks: int) -> None:
        """Starts before the first pass of a step.

        `schedule` has micro-batch and chunk of every forward pass in the order Megatron runs them; backward passes run
        in the same order with the chunks counted from the last (`get_model_chunk_id`).
        """
        self._recorder = recorder
        interleaves = num_chunks > 1
        self._slots: dict[str, list[ChunkSlot]] = {
            "forward": [(batch, chunk if interleaves else None) for batch, chunk in schedule],
            "backward": [(batch, num_chunks - 1 - chunk if interleaves else None) for batch, chunk in schedule],
        }
        self._next = {"forward": 0, "backward": 0}
        self._open: AbstractContextManager[None] | None = None

    @contextmanager
    def step(self) -> Iterator[None]:
        """Spans the enclosed work as a step, whose passes are counted from the first."""
        self._next = {"forward": 0, "backward": 0}
        with self._recorder.phase("step"):
            try:
                yield
            except BaseException as error:  # raised on: whatever ends the step, the phase it came out of is noted
                self._end(error)
                raise

    def _end(self, error: BaseException) -> None:
        """Ends the phase an error came out of, which Megatron does not: it is then marked, and noted with the error."""
        phase, self._open = self._open, None
        if phase is not None:
            try:
                phase.__exit__(type(error), error, error.__traceback__)
            except type(error):
                return

    def __call__(self, name: str, log_level: int | None = None) -> "_Timer":  # noqa: ARG002 - as Megatron's
        """The timer of that name."""
        phase = PHASE_OF.get(name)
        return _NONE if phase is None else _Timer(lambda: self._start(phase), self._stop)

    def _start(self, phase: str) -> None:
        micro_batch, chunk = self._slots[phase][self._next[phase]]
        self._next[phase] += 1
        self._open = self._recorder.phase(phase, micro_batch=micro_batch, chunk=chunk)
        self._open.__enter__()

    def _stop(self) -> None:
        phase, self._open = self._open, None
        assert phase is not None, "Megatron stops what it has started"
        phase.__exit__(None, None, None)


class _Timer:
    """A timer that Megatron starts and stops."""

    def __init__(self, start: Callable[[], None], stop: Callable[[], None]) -> None:
        self._start, self._stop = start, stop

    def start(self, *_: Any, **__: Any) -> None:
        self._start()

    def stop(self, *_: Any, **__: Any) -> None:
        self._stop()


_NONE: Final = _Timer(lambda: None, lambda: None)
