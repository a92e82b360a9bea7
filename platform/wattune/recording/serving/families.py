"""Names, types and help texts of the metrics that a recording exposes, in base units, as Prometheus asks for.

Sources: https://prometheus.io/docs/practices/naming/, and the OpenMetrics specification 1.0. A name is that of a
quantity and never of a device: device, uuid and node are labels. What was not read is absent.
"""

from collections.abc import Mapping, Sequence
from functools import partialmethod
from typing import Final

from prometheus_client import Metric

from wattune.analysis.signals.readings import HOST
from wattune.recording.serving.follower import LOOK_BACK_S, ClockLost, DeviceView, Latest, Peaks, Snapshot
from wattune.schema import TELEMETRY, THROTTLE_REASON_BITS
from wattune.units import NS_PER_S, ns_to_s, s_to_ns
from wattune.version import __version__

STALE_S: Final = 10.0
"""Age from which a reading is not exposed. The sampler writes every 0.8 s, its slowest tier is read once a second."""

_HZ_PER_MHZ: Final = 1e6


_Columns = Mapping[str, tuple[str, Mapping[str, Mapping[str, str]]]]
"""Metrics that are a reading as it is: by name the help text, and the columns, each with its labels besides those of
the device. What `wattune.schema` calls cumulative is a counter."""

DEVICE_COLUMNS: Final[_Columns] = {
    "wattune_device_power_watts": ("Power of the device, the last reading.", {"power_instant_w": {}}),
    "wattune_device_power_average_watts": (
        "Power as the driver averages it, on NVIDIA data-centre GPUs over 1 s.",
        {"power_average_w": {}},
    ),
    "wattune_device_power_limit_watts": ("Enforced power limit.", {"power_limit_w": {}}),
    "wattune_device_energy_joules": (
        "Energy by the device's own counter, which begins when the driver is loaded.",
        {"energy_j": {}},
    ),
    "wattune_device_sm_clock_hertz": ("SM clock, the last reading.", {"sm_clock_mhz": {}}),
    "wattune_device_temperature_celsius": (
        "Temperature of the core or of the memory.",
        {"gpu_temp_c": {"sensor": "core"}, "memory_temp_c": {"sensor": "memory"}},
    ),
    "wattune_device_thermal_margin_celsius": (
        "Distance of the core to the temperature at which the device slows down.",
        {"thermal_margin_c": {}},
    ),
    "wattune_device_active_ratio": (
        "Share of time in which a part of the device was active, since the reading before.",
        {f"{part}_active_frac": {"part": part} for part in ("sm", "tensor", "dram")},
    ),
    "wattune_device_memory_used_bytes": ("Memory in use on the device.", {"memory_used_bytes": {}}),
    "wattune_device_link_bytes": (
        "Bytes over all links of a kind, as the device counts them.",
        {
            f"{link}_{short}_bytes": {"link": link, "direction": direction}
            for link in ("nvlink", "pcie")
            for short, direction in (("tx", "transmit"), ("rx", "receive"))
        },
    ),
    "wattune_device_driver_throttle_seconds": (
        "The driver's own count of time in which a cause was active. It also runs where no clock is lost.",
        {f"throttle_{cause}_ns": {"cause": cause} for cause in THROTTLE_REASON_BITS},
    ),
}

NODE_COLUMNS: Final[_Columns] = {
    "wattune_node_cpu_busy_ratio": ("Share of the node's processors that were busy.", {"cpu_busy_frac": {}}),
    "wattune_node_power_watts": (
        "Power of the processor packages, and of the node's memory, by RAPL.",
        {f"{domain}_power_w": {"domain": domain} for domain in ("package", "dram")},
    ),
    "wattune_node_memory_used_bytes": ("Main memory in use.", {"memory_used_bytes": {}}),
    "wattune_node_network_bytes": (
        "Bytes over all network ports of the node.",
        {"nic_tx_bytes": {"direction": "transmit"}, "nic_rx_bytes": {"direction": "receive"}},
    ),
    "wattune_node_cpu_temperature_celsius": ("The hottest processor sensor.", {"cpu_temp_max_c": {}}),
    "wattune_node_pressure_ratio": (
        "Share of time in which some task waited for a resource (Linux pressure stall information).",
        {f"psi_{each}_some_frac": {"resource": each} for each in ("cpu", "memory", "io")},
    ),
}
_SCALES: Final = {"_mhz": _HZ_PER_MHZ, "_ns": 1 / NS_PER_S}
"""Factors to base units, by the end of a column's name; else 1."""

_UNITS: Final = ("bytes", "celsius", "hertz", "joules", "ratio", "seconds", "watts")
"""Units of metrics, as the last words of their names."""


class _Made:
    """Families by name, in the order of their first sample. Of samples with the same labels the first one counts."""

    def __init__(self) -> None:
        self.families: dict[str, Metric] = {}
        self._seen: set[tuple[str, frozenset[tuple[str, str]]]] = set()

    def _add(self, kind: str, suffix: str, name: str, text: str, labels: Mapping[str, str], value: float = 1.0) -> None:
        if name not in self.families:
            word = name.rpartition("_")[2]
            self.families[name] = Metric(name, text, kind, unit=word if word in _UNITS else "")
        key = (name, frozenset(labels.items()))
        if key not in self._seen:
            self._seen.add(key)
            self.families[name].add_sample(f"{name}{suffix}", dict(labels), value)

    gauge = partialmethod(_add, "gauge", "")
    counter = partialmethod(_add, "counter", "_total")
    info = partialmethod(_add, "info", "_info")


def families(snapshots: Sequence[Snapshot], now_mono_ns: int, *, num_failures: int = 0) -> list[Metric]:
    """Makes the metrics of the recordings that are followed.

    The newest recording comes first: of what several have, such as the node's processors, its readings are exposed. A
    reading older than `STALE_S` is left out. Every family has a sample, and none is there twice. Returns families with
    at least one sample each, none twice.
    """
    made = _Made()
    made.info("wattune_build", "The version that exposes these metrics.", {"version": __version__})
    made.counter("wattune_exporter_failed_looks", "Looks at the sampler's files that failed.", {}, num_failures)
    for snapshot in snapshots:
        _of_recording(made, snapshot, now_mono_ns)
    return list(made.families.values())


def _of_recording(made: _Made, snapshot: Snapshot, now_mono_ns: int) -> None:
    _recording(made, snapshot)
    for name, view in snapshot.devices.items():
        labels = {"node": snapshot.node, "device": name, "uuid": str(view.facts.get("uuid", ""))}
        fresh = _fresh(view.latest, now_mono_ns)
        _device_facts(made, view, labels)
        _columns(made, DEVICE_COLUMNS, fresh, labels)
        _throttle_reasons(made, fresh, labels)
        if fresh:
            _peaks(made, "wattune_device_power", "the device's power", view.peaks, labels)
            _clock_lost(made, view.clock_lost, labels)
        _ages(made, view.latest, now_mono_ns, labels)
    node_labels = {"node": snapshot.node}
    host = {} if snapshot.host is None else {HOST: snapshot.host}
    _columns(made, NODE_COLUMNS, _fresh(host, now_mono_ns), node_labels)
    if any(_fresh(view.latest, now_mono_ns) for view in snapshot.devices.values()):
        _peaks(
            made, "wattune_node_devices_power", "the power of the node's devices together", snapshot.peaks, node_labels
        )
    _ages(made, host, now_mono_ns, {**node_labels, "device": HOST, "uuid": ""})
    _sampler(made, snapshot)


def _fresh(latest: Mapping[str, Latest], now_mono_ns: int) -> dict[str, Latest]:
    return {tier: one for tier, one in latest.items() if now_mono_ns - one["mono_ns"] <= s_to_ns(STALE_S)}


def _recording(made: _Made, snapshot: Snapshot) -> None:
    labels = {"node": snapshot.node}
    told = {"recording": snapshot.recording, **({"not_counted": ",".join(snapshot.others)} if snapshot.others else {})}
    made.info("wattune_recording", "The recording whose readings these are.", {**labels, **told})
    made.gauge(
        "wattune_recording_start_time_seconds",
        "Start of the recording's window, in seconds since 1970.",
        labels,
        ns_to_s(snapshot.start_wall_ns),
    )


def _device_facts(made: _Made, view: DeviceView, labels: Mapping[str, str]) -> None:
    facts = view.facts
    made.info(
        "wattune_device",
        "Facts of a device: product, driver, slot, and the backend that reads it (replay plays an earlier recording).",
        {**labels, **{name: str(facts.get(name, "")) for name in ("name", "driver", "slot", "backend")}},
    )
    if facts.get("sm_clock_max_mhz"):
        made.gauge(
            "wattune_device_sm_clock_max_hertz",
            "Highest SM clock of the device.",
            labels,
            facts["sm_clock_max_mhz"] * _HZ_PER_MHZ,
        )


def _columns(made: _Made, listed: _Columns, fresh: Mapping[str, Latest], labels: Mapping[str, str]) -> None:
    for name, (text, columns) in listed.items():
        for column, own in columns.items():
            tier = next((tier for tier, latest in fresh.items() if column in latest), None)
            if tier is not None:
                add = made.counter if TELEMETRY[tier].field(column).metadata[b"kind"] == b"cumulative" else made.gauge
                scale = next((scale for end, scale in _SCALES.items() if column.endswith(end)), 1.0)
                add(name, text, {**labels, **own}, fresh[tier][column] * scale)


def _throttle_reasons(made: _Made, fresh: Mapping[str, Latest], labels: Mapping[str, str]) -> None:
    reasons = fresh.get("fast", {}).get("event_reasons")
    for cause, bits in THROTTLE_REASON_BITS.items() if reasons is not None else ():
        made.gauge(
            "wattune_device_throttle_reason_active",
            "1 where the driver names the cause. The power cause alone does not say that clock is lost.",
            {**labels, "cause": cause},
            float(bool(int(reasons or 0) & bits)),
        )


def _peaks(made: _Made, prefix: str, what: str, peaks: Peaks, labels: Mapping[str, str]) -> None:
    for name, since, found in (
        ("peak", "since the recording's start", peaks.since_start_w),
        ("recent_peak", f"in the last {LOOK_BACK_S:.0f} s", peaks.recent_w),
    ):
        for window, peak_w in found.items():
            text = f"Highest mean of {what} over a window of that length, {since}."
            made.gauge(f"{prefix}_{name}_watts", text, {**labels, "window": window}, peak_w)


def _clock_lost(made: _Made, lost: ClockLost, labels: Mapping[str, str]) -> None:
    if not lost.assessed_s:
        return
    for name, text, value in (
        ("assessed", "Time whose clock was assessed for throttling, since the recording's start.", lost.assessed_s),
        ("throttled", "Assessed time with the clock below 0.98 of its maximum for a cause.", lost.throttled_s),
        (
            "clock_lost",
            "Integral of 1 minus clock over maximum while throttled. Its rate is the share lost.",
            lost.lost_s,
        ),
    ):
        made.counter(f"wattune_device_{name}_seconds", text, labels, value)
    for cause, lost_s in lost.lost_by_cause_s.items():
        text = "Clock lost while a cause was active. Causes overlap, so do not add them."
        made.counter("wattune_device_clock_lost_by_cause_seconds", text, {**labels, "cause": cause}, lost_s)


def _ages(made: _Made, latest: Mapping[str, Latest], now_mono_ns: int, labels: Mapping[str, str]) -> None:
    for tier, one in latest.items():
        text = f"Age of the last reading. Readings older than {STALE_S:.0f} s are not exposed."
        age_s = max(ns_to_s(now_mono_ns - one["mono_ns"]), 0.0)
        made.gauge("wattune_reading_age_seconds", text, {**labels, "tier": tier}, age_s)


def _sampler(made: _Made, snapshot: Snapshot) -> None:
    labels, manifest = {"node": snapshot.node}, snapshot.manifest
    made.gauge("wattune_sampler_up", "1 while the sampler's process runs.", labels, float(snapshot.sampler_alive))
    if "sampler" in manifest:
        text = "CPU time of the sampler."
        made.counter("wattune_sampler_cpu_seconds", text, labels, manifest["sampler"]["cpu_s"])
    for tier, record in manifest.get("tiers", {}).items():
        text = "Reads of a tier that came too late to be made."
        made.counter("wattune_sampler_missed_reads", text, {**labels, "tier": tier}, record["missed_ticks"])
        for column, codes in record.get("errors", {}).items():
            for code, count in codes.items():
                more = {"tier": tier, "column": column, "code": code}
                made.counter("wattune_sampler_failed_reads", "Reads that failed.", {**labels, **more}, count)
    text = "CPU time that reading the sampler's files for these metrics has cost."
    made.counter("wattune_exporter_cpu_seconds", text, labels, snapshot.cpu_s)
