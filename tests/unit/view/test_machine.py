"""A sweep on a terminal."""

import io
import json

from rich.console import Console

from wattune.cost.sweep import read_rows
from wattune.units import format_quantity
from wattune.view.console import show
from wattune.view.machine import links_view

COMMON = {"device": "h200_sxm", "device_name": "NVIDIA H200", "device_uuid": "GPU-1", "in_graph": False}
TIMES = {"time_s": 1e-3, "time_low_s": 0.9e-3, "time_high_s": 1.2e-3}
REDUCED = {"kind": "all_reduce", "size_bytes": 10**6, "group_size": 4, "num_nodes": 1, **COMMON, **TIMES}
REDUCED |= {"algorithm_bytes_per_s": 1e9, "bus_bytes_per_s": 1.5e9}
PRODUCT = {"kind": "matmul", "m": 1, "n": 1, "k": 1, "flop_per_s": 7e14, **COMMON, **TIMES}


def shown(*rows: dict[str, object]) -> str:
    text = io.StringIO()
    table = read_rows("".join(json.dumps(row) + "\n" for row in rows))
    show(Console(file=text, width=140), *links_view(table))
    return text.getvalue()


def test_both_bandwidths_and_the_spread_are_shown() -> None:
    text = shown(REDUCED, PRODUCT)
    assert "NVIDIA H200" in text
    assert "1,000,000" in text
    assert format_quantity("rate_bytes_per_s", 1e9) in text
    assert format_quantity("rate_bytes_per_s", 1.5e9) in text
    assert format_quantity("rate_flop_per_s", 7e14) in text


def test_nothing_is_shown_of_what_was_not_measured() -> None:
    assert "Kernels" not in shown(REDUCED)
    assert "collectives" not in shown(PRODUCT)
