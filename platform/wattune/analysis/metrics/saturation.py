"""Evidence of saturation: the time that links and units ran near their peak; without it nothing is called saturated."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np

from wattune.analysis.metrics.phases import Segments
from wattune.analysis.signals.align import Aligned
from wattune.analysis.signals.readings import HOST, Readings
from wattune.arrays import Floats
from wattune.catalog.hardware import DeviceSpec
from wattune.schema import DeviceKey

ABOVE_FRAC: Final = 0.5
"""Share of the assessed time that must be above the threshold: most of it. Wattune's own choice."""

OF_RATED_FRAC: Final = 0.8
"""Share of a link's rated peak from which a reading counts as near it.

Headers take the rest: some 20 of NVLink's 25 GB/s a link arrive as payload (github.com/NVIDIA/nccl-tests/issues/149),
"roughly, the app-level bandwidth is 80% of the peak" (github.com/NVIDIA/nccl/issues/1054), both by NCCL's maintainer.
The counters count payload. For PCIe and networks the catalog has no rated peak.
"""

OF_MEASURED_FRAC: Final = 0.9
"""The same share of a measured peak, which includes headers. Wattune's own choice: a tenth for run-to-run variation."""

COUNTER_FRAC: Final = 0.8
"""The same share for units whose counter is already a share of their peak.

From 80 % of a unit's throughput on, Nsight Compute's rule SpeedOfLight says that work must move to another unit to get
faster. NVIDIA's DCGM guide (feature overview, profiling metrics) gives 0.8 as the most that memory reaches.
"""

_LINKS: Final = {"nvlink": ("nvlink_tx_bytes", "nvlink_rx_bytes"), "pcie": ("pcie_tx_bytes", "pcie_rx_bytes")}
_UNITS: Final = {"hbm": "dram_active_frac", "tensor": "tensor_active_frac"}
_NIC: Final = ("nic_tx_bytes", "nic_rx_bytes")
_PARTS: Final = {
    "communication": ("wait",),
    "compute": ("forward", "backward", "optimizer"),
    "steps": ("forward", "backward", "optimizer", "wait", "other"),
}
"""Parts of a rank's timeline (`wattune.analysis.metrics.phases.PARTS`) in each `Saturation.within` except `window`."""


LinkPeak = tuple[float, str]
"""Peak rate of a link in one direction in bytes a second, and its source: `measured` by a calibration, or that of the
rating."""

MEASURED: Final = "measured"


@dataclass(frozen=True, slots=True, kw_only=True)
class Saturation:
    """Load of one kind of link or unit relative to its peak."""

    what: str
    """`nvlink`, `pcie`, `nic`, `hbm` or `tensor`."""
    within: str
    """Assessed time: `communication` or `compute` if spans divide the steps, else `steps`, else `window`."""
    achieved_frac: float
    """Mean over that time and all devices, over the peak."""
    above_frac: float
    """Share of that time at or above the threshold."""
    threshold_frac: float
    """Of the peak."""
    peak: float | None
    """Bytes a second in one direction; None for units, whose counters are shares already."""
    peak_source: str
    measured: bool
    """True if the peak was measured. A unit's counter is relative to its own peak."""

    @property
    def saturated(self) -> bool:
        """True if the load was above the threshold for most of the time."""
        return self.above_frac >= ABOVE_FRAC

    @property
    def claim(self) -> str:
        """Name of a saturated link or unit, with the kind of its peak, such as `nvlink (of rated peak)`."""
        if self.peak is None:
            return self.what
        return f"{self.what} (of {'measured' if self.measured else 'rated'} peak)"

    def to_json(self) -> dict[str, Any]:
        """Plain data, ready for `json.dumps`."""
        return asdict(self) | {"saturated": self.saturated}


def link_peaks(aligned: Aligned, sensed: DeviceSpec | None) -> dict[str, LinkPeak]:
    """Finds the peak of every kind of link that has one: measured by every device's calibration, else rated.

    A manifest has the measured peaks of a calibration under `link_peaks` of each device, bytes a second in one
    direction: the smallest of all devices counts. Else NVLink has its rated peak from the catalog, which does not know
    that of a bridge between PCIe boards, and a node's network has the negotiated speed of its ports' links
    (`nic_link_bytes_per_s` of the host in its manifest) on the slowest node.
    """
    peaks: dict[str, LinkPeak] = {}
    ports = [aligned.hosts.get(node, {}).get("nic_link_bytes_per_s") for node in {node for node, _ in aligned.devices}]
    speeds = [float(speed) for speed in ports if speed]
    if speeds and len(speeds) == len(ports):
        source = "rated: what the links of the node's ports were agreed at"
        peaks["nic"] = min(speeds), source
    if sensed is not None and sensed.link_bandwidth_bytes_per_s and not sensed.is_linked_by_pcie:
        peaks["nvlink"] = sensed.link_bandwidth_bytes_per_s, f"rated: {sensed.source}"
    for what in ("nvlink", "pcie", "nic"):
        found = [aligned.known.get(device, {}).get("link_peaks", {}).get(what) for device in aligned.devices]
        known = [float(one) for one in found if one]
        if known and len(known) == len(found):
            peaks[what] = min(known), MEASURED
    return peaks


def saturation(
    aligned: Aligned, peaks: Mapping[str, LinkPeak], ways: Mapping[DeviceKey, Segments], *, divided: bool
) -> tuple[Saturation, ...]:
    """Computes the load of every link and unit that was read and has a peak.

    Between two readings of a counter its rate is their difference over their distance. The busier direction counts. An
    interval weighs as much as the communication (for units: compute) in it. An interval is 200 ms by default, longer
    than most communication, so it shows less than the true load: evidence can be missed, but not invented.

    `ways` is empty for a recording without spans. `divided` says that spans separate communication from compute
    (`wattune.analysis.metrics.step_breakdown.divide`).
    """
    if ways and divided:
        of_links, of_units = "communication", "compute"
    else:
        of_links = of_units = "steps" if ways else "window"
    found = []
    for what, columns in _LINKS.items():
        if what in peaks:
            rates = ((device, _rates(aligned, device, "counter", columns)) for device in aligned.devices)
            found.append(_loaded(what, rates, ways, of_links, peaks[what]))
    if "nic" in peaks:
        nodes = sorted({node for node, _ in aligned.devices})
        rates = (((node, HOST), _rates(aligned, (node, HOST), HOST, _NIC)) for node in nodes)
        found.append(_loaded("nic", rates, {}, "window", peaks["nic"]))
    for what, column in _UNITS.items():
        shares = ((device, _shares(aligned, device, column)) for device in aligned.devices)
        found.append(_loaded(what, shares, ways, of_units, None))
    return tuple(one for one in found if one is not None)


_Rates = tuple[Floats, Floats]
"""Edges of intervals in seconds, and the value inside each."""


def _loaded(
    what: str,
    rates: Iterable[tuple[DeviceKey, _Rates | None]],
    ways: Mapping[DeviceKey, Segments],
    within: str,
    peak: LinkPeak | None,
) -> Saturation | None:
    """Returns the load of a link by its rates over its peak, or without a peak of a unit by its shares."""
    if peak is None:
        threshold_frac, bytes_per_s, source = COUNTER_FRAC, None, "the counter is a share of the peak"
    else:
        bytes_per_s, source = peak
        threshold_frac = OF_MEASURED_FRAC if source == MEASURED else OF_RATED_FRAC
    over = bytes_per_s or 1.0
    shares = ((device, None if each is None else (each[0], each[1] / over)) for device, each in rates)
    weighed = _weighed(shares, ways, within, threshold_frac)
    if weighed is None:
        return None
    return Saturation(
        what=what,
        within=within,
        achieved_frac=weighed[0],
        above_frac=weighed[1],
        threshold_frac=threshold_frac,
        peak=bytes_per_s,
        peak_source=source,
        measured=peak is None or source == MEASURED,
    )


def _weighed(
    each: Iterable[tuple[DeviceKey, _Rates | None]],
    ways: Mapping[DeviceKey, Segments],
    within: str,
    threshold_frac: float,
) -> tuple[float, float] | None:
    """Computes mean share of the peak and share of time above the threshold, None unless every device has readings."""
    weight_s = reached_s = above_s = 0.0
    for device, rates in each:
        if rates is None:
            return None
        edge_s, share = rates
        spent_s = edge_s if within == "window" else ways[device].time_until_s(edge_s, *_PARTS[within])
        width_s = np.diff(spent_s)
        weight_s += float(width_s.sum())
        reached_s += float((width_s * share).sum())
        above_s += float(width_s[share >= threshold_frac].sum())
    return (reached_s / weight_s, above_s / weight_s) if weight_s > 0 else None


def _rates(aligned: Aligned, device: DeviceKey, tier: str, columns: tuple[str, ...]) -> _Rates | None:
    """Computes the busier direction's rate between neighbouring readings inside the window."""
    readings = aligned.tiers.get(tier, {}).get(device)
    if readings is None:
        return None
    read = [readings.inside(column, 0.0, aligned.duration_s) for column in columns]
    time_s = read[0][0]
    if len(time_s) < 2 or any(len(times_s) != len(time_s) for times_s, _ in read):
        return None
    rates = np.stack([np.diff(value) / np.diff(time_s) for _, value in read])
    # A counter that fell was reset or wrapped: the traffic meanwhile is unknown, so it counts as none.
    return time_s, np.maximum(rates.max(axis=0), 0.0)


def _shares(aligned: Aligned, device: DeviceKey, column: str) -> _Rates | None:
    """Returns a unit's share between neighbouring readings: a reading is the mean since the one before."""
    readings: Readings | None = aligned.tiers.get("counter", {}).get(device)
    if readings is None:
        return None
    time_s, value = readings.inside(column, 0.0, aligned.duration_s)
    return (time_s, value[1:]) if len(time_s) >= 2 else None
