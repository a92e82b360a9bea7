"""NVML's field values: their numbers by driver, the decoding of a value, and counts that only rise.

Pure data and arithmetic: nothing here calls a driver. Numbers are those of `nvml.h` (CUDA 13.1), where no other source
is given; what was measured was measured on one H200 with driver 580.159.04.
"""

import re
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from wattune.errors import TelemetryError

THROTTLE_POWER: Final = 74
"""PERF_POLICY_POWER: nanoseconds under the software power cap; its number never changed."""
LOW_UTILIZATION: Final = 78
"""PERF_POLICY_LOW_UTILIZATION: runs while the device idles, so it is the one that is never 0."""
MEMORY_TEMP: Final = 82
TOTAL_ENERGY: Final = 83
"""Millijoules since the driver was loaded. A read took 3.1 ms in the median and 14.8 ms at most: too slow to poll."""
NVLINK_TX: Final = 138
"""NVLink payload in KiB; its scope is a link, and without one it is link 0."""
NVLINK_RX: Final = 139
POWER_AVERAGE: Final = 185
POWER_INSTANT: Final = 186
PCIE_TX: Final = 197
"""PCIe bytes, a 32-bit register on H200."""
PCIE_RX: Final = 198

COUNTER_STEP_S: Final = 0.1
"""Counters of energy and throttle time move in steps of this length, so they may lead the clock (H200)."""

ALL_LINKS: Final = 2**32 - 1
"""The scope that sums a field over all NVLinks (UINT_MAX)."""

UNSIGNED_64: Final = 3
"""The value type of every counter of nanoseconds and millijoules."""
_BITS: Final[dict[int, int]] = {1: 32, 2: 64, 3: 64, 6: 16}
"""Width of the unsigned value types: what a counter of that type wraps at."""
_MEMBERS: Final[dict[int, str]] = {
    0: "dVal",
    1: "uiVal",
    2: "ulVal",
    3: "ullVal",
    4: "sllVal",
    5: "siVal",
    6: "usVal",
}
"""Member of the value's union by value type (nvml.h, nvmlValueType_t)."""


def decode(value_type: int, value: Any) -> int | float:
    """The number in an `nvmlValue_t`.

    `value_type` is what the driver says it wrote: on H200 power is u32, energy u64, thresholds s32, and reading one as
    another gives a plausible wrong number. Raises `TelemetryError`: the type is not known; the text is a code for the
    row.
    """
    if value_type not in _MEMBERS:
        raise TelemetryError(f"VALUE_TYPE_{value_type}")
    number: int | float = getattr(value, _MEMBERS[value_type])
    return number


def counter_bits(value_type: int) -> int:
    """Width of the register behind a counter of a value type.

    Raises `TelemetryError`: no counter has such a type; the text is a code for the row.
    """
    if value_type not in _BITS:
        raise TelemetryError(f"VALUE_TYPE_{value_type}")
    return _BITS[value_type]


class Counter:
    """A cumulative count that never runs backwards, whatever its register does."""

    def __init__(self) -> None:
        self._total = 0
        self._last: tuple[int, float] | None = None

    def advance(
        self,
        raw: int,
        bits: int,
        time_s: float,
        *,
        about_per_s: float | None = None,
        at_most_per_s: float | None = None,
    ) -> int:
        """Returns the count at a new reading of the register, `raw`, at a monotonic time.

        A register that runs backwards has wrapped at its width; 64 bits never do, so those were reset. How often a
        narrow one wrapped since the last reading follows from its rate by another sensor, `about_per_s`; without one it
        wrapped at most once. Raises `TelemetryError`: the register was reset, or rose by more than it can. The text is
        a code for the row; the count then continues from the new reading. Or all 64 bits are set, which a bus gives for
        a device that is gone: that reading is passed over.
        """
        if bits == 64 and raw == 2**64 - 1:
            raise TelemetryError("ALL_BITS_SET")
        last, self._last = self._last, (raw, time_s)
        if last is None:
            self._total = raw
            return raw
        last_raw, elapsed_s = last[0], time_s - last[1]
        if bits == 64 and raw < last_raw:
            raise TelemetryError("COUNTER_RESET")
        rise = (raw - last_raw) % 2**bits
        if about_per_s is not None:
            rise += 2**bits * max(0, round((about_per_s * elapsed_s - rise) / 2**bits))
        if at_most_per_s is not None and rise > at_most_per_s * (elapsed_s + 2 * COUNTER_STEP_S):
            raise TelemetryError("COUNTER_TOO_FAST")
        self._total += rise
        return self._total


class ThrottleFields(NamedTuple):
    """Field numbers of the throttle counters whose numbering depends on the driver; each counts nanoseconds."""

    sw_thermal: int
    hw_thermal: int
    power_brake: int


OLD_THROTTLE_FIELDS: Final = ThrottleFields(251, 252, 253)
"""As in nvidia-ml-py 12.575.51 and 13.580.65; elsewhere these numbers are power smoothing's."""
NEW_THROTTLE_FIELDS: Final = ThrottleFields(269, 270, 271)
"""As in nvidia-ml-py 13.580.126, .590, .595, .610 and .615; answered by driver 580.159.04."""


def throttle_fields(driver: str) -> ThrottleFields | None:
    """The numbering a driver should have, by its version.

    Between 580.65 and 580.126 the renumbering's exact place is not known: those are given the old numbers, and
    `likely_throttle_fields` and the check against violation status find out.

    None before 575, where 251 was power smoothing's and the counters were not there.
    """
    version = tuple(int(part) for part in re.findall(r"\d+", driver)[:2])
    if version < (575,):
        return None
    return OLD_THROTTLE_FIELDS if version < (580, 126) else NEW_THROTTLE_FIELDS


def likely_throttle_fields(driver: str, types: Mapping[int, int]) -> ThrottleFields | None:
    """The numbering whose fields answer like counters.

    It is that of the version where all its fields are 64-bit counters, else the other one where all of its are, else
    None. Power smoothing's switches are no 64-bit counters.
    """
    expected = throttle_fields(driver)
    both = sorted((OLD_THROTTLE_FIELDS, NEW_THROTTLE_FIELDS), key=lambda fields: fields != expected)
    return next((fields for fields in both if all(types.get(field) == UNSIGNED_64 for field in fields)), None)
