"""Views of a machine and of what is known of machines: doctor, catalog, metrics, calibrations, sweeps of links."""

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from statistics import median
from typing import Any, Final

import pyarrow as pa

from wattune.catalog.hardware import DEVICES, DeviceSpec
from wattune.catalog.models import MODELS
from wattune.catalog.networks import FABRICS, HOST_CLOCKS_GHZ, NETWORKS
from wattune.cost.sweep import COLLECTIVES
from wattune.metrics import METRICS
from wattune.view.table import COUNT, FIGURE, SIMULATED, Cell, Column, Note, Table, View, columns_of, worded

_KERNELS_OF_FLOPS: Final = ("matmul", "attention_forward", "attention_backward")


def metrics_table(title: str, metrics: Mapping[str, float]) -> Table:
    """Lays out every metric of a trial or recording, in the schema's order, the group once."""
    names = [name for name in METRICS if name in metrics]
    first = {METRICS[name].group: name for name in reversed(names)}
    columns = [
        Column("group", lambda name: METRICS[name].group if first[METRICS[name].group] == name else ""),
        Column("metric", str, place="lead"),
        Column("value", lambda name: worded(name, metrics[name]), FIGURE),
    ]
    return Table(title, columns, names)


def metric_list(rows: Sequence[Mapping[str, Any]]) -> View:
    """Lays out metrics by group: unit, better direction, meaning, tables."""
    columns = [
        Column("metric", lambda row: row["name"]),
        Column("unit", lambda row: row["unit"]),
        Column("better", lambda row: row["better"]),
        Column("is", lambda row: row["meaning"], place="prose"),
        Column("from", lambda row: " ".join(row["tables"])),
    ]
    groups = dict.fromkeys(row["group"] for row in rows)
    return [Table(group, columns, [row for row in rows if row["group"] == group]) for group in groups]


def findings_table(findings: Sequence[Any]) -> Table:
    """Lays out what a machine has or lacks, and the consequences; see `wattune.doctor.Finding`."""
    columns = [
        Column("", lambda one: Cell("yes", tone="good") if one.ok else Cell("no", tone="lacking"), place="lead"),
        Column("what", lambda one: one.topic, place="lead"),
        Column("have, and what follows", lambda one: Cell(one.have, small=one.follows), place="prose"),
    ]
    return Table("", columns, findings)


def catalog_view(names: Collection[str] | None = None) -> View:
    """Lays out devices, networks and models with their sources: all, or of some names; and models that are left out."""
    chosen = {*DEVICES, *NETWORKS, *FABRICS, *HOST_CLOCKS_GHZ, *MODELS} if names is None else names
    figures = {
        "bf16 peak": "peak_bf16_flop_per_s",
        "fp8 peak": "peak_fp8_flop_per_s",
        "memory": "memory_bytes",
        "bandwidth": "memory_bandwidth_bytes_per_s",
        "power limit": "power_limit_w",
        "clock": "sm_clock_max_mhz",
    }

    def known(device: DeviceSpec, name: str) -> Any:
        return Cell(text="unknown") if (value := getattr(device, name)) is None else value

    source = Column("source", lambda one: one.source, place="prose")
    devices = [
        Column("name", lambda one: one.name),
        *columns_of(figures, known),
        source,
    ]
    models = [
        Column("name", lambda one: one.name),
        Column("parameters", lambda one: f"{one.num_parameters / 1e9:.1f} B", FIGURE),
        Column("active", lambda one: f"{one.num_active_parameters / 1e9:.1f} B", FIGURE),
        Column("layers", lambda one: str(one.num_layers), FIGURE),
        Column("hidden", lambda one: str(one.hidden_size), FIGURE),
        Column("ffn", lambda one: str(one.ffn_hidden_size), FIGURE),
        Column("heads", lambda one: str(one.num_heads), FIGURE),
        Column("KV", lambda one: str(one.num_kv_heads), FIGURE),
        Column("vocabulary", lambda one: one.vocab_size, COUNT),
        Column(
            "experts", lambda one: f"{one.num_experts_per_token} of {one.num_experts}" if one.is_moe else None, FIGURE
        ),
        source,
    ]
    networks = [
        Column("name", lambda one: one.name),
        Column("bandwidth", lambda one: one.bandwidth_bytes_per_s, "bandwidth_bytes_per_s"),
        Column("ports a device", lambda one: f"{one.ports_per_device:g}", FIGURE),
        Column("latency", lambda one: f"{1e6 * one.latency_s:g} us", FIGURE),
        Column("to the spine", lambda one: f"1:{one.oversubscription:g}" if one.rail_devices else None, FIGURE),
        source,
    ]
    fabrics = [
        Column("name", lambda one: one[0]),
        Column("devices", lambda one: one[1][0], COUNT),
        Column("source", lambda one: one[1][2], place="prose"),
    ]
    hosts = [Column("name", lambda one: one[0]), Column("clock", lambda one: f"{one[1]:g} GHz", FIGURE)]
    return [
        Table("Devices", devices, [one for one in DEVICES.values() if one.name in chosen]),
        Table("Networks between nodes", networks, [one for one in NETWORKS.values() if one.name in chosen]),
        Table("Fabrics", fabrics, [one for one in FABRICS.items() if one[0] in chosen]),
        Table("Processors of hosts", hosts, [one for one in HOST_CLOCKS_GHZ.items() if one[0] in chosen]),
        Table("Models", models, [one for one in MODELS.values() if one.name in chosen]),
    ]


def calibration_view(found: Mapping[str, Any]) -> View:
    """Lays out a calibration: a device's power sensors, errors by window, cost of sampling, peaks of links."""
    title = f"{found['device']} {found['name']}" + (f", driver {found['driver']}" if "driver" in found else "")
    signals = [
        Column("signal", lambda one: one[0]),
        Column("period", lambda one: one[1]["sensor_period_s"], "time_s"),
        Column("delay", lambda one: one[1]["delay_s"], "time_s"),
        Column("window", lambda one: one[1]["window_s"], "time_s"),
        Column("energy told", lambda one: _percent(one[1]["gain_frac"]), FIGURE),
        Column("fit R²", lambda one: f"{one[1]['explained_frac']:.3f}", FIGURE),
    ]
    windows = {window: window for wave in found["waves"] for window in wave["peaks_w"]}

    def peak(wave: Mapping[str, Any], window: str) -> Cell:
        """Returns the highest power by one window, and its distance below the highest sample."""
        if window not in wave["peaks_w"]:
            return Cell()
        short_frac = wave["under_report_frac"][window]
        return Cell(wave["peaks_w"][window], detail=f"{-short_frac:+.0%}" if short_frac else "")

    waves = [
        Column("period", lambda wave: wave["period_s"], "period_s"),
        *columns_of(windows, peak, "peak_w"),
        Column("energy off by", lambda wave: _percent(wave["energy_error_frac"]), FIGURE),
    ]
    cost = found["overhead"]
    link_peaks = {link: worded("link_bytes_per_s", rate) for link, rate in found.get("link_peaks", {}).items()}
    return [
        Table(f"{title}: sensors", signals, list(found["signals"].items())),
        Table("Highest power of a square wave, by window", waves, found["waves"]),
        Note(
            f"sampling: step time x {cost['ratio']:.4f} ({cost['low']:.4f} to {cost['high']:.4f} with "
            f"{cost['confidence_frac']:.0%} confidence), {_percent(cost['sampler_cpu_frac'])} of one processor"
        ),
        *(
            Note(f"{link}: {peak} one way of copies that go both, by the device's own counter")
            for link, peak in link_peaks.items()
        ),
        *([SIMULATED] if found["simulated"] else []),
    ]


def _percent(value_frac: float | None) -> str | None:
    return None if value_frac is None else f"{value_frac:.2%}"


def links_view(table: pa.Table) -> View:
    """Lays out rows of `wattune.cost.sweep.COLUMNS`: collectives by group and size, and the rates of kernels."""
    rows = table.to_pylist()
    collectives = [row for row in rows if row["kind"] in COLLECTIVES]
    collectives.sort(key=lambda row: (row["group_size"], COLLECTIVES.index(row["kind"]), row["size_bytes"]))
    kernels: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        if row["kind"] not in COLLECTIVES:
            kernels[row["kind"], row["device_uuid"] or row["device"]].append(row)
    return [_collectives(collectives), _kernels(kernels)]


def _collectives(rows: Sequence[Mapping[str, Any]]) -> Table:
    device = rows[0]["device_name"] if rows else ""

    def microseconds(row: Mapping[str, Any], name: str) -> str:
        """Latencies of links are some microseconds, which the milliseconds of other tables hide."""
        return f"{row[name] * 1e6:,.1f}"

    columns = [
        Column("collective", lambda row: row["kind"] + (" in a graph" if row["in_graph"] else ""), place="lead"),
        Column("ranks", lambda row: row["group_size"], COUNT),
        Column("nodes", lambda row: row["num_nodes"], COUNT),
        Column("size", lambda row: row["size_bytes"], COUNT, place="lead"),
        Column("time µs", lambda row: microseconds(row, "time_s"), FIGURE),
        Column(
            "quartiles µs",
            lambda row: f"{microseconds(row, 'time_low_s')} to {microseconds(row, 'time_high_s')}",
            FIGURE,
        ),
        Column("algorithm", lambda row: row["algorithm_bytes_per_s"], "rate_bytes_per_s"),
        Column("bus", lambda row: row["bus_bytes_per_s"], "rate_bytes_per_s"),
    ]
    return Table(f"{device}: collectives (size and bandwidths as nccl-tests count them)", columns, rows)


def _kernels(kernels: Mapping[tuple[str, str], Sequence[Mapping[str, Any]]]) -> Table:
    def rate(choose: Any) -> Any:
        def text(one: tuple[tuple[str, str], Sequence[Mapping[str, Any]]]) -> str:
            column = "flop_per_s" if one[0][0] in _KERNELS_OF_FLOPS else "algorithm_bytes_per_s"
            return worded(f"rate_{column}", choose([row[column] for row in one[1]]))

        return text

    columns = [
        Column("kernel", lambda one: one[0][0], place="lead"),
        Column("device", lambda one: one[0][1], place="lead"),
        Column("cases", lambda one: len(one[1]), COUNT),
        Column("slowest", rate(min), FIGURE),
        Column("median", rate(median), FIGURE),
        Column("fastest", rate(max), FIGURE),
    ]
    return Table("Kernels", columns, list(kernels.items()))
