"""Columns of other tools: what their names mean here, and values with their units and marks of what was not read."""

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from wattune.arrays import Floats
from wattune.errors import PlanError
from wattune.schema import BOUNDS
from wattune.units import unit_of

_SCALES: Final[dict[str, dict[str, float]]] = {
    "W": {"w": 1, "watt": 1, "watts": 1, "mw": 1e-3, "milliwatts": 1e-3, "kw": 1e3, "uw": 1e-6, "microwatts": 1e-6},
    "J": {
        "j": 1, "joule": 1, "joules": 1, "mj": 1e-3, "millijoules": 1e-3, "uj": 1e-6, "kj": 1e3,
        "wh": 3600, "mwh": 3.6, "kwh": 3.6e6,
    },
    "degC": {"c": 1, "degc": 1, "°c": 1, "celsius": 1, "degrees c": 1, "mc": 1e-3},
    "MHz": {"mhz": 1, "hz": 1e-6, "khz": 1e-3, "ghz": 1e3, "hertz": 1e-6},
    "B": {
        "b": 1, "bytes": 1, "kib": 2**10, "kb": 2**10, "mib": 2**20, "mb": 2**20, "gib": 2**30, "gb": 2**30,
    },
    "s": {"s": 1, "seconds": 1, "ms": 1e-3, "us": 1e-6, "ns": 1e-9},
}  # fmt: skip
"""Units of other tools, in lower case: MW is milliwatts. MB is 2^20 bytes, as nvidia-smi and amd-smi mean it."""

UNITS: Final = {word for scales in _SCALES.values() for word in scales}

_UNREAD: Final = re.compile(
    r"|-+|n/?a|\[.*\]|err!?|nan|[+-]?inf|null|none|unknown( error)?|"
    r"<not \w+>|(not |un)(supported|available)|n\.a\.|\?+|no reading|disabled|insufficient permissions?"
)
"""Words for a value that was not read: nvidia-smi's `[N/A]`, `[Not Supported]` and `[Unknown Error]`, dcgmi's `N/A`,
dmon's `-`, rocm-smi's `None`, perf's `<not counted>`, ipmitool's `no reading`."""

_BLANKS: Final = (-1.0, 65535.0, 2.0**31 - 1, 2.0**32 - 1, 2.0**47, 2.0**63, 2.0**64)
"""Numbers for the same: -1 and all bits of 16, 31, 32, 63 and 64 (AMD's libraries); DCGM's 2^47 and 2^63 less a few
(dcgm_structs.h: DCGM_FP64_BLANK, DCGM_INT64_BLANK). None of them is possible where it counts as not read."""

_NUMBER: Final = r"^\(?(?P<number>[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)\s*(?P<unit>[A-Za-z%°/ ]*)\.?\)?$"


def _table(text: str) -> list[tuple[str, str, str]]:
    """Reads lines of: our name, the source's unit where it says none, its names as patterns."""
    lines = [line.split() for line in text.strip().splitlines()]
    return [(ours, unit, "|".join(names)) for ours, unit, *names in lines]


_KEYS: Final = _table(r"""
time   - time_?stamp(_.+)? time ts epoch _?runtime elapsed (collected|sampled|recorded|created)_at
time   - (date|local|utc|wall|unix|epoch|relative|elapsed|sample|ipmi)_?time(stamp)?(_.+)?
date   - date yyyymmdd
device - index idx entity (gpu|device|accelerator|card)(_?(id|index|idx|number))?
uuid   - (gpu_)?uuid (pci_|gpu_)?(bus_?id|bdf) pci_bus
name   - (gpu_|product_|model_?)?name model
node   - host(_?name)? node(_?name)? instance chassis server ((outlet|pdu|rack|psu)(_?(id|name|number))?)
""")
"""Columns that say when and of what a row is. Names are in lower case with `_` between words."""

_DEVICE: Final = _table(r"""
power_instant_w   w   power_draw_instant instant(aneous)?_power_draw powinst power_usage_instant
power_limit_w     w   ((enforced|current|requested)_)?power_limit power_mgmt_limit max_graphics_package_power power_cap
power_average_w   w   (average_)?power_draw(_average)? pwr power_usage ((average|current|power)_)?socket_power gpu_power
power_average_w   w   (average|current_socket)_graphics_package_power power(_average)? powe?r watts?
power_average_w   w   gpu_(average_)?package_power
energy_j          mj  totec dcgm_fi_dev_total_energy_consumption
energy_j          j   (energy_)?total_energy(_consumption)? gpu_energy energy(_(consumed|counter))?
gpu_temp_c        c   temperature_gpu gpu_(current_)?temp(erature)? gtemp tmptr temp(erature)?
gpu_temp_c        c   ((temperature|temp|gpu)_)?(sensor_)?(junction|hotspot)(_temperature)?
memory_temp_c     c   temperature_mem(ory)? mem(ory)?_(current_)?temp(erature)? mtemp mmtmp temperature_sensor_memory
sm_clock_max_mhz  mhz clocks_max_sm
sm_clock_mhz      mhz clocks_(current_)?sm sm_clock smclk pclk (clock_)?gfx(_0)?_(clk|clock) sclk_clock_speed
event_reasons     -   clocks?_(throttle|event)_reasons(_active)?
memory_used_bytes mib memory_used fb_used fbusd vram_used memory_allocated
""")
"""Columns of a device."""

KEYS: Final = ("time", "date", "device", "uuid", "name", "node")

UNSURE: Final = r"power(_usage)?|pwr|powe?r|watts?|energy.*|temp(erature)?"
"""Names that are a device's only where a column says which device; elsewhere they may be of anything."""

HOST_VALUES: Final = _table(r"""
package_power_w  w (cpu_)?package(_\d+)?_power cpu_power
dram_power_w     w dram_power ram_power
node_power_w     w instantaneous_power_reading power_consumed pwr_consumption real_power power_watts_reading
node_power_w     w current_power ipmi_dcmi_power_consumption redfish_.*power_consumed
node_power_w     w (system|chassis|node|server|total|active|input|wall|ac)_((input|active|total)_)*power(_\w+)?
node_power_w     w (outlet|pdu|inlet|rack)_?(\d+_?)?((input|active|total)_)*power(_\w+)?
package_energy_j - ((cpu|node|rapl|intel)_)*package(_\d+)?(_energy)? cpu_energy
dram_energy_j    - ((cpu|node|rapl|intel)_)*dram(_\d+)?(_energy)? ram_energy
node_energy_j    j (node|chassis|outlet|pdu|system|active|total)_((input|active|total)_)*energy
""")
"""Columns of a host, or of the meter of its chassis or rack; of energies only their rise, as power, is kept."""

_OF_DEVICE: Final = re.compile(r"(?:.*_)?(?:gpu|card|device)_?(?P<device>\d+)(?:_(?P<rest>.+))?")
_PREFIX: Final = re.compile(r"(dcgm_fi_dev(?!_total_energy)|nvidia_smi|nvidia_gpu|amd_gpu|amd_smi)_")


def named(column: str) -> tuple[str, str]:
    """Splits a column's name into words, in lower case with `_` between them, and its unit; empty where it says none.

    Such as `power.draw [W]`, `Temperature (Sensor edge) (C)`, `powerWatts`, `gpu_0_power_usage_watts`.
    """
    column, unit = column.strip().lstrip("#").strip(), ""
    if (found := re.fullmatch(r"(.+?)\s*[\[(]([^\[\]()]*)[\])]", column)) and found[2].strip().lower() in UNITS:
        column, unit = found[1], found[2].strip().lower()
    plain = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", column)
    plain = _PREFIX.sub("", re.sub(r"[^a-z0-9]+", "_", plain.lower()).strip("_"))
    plain = re.sub(r"(?<=_joules)_total$", "", plain)
    head, _, last = plain.rpartition("_")
    return (head, last) if head and not unit and last in UNITS - {"b"} else (plain, unit)


@lru_cache(4096)
def meaning(column: str, *, of_devices: bool) -> tuple[str, str, str | None] | None:
    """Says what a column means: one of ours or of the keys, its unit, and the device its name has; None if unknown."""
    plain, unit = named(column)
    if not unit or unit in _SCALES["s"]:
        for key, _, pattern in _KEYS:
            if re.fullmatch(pattern, plain):
                return key, unit, None
    if found := _OF_DEVICE.fullmatch(plain):
        # A number alone is Zeus's: the power of that device in watts.
        rest = meaning(found["rest"], of_devices=True) if found["rest"] else ("power_average_w", "w", None)
        return None if rest is None or rest[0] in KEYS else (rest[0], unit or rest[1], found["device"])
    for ours, otherwise, pattern in (*_DEVICE, *HOST_VALUES):
        if re.fullmatch(pattern, plain) and (of_devices or not re.fullmatch(UNSURE, plain)):
            return ours, unit or otherwise, None
    return None


def values(texts: pa.ChunkedArray, ours: str, unit: str, where: str) -> Floats:
    """Reads a column of texts as numbers in our unit; not-a-number where the source says that it did not read.

    Raises `PlanError` where a value is neither a number nor a word for none, or of another unit, or cannot be.
    """
    coded = pc.utf8_trim_whitespace(texts.cast(pa.string())).combine_chunks().dictionary_encode()
    read = np.array([*(_value(word, ours, unit, where) for word in coded.dictionary.to_pylist()), np.nan])
    result: Floats = read[coded.indices.fill_null(-1).to_numpy()]
    return result


def _value(text: str, ours: str, unit: str, where: str) -> float:
    if _UNREAD.fullmatch(text.lower()):
        return np.nan
    target = unit_of(ours) or ""
    if ours == "event_reasons" and re.fullmatch(r"0[xX][0-9a-fA-F]+|\d+(\.0+)?", text):
        bits = int(text.partition(".")[0], 0)
        return np.nan if bits >= 2**52 else float(bits)  # all bits: not read. Floats hold 52 exactly
    if re.fullmatch(r"-?\d+,(\d{1,2}|\d{4,})( ?[^\W\d]\w*)?", text):  # a comma before three digits may part thousands
        text = text.replace(",", ".")
    found = re.match(_NUMBER, text)
    scales = _SCALES.get(target, {"": 1.0})
    said = (found["unit"].strip() or unit).lower() if found else ""
    if found is None or (said not in scales and target):
        raise PlanError(f'{where}: got "{text[:60]}", allowed: a number in {" ".join(scales)}, or N/A')
    number = float(found["number"])
    bound = BOUNDS.get(ours, BOUNDS["energy_j" if target == "J" else "sm_clock_mhz"])
    value = number * scales.get(said, 1.0)
    if bound.least <= value <= bound.most:
        return value
    if number in _BLANKS or 2.0**63 - 1024 <= number <= 2.0**64 or 2.0**47 <= number < 2.0**47 + 16:
        return np.nan
    raise PlanError(
        f"{where}: got {text[:60]}, which is {value:.6g} {target}: {ours} is {bound.least:.6g} to {bound.most:.6g}; "
        "see that its unit is the one in the log"
    )


def known_names() -> Sequence[str]:
    """Returns our names of all values that a log may hold."""
    return sorted({ours for ours, _, _ in (*_DEVICE, *HOST_VALUES)})
