"""Tells wattune the steps of a training program, in three lines.

    from wattune import spans

    for batch in batches:
        with spans.step(tokens=batch.numel()):
            train(batch)

It needs the standard library alone, costs some microseconds a step, and does nothing where wattune does not listen.
"""

from __future__ import annotations

import os
import time
from contextlib import nullcontext
from typing import TYPE_CHECKING, Final

from wattune.steps.process.writer import FOLDER_VARIABLE, StepWriter

if TYPE_CHECKING:
    from contextlib import AbstractContextManager
    from types import TracebackType

WRITER: Final = StepWriter("spans") if os.environ.get(FOLDER_VARIABLE) else None
"""The writer of this process's steps; None where wattune does not listen."""

# Bound once: right after a step of real work caches hold none of the objects that a look-up goes through.
_now_ns: Final = time.monotonic_ns
_take: Final = None if WRITER is None else WRITER.step


class _Step:
    """One step that is timed; a step that raises is no step and is left out."""

    __slots__ = ("_start_ns", "_tokens")

    def __init__(self, tokens: int | None) -> None:
        self._tokens = tokens
        self._start_ns = 0

    def __enter__(self) -> _Step:
        self._start_ns = _now_ns()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None and _take is not None:
            _take(self._start_ns, _now_ns(), self._tokens)


_NOTHING: Final = nullcontext()
"""A step that nobody listens to."""


def step(tokens: int | None = None) -> AbstractContextManager[object]:
    """Times one training step: all its work, from loading the batch to the optimizer.

    Call it in every rank. It waits for no device. On GPUs a step ends when its last kernel was launched, so single
    steps scatter where the program runs ahead, and their mean is right.

    Args:
        tokens: Tokens that this rank trains in the step; the sum over all ranks is the step's. Where several ranks
            share a batch (tensor or pipeline parallel), let one of them tell it. None where they are unknown.

    Returns:
        A context manager.
    """
    return _NOTHING if WRITER is None else _Step(tokens)
