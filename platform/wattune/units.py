"""Units: conversions at the edges, and the rule that every dimensional name ends in its unit.

Quantities inside wattune are SI: seconds, watts, joules, bytes. Megahertz is the one exception, because every vendor,
datasheet and sensor uses it. Nanoseconds appear only as integer timestamps and counters.
"""

from functools import cache
from typing import Final

NS_PER_S: Final = 1_000_000_000
"""Nanoseconds in a second."""

BYTES_PER_GIB: Final = 1024**3
"""Bytes in a gibibyte, the unit in which memory is shown."""

SUFFIX_UNITS: Final[dict[str, str]] = {
    "_bytes_per_s": "B/s",
    "_flop_per_s": "FLOP/s",
    "_w_per_s": "W/s",
    "_per_s_per_device": "1/s",
    "_per_s": "1/s",
    "_per_j": "1/J",
    "_per_step_j": "J",
    "_per_token_j": "J",
    "_js": "J*s",
    "_ns": "ns",
    "_s": "s",
    "_w": "W",
    "_j": "J",
    "_c": "degC",
    "_mhz": "MHz",
    "_bytes": "B",
    "_flop": "FLOP",
    "_frac": "1",
    "_count": "1",
}
"""Units by the suffix of a name, longest suffixes first. The first one that matches wins."""


def ns_to_s(duration_ns: float) -> float:
    """Converts nanoseconds to seconds."""
    return duration_ns / NS_PER_S


def s_to_ns(duration_s: float) -> int:
    """Converts seconds to whole nanoseconds, rounded to the nearest."""
    return round(duration_s * NS_PER_S)


def mw_to_w(power_mw: float) -> float:
    """Converts milliwatts, as NVML reports power, to watts."""
    return power_mw / 1e3


def mj_to_j(energy_mj: float) -> float:
    """Converts millijoules, as NVML reports energy, to joules."""
    return energy_mj / 1e3


def uj_to_j(energy_uj: float) -> float:
    """Converts microjoules, as Linux powercap (RAPL) reports energy, to joules."""
    return energy_uj / 1e6


def mc_to_c(temperature_mc: float) -> float:
    """Converts millidegrees, as Linux hwmon reports temperatures, to degrees Celsius."""
    return temperature_mc / 1e3


def us_to_s(duration_us: float) -> float:
    """Converts microseconds, as Linux counts pressure stalls, to seconds."""
    return duration_us / 1e6


def kib_to_bytes(size_kib: int) -> int:
    """Converts kibibytes, as NVML reports NVLink traffic, to bytes."""
    return size_kib * 1024


@cache
def unit_of(name: str) -> str | None:
    """Returns the unit that a name declares by its suffix.

    It is ``"1"`` for fractions and counts, and None for a name without a unit suffix.
    """
    for suffix, unit in SUFFIX_UNITS.items():
        if name.endswith(suffix):
            return unit
    return None


def with_unit(name: str) -> str:
    """Returns a name with the unit that it declares, as of an axis."""
    unit = unit_of(name)
    return name if unit in (None, "1") else f"{name} [{unit}]"


def format_change(name: str, change: float) -> str:
    """Formats a difference of two values: temperatures in kelvin, fractions in points of a percent."""
    unit = unit_of(name)
    if unit == "degC":
        return f"{change:.1f} K"
    if unit == "1" and name.endswith("_frac"):
        return f"{100 * change if abs(change) >= 5e-5 else 0:.2g} points"
    return format_quantity(name, change)


def format_probability(probability: float) -> str:
    """Formats a probability with two digits, and one that is small but not zero as `<0.01`."""
    return "<0.01" if 0.0 < probability < 0.01 else f"{probability:.2f}"


_PREFIXES: Final = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def format_quantity(name: str, value: float) -> str:
    """Formats a value for users: three or four significant digits, the unit of its name, fractions as percent.

    Text such as ``"2.788 kW"``, ``"41.3 %"``, ``"18.2 ms"`` or ``"11.3 GiB"``.
    """
    unit = unit_of(name)
    if unit == "1" and name.endswith("_frac"):
        return f"{100 * value:.1f} %"
    if unit == "B":
        return f"{value / BYTES_PER_GIB:.2f} GiB" if abs(value) >= BYTES_PER_GIB / 10 else f"{value / 2**20:.1f} MiB"
    if unit == "s" and abs(value) < 1:
        return f"{1e3 * value:.1f} ms"
    if unit in ("degC", "MHz"):
        return f"{value:.1f} {'°C' if unit == 'degC' else 'MHz'}"
    if unit == "J" and 0 < abs(value) < 1:
        return f"{_three_digits(1e3 * value)} mJ"
    label = {None: "", "1": "", "1/s": "/s", "1/J": "/J"}.get(unit, unit)
    for scale, prefix in _PREFIXES:
        if abs(value) >= scale:
            return f"{value / scale:.4g} {prefix}{label}".rstrip()
    return f"{_three_digits(value)} {label}".rstrip()


def _three_digits(value: float) -> str:
    """Formats a value with three significant digits, with four where three would round it up to 1e+03."""
    return f"{value:.4g}" if 999.5 <= abs(value) < 1000 else f"{value:.3g}"
