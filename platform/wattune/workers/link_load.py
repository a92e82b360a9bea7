"""One rank of a sweep of collectives and kernels; `wattune calibrate --links` starts one for each device of a node.

    torchrun --nproc-per-node 8 -m wattune.workers.link_load FOLDER --minutes 5
    torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29500 \
        -m wattune.workers.link_load FOLDER --minutes 5 --network ndr

Over several nodes torchrun starts it, as the second line shows. Rank 0 writes each result to `rows.jsonl` in the folder
at once, so that a sweep that is stopped or killed keeps what it has, and `links.parquet` when it ends. Its standard
output says what runs, one line for each case.

Time is that of the device (CUDA events); on processors, that of the clock. Every case is called a few times first. A
repeat is a number of calls without pause that takes some milliseconds, so that neither the clock's resolution nor late
ranks count. Buffers stay in the caches where they fit, as in nccl-tests.
"""

import argparse
import json
import os
import platform
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812  (its usual name)

from wattune.catalog.hardware import device_of_product
from wattune.catalog.networks import NETWORKS
from wattune.cost.sweep import COLLECTIVES, NUM_COPIES, ROWS, SIZES_BYTES, TABLE, Case, bus_factor, cases, read_rows
from wattune.storage.files import make_folder, write_table
from wattune.workers.provenance import provenance

REPEAT_S: Final = 2e-3
"""Length that a repeat is made for."""
END_S: Final = 6.0
"""Kept at the end of the time for closing communicators."""
CASE_S: Final = 0.06
"""Length that all repeats of a case are made for, where a call is not longer."""
FEWEST: Final = 5
MOST: Final = 25
"""Repeats of a case. Of calls beyond 1 s there are two."""
MOST_CALLS: Final = 200
LONG_S: Final = 0.05
"""Length of a call beside which late ranks and a cold start do not count."""
WARM_CALLS: Final = 3
TIMEOUT_S: Final = 60.0
"""Longest that a rank waits for others: a sweep that hangs ends by itself."""
MEMORY_FRAC: Final = 0.5
"""Share of free memory that buffers of a case may take."""
CPU_SHRINK: Final = 256
"""Rows and sequences of kernels on processors are shorter by this."""
BUFFERS: Final = 3
"""Arrays of a case's size that it may need at once."""

Call = Callable[[], Any]


@dataclass(slots=True)
class Rank:
    """One rank, its device and its groups."""

    rank: int
    world_size: int
    local_rank: int
    local_size: int
    device: torch.device
    control: Any = None
    """A group of all ranks on processors: it agrees on counts, and says when to stop."""
    groups: dict[tuple[int, int], Any] = field(default_factory=dict)
    """This rank's own group by size and stride; None where it is in none."""

    @property
    def on_gpu(self) -> bool:
        """True where kernels run on a GPU."""
        return self.device.type == "cuda"

    @property
    def dtype(self) -> torch.dtype:
        """Type of numbers: bf16 as in training, fp32 on processors, whose bf16 is slow."""
        return torch.bfloat16 if self.on_gpu else torch.float32

    def largest(self, value: float) -> float:
        """Returns the largest value of all ranks."""
        return self._reduced(value, dist.ReduceOp.MAX)

    def least(self, value: float) -> float:
        """Returns the least value of all ranks."""
        return self._reduced(value, dist.ReduceOp.MIN)

    def _reduced(self, value: float, operation: Any) -> float:
        if self.world_size == 1:
            return value
        cell = torch.tensor([value], dtype=torch.float64)
        dist.all_reduce(cell, operation, group=self.control)
        return float(cell)

    def gathered(self, one: Any) -> list[Any]:
        """Returns the objects of all ranks on every rank."""
        if self.world_size == 1:
            return [one]
        found = [None] * self.world_size
        dist.all_gather_object(found, one, group=self.control)
        return found

    def group(self, size: int, stride: int) -> Any:
        """Returns this rank's group of `size` ranks, `stride` apart; makes all such groups on first use."""
        if (size, stride) not in self.groups:
            self.groups[size, stride] = None
            for ranks in tiled(self.world_size, size, stride):
                made = dist.new_group(ranks, timeout=timedelta(seconds=TIMEOUT_S))
                if self.rank in ranks:
                    self.groups[size, stride] = made
        return self.groups[size, stride]


def tiled(world_size: int, size: int, stride: int) -> list[list[int]]:
    """Lists the groups of `size` ranks, `stride` apart, that the ranks hold; ranks that are left over are in none.

    All of them communicate at once, as they do in training.
    """
    span = size * stride
    starts = [block + offset for block in range(0, world_size - span + 1, span) for offset in range(stride)]
    return [[start + place * stride for place in range(size)] for start in starts]


Times = tuple[Sequence[float], int]
"""Seconds a call of every repeat, and how many calls a repeat has."""


def timed(rank: Rank, call: Call, *, in_graph: bool = False) -> Times:
    """Measures a call. All ranks take the same counts, and every rank must call this for each case.

    Each repeat of a short call begins with one that is not timed, in which ranks of a group wait for the last one.
    """
    call()  # the first one also sets up connections and chooses kernels
    once_s = rank.largest(_once_s(rank, call, 1, lines_up=False))
    lines_up = once_s < LONG_S
    if lines_up:
        once_s = rank.largest(min(_once_s(rank, call, 1) for _ in range(WARM_CALLS)))
    num_calls = int(np.clip(np.ceil(REPEAT_S / max(once_s, 1e-7)), 1, MOST_CALLS))
    num_repeats = int(np.clip(CASE_S / max(once_s * num_calls, 1e-7), FEWEST if once_s < 1.0 else 2, MOST))
    if in_graph:
        return _replayed(rank, call, num_calls, num_repeats)
    each_s = [_once_s(rank, call, num_calls, lines_up=lines_up) / num_calls for _ in range(num_repeats)]
    return each_s, num_calls


def _once_s(rank: Rank, call: Call, num_calls: int, *, lines_up: bool = True) -> float:
    if lines_up:
        call()
    if not rank.on_gpu:
        start_ns = time.monotonic_ns()
        for _ in range(num_calls):
            call()
        return (time.monotonic_ns() - start_ns) / 1e9

    def calls() -> None:
        for _ in range(num_calls):
            call()

    return _events_s(calls)


def _events_s(work: Call) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    start.record()
    work()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3


def _replayed(rank: Rank, call: Call, num_calls: int, num_repeats: int) -> Times:
    """Captures the calls in one graph and measures its replays."""
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for _ in range(num_calls):
            call()
    graph.replay()
    torch.cuda.synchronize()
    found = []
    for _ in range(num_repeats):
        rank.least(0.0)  # ranks leave together: a replay has no call of its own to wait in
        call()
        found.append(_events_s(graph.replay) / num_calls)
    return found, num_calls


@contextmanager
def prepared(rank: Rank, case: Case) -> Iterator[Call | None]:
    """Makes a case's arrays; gives its call, or None where this rank has no part in it."""
    if not case.is_collective:
        yield _kernel(rank, case)
    else:
        group = rank.group(case.group_size, case.stride)
        yield _collective(rank, case, group) if group is not None else None


def _collective(rank: Rank, case: Case, group: Any) -> Call:
    n, width = case.group_size, rank.dtype.itemsize
    count = max(case.size_bytes // width // n, 1) * n

    def array(length: int) -> torch.Tensor:
        return torch.zeros(length, dtype=rank.dtype, device=rank.device)

    whole = array(count)
    if case.kind == "all_reduce":
        return lambda: dist.all_reduce(whole, group=group)
    if case.kind == "all_gather":
        own = array(count // n)
        return lambda: dist.all_gather_into_tensor(whole, own, group=group)
    if case.kind == "reduce_scatter":
        part = array(count // n)
        return lambda: dist.reduce_scatter_tensor(part, whole, group=group)
    received = array(count)
    if case.kind == "all_to_all":
        return lambda: dist.all_to_all_single(received, whole, group=group)
    ranks = dist.get_process_group_ranks(group)
    place = ranks.index(rank.rank)
    following, previous = ranks[(place + 1) % n], ranks[place - 1]

    def exchange() -> None:
        operations = [
            dist.P2POp(dist.isend, whole, following, group),
            dist.P2POp(dist.irecv, received, previous, group),
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()

    return exchange


def _kernel(rank: Rank, case: Case) -> Call:
    shape = case.shape

    def array(*size: int) -> torch.Tensor:  # random: products of zeros draw less power, and run faster
        return torch.randn(*size, dtype=rank.dtype, device=rank.device)

    if case.kind == "matmul":
        x, w = array(shape["m"], shape["k"]), array(shape["n"], shape["k"])
        return lambda: F.linear(x, w)
    if case.kind.startswith("attention"):
        length, width = shape["seq_len"], shape["head_size"]
        q = array(1, shape["num_heads"], length, width)
        k, v = (array(1, shape["num_kv_heads"], length, width) for _ in range(2))
        grouped = shape["num_heads"] != shape["num_kv_heads"]

        def attention() -> torch.Tensor:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)

        if case.kind == "attention_forward":
            return attention
        for one in (q, k, v):
            one.requires_grad_()
        mixed = attention()
        gradient = torch.randn_like(mixed)
        return lambda: torch.autograd.grad(mixed, (q, k, v), gradient, retain_graph=True)
    columns = 8192
    x = array(max(case.size_bytes // rank.dtype.itemsize // columns, 1), columns)
    y = torch.empty_like(x)
    if case.kind == "copy":
        return lambda: y.copy_(x)
    if case.kind == "add":
        z = torch.empty_like(x)
        return lambda: torch.add(x, y, out=z)
    weight = array(columns)
    return lambda: F.rms_norm(x, (columns,), weight)


def _fits(rank: Rank, case: Case) -> bool:
    if rank.on_gpu:
        torch.cuda.empty_cache()
        free_bytes = torch.cuda.mem_get_info()[0]
    else:
        import psutil  # here alone: a GPU's sweep does not need it

        free_bytes = psutil.virtual_memory().available // rank.local_size
    s = case.shape
    wanted = BUFFERS * case.size_bytes
    if case.kind == "matmul":
        wanted = 4 * (s["m"] * s["k"] + s["n"] * s["k"] + s["m"] * s["n"])
    return rank.least(free_bytes * MEMORY_FRAC - wanted) >= 0


def row_of(rank: Rank, case: Case, times: Times, num_groups: int) -> dict[str, Any]:
    """Returns a result's own columns."""
    each_s, num_calls = times
    low_s, time_s, high_s = np.quantile(each_s, [0.25, 0.5, 0.75]).tolist()
    row: dict[str, Any] = {
        "kind": case.kind,
        "dtype": str(rank.dtype).removeprefix("torch."),
        "in_graph": case.in_graph,
        "num_repeats": len(each_s),
        "num_calls": num_calls,
        "time_s": time_s,
        "time_low_s": low_s,
        "time_high_s": high_s,
        "model": case.model or None,
        **case.shape,
    }
    if case.flop:
        row["flop_per_s"] = case.flop / time_s
    if case.size_bytes:
        row["size_bytes"] = case.size_bytes
        row["algorithm_bytes_per_s"] = case.size_bytes * NUM_COPIES.get(case.kind, 1) / time_s
    if case.is_collective:
        inside = max(1, min(case.group_size, rank.local_size // case.stride))
        row["group_size"] = case.group_size
        row["num_nodes"] = -(-case.group_size // inside)
        row["num_groups"] = num_groups
        row["bus_bytes_per_s"] = row["algorithm_bytes_per_s"] * bus_factor(case.kind, case.group_size)
    return row


def measure(rank: Rank, case: Case) -> list[dict[str, Any]]:
    """Measures one case on all ranks; returns its rows, on rank 0 alone."""
    with prepared(rank, case) as call:
        # A rank without a part still agrees on counts.
        times = timed(rank, call or (lambda: None), in_graph=case.in_graph and call is not None)
        if case.in_graph and call is None:
            for _ in times[0]:
                rank.least(0.0)
    found = rank.gathered(times if call else None)
    if rank.rank:
        return []
    taking = [one for one in found if one is not None]
    if case.is_collective:
        slowest = np.max([each_s for each_s, _ in taking], axis=0).tolist()
        num_groups = len(tiled(rank.world_size, case.group_size, case.stride))
        return [{"rank": 0, **row_of(rank, case, (slowest, taking[0][1]), num_groups)}]
    return [{"rank": place, **row_of(rank, case, one, 0)} for place, one in enumerate(taking)]


def facts(rank: Rank) -> dict[str, Any]:
    """Returns the device of a rank, and what it runs with."""
    name, uuid = platform.processor() or platform.machine(), None
    if rank.on_gpu:
        properties = torch.cuda.get_device_properties(rank.device)
        name, uuid = properties.name, f"GPU-{properties.uuid}"
    found = device_of_product(name) if rank.on_gpu else None
    tags = provenance(str(rank.device))

    def tagged(kind: str) -> str:
        own = {tag.removeprefix(f"{kind}."): value for tag, value in tags.items() if tag.startswith(f"{kind}.")}
        return json.dumps(own, sort_keys=True)

    return {
        "device": found.name if found else (name if rank.on_gpu else "cpu"),
        "device_name": name,
        "device_uuid": uuid,
        "node": platform.node(),
        "versions": tagged("version"),
        "settings": tagged("env"),
    }


def sweep(
    rank: Rank, folder: Path, wanted: Sequence[Case], seconds: float, network: str | None = None
) -> tuple[int, str]:
    """Measures case after case until all are done, the time is used, or a signal came.

    Returns how many were measured, and why it ended early; empty where it did not. Rows of several nodes keep the name
    of the `network` between them.
    """
    deadline_s = time.monotonic() + seconds
    known = rank.gathered(facts(rank))
    num_done, why = 0, ""
    signals: list[int] = []
    for each in (signal.SIGINT, signal.SIGTERM):  # the case in hand is finished first: others wait for this rank in it
        signal.signal(each, lambda came, _frame: signals.append(came))
    path = folder / ROWS
    for number, case in enumerate(wanted):
        if rank.largest(float(time.monotonic() > deadline_s) if rank.rank == 0 else 0.0):
            why = "its time is used"
        if rank.largest(float(bool(signals))):
            why = "it was interrupted"
        if why:
            break
        if not _fits(rank, case):
            _say(rank, f"left out: {case.text}: its buffers do not fit")
            continue
        _say(rank, f"{number + 1}/{len(wanted)} {case.text}")
        try:
            rows = measure(rank, case)
        except RuntimeError as error:
            if not case.in_graph:
                raise
            why = f"{case.kind} was not captured in a graph: {(str(error) or repr(error)).splitlines()[0]}"
            break  # graphs are last, and a failed capture leaves the stream unusable
        num_done += 1
        if rank.rank == 0:
            date = datetime.now(UTC).isoformat(timespec="seconds")
            more = {"date": date, "network": network if case.is_collective and rows[0]["num_nodes"] > 1 else None}
            with path.open("a") as file:
                file.writelines(json.dumps({**row, **known[row["rank"]], **more}) + "\n" for row in rows)
    if rank.rank == 0:
        write_table(folder / TABLE, read_rows(path.read_text() if path.exists() else ""))
    return num_done, why


def _say(rank: Rank, text: str) -> None:
    if rank.rank == 0:
        print(text, flush=True)  # noqa: T201 - the process that started this shows it


def join(on_gpu: bool) -> Rank:
    """Joins the ranks that torchrun started; alone, where it started none."""
    place = {name: int(os.environ.get(name, default)) for name, default in
             (("RANK", 0), ("WORLD_SIZE", 1), ("LOCAL_RANK", 0), ("LOCAL_WORLD_SIZE", 1))}  # fmt: skip
    device = torch.device("cuda", place["LOCAL_RANK"]) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    rank = Rank(place["RANK"], place["WORLD_SIZE"], place["LOCAL_RANK"], place["LOCAL_WORLD_SIZE"], device)
    if rank.world_size > 1:
        longest = timedelta(seconds=TIMEOUT_S)
        dist.init_process_group("nccl" if on_gpu else "gloo", timeout=longest)
        rank.control = dist.new_group(backend="gloo", timeout=longest) if on_gpu else dist.group.WORLD
    return rank


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one rank; returns 0 also where it was stopped, since what it measured is kept."""
    parser = argparse.ArgumentParser(prog="python -m wattune.workers.link_load")
    parser.add_argument("folder", type=Path, help="the folder for rows.jsonl and links.parquet")
    parser.add_argument("--minutes", type=float, default=5.0, help="longest time")
    parser.add_argument("--until-mono-s", type=float, help="end at this monotonic time of rank 0's node instead")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES_BYTES), metavar="BYTES")
    parser.add_argument("--kinds", nargs="+", metavar="KIND", help=f"only these, such as {', '.join(COLLECTIVES)}")
    parser.add_argument("--network", choices=sorted(NETWORKS), help="that between nodes, as spaces name it")
    given = parser.parse_args(arguments)
    if given.device == "cuda" and not torch.cuda.is_available():
        parser.error(f"this torch ({torch.__version__}) sees no GPU; use --device cpu")
    make_folder(given.folder)
    rank = join(given.device == "cuda")
    shrink = 1 if rank.on_gpu else CPU_SHRINK
    wanted = cases(rank.world_size, rank.local_size, graphs=rank.on_gpu, sizes_bytes=given.sizes, shrink=shrink)
    if given.kinds:
        wanted = [one for one in wanted if one.kind in given.kinds]
    until_s = given.until_mono_s
    seconds = given.minutes * 60 if until_s is None else until_s - END_S - time.monotonic()
    num_done, why = sweep(rank, given.folder, wanted, seconds, given.network)
    _say(rank, f"done: {num_done} of {len(wanted)} cases" + (f"; {why}" if why else ""))
    if rank.world_size > 1:
        dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
