"""Kernels of a step, by torch's profiler: those of GPUs, and on CPUs operators and gloo's collectives.

Steps are profiled in a pass of their own, after the measured ones: a profiler costs time. Names are kept as they are;
`wattune.analysis.metrics.exposed_comm` sorts them.
"""

import bisect
import contextlib
import json
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import torch

from wattune.clock import ClockAnchor
from wattune.schema import KERNELS
from wattune.workers.engine import StepSpans

LONGEST_NAME: Final = 200
"""Characters kept of a name: C++ templates spell out their arguments for thousands."""

_ON_DEVICE: Final = ("kernel", "gpu_memcpy", "gpu_memset")
_EVENT_BEGINS: Final = "\n  {\n"
_DEVICE_EVENT: Final = tuple(f'"ph": "X",\n    "cat": "{category}"' for category in _ON_DEVICE)
_WAITS: Final = re.compile(r"c10d::|_c10d_functional::|record_param_comms|autograd::engine|ProfilerStep|## ")
"""Operators that only hand over to a collective or wait for one, or only enclose others."""
_CALLERS: Final = re.compile(r"FSDP::|_c10d_functional::|c10d::(?!barrier)")
"""Callers of gloo's collectives, whose own events do not name their group."""


@dataclass(frozen=True, slots=True)
class ProfiledInterval:
    """One thing that ran."""

    name: str
    stream: int
    start_us: float
    end_us: float
    collective: str = ""
    group: str = ""
    """Description of the process group, or the caller of the collective."""
    ranks: str = ""
    """The group's ranks, such as `[0, 1]`."""


def profiled_steps(
    step: Callable[[], StepSpans], num_steps: int, *, on_gpu: bool
) -> tuple[list[tuple[int, int]], Callable[[], dict[str, Any]]]:
    """Runs steps under the profiler, every rank equally often; kernels are asked for, or operators of the processor.

    Returns start and end of each step in wall nanoseconds, and what reads the trace: arguments of `kernels_table`.
    """
    activities = [torch.profiler.ProfilerActivity.CPU]
    if on_gpu:
        activities.append(torch.profiler.ProfilerActivity.CUDA)  # HIP devices go by this name too
    anchor = ClockAnchor.now()
    spans = []
    with torch.profiler.profile(activities=activities) as profiler:
        for _ in range(num_steps):
            (whole,) = (span for span in step().spans if span.phase == "step")
            spans.append((anchor.to_wall_ns(whole.start_mono_ns), anchor.to_wall_ns(whole.end_mono_ns)))

    def trace() -> dict[str, Any]:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            profiler.export_chrome_trace(str(path))
            text = path.read_text()
        return device_trace(text) if on_gpu else dict(json.loads(text))

    return spans, trace


def device_trace(text: str) -> dict[str, Any]:
    """Reads a Chrome trace of torch's profiler, of its events those on devices alone; nothing else parses them.

    A device waits while its rank reads, and kernels are a sixth of the events. A trace without any, or that is not laid
    out as Kineto does, each event from a line of its own on, is read whole. Raises `ValueError`: it is not JSON.
    """
    head, *events = text.split(_EVENT_BEGINS)
    kept = [event.rstrip().removesuffix(",") for event in events if event.lstrip().startswith(_DEVICE_EVENT)]
    if kept:
        with contextlib.suppress(ValueError):
            return {**json.loads(head + "]}"), "traceEvents": json.loads("[{" + ",{".join(kept) + "]")}
    return dict(json.loads(text))


def kernels_table(
    trace: dict[str, Any], spans_ns: Sequence[tuple[int, int]], *, rank: int, devices_per_node: int
) -> pa.Table:
    """A Chrome trace of torch's profiler as a table of `wattune.schema.KERNELS`.

    `spans_ns` are start and end of each step on the wall clock; rows are in nanoseconds from the start of theirs.
    `devices_per_node` tells links inside a node from those between nodes.
    """
    base_ns = int(trace.get("baseTimeNanoseconds", 0))
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    described = {
        config["pg_name"]: (config["pg_desc"], str(config["ranks"]))
        for config in (trace.get("distributedInfo") or {}).get("pg_config", ())
    }
    on_device = any(event.get("cat") in _ON_DEVICE for event in events)
    found = list(_kernels(events, described) if on_device else _operators(events))
    rows: list[tuple[Any, ...]] = []
    for step, (start_ns, end_ns) in enumerate(spans_ns):
        rows.append((rank, step, -1, "step", "", "", "", "", 0, end_ns - start_ns))
        for each in found:
            first = max(base_ns + round(each.start_us * 1e3), start_ns)
            last = min(base_ns + round(each.end_us * 1e3), end_ns)
            if first < last:
                told = each.stream, each.name[:LONGEST_NAME], each.collective, each.group, each.ranks
                rows.append(
                    (rank, step, *told, _fabric(each.ranks, devices_per_node), first - start_ns, last - start_ns)
                )
    return pa.Table.from_pydict(dict(zip(KERNELS.names, zip(*rows, strict=True), strict=True)), schema=KERNELS)


@cache
def _fabric(ranks: str, devices_per_node: int) -> str:
    """`node` where a group's ranks share one, `network` where they do not, nothing where the group is not known."""
    numbers = [int(number) for number in re.findall(r"\d+", ranks)]
    if not numbers:
        return ""
    return "node" if len({number // devices_per_node for number in numbers}) == 1 else "network"


def _kernels(events: Iterable[dict[str, Any]], described: dict[str, tuple[str, str]]) -> Iterator[ProfiledInterval]:
    """Yields kernels of a GPU; those of NCCL and RCCL name their group, the trace has its description and ranks."""
    for event in events:
        if event.get("cat") not in _ON_DEVICE:
            continue
        arguments = event.get("args", {})
        group, ranks = described.get(str(arguments.get("Process Group Name", "")), ("", ""))
        yield ProfiledInterval(
            name=event["name"],
            stream=int(arguments.get("stream", -1)),
            start_us=event["ts"],
            end_us=event["ts"] + event["dur"],
            collective=str(arguments.get("Collective name", "")),
            group=group or str(arguments.get("Process Group Description", "")),
            ranks=ranks or str(arguments.get("Process Group Ranks", "")),
        )


def _operators(events: Sequence[dict[str, Any]]) -> Iterator[ProfiledInterval]:
    """Yields the innermost operator of every moment of a processor's thread, and gloo's collectives."""
    gloo = [event for event in events if event["name"].startswith("gloo:")]
    # gloo copies on threads of its own; sends and receives end on the thread that computes.
    computing = {event["tid"] for event in events if event["name"].startswith(("autograd::", "FSDP::", "c10d::"))}
    copying = {event["tid"] for event in gloo} - computing
    callers = sorted((event["ts"], event["name"]) for event in events if _CALLERS.match(event["name"]))
    # A functional collective calls a plain one at once; what it calls is not who began.
    functional = [(e["ts"], e["ts"] + e["dur"]) for e in events if e["name"].startswith(("_c10d_functional", "FSDP::"))]
    begun = [
        (ts, name)
        for ts, name in callers
        if not name.startswith("c10d::") or not any(start < ts < end for start, end in functional)
    ]
    for event in gloo:
        index = bisect.bisect_right(begun, (event["ts"], "\x7f")) - 1
        yield ProfiledInterval(
            name=event["name"],
            stream=int(event["tid"]),
            start_us=event["ts"],
            end_us=event["ts"] + event["dur"],
            collective=event["name"].removeprefix("gloo:"),
            group=begun[index][1] if index >= 0 else "",
        )
    by_thread: dict[Any, list[dict[str, Any]]] = {}
    for event in events:
        if event.get("cat") == "cpu_op" and event["tid"] not in copying:
            by_thread.setdefault(event["tid"], []).append(event)
    for thread, calls in by_thread.items():
        yield from _innermost(int(thread), calls)


def _innermost(thread: int, calls: list[dict[str, Any]]) -> Iterator[ProfiledInterval]:
    """Nested operators as intervals that follow each other, each of the operator that was innermost."""
    open_calls: list[tuple[str, float]] = []
    now = 0.0

    def until(time_us: float) -> Iterator[ProfiledInterval]:
        nonlocal now
        while open_calls:
            name, end_us = open_calls[-1]
            stop_us = min(end_us, time_us)
            if stop_us > now and not _WAITS.match(name):
                yield ProfiledInterval(name, thread, now, stop_us)
            now = max(now, stop_us)
            if end_us > time_us:
                return
            open_calls.pop()

    for call in sorted(calls, key=lambda each: (each["ts"], -each["dur"])):
        yield from until(call["ts"])
        now = max(now, call["ts"])
        open_calls.append((call["name"], call["ts"] + call["dur"]))
    yield from until(float("inf"))
