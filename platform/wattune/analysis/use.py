"""How much of the machine is used: units and memory busy, bytes over links, memory filled."""

from collections.abc import Sequence

import numpy as np

from wattune.analysis.align import HOST, Aligned, Readings
from wattune.analysis.energy import counter_span
from wattune.catalog.hardware import DeviceSpec

_ACTIVE = ("tensor_active_frac", "dram_active_frac")
_LINKS = {
    "nvlink_bytes_per_s": ("nvlink_tx_bytes", "nvlink_rx_bytes"),
    "pcie_bytes_per_s": ("pcie_tx_bytes", "pcie_rx_bytes"),
}
_NIC = ("nic_tx_bytes", "nic_rx_bytes")


def use_metrics(aligned: Aligned, sensed: DeviceSpec | None) -> dict[str, float]:
    """Use of units and links.

    `tensor_active_frac`, `dram_active_frac`: mean over devices of their time-weighted means. `nvlink_bytes_per_s`,
    `pcie_bytes_per_s`: what a device sends and receives, mean over devices, by the counters' rise over their own span.
    `nic_bytes_per_s`: the same of a node's ports, mean over nodes. `nvlink_of_peak_frac`: over twice the catalog's
    one-direction bandwidth of the device's links. Peaks of PCIe and network ports are not in the catalog, so
    `pcie_of_peak_frac` and `nic_of_peak_frac` are absent.

    Args:
        aligned: The trial.
        sensed: The device telemetry describes, None for a recording.
    """
    metrics: dict[str, float] = {}
    counters = aligned.readings("counter")
    for name in _ACTIVE:
        found = [readings.series(name) for readings in counters or []]
        inside = [whole.clip(0.0, aligned.duration_s) for whole in found if whole is not None]
        means = [clipped.mean() for clipped in inside if clipped is not None]
        if means and len(means) == len(aligned.devices):
            metrics[name] = float(np.mean(means))
    for name, columns in _LINKS.items():
        rate = _mean_rate(counters, columns, aligned.duration_s)
        if rate is not None:
            metrics[name] = rate
    if sensed is not None and sensed.link_bandwidth_bytes_per_s and "nvlink_bytes_per_s" in metrics:
        metrics["nvlink_of_peak_frac"] = metrics["nvlink_bytes_per_s"] / (2 * sensed.link_bandwidth_bytes_per_s)
    nodes = sorted({node for node, _ in aligned.devices})
    hosts = [aligned.tiers.get("host", {}).get((node, HOST)) for node in nodes]
    rate = _mean_rate([host for host in hosts if host is not None], _NIC, aligned.duration_s)
    if rate is not None and None not in hosts:
        metrics["nic_bytes_per_s"] = rate
    return metrics


def memory_metrics(memory_peak_bytes: Sequence[int], used: DeviceSpec | None) -> dict[str, float]:
    """Memory of the fullest device.

    `memory_peak_bytes`: the largest of the ranks' peaks. `memory_headroom_frac`: 1 minus that over the device's memory,
    where the catalog knows it.

    Args:
        memory_peak_bytes: Every rank's highest memory; empty where nobody counted.
        used: The device the ranks drive, None for a recording.
    """
    if not memory_peak_bytes:
        return {}
    peak = float(max(memory_peak_bytes))
    metrics = {"memory_peak_bytes": peak}
    if used is not None and used.memory_bytes:
        metrics["memory_headroom_frac"] = 1.0 - peak / used.memory_bytes
    return metrics


def _mean_rate(each: Sequence[Readings] | None, columns: Sequence[str], window_s: float) -> float | None:
    """Mean over devices of several counters' summed rates, None unless all of them can be told."""
    spans = [counter_span(readings, column, 0.0, window_s) for readings in each or [] for column in columns]
    rates = [span.per_s for span in spans if span is not None]
    return sum(rates) / len(each) if each and len(rates) == len(spans) else None
