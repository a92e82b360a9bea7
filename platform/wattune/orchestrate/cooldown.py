"""The pause before a trial, until its devices are as cool as the study asks."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Final

from wattune.run import Numbers

COOLDOWN_LOOK_S: Final = 2.0
"""Seconds between two readings of temperatures while a trial waits for its devices to cool."""


async def wait_until_cool(
    read_c: Callable[[], Awaitable[Mapping[str, float]]],
    *,
    below_c: float,
    max_s: float,
    clock_s: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> tuple[dict[str, str], Numbers]:
    """Waits until no device is warmer than a temperature.

    `read_c` reads the temperatures now by device; it has none if no sensor reads them. Returns tags for the trial's
    result, what went wrong (`too warm`, `no temperature`), and its numbers: the seconds waited, and the temperature of
    the warmest device then.
    """
    begun_s = clock_s()
    while True:
        temperatures_c = await read_c()
        waited_s = clock_s() - begun_s
        if not temperatures_c:
            return {"cooldown": "no temperature"}, Numbers(cooldown_s=round(waited_s, 1))
        warmest_c = max(temperatures_c.values())
        numbers = Numbers(cooldown_s=round(waited_s, 1), start_temp_max_c=round(warmest_c, 1))
        if warmest_c <= below_c:
            return {}, numbers
        if waited_s >= max_s:
            return {"cooldown": "too warm"}, numbers
        await sleep(min(COOLDOWN_LOOK_S, max_s - waited_s))
