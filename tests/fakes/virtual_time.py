"""An event loop whose clock jumps to the next timer when nothing else is left to do: nobody waits, nothing is late."""

import asyncio
import selectors
import time
from collections.abc import Coroutine
from typing import Any, TypeVar
from unittest.mock import patch

Result = TypeVar("Result")


class _Jump(selectors.DefaultSelector):
    """Takes the time somebody would sleep as slept."""

    now_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        found = super().select(0 if timeout else timeout)
        if not found and timeout:
            self.now_s += timeout
        return found


class _VirtualTime(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._clock = _Jump()
        super().__init__(self._clock)

    def time(self) -> float:
        return self._clock.now_s


def run_in_virtual_time(main: Coroutine[Any, Any, Result]) -> Result:
    """Runs as `asyncio.run` does, without the waiting; `time.monotonic` is the loop's clock meanwhile."""
    with asyncio.Runner(loop_factory=_VirtualTime) as runner, patch.object(time, "monotonic", runner.get_loop().time):
        return runner.run(main)
