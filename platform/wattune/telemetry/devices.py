"""Devices of a node: those that somebody means, what was recorded of some alone, and whose processes are on them.

Somebody means devices by a list of positions or UUIDs, or by the variables that CUDA and ROCm obey.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

import pyarrow as pa

from wattune.errors import SensorChoiceError
from wattune.telemetry.backend import OTHER_PROCESSES

Devices = Mapping[str, Mapping[str, Any]]
"""Facts of a node's devices, by the name that telemetry has for them; the host is not among them."""

ORDER: Final = "CUDA_DEVICE_ORDER"
_ROCR, _HIP, _CUDA = "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"
VARIABLES: Final = (_ROCR, _HIP, _CUDA, ORDER)
"""Variables that choose devices. CUDA's are in the CUDA C++ Programming Guide, "CUDA Environment Variables"; ROCm's in
"GPU isolation techniques" of its documentation: HIP counts among the devices that ROCR leaves, and takes CUDA's name
where its own is absent."""


def named(text: str, devices: Devices) -> list[str]:
    """Returns the devices of a list: positions as nvidia-smi has them, names, or UUIDs or their unique beginnings.

    `all` and `none` are lists too. Raises `SensorChoiceError`: a part of it names no device, several, or a part of a
    device.
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

    As the vendors do, a list ends before its first entry that names no device, and an empty one names none. Raises
    `SensorChoiceError`: a part of a device is named, or nobody can tell which device a position means.
    """
    kinds = {str(facts.get("name")) for facts in devices.values()}
    amd = any("AMD" in kind for kind in kinds) or any(one.get("backend") == "amd_smi" for one in devices.values())
    order, why = _in_order(devices), list[str]()
    for variable in (_ROCR, _HIP if _HIP in variables else _CUDA) if amd else (_CUDA,):
        text = variables.get(variable)
        if text is None:
            continue
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


def of_devices(
    tables: Mapping[str, pa.Table], manifest: Mapping[str, Any], names: Collection[str]
) -> tuple[dict[str, pa.Table], dict[str, Any]]:
    """Returns tables and manifest of a node with some of its devices alone; a tier that none of them has is absent."""
    import pyarrow.compute as pc  # a sampler, which starts with every trial, needs none

    wanted = pa.array(sorted(names), pa.string())
    parts = {tier: table.filter(pc.is_in(table["device"].cast(pa.string()), wanted)) for tier, table in tables.items()}
    by_device = {key: manifest[key] for key in ("devices", "measured") if isinstance(manifest.get(key), Mapping)}
    kept = {key: {name: one for name, one in each.items() if name in names} for key, each in by_device.items()}
    return {tier: part for tier, part in parts.items() if part.num_rows}, {**manifest, **kept}


def without_own_processes(
    manifest: Mapping[str, Any], pids: Mapping[str, Sequence[int]], *, warm: bool
) -> dict[str, Any]:
    """Takes a run's own processes, by the device they drive, out of those that a node's manifest calls strangers.

    Warm workers were there before the trial and are there after it. A container may hide which process is which: the
    driver then reports ids that no process here has. One process per worker is then taken for it, the largest first: a
    training process holds more memory than a viewer.

    A command, and the workers of a lane's first trial, come after the sampler's start and are not `warm`. Whatever was
    on a device by then is a stranger, by whatever id.
    """
    devices = {}
    for name, facts in manifest.get("devices", {}).items():
        own, known = set(pids.get(name, ())), dict(facts)
        early = {process["pid"] for process in known.get("at_start", {}).get(OTHER_PROCESSES, ())}
        for when in ("at_start", "at_end"):
            found = known.get(when, {}).get(OTHER_PROCESSES)
            if own and found:
                mine = [process for process in found if process["pid"] in own]
                if not mine:
                    possible = [process for process in found if warm or process["pid"] not in early]
                    mine = sorted(possible, key=lambda process: -process.get("memory_used_bytes", 0))[: len(own)]
                known[when] = {**known[when], OTHER_PROCESSES: [process for process in found if process not in mine]}
        devices[name] = known | ({"own_processes": sorted(own)} if own else {})
    return {**manifest, "devices": devices}
