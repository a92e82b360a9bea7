"""Alignment of the tables of all nodes on one time axis, in seconds from the start of the measured window.

Within a node everything is joined on the monotonic clock. Between nodes a monotonic reading becomes *common time*, the
reference node's wall clock. For that one number per node is added to it: the median of wall minus monotonic in the
node's own tables, less the `clock_offset_ns` of its manifest (this node's wall clock minus the reference's). It is a
single number, so that jitter between the two clock reads never moves readings of one node against each other.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np
import pyarrow as pa

from wattune.analysis.signals.readings import (
    DEVICE_TIERS,
    HOST,
    Readings,
    ReadingsCache,
    Tables,
    Tier,
    as_source,
    integers,
    with_values,
)
from wattune.analysis.signals.steps import Steps, find_steps
from wattune.arrays import Ints
from wattune.errors import ImpossibleValueError
from wattune.schema import MOST_WINDOW_NS, DeviceKey
from wattune.storage.parquet import codes
from wattune.units import NS_PER_S

_SPAN_KEYS: Final = ("node", "device", "rank", "step", "phase", "start_mono_ns", "end_mono_ns", "start_wall_ns")
_CLOCKS: Final = ("mono_ns", "wall_ns")
_ANCHOR_TIERS: Final = ("slow", HOST, "counter", "fast", "ring")


@dataclass(frozen=True, slots=True, kw_only=True)
class Aligned:
    """A trial or recording on one time axis: 0 is the window's start."""

    start_ns: int
    """The window's start in common time."""
    duration_s: float
    """The window's length."""
    steps: Steps | None
    """None for a recording without spans."""
    devices: tuple[DeviceKey, ...]
    """Devices whose readings count: those the spans name, else all that were recorded or are in a manifest."""
    tiers: Mapping[str, Mapping[DeviceKey, Readings]]
    cache: ReadingsCache = field(repr=False, compare=False)
    """Holds recent readings, and series made from them."""
    known: Mapping[DeviceKey, Mapping[str, Any]]
    """The manifests' facts of each device; empty without manifests."""
    hosts: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """The manifests' facts of each node's host, by node."""

    def readings(self, tier: str) -> Iterator[tuple[DeviceKey, Readings]]:
        """Yields every device's readings in order, one in memory at a time.

        Yields none unless all have some: a sum over only some would be wrong.
        """
        found = self.tiers.get(tier, {})
        if all(device in found for device in self.devices):
            yield from ((device, found[device]) for device in self.devices)

    def only(self, device: DeviceKey) -> "Aligned":
        """Returns the same of one device, as if it had been sampled alone in the same window."""
        return replace(
            self,
            steps=None if self.steps is None else self.steps.only(device),
            devices=(device,),
            tiers={name: tier for name, tier in self.tiers.items() if name != HOST},
            known={device: self.known[device]} if device in self.known else {},
            hosts={},
        )

    @property
    def missing(self) -> list[DeviceKey]:
        """Devices that should have telemetry and have none in any tier."""
        return [device for device in self.devices if not any(device in self.tiers.get(t, {}) for t in DEVICE_TIERS)]


def align(
    tables: Tables,
    spans: pa.Table | None,
    manifests: Mapping[str, Mapping[str, Any]],
    *,
    measured_steps: Sequence[int] | None = None,
    window: tuple[int, int] | None = None,
) -> Aligned | None:
    """Puts telemetry and spans on one axis, and finds the window and the devices that count.

    The window runs from the earliest start to the latest end of the measured steps over all ranks. Without spans it is
    `window`. `measured_steps` None counts every step from 0 on, because warm-up steps are negative; `window` is in
    nanoseconds of the reference node's wall clock. None where neither spans nor `window` give a window of positive
    length. Raises `ImpossibleValueError`: the window is longer than `wattune.schema.MOST_WINDOW_NS`.
    """
    sources = {tier: as_source(table) for tier, table in tables.items()}
    spans = None if spans is None else with_values(spans, _SPAN_KEYS)
    anchors_ns = clock_anchors_ns(sources, spans, manifests)
    steps = None if spans is None else find_steps(spans, anchors_ns, measured_steps)
    if steps is not None:
        window = int(steps.start_ns.min()), int(steps.end_ns.max())
    if window is None or window[1] <= window[0]:
        return None
    if window[1] - window[0] > MOST_WINDOW_NS:
        span_s = (window[1] - window[0]) / NS_PER_S
        raise ImpossibleValueError(f"window: got {span_s:.6g} s, allowed: {MOST_WINDOW_NS // NS_PER_S:,} s")
    cache = ReadingsCache()
    tiers = {name: Tier(name, source, anchors_ns, window[0], cache) for name, source in sources.items()}
    known = {
        (node, name): facts
        for node, manifest in manifests.items()
        for name, facts in manifest.get("devices", {}).items()
        if name != HOST
    }
    recorded = {device for tier in DEVICE_TIERS for device in tiers.get(tier, {})}
    devices = set(steps.device) if steps is not None else recorded | known.keys()
    return Aligned(
        start_ns=window[0],
        duration_s=(window[1] - window[0]) / NS_PER_S,
        steps=steps,
        devices=tuple(sorted(devices)),
        tiers=tiers,
        cache=cache,
        known=known,
        hosts={node: manifest.get("devices", {}).get(HOST, {}) for node, manifest in manifests.items()},
    )


def clock_anchors_ns(
    tables: Tables, spans: pa.Table | None, manifests: Mapping[str, Mapping[str, Any]]
) -> dict[str, int]:
    """Computes the shift from monotonic readings to common time, for every node that wrote a row."""
    anchors_ns: dict[str, int] = {}
    for tier in (name for name in _ANCHOR_TIERS if name in tables):
        source = as_source(tables[tier])
        for device in sorted(source.devices):
            if device[0] not in anchors_ns:
                clocks = [with_values(part, _CLOCKS) for part in source.parts(device, _CLOCKS)]
                each_ns = [integers(part, "wall_ns") - integers(part, "mono_ns") for part in clocks]
                _add_anchor(anchors_ns, device[0], np.concatenate(each_ns) if each_ns else np.empty(0, np.int64))
    if spans is not None:
        code, nodes = codes(spans, "node")
        difference = integers(spans, "start_wall_ns") - integers(spans, "start_mono_ns")
        for index, node in enumerate(nodes):
            if node not in anchors_ns:
                _add_anchor(anchors_ns, node, difference[code == index])
    # A node's wall clock less its offset is the reference node's.
    return {
        node: anchor - int(manifests.get(node, {}).get("clock_offset_ns") or 0) for node, anchor in anchors_ns.items()
    }


def _add_anchor(anchors_ns: dict[str, int], node: str, difference_ns: Ints) -> None:
    if len(difference_ns):
        # Not np.median: nanoseconds since 1970 do not fit a float exactly.
        anchors_ns[node] = int(np.partition(difference_ns, len(difference_ns) // 2)[len(difference_ns) // 2])
