"""Metrics, a line each: unit in the name, group, direction that is better, tables, meaning and formula."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, Protocol, TypeAlias

from wattune.units import unit_of


class MetricInput(Protocol):
    """Facts of a run that formulas use, beside its other metrics (`wattune.analysis.run_data.Examined`)."""

    @property
    def num_steps(self) -> int | None:
        """Measured steps; None without spans."""

    @property
    def duration_s(self) -> float:
        """Length of the window."""

    @property
    def first_step_time_s(self) -> float | None:
        """Time of the very first step on its slowest rank; None where no step of warm-up is known."""

    @property
    def tokens_per_step(self) -> float | None:
        """Tokens of a step over all ranks."""

    @property
    def energy_j(self) -> float | None:
        """Energy of all devices over the window; None unless every power sensor covers it."""

    @property
    def device_outlier_frac(self) -> float | None:
        """Distance of the oddest device to the median of its peers."""

    def host_bound_frac(self, step_time_s: float) -> float | None:
        """Share of a step in which devices wait for their host; None without a profiled pass."""


Formula: TypeAlias = Callable[[MetricInput, Mapping[str, float]], float | None]
"""Computes a metric of a run, with the run's other metrics by name; one that was not measured is a `KeyError`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One figure that a trial's result may hold."""

    name: str
    group: str
    better: str
    """`lower`, `higher`, or `none` where neither is better by itself."""
    meaning: str
    """A line that stands alone; docs/metrics says more: windows, formulas, pitfalls."""
    tables: tuple[str, ...]
    """Tables that it is computed from: tiers of telemetry, `spans`, `kernels`; `result` is what workers report, or a
    recorder."""
    formula: Formula | None
    """None where the function of its group finds it (`wattune.analysis.figures.GROUPS`), or where it is told."""

    @property
    def is_told(self) -> bool:
        """True where only the run's own processes, or a recorder, know it."""
        return self.tables == ("result",)

    @property
    def unit(self) -> str | None:
        """The unit that its name declares."""
        return unit_of(self.name)


def _metrics(head: str, **lines: str | tuple[str, Formula]) -> dict[str, Metric]:
    group, better, tables = head.split(" | ")
    found = {}
    for name, line in lines.items():
        meaning, formula = (line, None) if isinstance(line, str) else line
        sources = tuple(tables.split())
        found[name] = Metric(name=name, group=group, better=better, meaning=meaning, tables=sources, formula=formula)
    return found


def over(value: float | None, divisor: float | None) -> float | None:
    """Returns a figure over another; None where either is not known, or the divisor is 0."""
    return None if value is None or not divisor else value / divisor


METRICS: Final[dict[str, Metric]] = {
    **_metrics(
        "speed | lower | result",
        window_s="length of a recording's window, where it has no steps",
        startup_s="time from the start of a command to its first step",
        overhead_frac="share of a command's run outside of its measured steps",
    ),
    **_metrics(
        "speed | lower | spans",
        step_time_s="time of a step: the median over steps of the slowest rank's time",
        step_time_p95_s="95th percentile over steps of the slowest rank's time",
        first_step_time_s=("time of the very first step, slowest rank", lambda run, _: run.first_step_time_s),
        compile_time_s=(
            "time of the first step beyond step_time_s: compiling, tuning, start of communication",
            lambda _, found: max(found["first_step_time_s"] - found["step_time_s"], 0.0),
        ),
    ),
    **_metrics(
        "speed | lower | kernels spans",
        device_bound_step_time_s=(
            "median step time less what devices wait for their host",
            lambda _, found: (1 - found["host_bound_frac"]) * found["step_time_s"],
        ),
    ),
    **_metrics(
        "speed | higher | spans",
        tokens_per_s="throughput: all tokens of the measured steps over the window",
        tokens_per_s_per_device="throughput of one device: tokens_per_s over the ranks",
        mfu_frac="model FLOP utilization: FLOPs the model needs a second over the ranks' dense peak",
    ),
    **_metrics(
        "energy | lower | ring fast",
        total_energy_j=(
            "energy of a recording without steps: of all devices over window_s",
            lambda run, _: run.energy_j if run.num_steps is None else None,
        ),
    ),
    **_metrics(
        "energy | lower | ring fast spans",
        energy_per_step_j=("energy of all devices for a step", lambda run, _: over(run.energy_j, run.num_steps)),
        energy_per_token_j=(
            "energy of all devices for a token",
            lambda run, found: over(found["energy_per_step_j"], run.tokens_per_step) or None,
        ),
    ),
    **_metrics(
        "energy | higher | ring fast spans",
        tokens_per_j=(
            "tokens for a joule of all devices",
            lambda run, found: over(run.tokens_per_step, found["energy_per_step_j"]),
        ),
    ),
    **_metrics(
        "energy | lower | ring fast spans",
        energy_delay_product_js=(
            "energy of a step times step_time_s",
            lambda _, found: found["energy_per_step_j"] * found["step_time_s"],
        ),
    ),
    **_metrics(
        "power | lower | ring fast",
        device_power_mean_w="mean power of a device, mean over devices",
        device_power_peak_20ms_w="largest sample of power, worst device; only from a ring of 20 ms",
        device_power_peak_100ms_w="largest mean power over 100 ms, worst device",
        device_power_peak_1s_w="largest mean power over 1 s, worst device",
        node_device_power_mean_w="mean power of all devices of a node together, worst node",
        node_device_power_peak_100ms_w="largest power over 100 ms of all devices of a node together, worst node",
        node_device_power_peak_1s_w=(
            "largest power over 1 s of all devices of a node together: what a rack must carry"
        ),
        cluster_device_power_peak_1s_w="largest power over 1 s of all devices of the cluster together",
    ),
    **_metrics(
        "power | lower | host",
        node_power_mean_w="mean power of a chassis meter, where there is one",
        node_power_peak_1s_w="largest power over 1 s of a chassis meter, where there is one",
    ),
    **_metrics(
        "power | none | slow",
        device_power_limit_w="lowest limit of power that was enforced on a device",
    ),
    **_metrics(
        "power | none | ring fast",
        power_coincidence_frac="the cluster's peak over 1 s as a share of the sum of the devices' own peaks",
    ),
    **_metrics(
        "power | lower | ring fast",
        power_ramp_max_w_per_s="largest change of a node's power between neighbouring means of 100 ms",
        power_swing_rms_w="swing of a node's power between 0.1 Hz and 20 Hz, root of the mean square",
    ),
    **_metrics(
        "excursion | lower | ring slow",
        excursion_count="number of times a device's 100 ms mean power exceeded 1.05 of its limit",
        excursion_time_frac="share of device-time inside excursions of power over the limit",
        excursion_energy_j="energy above the limit inside excursions",
        excursion_peak_over_limit_frac="largest 100 ms mean power over the limit, minus 1, worst device",
        over_limit_20ms_time_frac="share of device-time in which samples of power are above the limit",
    ),
    **_metrics(
        "throttle | lower | fast ring slow",
        throttle_time_s="time in which clock is lost for a cause",
        throttle_frac="share of device-time in which clock is lost for a cause: power, heat or hardware",
        throttle_loss_frac="share of clock lost to all causes",
        throttle_power_frac="share of device-time in which clock is lost to the power cap",
        throttle_thermal_frac="share of device-time in which clock is lost to heat",
        throttle_hw_frac="share of device-time in which clock is lost to a hardware slowdown or an external brake",
    ),
    **_metrics(
        "throttle | lower | fast",
        clock_deficit_frac="share of clock below the maximum at all times, whatever the cause",
    ),
    **_metrics(
        "throttle | lower | fast ring slow",
        throttle_power_loss_frac="share of clock lost to the power cap",
        throttle_thermal_loss_frac="share of clock lost to heat",
        throttle_hw_loss_frac="share of clock lost to a hardware slowdown or an external brake",
    ),
    **_metrics(
        "throttle | lower | slow",
        power_cap_active_frac="share of time in which the driver's counter of the power cap ran; no loss by itself",
        thermal_active_frac="share of time in which the driver's counter of heat ran",
        hw_active_frac="share of time in which the driver's counter of hardware slowdowns ran",
    ),
    **_metrics(
        "thermal | lower | fast",
        device_temp_max_c="hottest core temperature of any device",
        device_temp_mean_c="core temperature, mean over time and devices",
        device_temp_spread_c=("difference of the mean temperatures of a node's hottest and coolest device, worst node"),
    ),
    **_metrics(
        "thermal | lower | fast ring",
        device_temp_settled_c="hottest core temperature once stored heat is in balance with the measured power",
        device_temp_settled_uncertainty_c="half of the 95 % interval of the settled temperature, in kelvin",
    ),
    **_metrics(
        "thermal | none | fast ring",
        device_temp_start_c="core temperature at the window's start of the device that gets hottest",
    ),
    **_metrics(
        "thermal | lower | slow",
        memory_temp_max_c="hottest memory temperature of any device",
    ),
    **_metrics(
        "thermal | higher | slow",
        thermal_margin_min_c="smallest distance of a device to its own limit of temperature",
    ),
    **_metrics(
        "thermal | higher | fast ring slow",
        thermal_margin_settled_c=(
            "distance of the hottest device to its own limit of temperature once it is settled",
            lambda _, m: m["thermal_margin_min_c"] - (m["device_temp_settled_c"] - m["device_temp_max_c"]),
        ),
    ),
    **_metrics(
        "utilization | none | counter",
        tensor_active_frac="share of cycles in which tensor cores work, mean over devices",
        dram_active_frac="share of the peak of memory bandwidth that is used, mean over devices",
        nvlink_bytes_per_s="bytes that a device sends and receives over NVLink, mean over devices",
        pcie_bytes_per_s="bytes that a device sends and receives over PCIe, mean over devices",
    ),
    **_metrics(
        "utilization | none | host",
        nic_bytes_per_s="bytes that a node sends and receives over its network ports, mean over nodes",
    ),
    **_metrics(
        "utilization | none | counter",
        nvlink_of_peak_frac="traffic over NVLink as a share of twice the peak of one direction",
        pcie_of_peak_frac="traffic over PCIe as a share of twice the measured peak of one direction",
    ),
    **_metrics(
        "utilization | none | host",
        nic_of_peak_frac="traffic of the network as a share of twice the ports' peak of one direction",
    ),
    **_metrics(
        "utilization | lower | result",
        expert_imbalance_frac="tokens of the busiest expert parallel rank over those of the mean rank, minus 1",
    ),
    **_metrics(
        "memory | lower | result",
        memory_peak_bytes="largest memory that a rank's allocator held",
        memory_retries_per_step_count="times a step that a rank's allocator gave memory back to ask anew, worst rank",
    ),
    **_metrics(
        "memory | higher | result",
        memory_headroom_frac="share of device memory that the largest rank left free",
    ),
    **_metrics(
        "step_breakdown | none | spans",
        compute_frac="share of rank-time in forward, backward or optimizer without waiting",
        exposed_comm_frac="share of rank-time waiting for communication that no compute hides",
        bubble_frac="share of rank-time waiting that the pipeline's schedule has anyway",
        straggler_frac="share of rank-time waiting for a rank that computes longer",
        other_frac="share of rank-time in no phase",
    ),
    **_metrics(
        "step_breakdown | none | kernels spans",
        exposed_comm_tp_frac="part of exposed_comm_frac that is tensor parallelism's",
        exposed_comm_pp_frac="part of exposed_comm_frac that is the pipeline's",
        exposed_comm_cp_frac="part of exposed_comm_frac that is context parallelism's",
        exposed_comm_dp_frac="part of exposed_comm_frac that is data parallelism's",
        exposed_comm_ep_frac="part of exposed_comm_frac that is expert parallelism's",
    ),
    **_metrics(
        "step_breakdown | lower | kernels spans",
        host_bound_frac=(
            "share of a step in which devices wait for their host, or in a collective for another rank's",
            lambda run, found: run.host_bound_frac(found["step_time_s"]),
        ),
    ),
    **_metrics(
        "measurement_quality | higher | ring fast",
        sample_coverage_frac="share of the window that the worst power sensor covers",
    ),
    **_metrics(
        "measurement_quality | lower | ring fast slow",
        energy_integral_error_frac="difference of integrated power and the energy counters",
    ),
    **_metrics(
        "measurement_quality | lower | ring fast",
        sensor_period_s="period of the slowest power sensor: half the finest window that it resolves",
    ),
    **_metrics(
        "measurement_quality | lower | result",
        telemetry_overhead_frac="share of a step that sampling costs, where it was measured",
    ),
    **_metrics(
        "measurement_quality | lower | spans",
        step_time_uncertainty_frac="half of the 95 % interval of the mean step time, over it",
    ),
    **_metrics(
        "measurement_quality | lower | ring fast spans",
        energy_per_step_uncertainty_frac="half of the 95 % interval of a step's energy, over it",
    ),
    **_metrics(
        "measurement_quality | lower | spans ring fast slow",
        device_outlier_frac=(
            "distance of the oddest device to the median of its peers",
            lambda run, _: run.device_outlier_frac,
        ),
    ),
}
"""Every metric by name, in the order of tables. Ranking, MLflow, exports and `wattune metrics` read it."""

PER_STEP_METRICS: Final = (
    "step_time_s",
    "step_time_p95_s",
    "device_bound_step_time_s",
    "energy_per_step_j",
    "energy_delay_product_js",
)
"""Metrics of one step: of steps with different numbers of tokens they do not compare."""
