"""Measures what offloading activations costs and saves on one GPU, beside torch's own `save_on_cpu`.

Every case trains the same Llama-3 8B slice from the same weights in a process of its own: layers as they are, the same
once more as a control, offloaded (`wattune/engines/model/offload.py`), recomputed, and both. The peer
`torch.autograd.graph.save_on_cpu(pin_memory=True)` fails under the compiler of torch 2.11 (strides of a saved tensor),
so it runs without one, beside a plain case and an offloaded one. Printed are the median step, its ratio to the plain
case of the same compiler, the peak of memory, the predicted peak of compiled cases, and the rates of large copies to
and from pinned memory.

The losses of a case may differ from those of its plain case by three times what the control's do, as attention's
backward pass adds in no fixed order on a GPU, and by `SAME_LOSS` where the control's agree. The exit code is 1 if they
differ by more, or if a case fails.

    python benchmarks/activation_offload.py            # one GPU, more than six minutes
    python benchmarks/activation_offload.py --cases plain plain_again eager eager_offload eager_save_on_cpu
    python benchmarks/activation_offload.py --quick    # a dry run of this script on a CPU
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn

from wattune.catalog.hardware import ClusterSpec
from wattune.catalog.models import ModelSpec
from wattune.cost.batch import batches
from wattune.cost.memory.defaults import H200
from wattune.cost.memory.predict import predict as predict_memory
from wattune.engines.model.compiler import EAGER
from wattune.engines.torch import engine as torch_engine
from wattune.engines.torch.engine import TorchEngine
from wattune.plans.axes import Plan
from wattune.trial import TrialSpec, Workload
from wattune.workers.engine import Ranks

SEED: Final = 7
NUM_WARMUP, NUM_STEPS = 4, 12
CASES: Final[dict[str, dict[str, Any]]] = {
    "plain": {},
    "plain_again": {},
    "offload": {"offload": "activations"},
    "recompute": {"recompute": "full"},
    "recompute_offload": {"recompute": "full", "offload": "activations"},
    "eager": {},
    "eager_offload": {"offload": "activations"},
    "eager_save_on_cpu": {"offload": "activations"},
}
CONTROL: Final = "plain_again"
SAME_LOSS: Final = 1e-6
"""Largest relative deviation of a loss: a copy changes no bit, recomputation compiles other graphs."""
SAME_LOSS_RECOMPUTED: Final = 1e-4


def base_of(name: str) -> str:
    """The case that another one is compared with: its layers as they are, by the same compiler."""
    return "eager" if name.startswith("eager") else "plain"


def missing(names: Sequence[str]) -> dict[str, list[str]]:
    """The cases that asked ones cannot be judged without, by the asked one.

    Each needs its base. Where losses are held to those of the base, the control says how far two equal runs are apart,
    and it is compared with `plain`.
    """
    found = {}
    for name in names:
        needed = {base_of(name)} if name == base_of(name) else {base_of(name), CONTROL, base_of(CONTROL)}
        if lacking := [each for each in CASES if each in needed and each not in names]:
            found[name] = lacking
    return found


class SaveOnCpu:
    """torch's own hooks in place of ours. They move weights too, and the host waits for each copy."""

    def __init__(self, *_: Any) -> None:
        """Holds nothing."""

    def begin(self) -> None:
        """Nothing to begin."""

    def layer(self, _: nn.Module) -> AbstractContextManager[Any]:
        """See `torch.autograd.graph.save_on_cpu`."""
        return torch.autograd.graph.save_on_cpu(pin_memory=torch.cuda.is_available())


def specification(axes: dict[str, Any], *, quick: bool) -> TrialSpec:
    """Eight layers of Llama-3 8B's widths with two micro-batches, or tiny ones."""
    widths = (
        {"hidden_size": 64, "ffn_hidden_size": 128, "num_heads": 4, "num_kv_heads": 2, "vocab_size": 256}
        if quick
        else {"hidden_size": 4096, "ffn_hidden_size": 14336, "num_heads": 32, "num_kv_heads": 8, "vocab_size": 32000}
    )
    return TrialSpec(
        model=ModelSpec(name="llama_slice", num_layers=8, rope_base=5e5, **widths),
        cluster=ClusterSpec(device="cpu" if quick else "h200_sxm", devices_per_node=1),
        engine="torch",
        workload=Workload(seq_len=32 if quick else 4096, global_batch_size=8),
        plan=Plan(micro_batch_size=4, dtype="fp32" if quick else "bf16", **axes),
    )


def run(name: str, *, quick: bool) -> dict[str, Any]:
    """Trains one case in this process."""
    spec = specification(CASES[name], quick=quick)
    if name == "eager_save_on_cpu":
        torch_engine.Offload = SaveOnCpu  # type: ignore[assignment, misc]
    if quick:
        torch.set_num_threads(1)
    dist.init_process_group("gloo" if quick else "nccl", store=dist.HashStore(), rank=0, world_size=1)
    engine = TorchEngine(EAGER if name.startswith("eager") else None)
    engine.build(spec, Ranks(rank=0, world_size=1, local_rank=0, device="cpu" if quick else "cuda:0"), seed=SEED)
    losses, steps_s = [], []
    for _ in range(3 if quick else NUM_WARMUP + NUM_STEPS):
        start_s = time.perf_counter()
        losses.append(engine.step().loss)  # waits for the device
        steps_s.append(time.perf_counter() - start_s)
    peak_bytes = engine.memory_peak_bytes()
    engine.close()
    dist.destroy_process_group()
    predicted = None
    if not quick and not name.startswith("eager"):  # compiled layers are predicted, which keep less
        ((_, batch),) = batches([spec])
        predicted = sum(part[0] for part in predict_memory(batch, H200).parts_bytes.values())
    return {
        "losses": losses,
        "step_s": statistics.median(steps_s[-2 if quick else -NUM_STEPS :]),
        "peak_bytes": peak_bytes,
        "predicted_peak_bytes": predicted,
    }


def copy_rates() -> tuple[float, float]:
    """Bytes a second of copies of 1 GiB to and from pinned memory, median of ten."""
    device = torch.empty(2**30, dtype=torch.uint8, device="cuda")
    host = torch.empty_like(device, device="cpu", pin_memory=True)
    rates = []
    for to, source in ((host, device), (device, host)):
        seconds = []
        for _ in range(10):
            torch.cuda.synchronize()
            start_s = time.perf_counter()
            to.copy_(source, non_blocking=True)
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - start_s)
        rates.append(2**30 / statistics.median(seconds))
    return rates[0], rates[1]


def main() -> int:
    """Runs every case; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a tiny model on a CPU")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES), help="some of the cases")
    parser.add_argument("--case", choices=CASES, help="one case alone, as JSON")
    arguments = parser.parse_args()
    for name, lacking in missing(arguments.cases).items():
        parser.error(f"--cases: {name} cannot be judged without {' and '.join(lacking)}; name these too")
    if arguments.case:
        print(json.dumps(run(arguments.case, quick=arguments.quick)))
        return 0
    where = "cpu" if arguments.quick else torch.cuda.get_device_name(0)
    print(f"{where}, torch {torch.__version__}, Python {sys.version.split()[0]}", flush=True)
    if not arguments.quick:
        down, up = copy_rates()
        print(f"pinned copies of 1 GiB: {down / 1e9:.1f} GB/s from the device, {up / 1e9:.1f} GB/s to it", flush=True)
    rows: dict[str, dict[str, Any]] = {}
    num_bad, control = 0, 0.0
    print("case,step_ms,step_ratio,peak_gb,predicted_peak_gb,first_loss_deviation_ratio,largest_loss_deviation_ratio")
    for name in [each for each in CASES if each in arguments.cases]:
        command = [sys.executable, __file__, "--case", name, *(["--quick"] if arguments.quick else [])]
        done = subprocess.run(command, capture_output=True, text=True, timeout=280)
        if done.returncode:
            print(f"{name},failed\n{done.stderr[-2000:]}", flush=True)
            num_bad += 1
            continue
        row = rows[name] = json.loads(done.stdout.splitlines()[-1])
        plain = rows.get(base_of(name))
        if plain is None:
            continue  # it failed, and counts already
        away = [abs(a / b - 1) for a, b in zip(row["losses"], plain["losses"], strict=True)]
        if name == CONTROL:
            control = max(away)
        else:
            least = SAME_LOSS_RECOMPUTED if "recompute" in CASES[name] else SAME_LOSS
            num_bad += max(away) > max(least, 3 * control)
        guess = row["predicted_peak_bytes"]
        print(
            f"{name},{1e3 * row['step_s']:.1f},{row['step_s'] / plain['step_s']:.3f},{row['peak_bytes'] / 1e9:.2f},"
            f"{'' if guess is None else f'{guess / 1e9:.2f}'},{away[0]:.1e},{max(away):.1e}",
            flush=True,
        )
    print(f"{num_bad} bad")
    return 1 if num_bad else 0


if __name__ == "__main__":
    sys.exit(main())
