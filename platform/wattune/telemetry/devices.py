"""Devices that somebody means: as a list of positions or UUIDs, or by the variables that CUDA and ROCm obey."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from wattune.errors import SensorChoiceError

Devices = Mapping[str, Mapping[str, Any]]
"""Facts of a node's devices, by the name that telemetry has for them; the host is not among them."""

ORDER: Final = "CUDA_DEVICE_ORDER"
_OF_ROCM: Final = ("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES")
VARIABLES: Final = (*_OF_ROCM, ORDER)
"""Variables that choose devices. CUDA's are in the CUDA C++ Programming Guide, "CUDA Environment Variables"; ROCm's in
"GPU isolation techniques" of its documentation: HIP counts among the devices that ROCR leaves, and takes CUDA's name
where its own is absent."""


def named(text: str, devices: Devices) -> list[str]:
    """Returns the devices of a list: positions as nvidia-smi has them, names, or UUIDs or their unique beginnings.

    `all` and `none` are lists too.

    Raises:
        SensorChoiceError: A part of it names no device, several, or a part of a device.
    """
    order = _in_order(devices)
    if text in ("all", "none"):
        return order if text == "all" else []
    there = ", ".join(f"{at} ({name})" for at, name in enumerate(order)) or "none on this machine"
    found = []
    for word in text.split(","):
        matching = [word] if word in order else _matching(word.strip(), order, devices)
        if len(matching) != 1:
            what = "several devices" if matching else "no device"
            raise SensorChoiceError(
                f'--devices: "{word}" names {what}; allowed: {there}, their UUIDs or beginnings of one, all, none'
            )
        found += matching
    return sorted(set(found), key=order.index)


def visible(variables: Mapping[str, str], devices: Devices) -> tuple[list[str], str] | None:
    """Returns the devices that a program with these variables sees, and the variables; None where none chooses.

    As the vendors do, a list ends before its first entry that names no device, and an empty one names none.

    Raises:
        SensorChoiceError: A part of a device is named, or nobody can tell which device a position means.
    """
    amd = any("AMD" in str(facts.get("name")) or facts.get("backend") == "amd_smi" for facts in devices.values())
    order, why = _in_order(devices), list[str]()
    for variable in _OF_ROCM if amd else _OF_ROCM[2:]:
        text = variables.get(variable)
        if text is None or (amd and variable == _OF_ROCM[2] and _OF_ROCM[1] in variables):
            continue
        kinds = {str(facts.get("name")) for facts in devices.values()}
        if not amd and len(kinds) > 1 and re.search(r"(?:^|,)\s*\d", text) and variables.get(ORDER) != "PCI_BUS_ID":
            raise SensorChoiceError(
                f"{variable}={text}: CUDA counts the fastest device first, and sensors by bus address; the kinds here "
                f"differ ({', '.join(sorted(kinds))}). Set {ORDER}=PCI_BUS_ID, or give --devices"
            )
        left: list[str] = []
        for word in text.split(","):
            matching = _matching(word.strip(), order, devices)
            if len(matching) != 1:
                break
            left += matching
        order, why = list(dict.fromkeys(left)), [*why, f"{variable}={text}"]
    return (order, " ".join(why)) if why else None


def _in_order(devices: Devices) -> list[str]:
    """Returns the names in the drivers' order, that of bus addresses."""
    return sorted(devices, key=lambda name: (devices[name].get("slot", len(devices)), len(name), name))


def _matching(word: str, order: Sequence[str], devices: Devices) -> list[str]:
    """Returns the devices that a position among `order`, or the beginning of a UUID, can mean."""
    if word.upper().startswith("MIG"):
        raise SensorChoiceError(
            f'"{word}" is a part of a device, and power is measured of whole ones; give --devices with the whole '
            "device, whose other parts then count too, or --devices none"
        )
    if word.isdecimal() and word.isascii():
        return list(order[int(word) : int(word) + 1]) if len(word) < 6 else []
    if len(word) < 3 or not re.fullmatch(r"[\w-]+", word):
        return []
    return [name for name in order if any(uuid.lower().startswith(word.lower()) for uuid in _uuids(devices[name]))]


def _uuids(facts: Mapping[str, Any]) -> list[str]:
    """Returns a device's UUIDs as they are written, with and without the vendor's prefix; of a replay the recorded."""
    told = (facts.get("uuid"), (facts.get("at_start") or {}).get("recorded_uuid"))
    return [form for uuid in told if uuid for form in (str(uuid), str(uuid).removeprefix("GPU-"))]
