"""Coefficients of collectives and kernels, fitted to the table of a sweep, with errors on cases held out."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import pyarrow as pa

from wattune.arrays import Floats
from wattune.catalog.hardware import ClusterSpec, DeviceSpec
from wattune.catalog.networks import NETWORKS
from wattune.cost.coefficients import KernelCoefficients, MeasuredCollective, StepTimeCoefficients
from wattune.cost.step_time.links import Links
from wattune.cost.step_time.matmul import matmul_s
from wattune.cost.step_time.work import attention_fill
from wattune.cost.sweep import COLLECTIVES, COLUMNS, GRAPH_BYTES
from wattune.errors import PlanError
from wattune.fitting.store import HoldOut, note

LEAST_SIZES: Final = 3
"""Sizes of a collective that say how its time depends on the size."""

MEMORY_KINDS: Final = ("copy", "add")
"""Kernels whose rate is that of memory alone."""
LEAST_BYTES: Final = 2**28
"""Least array of such a kernel: smaller ones lie in caches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepFit:
    """Fit of a sweep to one kind of device."""

    device: str
    device_uuids: tuple[str, ...]
    date: str
    """Of the last row, ISO 8601."""
    collectives: tuple[MeasuredCollective, ...]
    kernels: Mapping[str, float]
    """Fields of `KernelCoefficients` that were measured."""
    hold_out: Mapping[str, HoldOut]
    """Errors of collectives with one size left out, and of products with one model left out."""

    @property
    def label(self) -> str:
        """Short text, such as `links of 2026-11-22`."""
        return f"links of {self.date[:10]}"

    def applied(self, prior: StepTimeCoefficients) -> StepTimeCoefficients:
        """Returns coefficients with what was measured, beside what earlier sweeps did in other groups and networks.

        Kernels that were measured inside steps here stay: in a step they meet other caches, clocks and neighbours.
        """
        link, kernel = prior.link, prior.kernel
        if self.collectives:
            again = {one.place for one in self.collectives}
            kept = [one for one in link.measured if one.place not in again]
            link = replace(link, measured=(*kept, *self.collectives), origin="measured here")
        if self.kernels and kernel.origin != "measured here":
            values: dict[str, Any] = dict(self.kernels)
            kernel = replace(kernel, **values)
        return replace(prior, link=link, kernel=kernel)


def fit_sweep(table: pa.Table, device: DeviceSpec, prior: StepTimeCoefficients) -> SweepFit:
    """Fits a sweep, rows of `wattune.cost.sweep.COLUMNS` of one kind of device alone.

    Raises `PlanError` where the table has other columns, no rows, or the catalog lacks the device's peaks.
    """
    missing = [name for name in COLUMNS.names if name not in table.column_names]
    if missing or not table.num_rows:
        what = f"lacks the columns {', '.join(missing)}" if missing else "has no row"
        raise PlanError(f"the table of links {what}; give links.parquet of `wattune calibrate --links`")
    rows = table.to_pylist()
    hold_out: dict[str, HoldOut] = {}
    collectives = _collectives(rows, device, prior, hold_out)
    return SweepFit(
        device=device.name,
        device_uuids=tuple(sorted({row["device_uuid"] for row in rows if row["device_uuid"]})),
        date=max(row["date"] for row in rows),
        collectives=collectives,
        kernels=_kernels(rows, device, hold_out),
        hold_out=hold_out,
    )


def _collectives(
    rows: Sequence[Mapping[str, Any]], device: DeviceSpec, prior: StepTimeCoefficients, hold_out: dict[str, HoldOut]
) -> tuple[MeasuredCollective, ...]:
    """Divides measured times by the formula's, by kind, group, network and size."""
    if device.link_bandwidth_bytes_per_s is None:
        return ()
    groups: dict[tuple[str, int, int, str], list[Mapping[str, Any]]] = defaultdict(list)
    for row in rows:
        if row["kind"] in COLLECTIVES:
            groups[row["kind"], row["group_size"], row["num_nodes"], row["network"] or ""].append(row)
    found, errors = [], []
    alone = replace(prior.link, in_step_frac=1.0, measured=())
    for (kind, size, nodes, network), own in sorted(groups.items()):
        times_s = _by_size(own)
        if len(times_s) < LEAST_SIZES:
            continue
        sizes, measured_s = np.array([*times_s]), np.array([*times_s.values()])
        ratio = measured_s / _formula_s(
            kind, size, nodes, sizes, Links.of(_cluster(device, size, nodes, network), alone)
        )
        errors += [*_left_out(np.log(sizes), np.log(ratio))]
        found.append(
            MeasuredCollective(
                kind=kind,
                group_size=size,
                num_nodes=nodes,
                sizes_bytes=tuple(sizes.tolist()),
                time_ratio=tuple(ratio.tolist()),
                latency_s=float(measured_s[0]),
                network=network,
            )
        )
    note(hold_out, "collective_time_s", np.array(errors), len(errors))
    return tuple(found)


def _by_size(rows: Sequence[Mapping[str, Any]]) -> dict[float, float]:
    """Returns the median time of each size.

    Where graphs were measured, small messages outside of them are left out: theirs is the time of the host to start
    them, which a step hides.
    """
    graphs = any(row["in_graph"] for row in rows)
    kept = [row for row in rows if row["in_graph"] or not graphs or row["size_bytes"] > GRAPH_BYTES]
    sizes = sorted({float(row["size_bytes"]) for row in kept})
    return {size: float(np.median([row["time_s"] for row in kept if row["size_bytes"] == size])) for size in sizes}


def _cluster(device: DeviceSpec, size: int, nodes: int, network: str) -> ClusterSpec:
    on_node, between = max(size // nodes, 1), NETWORKS.get(network)
    return ClusterSpec(device=device.name, num_nodes=nodes, devices_per_node=on_node, network=between)


def _formula_s(kind: str, size: int, nodes: int, sizes: Floats, links: Links) -> Floats:
    if kind == "send_recv":
        return links.send_s(sizes, np.full(len(sizes), nodes > 1))
    group = links.group(np.full(len(sizes), float(size)), np.ones(len(sizes)))
    return links.collective_s(kind, group, sizes)


def _left_out(x: Floats, y: Floats) -> Floats:
    """Returns relative errors of each inner point, interpolated between its neighbours."""
    guess = y[:-2] + (y[2:] - y[:-2]) * (x[1:-1] - x[:-2]) / (x[2:] - x[:-2])
    return np.asarray(np.expm1(guess - y[1:-1]))


def _kernels(rows: Sequence[Mapping[str, Any]], device: DeviceSpec, hold_out: dict[str, HoldOut]) -> dict[str, float]:
    """Computes rates over those of the table of products, and over the device's peaks."""
    peak, bandwidth = device.peak_bf16_flop_per_s, device.memory_bandwidth_bytes_per_s
    found: dict[str, float] = {}
    if peak is None or bandwidth is None:
        return found
    products = [row for row in rows if row["kind"] == "matmul" and row["dtype"] == "bfloat16"]
    if products:
        m, n, k, measured_s = (np.array([row[name] for row in products], float) for name in ("m", "n", "k", "time_s"))
        frac = matmul_s(m, n, k, flop_per_s=peak, bytes_per_s=bandwidth) / measured_s
        found["matmul_frac"] = float(np.median(frac))
        models = np.array([row["model"] for row in products])
        if len(set(models)) > 1:
            other = np.array([np.median(frac[models != name]) for name in models])
            note(hold_out, "product_time_s", frac / other - 1, len(set(models)))
    for kind in ("attention_forward", "attention_backward"):
        own = [row for row in rows if row["kind"] == kind and row["dtype"] == "bfloat16"]
        if own:
            rates = [row["flop_per_s"] / peak / attention_fill(row["seq_len"], row["head_size"]) for row in own]
            found[f"{kind}_frac"] = float(np.median(rates))
    moved = [row for row in rows if row["kind"] in MEMORY_KINDS and row["size_bytes"] >= LEAST_BYTES]
    if moved:
        found["memory_frac"] = float(np.median([row["algorithm_bytes_per_s"] for row in moved])) / bandwidth
    assert found.keys() <= {*KernelCoefficients.__dataclass_fields__}, "fields of the coefficients"
    return found
