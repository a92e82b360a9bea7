"""Links, units and memory."""

import numpy as np
import pytest

from wattune.analysis.metrics.saturation import link_peaks
from wattune.analysis.metrics.utilization import memory_metrics, use_metrics
from wattune.analysis.signals.align import align
from wattune.catalog.hardware import device

DEVICES = [("n0", "gpu0"), ("n0", "gpu1")]
TIME_S = np.arange(-1.0, 21.0, 0.2)


def counter(bench, tx_rx=(90e9, 45e9), reset_at_s=None):
    rows = {}
    for index, where in enumerate(DEVICES):
        sent = tx_rx[index] * TIME_S + 1e13
        if reset_at_s is not None:
            sent = np.where(reset_at_s <= TIME_S, tx_rx[index] * (TIME_S - reset_at_s), sent)
        rows[where] = {
            "time_s": TIME_S,
            "nvlink_tx_bytes": sent,
            "nvlink_rx_bytes": sent,
            "tensor_active_frac": np.full(len(TIME_S), 0.25 + 0.5 * index),
        }
    return {"counter": bench.tier("counter", rows)}


@pytest.mark.parametrize("reset_at_s", [None, 7.0])
def test_rates_are_means_over_devices_also_across_a_reset(bench, reset_at_s):
    aligned = align(counter(bench, reset_at_s=reset_at_s), bench.steps(DEVICES), {})
    metrics = use_metrics(aligned, link_peaks(aligned, device("h200_sxm")))
    assert metrics["nvlink_bytes_per_s"] == pytest.approx(135e9, rel=1e-6)
    assert metrics["nvlink_of_peak_frac"] == pytest.approx(0.15, rel=1e-6)
    assert metrics["tensor_active_frac"] == pytest.approx(0.5)
    assert not metrics.keys() & {"pcie_bytes_per_s", "dram_active_frac", "nic_bytes_per_s"}


def test_a_recording_has_no_shares_of_peaks(bench):
    assert "nvlink_of_peak_frac" not in use_metrics(align(counter(bench), bench.steps(DEVICES), {}), {})


def test_network_ports_are_the_nodes(bench):
    host = bench.tier(
        "host",
        {("n0", "host"): {"time_s": TIME_S, "nic_tx_bytes": 1e9 * TIME_S + 1e12, "nic_rx_bytes": 2e9 * TIME_S + 1e12}},
    )
    assert use_metrics(align({"host": host}, bench.steps(DEVICES), {}), {}) == pytest.approx({"nic_bytes_per_s": 3e9})
    assert use_metrics(align({"host": host}, bench.steps([*DEVICES, ("n1", "gpu0")]), {}), {}) == {}


def test_memory_is_the_fullest_ranks():
    used = memory_metrics([10, 35_250_000_000], device("h200_sxm"))
    assert used == {"memory_peak_bytes": 35.25e9, "memory_headroom_frac": pytest.approx(0.75)}
    assert memory_metrics([10], device("cpu")) == {"memory_peak_bytes": 10.0}
    assert memory_metrics([], None) == {}
