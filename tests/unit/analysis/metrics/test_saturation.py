"""The word saturated is used where it holds, and nowhere else."""

import numpy as np
import pytest

from wattune.analysis.metrics.phases import segments
from wattune.analysis.metrics.saturation import link_peaks, saturation
from wattune.analysis.metrics.utilization import use_metrics
from wattune.analysis.signals.align import align
from wattune.catalog.hardware import device

GPU = ("n0", "gpu0")
TIME_S = np.arange(-1.0, 21.0, 0.2)
RATED = 450e9


def of(bench, rate, *, spans=None, divided=None, known=None, sensed="h200_sxm", **columns):
    """One device whose NVLink carries `rate(t)` bytes a second in one direction, by its integral's counter."""
    fine_s = np.arange(-1.0, 21.0, 0.01)
    sent = np.interp(TIME_S, fine_s, np.concatenate([[0.0], np.cumsum(rate(fine_s)[:-1] * 0.01)])) + 1e12
    rows = {GPU: {"time_s": TIME_S, "nvlink_tx_bytes": sent, "nvlink_rx_bytes": sent * 0 + 5, **columns}}
    manifests = {"n0": {"devices": {"gpu0": known or {}}}}
    table = bench.spans(spans or [(GPU, 0, 0, "step", 0.0, 20.0)])
    aligned = align({"counter": bench.tier("counter", rows)}, table, manifests)
    peaks = link_peaks(aligned, device(sensed) if sensed else None)
    found = saturation(aligned, peaks, segments(aligned, table), divided=bool(spans) if divided is None else divided)
    return {one.what: one for one in found}


def half_communication():
    """Seconds 0 to 10 forward, 10 to 20 wait."""
    return [(GPU, 0, 0, "step", 0.0, 20.0), (GPU, 0, 0, "forward", 0.0, 10.0), (GPU, 0, 0, "wait", 10.0, 20.0)]


def test_a_link_that_is_full_whenever_it_communicates_is_saturated(bench):
    found = of(bench, lambda t: np.where(t > 10, 0.85 * RATED, 0.0), spans=half_communication())["nvlink"]
    assert found.saturated and found.within == "communication"
    assert found.achieved_frac == pytest.approx(0.85, abs=0.01)
    assert found.above_frac == pytest.approx(1.0, abs=0.03)
    assert found.peak == RATED and found.peak_source.startswith("rated: ")
    assert found.claim == "nvlink (of rated peak)"


def test_a_measured_peak_goes_before_the_catalogs_and_has_a_higher_threshold(bench):
    known = {"link_peaks": {"nvlink": 360e9}}
    found = of(bench, lambda t: np.full(len(t), 350e9), known=known)["nvlink"]
    assert (found.peak, found.peak_source, found.threshold_frac, found.saturated) == (360e9, "measured", 0.9, True)
    assert found.claim == "nvlink (of measured peak)"
    assert not of(bench, lambda t: np.full(len(t), 310e9), known=known)["nvlink"].saturated


@pytest.mark.parametrize("sensed", ["h100_nvl", "h100_pcie", "a100_pcie_80gb"])
def test_a_bridge_is_not_held_against_the_peak_of_pcie(bench, sensed):
    assert "nvlink" not in of(bench, lambda t: np.full(len(t), 60e9), sensed=sensed)
    bridge = {"link_peaks": {"nvlink": 240e9}}
    assert not of(bench, lambda t: np.full(len(t), 60e9), sensed=sensed, known=bridge)["nvlink"].saturated


def test_pcie_is_held_against_what_a_calibration_measured(bench):
    sent = 54e9 * (TIME_S + 1) + 1e12
    traffic = {"pcie_tx_bytes": sent, "pcie_rx_bytes": sent * 0 + 7.0}
    found = of(bench, lambda t: 0 * t, known={"link_peaks": {"pcie": 55e9}}, **traffic)["pcie"]
    assert found.saturated and found.claim == "pcie (of measured peak)"
    assert found.achieved_frac == pytest.approx(54 / 55)
    assert "pcie" not in of(bench, lambda t: 0 * t, **traffic)


def test_the_network_is_held_against_the_speed_of_the_slowest_nodes_links(bench):
    sent = 90e9 * (TIME_S + 1) + 1e12
    nodes = ("n0", "n1")
    rows = {(node, "host"): {"time_s": TIME_S, "nic_tx_bytes": sent, "nic_rx_bytes": sent} for node in nodes}
    gpus = [(node, "gpu0") for node in nodes]
    spans = bench.spans([(gpu, rank, 0, "step", 0.0, 20.0) for rank, gpu in enumerate(gpus)])

    def found(*speeds):
        hosts = [{} if speed is None else {"nic_link_bytes_per_s": speed} for speed in speeds]
        manifests = {node: {"devices": {"host": facts}} for node, facts in zip(nodes, hosts, strict=True)}
        aligned = align({"host": bench.tier("host", rows)}, spans, manifests)
        peaks = link_peaks(aligned, None)
        return use_metrics(aligned, peaks), saturation(aligned, peaks, segments(aligned, spans), divided=False)

    metrics, (one,) = found(200e9, 100e9)
    assert metrics["nic_of_peak_frac"] == pytest.approx(0.9)
    assert one.saturated and one.claim == "nic (of rated peak)" and "ports" in one.peak_source
    metrics, nothing = found(200e9, None)
    assert "nic_of_peak_frac" not in metrics and nothing == ()


def test_without_a_peak_or_readings_nothing_is_said(bench):
    assert "nvlink" not in of(bench, lambda t: np.full(len(t), 1e9), sensed=None)
    assert {"pcie", "nic", "hbm", "tensor"}.isdisjoint(of(bench, lambda t: np.full(len(t), 1e9)))


def test_units_count_in_shares_of_their_peak_while_computing(bench):
    busy = np.where(TIME_S <= 10, 0.93, 0.0)
    spans = half_communication()
    found = of(bench, lambda t: 0 * t, spans=spans, tensor_active_frac=busy, dram_active_frac=busy * 0.2)
    assert (found["tensor"].within, found["tensor"].saturated) == ("compute", True)
    assert found["tensor"].achieved_frac == pytest.approx(0.93, abs=0.02)
    assert not found["hbm"].saturated
