"""Changes that coroutines of one loop wait for, each until a condition of its own holds."""

import asyncio
import contextlib
from collections.abc import Callable
from typing import Final

LOOK_S: Final = 1.0
"""Seconds between two looks at what no change tells."""


class Changes:
    """Tells those who wait that something changed; workers are told apart from the rest."""

    def __init__(self) -> None:
        self._changed, self._told = asyncio.Event(), asyncio.Event()

    def _notify(self, *, workers: bool = True) -> None:
        # A new event each time: everyone who waits looks once at each change, and nobody has to clear it.
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
        if workers:
            told, self._told = self._told, asyncio.Event()
            told.set()

    async def _until(self, condition: Callable[[], bool], timeout_s: float | None = None) -> bool:
        """Waits until a condition holds; returns whether it does."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while not condition():
                    await self._changed.wait()
        return condition()

    async def _until_told(self, condition: Callable[[], bool]) -> None:
        """Waits for what a worker waits for, which only the owner brings about: none wakes all others."""
        while not condition():
            await self._told.wait()
