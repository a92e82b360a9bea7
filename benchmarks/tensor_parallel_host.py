"""Step time of tensor parallel layers in small micro-batches, where the host's time for a layer decides.

Compares the torch engine of this checkout with that of another source tree, by turns in one call, and on GPUs with
Megatron's own layers where its package is there. A layer's time is that of one micro-batch forward and backward: the
step of many layers less the step of few, divided by the layers between and the micro-batches. Steps are the median on
GPUs, and the fastest on processors, which other programs share.

    python benchmarks/tensor_parallel_host.py --before ../other/platform --csv host.csv         # two gloo ranks, tiny
    python benchmarks/tensor_parallel_host.py --before ../other/platform --gpu --csv gpu.csv    # two GPUs, 6 minutes
"""

import os
import statistics
import tempfile
from argparse import ArgumentParser, Namespace
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from engine_cases import Ranks, Where
from harness import Found, Rows, benchmark

from wattune.catalog.hardware import ClusterSpec, device
from wattune.catalog.models import ModelSpec, model
from wattune.cost.flops import workload_flop_per_token
from wattune.plans.axes import Plan
from wattune.trial import TrialSpec
from wattune.workload import Workload

MOST_OF_DTENSORS = 0.7
"""Bar on processors: a layer's time as a share of the other tree's."""
MOST_OF_MEGATRON = 1.15
"""Bar on GPUs: a step's time as a multiple of Megatron's."""
TIMEOUT_S = 150


def spec(engine: str, layers: int, micro_batch_size: int, *, gpu: bool) -> TrialSpec:
    """Two tensor parallel ranks: a slice of a model of 3 billion parameters, or of a tiny one."""
    whole = model("llama3_8b")
    widths: dict[str, Any] = {"hidden_size": 64, "ffn_hidden_size": 128, "num_heads": 4, "num_kv_heads": 4}
    if gpu:
        widths = {"hidden_size": 3072, "ffn_hidden_size": 8192, "num_heads": 24, "num_kv_heads": 8}
    slice_: ModelSpec = replace(whole, num_layers=layers, vocab_size=32_000 if gpu else 256, **widths)
    return TrialSpec(
        model=slice_,
        cluster=ClusterSpec(device="h100_sxm" if gpu else "cpu", devices_per_node=2),
        engine=engine,
        workload=Workload(seq_len=4096 if gpu else 32, global_batch_size=16 if gpu else 4),
        plan=Plan(tp=2, etp=2, micro_batch_size=micro_batch_size, dtype="bf16" if gpu else "fp32"),
    )


def measured(way: tuple[str, Path], wanted: list[TrialSpec], folder: Path, *, gpu: bool) -> list[dict[str, Any]]:
    """Runs specifications one after another in one set of ranks that load the given source tree."""
    before = os.environ.get("PYTHONPATH", "")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(way[1]), before])
    ranks = Ranks(wanted[0].engine, Where(ranks=2, quick=not gpu), folder)
    found = []
    try:
        for each in wanted:
            outcomes = ranks.run(each, (4, 6, 0) if gpu else (3, 30, 0), TIMEOUT_S)
            slowest = [max(times) for times in zip(*(one["times_s"] for one in outcomes), strict=True)]
            found.append(
                {
                    "step_s": statistics.median(slowest) if gpu else min(slowest),
                    "memory_gib": max(one["memory_peak_bytes"] for one in outcomes) / 2**30,
                    "first_step_s": max(one["spec_to_first_step_s"] for one in outcomes),
                    "loss": outcomes[0]["losses"][2],
                }
            )
    finally:
        ranks.stop()
        os.environ["PYTHONPATH"] = before
    return found


def options(parser: ArgumentParser) -> None:
    """Adds the options of this script."""
    parser.add_argument("--before", type=Path, required=True, help="`platform` of the source tree to compare with")
    parser.add_argument("--gpu", action="store_true", help="two GPUs, and Megatron where it is installed")


@benchmark(
    claim="A tensor parallel layer of plain tensors costs its host less than one of DTensors.",
    bar=f"a layer <= {MOST_OF_DTENSORS} times the other tree's; on GPUs a step <= {MOST_OF_MEGATRON} times Megatron's",
    options=options,
)
def main(given: Namespace) -> Found:
    """Measures every way on every case."""
    here = Path(__file__).parents[1] / "platform"
    cases = [(8, 1), (28, 1), (28, 4)] if given.gpu else [(2, 1), (10, 1)]
    ways = {"torch before": ("torch", given.before.resolve()), "torch": ("torch", here)}
    if given.gpu and find_spec("megatron") is not None:
        ways["megatron"] = ("megatron", here)
    rows = Rows(
        "way",
        "num_layers",
        "num_micro_batch",
        "step_ms",
        "mfu_frac",
        "layer_ms",
        "memory_gib",
        "first_step_s",
        "loss_nats",
    )
    steps: dict[tuple[str, int, int], float] = {}
    layer_ms: dict[str, float] = {}
    notes, missed = [], []
    with tempfile.TemporaryDirectory() as name:
        for number, (way, how) in enumerate(ways.items()):
            wanted = [spec(how[0], layers, size, gpu=given.gpu) for layers, size in cases]
            try:
                found = measured(how, wanted, Path(name) / str(number), gpu=given.gpu)
            except RuntimeError as error:
                missed.append(f"{way}: {str(error)[:300]}")
                continue
            (few, many), micro_batches = cases[:2], wanted[0].workload.global_batch_size
            layer_ms[way] = 1e3 * (found[1]["step_s"] - found[0]["step_s"]) / (many[0] - few[0]) / micro_batches
            for (layers, size), each, one in zip(cases, wanted, found, strict=True):
                steps[way, layers, size] = one["step_s"]
                flop = workload_flop_per_token(each.model, each.workload) * each.workload.tokens_per_step
                peak = device(each.cluster.device).peak_flop_per_s(each.plan.dtype) if given.gpu else None
                mfu = None if peak is None else flop / one["step_s"] / peak / 2
                own_ms = layer_ms[way] if (layers, size) == many else None
                rows.add(way, layers, size, 1e3 * one["step_s"], mfu, own_ms, *list(one.values())[1:])
    if {"torch before", "torch"} <= set(layer_ms):
        share = layer_ms["torch"] / layer_ms["torch before"]
        notes.append(f"A layer takes {share:.2f} times as long as in the other tree.")
        missed += [f"a layer {share:.2f}"] if share > MOST_OF_DTENSORS and not given.gpu else []
    for layers, size in cases if "megatron" in layer_ms and "torch" in layer_ms else ():
        share = steps["torch", layers, size] / steps["megatron", layers, size]
        notes.append(f"{layers} layers, micro-batch {size}: {share:.2f} times Megatron's step.")
        missed += [f"{layers} layers {share:.2f}"] if share > MOST_OF_MEGATRON and size == 1 else []
    return Found(rows, notes, missed)


if __name__ == "__main__":
    main()
