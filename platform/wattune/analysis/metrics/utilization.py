"""Utilization: busy units and memory, bytes over links, memory in use, load of experts."""

from collections.abc import Mapping, Sequence

import numpy as np

from wattune.analysis.metrics.energy import counter_span
from wattune.analysis.metrics.saturation import LinkPeak
from wattune.analysis.signals.align import Aligned
from wattune.analysis.signals.readings import HOST, Readings, all_known
from wattune.catalog.hardware import DeviceSpec

_ACTIVE = ("tensor_active_frac", "dram_active_frac")
_LINKS = {
    "nvlink_bytes_per_s": ("nvlink_tx_bytes", "nvlink_rx_bytes"),
    "pcie_bytes_per_s": ("pcie_tx_bytes", "pcie_rx_bytes"),
}
_NIC = ("nic_tx_bytes", "nic_rx_bytes")


def use_metrics(aligned: Aligned, peaks: Mapping[str, LinkPeak]) -> dict[str, float]:
    """Computes utilization of units and links.

    `tensor_active_frac`, `dram_active_frac`: mean over devices of their time-weighted means; a reading is the mean
    since the one before, so it counts for the time between the two that is in the window. `nvlink_bytes_per_s`,
    `pcie_bytes_per_s`: bytes sent and received by a device, mean over devices, by the counters' rise over their span.
    `nic_bytes_per_s`: the same of a node's ports, mean over nodes. `{nvlink,pcie,nic}_of_peak_frac`: over twice the
    peak of one direction, where there is one.
    """
    metrics: dict[str, float] = {}
    means: dict[str, list[float]] = {name: [] for name in _ACTIVE}
    rates: dict[str, list[float]] = {name: [] for name in _LINKS}
    for _, readings in aligned.readings("counter"):
        for name in _ACTIVE:
            share = _mean_since(readings, name, aligned.duration_s)
            means[name] += [] if share is None else [share]
        for name, columns in _LINKS.items():
            rate = _rate(readings, columns, aligned.duration_s)
            rates[name] += [] if rate is None else [rate]
    nodes = sorted({node for node, _ in aligned.devices})
    hosts = [aligned.tiers.get(HOST, {}).get((node, HOST)) for node in nodes]
    of_hosts = [None if host is None else _rate(host, _NIC, aligned.duration_s) for host in hosts]
    for name, each in {**means, **rates}.items():
        if each and len(each) == len(aligned.devices):
            metrics[name] = float(np.mean(each))
    if known := all_known(of_hosts):
        metrics["nic_bytes_per_s"] = float(np.mean(known))
    for link, (peak_bytes_per_s, _) in peaks.items():
        if f"{link}_bytes_per_s" in metrics:
            metrics[f"{link}_of_peak_frac"] = metrics[f"{link}_bytes_per_s"] / (2 * peak_bytes_per_s)
    return metrics


def memory_metrics(memory_peak_bytes: Sequence[int], used: DeviceSpec | None) -> dict[str, float]:
    """Computes memory of the fullest device.

    `memory_peak_bytes`: the largest of the ranks' peaks. `memory_headroom_frac`: 1 minus that over the device's memory,
    where the catalog knows it.
    """
    if not memory_peak_bytes:
        return {}
    peak = float(max(memory_peak_bytes))
    metrics = {"memory_peak_bytes": peak}
    if used is not None and used.memory_bytes:
        metrics["memory_headroom_frac"] = 1.0 - peak / used.memory_bytes
    return metrics


def expert_imbalance_frac(tokens: Sequence[Sequence[Sequence[int]]], ep: int) -> float | None:
    """Tokens of the busiest expert parallel rank over those of the mean one, minus 1, averaged over layers.

    0 is an even load; at ep=1 it is 0, since one rank has all experts. The ranks of a layer wait for the busiest one,
    so that the average over layers is the share by which uneven experts lengthen their part of a step. Ranks that hold
    the same experts in several replicas count together.

    `tokens` are those that each rank sent in the measured steps, by layer and expert. A rank holds a run of consecutive
    experts. None where no token was sent to an expert.
    """
    sent = [rank for rank in tokens if rank]
    if not sent:
        return None
    by_layer = np.sum(np.asarray(sent, dtype=np.float64), axis=0)
    by_rank = by_layer.reshape(by_layer.shape[0], ep, -1).sum(axis=2)
    by_rank = by_rank[by_rank.sum(axis=1) > 0]
    if not by_rank.size:
        return None
    return float(np.mean(by_rank.max(axis=1) / by_rank.mean(axis=1)) - 1)


def _mean_since(readings: Readings, column: str, window_s: float) -> float | None:
    """Returns the mean over the window of a column of means since the previous reading, None without readings."""
    whole = readings.series(column)
    if whole is None:
        return None
    width_s = np.diff(np.clip(whole.time_s, 0.0, window_s))
    covered_s = float(width_s.sum())
    return float(np.einsum("i,i->", width_s, whole.value[1:])) / covered_s if covered_s > 0 else None


def _rate(readings: Readings, columns: Sequence[str], window_s: float) -> float | None:
    """Sums the rates of several counters, None unless all of them are known."""
    spans = [counter_span(readings, column, 0.0, window_s) for column in columns]
    known = [rise / (end_s - start_s) for start_s, end_s, rise in filter(None, spans)]
    return sum(known) if len(known) == len(spans) else None
