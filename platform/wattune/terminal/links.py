"""A sweep of collectives and kernels on a terminal. Nothing here computes more than a median."""

from collections import defaultdict
from statistics import median
from typing import Any, Final

import pyarrow as pa
from rich.console import Console

from wattune.cost.sweep import COLLECTIVES
from wattune.terminal.tables import make_table, print_table
from wattune.units import format_quantity

_SHOWN: Final = ("matmul", "attention_forward", "attention_backward")


def print_links(console: Console, table: pa.Table) -> None:
    """Prints what a sweep found: collectives by group and size, then the rates of kernels.

    Args:
        console: The terminal.
        table: Rows of `wattune.cost.sweep.COLUMNS`.
    """
    rows = table.to_pylist()
    collectives = [row for row in rows if row["kind"] in COLLECTIVES]
    if collectives:
        _print_collectives(console, collectives)
    kernels: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        if row["kind"] not in COLLECTIVES:
            kernels[row["kind"], row["device_uuid"] or row["device"]].append(row)
    if not kernels:
        return
    shown = make_table("Kernels", "kernel", "device", "cases", "slowest", "median", "fastest", right=("cases",))
    for (kind, device), found in kernels.items():
        column = "flop_per_s" if kind in _SHOWN else "algorithm_bytes_per_s"
        rates = sorted(row[column] for row in found)
        figures = (format_quantity(f"rate_{column}", one) for one in (rates[0], median(rates), rates[-1]))
        shown.add_row(kind, device, str(len(found)), *figures)
    print_table(console, shown, lead=("kernel", "device"))


def _print_collectives(console: Console, rows: list[dict[str, Any]]) -> None:
    device = rows[0]["device_name"]
    title = f"{device}: collectives (size and bandwidths as nccl-tests count them)"
    names = ("collective", "ranks", "nodes", "size", "time µs", "quartiles µs", "algorithm", "bus")
    shown = make_table(title, *names, right=("ranks", "nodes", "size", "time µs"))
    order = sorted(rows, key=lambda row: (row["group_size"], COLLECTIVES.index(row["kind"]), row["size_bytes"]))
    for row in order:
        low, time, high = (_microseconds(row[name]) for name in ("time_low_s", "time_s", "time_high_s"))
        shown.add_row(
            row["kind"] + (" in a graph" if row["in_graph"] else ""),
            str(row["group_size"]),
            str(row["num_nodes"]),
            f"{row['size_bytes']:,}",
            time,
            f"{low} to {high}",
            format_quantity("rate_bytes_per_s", row["algorithm_bytes_per_s"]),
            format_quantity("rate_bytes_per_s", row["bus_bytes_per_s"]),
        )
    print_table(console, shown, lead=("collective", "size"))


def _microseconds(seconds: float) -> str:
    """Latencies of links are some microseconds, which the milliseconds of other tables hide."""
    return f"{seconds * 1e6:,.1f}"
