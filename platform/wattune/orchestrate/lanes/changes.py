"""Changes that coroutines of one loop wait for, each until a condition of its own holds; how long a lane waits."""

import asyncio
import contextlib
from collections.abc import Callable
from typing import Final

LOOK_S: Final = 1.0
"""Seconds between two looks at what no change tells."""
FREE_S: Final = 20.0
"""Longest ranks may take to leave a trial that cannot go on; then their processes are ended."""
DUMP_S: Final = 5.0
"""Longest ranks may take to report where they hang."""
END_S: Final = 60.0
"""Longest a group may take to end."""
LEAVE_S: Final = 3.0
"""Longest ranks may take to leave an interrupted trial: whoever stops a study may kill what takes longer."""
QUIT_S: Final = 5.0
"""Longest a group may take to end when its study was stopped; ended by force it takes as long again at most."""


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
