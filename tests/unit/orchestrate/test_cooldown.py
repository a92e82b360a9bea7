"""The pause before a trial, on a clock of the test's own."""

import asyncio

import pytest

from wattune.orchestrate.cooldown import COOLDOWN_LOOK_S, wait_until_cool
from wattune.run import Numbers


class Cooling:
    """A device that cools by a degree a second while it is waited for."""

    def __init__(self, temp_c: float) -> None:
        self.now_s, self.temp_c = 0.0, temp_c

    async def read_c(self) -> dict[str, float]:
        return {"gpu0": self.temp_c - self.now_s, "gpu1": 20.0}

    async def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.now_s += seconds


@pytest.mark.parametrize(
    ("max_s", "expected"),
    [
        (60, ({}, Numbers(cooldown_s=10.0, start_temp_max_c=50.0))),
        (5, ({"cooldown": "too warm"}, Numbers(cooldown_s=5.0, start_temp_max_c=55.0))),
    ],
)
def test_a_trial_waits_for_its_devices_to_cool(max_s: float, expected: tuple[dict[str, str], Numbers]) -> None:
    device = Cooling(60)
    pause = wait_until_cool(device.read_c, below_c=50, max_s=max_s, clock_s=lambda: device.now_s, sleep=device.sleep)
    assert asyncio.run(pause) == expected


def test_without_a_temperature_nothing_is_waited_for_and_it_is_said() -> None:
    async def nothing() -> dict[str, float]:
        return {}

    tags, _ = asyncio.run(wait_until_cool(nothing, below_c=50, max_s=60, clock_s=lambda: 0.0))
    assert tags["cooldown"] == "no temperature"


def test_a_device_that_is_cool_already_starts_at_once() -> None:
    async def never(_seconds: float) -> None:
        pytest.fail("it is cool")

    pause = wait_until_cool(Cooling(50).read_c, below_c=50, max_s=60, clock_s=lambda: 0.0, sleep=never)
    assert asyncio.run(pause) == ({}, Numbers(cooldown_s=0.0, start_temp_max_c=50.0))


def test_the_last_pause_ends_at_the_longest_wait() -> None:
    device, slept = Cooling(60), []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)
        await device.sleep(seconds)

    max_s = COOLDOWN_LOOK_S + 0.5
    pause = wait_until_cool(device.read_c, below_c=50, max_s=max_s, clock_s=lambda: device.now_s, sleep=sleep)
    tags, _ = asyncio.run(pause)
    assert slept == [COOLDOWN_LOOK_S, 0.5] and tags["cooldown"] == "too warm"
