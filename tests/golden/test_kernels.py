"""Kernel names and recorded traces: what they are, and where the step's time went.

`kernels_cpu.json.gz` holds real traces of one step each over gloo, on two ranks of a machine that was
busy otherwise: the figures say that reading does not change, not how fast anything is.
"""

import gzip
import json
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import yaml

from wattune.analysis.metrics.exposed_comm import COMPUTE, kernel_metrics, kind_of, parts, role_of
from wattune.plans.axes import Plan
from wattune.plans.parallel import num_micro_batches
from wattune.schema import KERNELS
from wattune.workers.profiler import kernels_table

HERE = Path(__file__).parent
NAMES = yaml.safe_load((HERE / "kernels_names.yaml").read_text())
RECORDED = ("tp2", "dp2-zero3", "pp2", "ep2")
FIVE = ("compute_frac", "exposed_comm_frac", "bubble_frac", "straggler_frac", "other_frac")


@pytest.mark.parametrize("row", [*NAMES["written"], *NAMES["recorded"]], ids=lambda row: row[0][:60])
def test_a_name_says_what_a_kernel_is(row: list[str]) -> None:
    name, collective, group, kind, role = row
    assert kind_of(name) == kind
    if kind == "communication":
        assert role_of(name, collective, group) == role


@cache
def recorded(case: str) -> tuple[pa.Table, Plan, int]:
    content: dict[str, Any] = json.loads(gzip.decompress((HERE / "kernels_cpu.json.gz").read_bytes()))
    ranks = content["cases"][case]
    tables = [
        kernels_table(trace, [tuple(span) for span in trace["spans_ns"]], rank=rank, devices_per_node=2)
        for rank, trace in enumerate(ranks)
    ]
    plan = Plan(**ranks[0]["axes"])
    return pa.concat_tables(tables), plan, num_micro_batches(plan, 2, content["global_batch_size"])


@pytest.mark.parametrize("case", RECORDED)
def test_recorded_steps_are_divided_without_remainder(case: str) -> None:
    kernels, plan, micro_batches = recorded(case)
    assert kernels.schema.equals(KERNELS)
    shares = parts(kernels, plan, num_micro_batches=micro_batches)
    assert sum(shares.values()) == pytest.approx(1.0, abs=1e-9)
    assert min(shares.values()) >= 0.0
    metrics = kernel_metrics(kernels, plan, num_micro_batches=micro_batches)
    assert sum(metrics[name] for name in FIVE) == pytest.approx(1.0, abs=1e-9)
    assert {"compute_gemm", "compute_attention", "compute_norm", "compute_optimizer"} <= shares.keys()
    assert {name.removeprefix("compute_") for name in shares if name.startswith("compute_")} <= {*COMPUTE, "host"}
    assert metrics["compute_frac"] > 0.2 and metrics["exposed_comm_frac"] > 0.05


@pytest.mark.parametrize(
    ("case", "role", "num_collectives"),
    # Per step, both ranks. tp2: embedding, layer and loss, forward and backward; dp2: three units gathered forward and
    # again backward, reduced once; pp2: four micro-batches there and back, each a send and a receive; ep2: five
    # exchanges a layer.
    [("tp2", "tp", 36), ("dp2-zero3", "dp", 18), ("pp2", "pp", 16), ("ep2", "ep", 10)],
)
def test_collectives_are_found_and_given_to_their_axis(case: str, role: str, num_collectives: int) -> None:
    kernels, plan, micro_batches = recorded(case)
    keys = zip(*(kernels[name].to_pylist() for name in ("name", "collective", "group")), strict=True)
    roles = Counter(role_of(*key) for key in keys if kind_of(key[0]) == "communication")
    assert roles[role] == num_collectives
    metrics = kernel_metrics(kernels, plan, num_micro_batches=micro_batches)
    axes = {name: share for name, share in metrics.items() if name.startswith("exposed_comm_") and name not in FIVE}
    assert max(axes, key=axes.__getitem__) == f"exposed_comm_{role}_frac"


def test_only_stages_have_bubbles() -> None:
    for case in RECORDED:
        kernels, plan, micro_batches = recorded(case)
        metrics = kernel_metrics(kernels, plan, num_micro_batches=micro_batches)
        assert (metrics["bubble_frac"] > 0) == (case == "pp2")


def test_a_step_recorded_on_an_h200_is_explained() -> None:
    """Two compiled steps of four Llama-3-8B-like layers, recorded on 2026-11-21."""
    trace: dict[str, Any] = json.loads(gzip.decompress((HERE / "kernels_h200.json.gz").read_bytes()))
    kernels = kernels_table(trace, [tuple(span) for span in trace["spans_ns"]], rank=0, devices_per_node=1)
    shares = parts(kernels, Plan(micro_batch_size=4), num_micro_batches=4)
    assert sum(shares.values()) == pytest.approx(1.0, abs=1e-9)
    assert shares["compute_gemm"] == pytest.approx(0.774, abs=0.002)
    assert shares["compute_attention"] == pytest.approx(0.096, abs=0.002)
    assert shares["other"] < 0.05
