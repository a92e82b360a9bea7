"""Memory that torch's allocator keeps of a nearly full device, and what giving it back costs a step, by two trees.

Plans of a mixture that fill devices of 80 GB, on two of them or on two larger ones whose allocator is held to what such
a device leaves a program; then dense plans with all of the device, whose steps should not change.

    python benchmarks/memory_kept.py --before ../other/platform --csv memory_kept.csv    # two GPUs, 4 minutes
    python benchmarks/memory_kept.py --before ../other/platform --cpu                    # a dry run on two gloo ranks
"""

import os
import statistics
import sys
import tempfile
from argparse import ArgumentParser, Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from engine_cases import Ranks, Where
from harness import Found, Rows, benchmark

from wattune.catalog.hardware import ClusterSpec
from wattune.catalog.models import model
from wattune.plans.axes import Plan
from wattune.trial import TrialSpec
from wattune.workload import Routing, Workload

REACH_BYTES: Final = 82.8e9
"""Bytes that two H100 of 80 GB left to a program: 82.3 to 83.3 GB (`wattune.cost.out_of_memory`)."""
OVERLAP: Final = {"overlap": "grad_param"}
FULL: Final[dict[str, dict[str, Any]]] = {
    "dp2 mbs4 zero3": {"micro_batch_size": 4, "sharding": "zero3"},
    "dp2 ep2 mbs2 zero1 overlap": {"ep": 2, "micro_batch_size": 2, "sharding": "zero1", **OVERLAP},
    "tp2 mbs4": {"tp": 2, "etp": 2, "micro_batch_size": 4},
    "dp2 ep2 mbs4 zero1": {"ep": 2, "micro_batch_size": 4, "sharding": "zero1"},
    "pp2 mbs4": {"pp": 2, "micro_batch_size": 4},
    "dp2 mbs4 zero1 overlap": {"micro_batch_size": 4, "sharding": "zero1", **OVERLAP},
}
DENSE: Final[dict[str, dict[str, Any]]] = {
    "dense dp2 mbs4 zero1 overlap": {"micro_batch_size": 4, "sharding": "zero1", **OVERLAP},
    "dense dp2 mbs2 zero2 overlap": {"micro_batch_size": 2, "sharding": "zero2", **OVERLAP},
    "dense dp2 mbs2 none grad": {"micro_batch_size": 2, "overlap": "grad"},
}
MOST_OF_DENSE: Final = 1.005
"""Bar of a dense step over the other tree's: half a per cent, as of an engine's."""
TIMEOUT_S: Final = 100


def spec(name: str, *, gpu: bool) -> TrialSpec:
    """A plan of a mixture, or of a dense model, on two devices."""
    slice_ = (
        replace(model("llama3_8b"), num_layers=8) if name in DENSE else replace(model("mixtral_8x7b"), num_layers=4)
    )
    if not gpu:
        tiny = {"hidden_size": 64, "ffn_hidden_size": 128, "num_heads": 4, "num_kv_heads": 2, "vocab_size": 256}
        slice_ = replace(slice_, num_layers=2, **tiny)
    return TrialSpec(
        model=slice_,
        cluster=ClusterSpec(device="h200_sxm" if gpu else "cpu", devices_per_node=2),
        engine="torch",
        workload=Workload(
            seq_len=4096 if gpu else 32,
            global_batch_size=16 if name in DENSE else 8,
            routing=Routing(by="balanced") if slice_.is_moe else None,
        ),
        plan=Plan(dtype="bf16" if gpu else "fp32", **(DENSE | FULL)[name]),
    )


def measured(tree: Path, folder: Path, *, gpu: bool) -> dict[str, dict[str, float]]:
    """Runs every plan in ranks that load a source tree; one that ends them is left out, and the next has new ranks."""
    before, found = os.environ.get("PYTHONPATH", ""), {}
    os.environ["PYTHONPATH"] = os.pathsep.join([str(tree), before])
    ranks = None
    try:
        for number, name in enumerate(FULL | DENSE):
            try:
                ranks = ranks or Ranks("torch", Where(ranks=2, quick=not gpu), folder / str(number))
                reach_bytes = REACH_BYTES if name in FULL else 0
                outcomes = ranks.run(spec(name, gpu=gpu), (3, 8, 0), TIMEOUT_S, reach_bytes)
            except RuntimeError as error:
                print(f"{tree}: {name}: {str(error)[:200]}", flush=True)
                if ranks is not None:
                    ranks.stop()
                ranks = None
                continue
            slowest = [max(times) for times in zip(*(one["times_s"] for one in outcomes), strict=True)]
            found[name] = {
                "step_s": statistics.median(slowest),
                "retries": max(one["memory_retries_per_step_count"] for one in outcomes),
                "held_gb": max(one["memory_peak_bytes"] for one in outcomes) / 1e9,
                "kept_gb": max(one["memory_kept_bytes"] for one in outcomes) / 1e9,
                "loss": outcomes[0]["losses"][-1],
            }
            print(f"{tree}: {name}: {found[name]}", file=sys.stderr, flush=True)
    finally:
        if ranks is not None:
            ranks.stop()
        os.environ["PYTHONPATH"] = before
    return found


def options(parser: ArgumentParser) -> None:
    """Adds the options of this script."""
    parser.add_argument("--before", type=Path, required=True, help="`platform` of the source tree to compare with")
    parser.add_argument("--cpu", action="store_true", help="tiny models on two processor ranks")


@benchmark(
    claim="A nearly full device gives no memory back in a step.",
    bar=f"no retry in a step of at least five of six full plans; dense steps <= {MOST_OF_DENSE} times the other tree's",
    options=options,
)
def main(given: Namespace) -> Found:
    """Measures every plan by both trees, with the allocator that workers have."""
    os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
    trees = {"before": given.before.resolve(), "this": Path(__file__).parents[1] / "platform"}
    with tempfile.TemporaryDirectory() as name:
        found = {tree: measured(path, Path(name) / tree, gpu=not given.cpu) for tree, path in trees.items()}
    rows = Rows("plan", "tree", "step_s", "num_retries_per_step", "held_gb", "kept_gb", "loss_nats")
    for plan in FULL | DENSE:
        for tree in (tree for tree in trees if plan in found[tree]):
            rows.add(plan, tree, *found[tree][plan].values())
    ratios = {
        p: found["this"][p]["step_s"] / found["before"][p]["step_s"]
        for p in FULL | DENSE
        if all(p in f for f in found.values())
    }
    calm = sum(one["retries"] == 0 for plan, one in found["this"].items() if plan in FULL)
    missed = [f"{calm} of {len(FULL)} without a retry"] if calm < len(FULL) - 1 else []
    missed += [f"{plan} {ratios[plan]:.3f}" for plan in DENSE if plan in ratios and ratios[plan] > MOST_OF_DENSE]
    return Found(rows, [f"{plan}: {ratio:.3f} times the other tree's step." for plan, ratio in ratios.items()], missed)


if __name__ == "__main__":
    main()
