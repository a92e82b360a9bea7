"""Traces made by hand: what counts as running, where, and in which step."""

import json
import re
from typing import Any

import torch

from wattune.schema import KERNELS
from wattune.workers.profiler import LONGEST_NAME, device_trace, kernels_table

BASE_NS = 10**15


def event(name: str, start_us: float, length_us: float, **more: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": "cpu_op", "tid": 1, "name": name, "ts": start_us, "dur": length_us} | more


def kernel(name: str, start_us: float, length_us: float, **arguments: Any) -> dict[str, Any]:
    return event(name, start_us, length_us, cat="kernel", tid=7, args={"stream": 7, **arguments})


def rows(*events: dict[str, Any], spans_us: tuple[tuple[int, int], ...] = ((0, 100),), **more: Any) -> list[Any]:
    trace = {"baseTimeNanoseconds": BASE_NS, "traceEvents": list(events), **more}
    spans = [(BASE_NS + start * 1000, BASE_NS + end * 1000) for start, end in spans_us]
    table = kernels_table(trace, spans, rank=3, devices_per_node=2)
    assert table.schema.equals(KERNELS)
    return table.to_pylist()


def times(found: list[Any]) -> list[tuple[str, int, int, int]]:
    return [(row["name"], row["step"], row["start_ns"], row["end_ns"]) for row in found]


def test_kernels_are_cut_to_the_step_they_are_in() -> None:
    found = rows(kernel("a", 10, 20), kernel("b", 90, 30), kernel("c", 400, 5), spans_us=((0, 100), (100, 200)))
    assert times(found) == [
        ("step", 0, 0, 100_000),
        ("a", 0, 10_000, 30_000),
        ("b", 0, 90_000, 100_000),
        ("step", 1, 0, 100_000),
        ("b", 1, 0, 20_000),
    ]
    assert {row["rank"] for row in found} == {3}


def test_where_there_are_kernels_operators_do_not_count() -> None:
    found = rows(event("aten::mm", 0, 50), kernel("nvjet", 10, 20), event("Memcpy HtoD", 5, 1, cat="gpu_memcpy"))
    assert [row["name"] for row in found] == ["step", "nvjet", "Memcpy HtoD"]


def test_a_collective_knows_its_group_its_ranks_and_what_they_span() -> None:
    info = {
        "pg_config": [
            {"pg_name": "4", "pg_desc": "mesh_tp_0", "ranks": [2, 3]},
            {"pg_name": "9", "pg_desc": "mesh_replicate_0", "ranks": [1, 3]},
        ]
    }
    found = rows(
        kernel("ncclDevKernel_AllReduce", 0, 10, **{"Process Group Name": "4", "Collective name": "allreduce"}),
        kernel("ncclDevKernel_AllGather", 20, 10, **{"Process Group Name": "9"}),
        kernel("ncclDevKernel_SendRecv", 40, 10, **{"Process Group Description": "PIPELINE_MODEL_PARALLEL_GROUP"}),
        distributedInfo=info,
    )[1:]
    assert [(row["group"], row["group_ranks"], row["fabric"], row["collective"]) for row in found] == [
        ("mesh_tp_0", "[2, 3]", "node", "allreduce"),
        ("mesh_replicate_0", "[1, 3]", "network", ""),
        ("PIPELINE_MODEL_PARALLEL_GROUP", "", "", ""),
    ]


def test_the_innermost_operator_counts_and_no_moment_twice() -> None:
    found = rows(event("aten::linear", 0, 30), event("aten::mm", 10, 10), event("aten::add", 40, 5))
    assert times(found[1:]) == [
        ("aten::linear", 0, 0, 10_000),
        ("aten::mm", 0, 10_000, 20_000),
        ("aten::linear", 0, 20_000, 30_000),
        ("aten::add", 0, 40_000, 45_000),
    ]


def test_handing_over_and_waiting_are_no_compute() -> None:
    found = rows(
        event("c10d::allreduce_", 0, 20),
        event("aten::copy_", 5, 5),
        event("_c10d_functional::wait_tensor", 30, 10),
        event("autograd::engine::evaluate_function: MmBackward0", 50, 30),
        event("MmBackward0", 52, 20),
    )
    assert [name for name, *_ in times(found[1:])] == ["aten::copy_", "MmBackward0"]


def test_gloo_s_collectives_belong_to_who_called_them() -> None:
    found = rows(
        event("FSDP::all_gather (layers.0)", 0, 10, cat="user_annotation"),
        event("c10d::_allgather_base_", 2, 5),
        event("gloo:all_gather", 4, 20, cat="user_annotation", tid=9),
        event("aten::copy_", 6, 2, tid=9),
        event("_c10d_functional::all_reduce", 40, 10),
        event("c10d::allreduce_", 42, 5),
        event("gloo:all_reduce", 51, 9, cat="user_annotation", tid=9),
        event("c10d::allreduce_", 70, 5),
        event("gloo:all_reduce", 74, 9, cat="user_annotation", tid=9),
        event("c10d::recv_", 90, 1),
        event("gloo:recv", 90.5, 4, cat="user_annotation", tid=1),
    )[1:]
    assert [(row["name"], row["group"]) for row in found] == [
        ("gloo:all_gather", "FSDP::all_gather (layers.0)"),
        ("gloo:all_reduce", "_c10d_functional::all_reduce"),
        ("gloo:all_reduce", "c10d::allreduce_"),
        ("gloo:recv", "c10d::recv_"),
    ]


def test_long_names_are_cut() -> None:
    (_, found) = rows(kernel("x" * 5000, 0, 1))
    assert found["name"] == "x" * LONGEST_NAME


def test_of_a_trace_s_text_only_events_on_devices_are_read_and_all_of_them(tmp_path) -> None:
    x = torch.ones(8, 8)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        for _ in range(20):
            x = (x @ x).relu()
    profiler.export_chrome_trace(str(tmp_path / "trace.json"))
    text = (tmp_path / "trace.json").read_text()
    assert device_trace(text) == json.loads(text), "without one, it is read whole"
    text = re.sub(r'"cat": "cpu_op",\n    "name": "aten::mm"', '"cat": "kernel",\n    "name": "gemm {\\\\n  {"', text)
    whole = json.loads(text)
    on_device = [event for event in whole["traceEvents"] if event.get("cat") == "kernel"]
    assert len(on_device) == 20
    assert device_trace(text) == {key: whole[key] for key in whole if key != "traceName"} | {"traceEvents": on_device}
    assert device_trace(json.dumps(whole)) == whole, "another layout is read whole"
