"""The model of a node's manifest: what analysis reads of it, and of which kind that is."""

import json
from collections.abc import Iterator
from typing import Any, Final

from wattune.errors import TelemetryError
from wattune.schema import BOUNDS, Bound
from wattune.units import unit_of

_NUMBER: Final = "a number, or null"
_NAME: Final = "a text, or null"
_COUNT: Final = "a whole number of at least 0, or null"
_TRUTH: Final = "true, false, or null"
_DEVICE: Final[dict[str, Any]] = {
    "device": _NAME,
    "name": _NAME,
    "uuid": _NAME,
    "backend": _NAME,
    "driver": _NAME,
    "power_domain": _NAME,
    "slot": _COUNT,
    "power_from_energy_counter": _TRUTH,
    "capabilities": {"*": {"*": _NAME}},
    "sensor_limits": {"*": {"finest_window_s": _NUMBER}},
    "link_peaks": {"*": _NUMBER},
    "at_start": {"other_processes": [{"pid": _COUNT}]},
    "at_end": {"other_processes": [{"pid": _COUNT}]},
}
_MANIFEST: Final[dict[str, Any]] = {
    "node": _NAME,
    "simulated": _TRUTH,
    "closed": _TRUTH,
    "devices": {"*": _DEVICE},
    "tiers": {"*": {"requested_hz": _NUMBER, "achieved_hz": _NUMBER, "rows": _COUNT}},
    "clock": {"steps": [{"step_ns": _NUMBER}]},
    "measured": {"*": {"*": {"rows": _COUNT}}},
}
"""Facts by name. `*` is any name, a list holds entries of one kind. Facts that are not here may be of any kind, except
that a name of the node or a device that ends in a unit is a number."""

_TIME: Final = Bound(least=-(2**62), most=2**62)
_MOST: Final = 10**300
"""Largest number, which no infinity is: of whole numbers, no float is larger."""


def checked_manifest(manifest: Any, where: str) -> dict[str, Any]:
    """Returns a node's manifest: facts of the node and its devices, from a sampler or another recorder.

    Raises `TelemetryError`: it, or a part of it, is of another kind than its name says. Every such part is named.
    """
    problems = list(_wrong(manifest, _MANIFEST, "")) if isinstance(manifest, dict) else ["allowed: an object"]
    if problems:
        raise TelemetryError(f"{where}: {'; '.join(problems[:20])}")
    return dict(manifest)


def _wrong(value: Any, kind: Any, path: str) -> Iterator[str]:
    """Yields what of a value is not of its kind."""
    allowed = kind if isinstance(kind, str) else "an object" if isinstance(kind, dict) else "a list"
    if isinstance(kind, dict):
        right = isinstance(value, dict)
    elif isinstance(kind, list):
        right = isinstance(value, list)
    else:
        right = _is(value, kind)
    if not right:
        yield f"{path}: got {json.dumps(value)[:80]}, allowed: {allowed}"
    elif isinstance(kind, list):
        for index, each in enumerate(value):
            yield from _wrong(each, kind[0], f"{path}[{index}]")
    elif isinstance(kind, dict):
        for name in [*(one for one in kind if one in value), *(one for one in value if one not in kind)]:
            each, below = value[name], f"{path}.{name}".lstrip(".")
            if name in kind or "*" in kind:
                yield from _wrong(each, kind.get(name, kind.get("*")), below)
            elif kind in (_MANIFEST, _DEVICE) and unit_of(name) is not None:
                yield from _wrong(each, _NUMBER, below)
            bound = BOUNDS.get(name) or (_TIME if name.endswith("_ns") else None)
            if bound and type(each) in (int, float) and _is(each, _NUMBER) and not bound.least <= each <= bound.most:
                yield f"{below}: got {each:.6g}, allowed: {bound.least:.6g} to {bound.most:.6g}"


def _is(value: Any, kind: str) -> bool:
    if value is None:
        return True
    if kind == _NAME:
        return isinstance(value, str)
    if kind == _TRUTH:
        return isinstance(value, bool)
    if isinstance(value, bool):
        return False
    if kind == _COUNT:
        return isinstance(value, int) and 0 <= value < 2**63
    return isinstance(value, int | float) and abs(value) <= _MOST
