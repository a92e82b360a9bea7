"""Memory that a loss in parts saves with a vocabulary of 201,088 tokens, and the time that its recomputation costs.

Four layers of a model of 3 billion parameters' widths, sequences of 4,096 tokens, four of them in a micro-batch, on two
GPUs: replicas with ZeRO-1, and tensor parallel. Losses must agree with that of one part. On two gloo ranks a dry run.

    python benchmarks/loss_chunks.py --csv chunks.csv            # two gloo ranks, tiny
    python benchmarks/loss_chunks.py --gpu --csv chunks.csv      # two GPUs, 4 minutes
"""

import statistics
import tempfile
from argparse import ArgumentParser, Namespace
from dataclasses import replace
from pathlib import Path

from engine_cases import Ranks, Where
from harness import Found, Rows, benchmark

from wattune.catalog.hardware import ClusterSpec
from wattune.catalog.models import model
from wattune.cost.defaults import default_coefficients
from wattune.cost.estimate import estimate
from wattune.plans.axes import Plan
from wattune.trial import TrialSpec
from wattune.workload import Workload

CHUNKS, LEAST_SAVED_GIB, MOST_STEP_RATIO = (1, 2, 8, 32), 3.0, 1.15


def spec(plan: Plan, *, gpu: bool) -> TrialSpec:
    """A slice with a large vocabulary."""
    widths = {"hidden_size": 3072, "ffn_hidden_size": 8192, "num_heads": 24, "num_kv_heads": 8, "vocab_size": 201_088}
    if not gpu:
        widths = {"hidden_size": 64, "ffn_hidden_size": 128, "num_heads": 4, "num_kv_heads": 4, "vocab_size": 4096}
    return TrialSpec(
        model=replace(model("llama3_8b"), num_layers=4, **widths),
        cluster=ClusterSpec(device="h100_sxm" if gpu else "cpu", devices_per_node=2),
        engine="torch",
        workload=Workload(seq_len=4096 if gpu else 64, global_batch_size=16),
        plan=replace(plan, micro_batch_size=4, dtype="bf16" if gpu else "fp32"),
    )


def options(parser: ArgumentParser) -> None:
    """Adds the option of this script."""
    parser.add_argument("--gpu", action="store_true", help="two GPUs")


@benchmark(
    claim="A loss in parts saves memory that a large vocabulary takes, for a little time.",
    bar=f"8 parts save >= {LEAST_SAVED_GIB} GiB a GPU, for <= {MOST_STEP_RATIO} times the step, with the same loss",
    options=options,
)
def main(given: Namespace) -> Found:
    """Measures every number of parts in both layouts."""
    rows = Rows("layout", "num_chunk", "step_ms", "step_ratio", "memory_gib", "predicted_gib", "loss_nats")
    missed = []
    with tempfile.TemporaryDirectory() as name:
        ranks = Ranks("torch", Where(ranks=2, quick=not given.gpu), Path(name) / "ranks")
        for layout, plan in {"dp2 zero1": Plan(sharding="zero1"), "tp2": Plan(tp=2, etp=2)}.items():
            first: tuple[float, float, float] | None = None
            for chunks in CHUNKS:
                one = spec(replace(plan, loss_chunks=chunks), gpu=given.gpu)
                outcomes = ranks.run(one, (4, 6, 0), 150)
                step_s = statistics.median(map(max, zip(*(each["times_s"] for each in outcomes), strict=True)))
                held = max(each["memory_peak_bytes"] for each in outcomes) / 2**30
                found = step_s, held, outcomes[0]["losses"][2]
                first = first or found
                known = estimate([one], default_coefficients).columns["memory_peak_bytes"] if given.gpu else None
                predicted = None if known is None else known.value[0] / 2**30
                rows.add(layout, chunks, 1e3 * step_s, step_s / first[0], held, predicted, found[2])
                if abs(found[2] / first[2] - 1) > (2e-3 if given.gpu else 1e-5):
                    missed.append(f"{layout}, {chunks} parts: loss {found[2]} against {first[2]}")
                if given.gpu and chunks == 8:
                    missed += [f"{layout} saves {first[1] - held:.1f} GiB"] if first[1] - held < LEAST_SAVED_GIB else []
                    missed += [f"{layout} {step_s / first[0]:.2f}"] if step_s / first[0] > MOST_STEP_RATIO else []
        ranks.stop()
    return Found(rows, [], missed)


if __name__ == "__main__":
    main()
