"""Measures FP8 against bf16 on one GPU: time, power, energy, memory and losses of the torch engine with one plan.

Two processes hold the same Llama-3 8B slice from the same weights and see the same tokens, one in bf16, one in FP8
(`wattune/engines/torch/float8.py`), both compiled. They take bursts of steps in turns, the other one waiting, and each
pair begins with the one that ended the pair before. A line is printed for each burst as it ends: the median step,
tokens a second, and from the driver's ring of 20 ms power samples the mean power, the highest mean of a second, and
energy a token. Last come FP8 over bf16 (median of the pairs, with the lowest and highest), the peaks of memory, the
predicted ratio, and the deviation of each loss. The exit code is 1 if a loss is further from bf16's than
`LARGEST_DEVIATION`.

    python benchmarks/fp8.py            # one GPU with FP8 and torchao: 130 s on an H200
    python benchmarks/fp8.py --quick    # a dry run on a CPU, eager and emulated: losses and this script alone
"""

import argparse
import sys
from typing import Final

import torch
from in_turns import FIGURES, Side, ratios, shown

from wattune.catalog.hardware import ClusterSpec, device_of_product
from wattune.catalog.models import ModelSpec
from wattune.cost.defaults import default_coefficients
from wattune.cost.estimate import estimate
from wattune.plans.axes import Plan
from wattune.trial import TrialSpec, Workload

DTYPES: Final = ("bf16", "fp8")
NUM_WARMUP: Final = 5
NUM_PAIRS: Final = 6
BURST_S: Final = 5.0
"""Least length of a burst: a hundred or more samples of power."""
LARGEST_DEVIATION: Final = 0.02
"""Largest relative deviation of a loss. Random tokens: losses stay near the entropy of the vocabulary."""


def specification(dtype: str, device: str) -> TrialSpec:
    """Eight layers of Llama-3 8B's widths with two micro-batches, or tiny ones on a CPU."""
    quick = device == "cpu"
    widths = (
        {"hidden_size": 64, "ffn_hidden_size": 128, "num_heads": 4, "num_kv_heads": 2, "vocab_size": 256}
        if quick
        else {"hidden_size": 4096, "ffn_hidden_size": 14336, "num_heads": 32, "num_kv_heads": 8, "vocab_size": 32000}
    )
    return TrialSpec(
        model=ModelSpec(name="llama_slice", num_layers=2 if quick else 8, rope_base=5e5, **widths),
        cluster=ClusterSpec(device=device, devices_per_node=1),
        engine="torch",
        workload=Workload(seq_len=32 if quick else 4096, global_batch_size=4),
        plan=Plan(micro_batch_size=2, dtype=dtype),
    )


def predicted_ratio(device: str) -> float | None:
    """Predicted step time of FP8 over that of bf16; None where nothing is predicted, as on a CPU."""
    if device == "cpu":
        return None
    specs = [specification(dtype, device) for dtype in DTYPES]
    column = estimate(specs, default_coefficients).columns["step_time_s"]
    return float(column.value[1] / column.value[0])


def main() -> int:
    """Runs the pairs; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a tiny model on a CPU")
    arguments = parser.parse_args()
    where = "cpu" if arguments.quick else torch.cuda.get_device_name(0)
    known = None if arguments.quick else device_of_product(where)
    device = "cpu" if known is None else known.name
    if device == "cpu" and not arguments.quick:
        print(f"{where} is no device of the catalog: its peak in FP8 is not known")
        return 1
    print(f"{where}, torch {torch.__version__}, Python {sys.version.split()[0]}", flush=True)
    sides = {dtype: Side("torch", on_cpu=device == "cpu") for dtype in DTYPES}
    try:
        for dtype, side in sides.items():
            side.begin(specification(dtype, device))
        for side in sides.values():
            side.built()
        slowest_s = max(side.take(NUM_WARMUP)["step_s"] for side in sides.values())
        for side in sides.values():
            side.bursts.clear()
        num_steps = 3 if arguments.quick else max(5, int(BURST_S / slowest_s))
        num_pairs = 2 if arguments.quick else NUM_PAIRS
        print(f"pair,dtype,{','.join(FIGURES)}", flush=True)
        for pair in range(num_pairs):
            for dtype in DTYPES if pair % 2 == 0 else reversed(DTYPES):
                print(f"{pair},{dtype},{shown(sides[dtype].take(num_steps))}", flush=True)
    finally:
        for side in sides.values():
            side.close()
    return summary(sides, device)


def summary(sides: dict[str, Side], device: str) -> int:
    """Prints FP8 over bf16; the exit code."""
    wide, narrow = sides["bf16"], sides["fp8"]
    print("figure,fp8_over_bf16,lowest,highest", flush=True)
    for name, (middle, lowest, highest) in ratios(narrow, wide).items():
        print(f"{name},{middle:.3f},{lowest:.3f},{highest:.3f}", flush=True)
    ratio = predicted_ratio(device)
    if ratio is not None:
        print(f"predicted step_s,{ratio:.3f},,", flush=True)
    away = [fp8 / bf16 - 1 for bf16, fp8 in zip(wide.losses, narrow.losses, strict=True)]
    worst = max(map(abs, away))
    print(f"loss of {len(away)} steps: largest deviation {worst:.1e}, last {away[-1]:+.1e}; ", end="")
    print(f"bf16 {wide.losses[0]:.4f} to {wide.losses[-1]:.4f}, fp8 to {narrow.losses[-1]:.4f}", flush=True)
    return 0 if worst <= LARGEST_DEVIATION else 1


if __name__ == "__main__":
    sys.exit(main())
