"""Cases of a sweep of collectives and kernels, in the order that a short sweep needs, and the table of its results."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import pyarrow as pa

from wattune.catalog.models import MODELS, ModelSpec

ROWS: Final = "rows.jsonl"
"""File that rank 0 adds each result to."""
TABLE: Final = "links.parquet"

COLLECTIVES: Final = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send_recv")

SIZES_BYTES: Final = tuple(4**exponent for exponent in range(6, 16))
"""Messages of 4 KiB to 1 GiB, each four times the one before."""

FIRST_SIZES_BYTES: Final = (2**12, 2**20, 2**26, 2**30)
"""Sizes that are measured first: a latency, the middle, and a bandwidth."""

GRAPH_BYTES: Final = 2**22
"""Largest message that is measured in a graph too: above it the host is faster than the link."""

TOKENS: Final = 4096
"""Rows of matrix products: one sequence of the shipped spaces."""

SEQUENCES: Final = (2048, 4096, 8192)
"""Lengths of sequences of attention."""

MEMORY_BYTES: Final = (2**26, 2**30)
"""Arrays of kernels that memory bounds. The larger is far above any cache."""

NUM_COPIES: Final = {"copy": 2, "add": 3, "norm": 2}
"""Arrays of the given size that each memory-bound kernel reads and writes."""

_TYPES: Final = (
    (pa.string(), "kind device device_name device_uuid node"),
    (pa.int32(), "rank"),
    (pa.string(), "date versions settings dtype"),
    (pa.int64(), "size_bytes"),
    (pa.int32(), "group_size num_nodes"),
    (pa.string(), "network"),
    (pa.int32(), "num_groups"),
    (pa.int64(), "m n k"),
    (pa.int32(), "num_heads num_kv_heads head_size"),
    (pa.int64(), "seq_len"),
    (pa.string(), "model"),
    (pa.bool_(), "in_graph"),
    (pa.int32(), "num_repeats num_calls"),
    (pa.float64(), "time_s time_low_s time_high_s algorithm_bytes_per_s bus_bytes_per_s flop_per_s"),
)
COLUMNS: Final = pa.schema([pa.field(name, kind) for kind, names in _TYPES for name in names.split()])
"""One row for each case; of kernels one for each case and device.

`time_s` is the median over `num_repeats`, each the mean of `num_calls` calls without pause, `time_low_s` and
`time_high_s` its quartiles. Of a collective each repeat counts as its slowest rank. `size_bytes`,
`algorithm_bytes_per_s` = size / time and `bus_bytes_per_s` are those of nccl-tests (doc/PERFORMANCE.md): the bus
bandwidth is what a ring needs of each link, comparable between group sizes. `network` is the catalog's name of that
between nodes, where it was said.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One thing to measure. A collective has `group_size`, a kernel has its shape."""

    kind: str
    size_bytes: int = 0
    group_size: int = 0
    stride: int = 1
    """Distance of the ranks of a group: 1 is neighbours, the ranks of a node is one rank of each node."""
    in_graph: bool = False
    """Calls are replayed from a CUDA graph, so that the host adds nothing."""
    shape: Mapping[str, int] = field(default_factory=dict)
    model: str = ""

    @property
    def is_collective(self) -> bool:
        """True where ranks communicate."""
        return self.kind in COLLECTIVES

    @property
    def text(self) -> str:
        """Returns a few words for people."""
        if self.is_collective:
            graph = ", graph" if self.in_graph else ""
            return f"{self.kind} of {self.size_bytes:,} bytes, {self.group_size} ranks{graph}"
        shape = " ".join(f"{name}={size}" for name, size in self.shape.items()) or f"{self.size_bytes:,} bytes"
        return f"{self.kind} {shape}"

    @property
    def flop(self) -> float:
        """Returns floating-point operations of one call; 0 where memory or links bound it.

        Causal attention counts half of the scores: 2 s^2 h a forward, 2.5 times that a backward (Dao 2023, arXiv
        2307.08691, section 4.1).
        """
        s = self.shape
        if self.kind == "matmul":
            return 2.0 * s["m"] * s["n"] * s["k"]
        if self.kind.startswith("attention"):
            forward = 2.0 * s["seq_len"] ** 2 * s["num_heads"] * s["head_size"]
            return forward * (2.5 if self.kind == "attention_backward" else 1.0)
        return 0.0


def bus_factor(kind: str, group_size: int) -> float:
    """Returns bus over algorithm bandwidth of a collective (nccl-tests, doc/PERFORMANCE.md)."""
    if kind == "send_recv":
        return 1.0
    return (2 if kind == "all_reduce" else 1) * (group_size - 1) / group_size


def groups(world_size: int, local_size: int) -> list[tuple[int, int]]:
    """Lists sizes and strides of groups: powers of 2 in a node, the whole node, one rank of each node, all ranks."""
    inside = [2**exponent for exponent in range(1, local_size.bit_length()) if 2**exponent <= local_size]
    found = [(size, 1) for size in [*inside, local_size] if size > 1]
    num_nodes = world_size // local_size
    if num_nodes > 1:
        found += [(num_nodes, local_size), (world_size, 1)]
    return list(dict.fromkeys(found))


def cases(
    world_size: int,
    local_size: int,
    *,
    graphs: bool,
    models: Sequence[ModelSpec] = tuple(MODELS.values()),
    sizes_bytes: Sequence[int] = SIZES_BYTES,
    shrink: int = 1,
) -> list[Case]:
    """Lists what is measured, most telling first, so that a sweep that is cut short has something of everything.

    First a few sizes of every collective in every group, with products and attention of each model; then the sizes
    between, graphs of small messages, and the products of higher tensor parallelism. `graphs`: the device can replay a
    graph of collectives. `shrink` divides the rows of products and the lengths of sequences, for slow devices.
    """
    placed = groups(world_size, local_size)
    widest_first = sorted(placed, key=lambda one: -one[0])
    first = [size for size in sizes_bytes if size in FIRST_SIZES_BYTES] or list(sizes_bytes)
    rest = [size for size in sizes_bytes if size not in first]

    def collectives(sizes: Sequence[int], in_graph: bool = False) -> Iterator[Case]:
        for group_size, stride in widest_first:
            for size in sizes:
                for kind in COLLECTIVES:
                    yield Case(kind=kind, size_bytes=size, group_size=group_size, stride=stride, in_graph=in_graph)

    found = [*collectives(first), *_memory(sizes_bytes)]
    for tp in (1, 2):
        found += [one for model in models for one in [*_products(model, tp, shrink), *_attention(model, tp, shrink)]]
    found += collectives(rest)
    for tp in (4, 8):
        found += [one for model in models for one in _products(model, tp, shrink)]
    if graphs:  # last: a library that cannot capture a collective may end the sweep
        found += collectives([size for size in sizes_bytes if size <= GRAPH_BYTES], in_graph=True)
    unique: dict[tuple[object, ...], Case] = {}
    for one in found:
        unique.setdefault((one.kind, one.size_bytes, one.group_size, one.stride, one.in_graph, *one.shape.items()), one)
    return list(unique.values())


def _memory(sizes_bytes: Sequence[int]) -> Iterator[Case]:
    most = max(sizes_bytes)
    for size in dict.fromkeys(min(size, most) for size in MEMORY_BYTES):
        for kind in NUM_COPIES:
            yield Case(kind=kind, size_bytes=size)


def _products(model: ModelSpec, tp: int, shrink: int) -> Iterator[Case]:
    """Lists a model's linear layers forward, and the two products of their gradients."""
    h, f, gates = model.hidden_size, model.ffn_hidden_size, model.ffn_matrices - 1
    widths = (model.query_width + model.kv_width) // tp, model.output_width // tp
    linears = [(widths[0], h), (h, widths[1]), (gates * f // tp, h), (h, f // tp)]
    if tp == 1:
        linears.append((-(-model.vocab_size // 128) * 128, h))
    tokens = TOKENS // shrink
    for n, k in linears:
        for rows, columns, inner in ((tokens, n, k), (tokens, k, n), (n, k, tokens)):
            yield Case(kind="matmul", shape={"m": rows, "n": columns, "k": inner}, model=model.name)


def _attention(model: ModelSpec, tp: int, shrink: int) -> Iterator[Case]:
    shape = {
        "num_heads": model.num_heads // tp,
        "num_kv_heads": max(model.num_kv_heads // tp, 1),
        "head_size": model.head_size,
    }
    for seq_len in SEQUENCES:
        for direction in ("forward", "backward"):
            yield Case(kind=f"attention_{direction}", shape={**shape, "seq_len": seq_len // shrink}, model=model.name)


def read_rows(text: str) -> pa.Table:
    """Reads rank 0's JSON lines as one table, without a last line that was cut off; what a row lacks is null."""
    *lines, _cut_off = text.split("\n")
    rows = [json.loads(line) for line in lines if line]
    return pa.Table.from_pylist([{name: row.get(name) for name in COLUMNS.names} for row in rows], schema=COLUMNS)
