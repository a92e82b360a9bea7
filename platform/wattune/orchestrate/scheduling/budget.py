"""The budget of one call. No Ray here."""

import math
import time
from collections.abc import Callable
from typing import Final

_S_PER_HOUR: Final = 3600.0


class Budget:
    """The budget of one call: hours on the wall clock, device-hours, and trials, with repeats and reference trials."""

    def __init__(
        self,
        *,
        max_hours: float | None = None,
        max_trials: int | None = None,
        max_device_hours: float | None = None,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begins to count now; None is unlimited. Device-hours are those of one device, failed trials' too."""
        self._end_s = math.inf if max_hours is None else clock_s() + max_hours * _S_PER_HOUR
        self._trials = math.inf if max_trials is None else max_trials
        self._device_s = math.inf if max_device_hours is None else max_device_hours * _S_PER_HOUR
        self._running: dict[str, tuple[int, float, float]] = {}
        self._clock_s = clock_s

    @property
    def num_left(self) -> float:
        """Trials that may still start; infinite without a limit."""
        return self._trials

    @property
    def left_s(self) -> float:
        """Seconds that are left; infinite without a limit."""
        return max(0.0, self._end_s - self._clock_s())

    @property
    def left_device_s(self) -> float:
        """Device-seconds that are left when the trials that run have taken what is expected; else infinite."""
        now_s = self._clock_s()
        taken_s = sum(num * max(expected_s, now_s - begun_s) for num, expected_s, begun_s in self._running.values())
        return max(0.0, self._device_s - taken_s)

    def allows(self, expected_s: float, num_devices: int = 0) -> bool:
        """Returns whether a trial with this expected time, on so many devices, may start."""
        in_time = self._clock_s() + expected_s <= self._end_s
        return self._trials > 0 and in_time and expected_s * num_devices <= self.left_device_s

    def spend(self, name: str = "", num_devices: int = 0, expected_s: float = 0.0) -> None:
        """Counts one trial that begins; `name` is its name in the call of `settle`."""
        self._trials -= 1
        self._running[name] = num_devices, expected_s, self._clock_s()

    def settle(self, name: str) -> None:
        """Counts the device time that a trial has taken which ends."""
        num_devices, _, begun_s = self._running.pop(name, (0, 0.0, 0.0))
        self._device_s -= num_devices * (self._clock_s() - begun_s)
