"""Meaning of every metric of `wattune.schema` in a line that stands alone, and the tables that it is computed from.

docs/metrics says more: windows, formulas, pitfalls. `wattune metrics` shows these lines.
"""

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Meaning:
    """One metric in words."""

    text: str
    tables: tuple[str, ...]
    """Tables that it is computed from: tiers of telemetry, `spans`, `kernels`; `result` is what workers report, or a
    recorder."""


def _of(tables: str, **texts: str) -> dict[str, Meaning]:
    return {name: Meaning(text, tuple(tables.split())) for name, text in texts.items()}


MEANINGS: Final[dict[str, Meaning]] = {
    **_of("result", window_s="length of a recording's window, where it has no steps"),
    **_of(
        "spans",
        step_time_s="time of a step: the median over steps of the slowest rank's time",
        step_time_p95_s="95th percentile over steps of the slowest rank's time",
    ),
    **_of("kernels spans", device_bound_step_time_s="median step time less what devices wait for their host"),
    **_of(
        "spans",
        tokens_per_s="throughput: all tokens of the measured steps over the window",
        tokens_per_s_per_device="throughput of one device: tokens_per_s over the ranks",
        mfu_frac="model FLOP utilization: FLOPs the model needs a second over the ranks' dense peak",
    ),
    **_of("ring fast", total_energy_j="energy of a recording without steps: of all devices over window_s"),
    **_of(
        "ring fast spans",
        energy_per_step_j="energy of all devices for a step",
        energy_per_token_j="energy of all devices for a token",  # noqa: S106 - tokens of text
        tokens_per_j="tokens for a joule of all devices",
        energy_delay_product_js="energy of a step times step_time_s",
    ),
    **_of(
        "ring fast",
        device_power_mean_w="mean power of a device, mean over devices",
        device_power_peak_20ms_w="largest sample of power, worst device; only from a ring of 20 ms",
        device_power_peak_100ms_w="largest mean power over 100 ms, worst device",
        device_power_peak_1s_w="largest mean power over 1 s, worst device",
        node_device_power_mean_w="mean power of all devices of a node together, worst node",
        node_device_power_peak_100ms_w="largest power over 100 ms of all devices of a node together, worst node",
        node_device_power_peak_1s_w="largest power over 1 s of all devices of a node together: what a rack must carry",
        cluster_device_power_peak_1s_w="largest power over 1 s of all devices of the cluster together",
    ),
    **_of(
        "host",
        node_power_mean_w="mean power of a chassis meter, where there is one",
        node_power_peak_1s_w="largest power over 1 s of a chassis meter, where there is one",
    ),
    **_of("slow", device_power_limit_w="lowest limit of power that was enforced on a device"),
    **_of(
        "ring fast",
        power_coincidence_frac="the cluster's peak over 1 s as a share of the sum of the devices' own peaks",
        power_ramp_max_w_per_s="largest change of a node's power between neighbouring means of 100 ms",
        power_swing_rms_w="swing of a node's power between 0.1 Hz and 20 Hz, root of the mean square",
    ),
    **_of(
        "ring slow",
        excursion_count="number of times a device's 100 ms mean power exceeded 1.05 of its limit",
        excursion_time_frac="share of device-time inside excursions of power over the limit",
        excursion_energy_j="energy above the limit inside excursions",
        excursion_peak_over_limit_frac="largest 100 ms mean power over the limit, minus 1, worst device",
        over_limit_20ms_time_frac="share of device-time in which samples of power are above the limit",
    ),
    **_of(
        "fast ring slow",
        throttle_time_s="time in which clock is lost for a cause",
        throttle_frac="share of device-time in which clock is lost for a cause: power, heat or hardware",
        throttle_loss_frac="share of clock lost to all causes",
        throttle_power_frac="share of device-time in which clock is lost to the power cap",
        throttle_thermal_frac="share of device-time in which clock is lost to heat",
        throttle_hw_frac="share of device-time in which clock is lost to a hardware slowdown or an external brake",
    ),
    **_of("fast", clock_deficit_frac="share of clock below the maximum at all times, whatever the cause"),
    **_of(
        "fast ring slow",
        throttle_power_loss_frac="share of clock lost to the power cap",
        throttle_thermal_loss_frac="share of clock lost to heat",
        throttle_hw_loss_frac="share of clock lost to a hardware slowdown or an external brake",
    ),
    **_of(
        "slow",
        power_cap_active_frac="share of time in which the driver's counter of the power cap ran; no loss by itself",
        thermal_active_frac="share of time in which the driver's counter of heat ran",
        hw_active_frac="share of time in which the driver's counter of hardware slowdowns ran",
    ),
    **_of(
        "fast",
        device_temp_max_c="hottest core temperature of any device",
        device_temp_mean_c="core temperature, mean over time and devices",
        device_temp_spread_c="difference of the mean temperatures of a node's hottest and coolest device, worst node",
    ),
    **_of(
        "slow",
        memory_temp_max_c="hottest memory temperature of any device",
        thermal_margin_min_c="smallest distance of a device to its own limit of temperature",
    ),
    **_of(
        "counter",
        tensor_active_frac="share of cycles in which tensor cores work, mean over devices",
        dram_active_frac="share of the peak of memory bandwidth that is used, mean over devices",
        nvlink_bytes_per_s="bytes that a device sends and receives over NVLink, mean over devices",
        pcie_bytes_per_s="bytes that a device sends and receives over PCIe, mean over devices",
    ),
    **_of("host", nic_bytes_per_s="bytes that a node sends and receives over its network ports, mean over nodes"),
    **_of(
        "counter",
        nvlink_of_peak_frac="traffic over NVLink as a share of twice the peak of one direction",
        pcie_of_peak_frac="traffic over PCIe as a share of twice the measured peak of one direction",
    ),
    **_of("host", nic_of_peak_frac="traffic of the network as a share of twice the ports' peak of one direction"),
    **_of(
        "result",
        expert_imbalance_frac="tokens of the busiest expert parallel rank over those of the mean rank, minus 1",
        memory_peak_bytes="largest memory that a rank's allocator held",
        memory_headroom_frac="share of device memory that the largest rank left free",
    ),
    **_of(
        "spans",
        compute_frac="share of rank-time in forward, backward or optimizer without waiting",
        exposed_comm_frac="share of rank-time waiting for communication that no compute hides",
        bubble_frac="share of rank-time waiting that the pipeline's schedule has anyway",
        straggler_frac="share of rank-time waiting for a rank that computes longer",
        other_frac="share of rank-time in no phase",
    ),
    **_of(
        "kernels spans",
        exposed_comm_tp_frac="part of exposed_comm_frac that is tensor parallelism's",
        exposed_comm_pp_frac="part of exposed_comm_frac that is the pipeline's",
        exposed_comm_cp_frac="part of exposed_comm_frac that is context parallelism's",
        exposed_comm_dp_frac="part of exposed_comm_frac that is data parallelism's",
        exposed_comm_ep_frac="part of exposed_comm_frac that is expert parallelism's",
        host_bound_frac="share of a step in which devices run nothing and wait for their host",
    ),
    **_of("ring fast", sample_coverage_frac="share of the window that the worst power sensor covers"),
    **_of("ring fast slow", energy_integral_error_frac="difference of integrated power and the energy counters"),
    **_of(
        "ring fast",
        sensor_period_s="period of the slowest power sensor: half the finest window that it resolves",
    ),
    **_of("result", telemetry_overhead_frac="share of a step that sampling costs, where it was measured"),
    **_of("spans", step_time_uncertainty_frac="half of the 95 % interval of the mean step time, over it"),
    **_of("ring fast spans", energy_per_step_uncertainty_frac="half of the 95 % interval of a step's energy, over it"),
    **_of("spans ring fast slow", device_outlier_frac="distance of the oddest device to the median of its peers"),
}
"""Meanings by metric. A test holds the names to those of `wattune.schema.METRICS`, in their order."""
