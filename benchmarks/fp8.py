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
import json
import statistics
import subprocess
import sys
import threading
import time
from typing import Any, Final

import numpy as np
import torch
import torch.distributed as dist

from wattune.catalog.hardware import ClusterSpec, device_of_product
from wattune.catalog.models import ModelSpec
from wattune.cost.defaults import default_coefficients
from wattune.cost.estimate import estimate
from wattune.engines.torch.engine import TorchEngine
from wattune.plan.axes import Plan
from wattune.trial import TrialSpec, Workload
from wattune.workers.engine import Ranks

SEED: Final = 7
DTYPES: Final = ("bf16", "fp8")
NUM_WARMUP: Final = 5
NUM_PAIRS: Final = 6
BURST_S: Final = 5.0
"""Least length of a burst: a hundred or more samples of power."""
LARGEST_DEVIATION: Final = 0.02
"""Largest relative deviation of a loss. Random tokens: losses stay near the entropy of the vocabulary."""
FIGURES: Final = ("step_s", "tokens_per_s", "energy_per_token_j", "power_mean_w", "power_peak_1s_w")


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


class Power:
    """Samples of the driver's power ring, kept while a burst runs. Without a GPU there are none."""

    def __init__(self) -> None:
        """Finds the first device."""
        self._samples: dict[int, float] = {}
        self._ended = threading.Event()
        if not torch.cuda.is_available():
            return
        import pynvml

        pynvml.nvmlInit()
        self._nvml, self._handle = pynvml, pynvml.nvmlDeviceGetHandleByIndex(0)
        threading.Thread(target=self._drain, daemon=True).start()

    def _drain(self) -> None:
        newest_us = 0
        while not self._ended.wait(0.5):
            try:
                _, samples = self._nvml.nvmlDeviceGetSamples(
                    self._handle, self._nvml.NVML_TOTAL_POWER_SAMPLES, newest_us
                )
            except self._nvml.NVMLError_NotFound:  # nothing new
                continue
            self._samples |= {sample.timeStamp: sample.sampleValue.uiVal / 1e3 for sample in samples}
            newest_us = max(self._samples)

    def between(self, start_s: float, end_s: float) -> dict[str, float]:
        """Mean power and the highest mean of a second, between two times of the wall clock."""
        if not self._samples:
            return {}
        time.sleep(1.0)  # the last samples are drained
        held = {at: watts for at, watts in self._samples.items() if start_s * 1e6 <= at <= end_s * 1e6}
        if len(held) < 20:
            return {}
        times_s, watts = np.array(sorted(held)) / 1e6, np.array([held[at] for at in sorted(held)])
        seconds = [watts[(times_s >= at) & (times_s < at + 1)].mean() for at in times_s[times_s <= times_s[-1] - 1]]
        return {"power_mean_w": float(watts.mean()), "power_peak_1s_w": float(max(seconds, default=watts.mean()))}


def serve(dtype: str, device: str) -> None:
    """Holds one engine. Each line on standard input is a number of steps to take, each line out what they were."""
    quick = device == "cpu"
    spec = specification(dtype, device)
    if quick:
        torch.set_num_threads(1)
    dist.init_process_group("gloo" if quick else "nccl", store=dist.HashStore(), rank=0, world_size=1)
    engine, power = TorchEngine(), Power()
    engine.build(spec, Ranks(rank=0, world_size=1, local_rank=0, device="cpu" if quick else "cuda:0"), seed=SEED)
    for line in sys.stdin:
        losses, steps_s, start_s = [], [], time.time()
        for _ in range(int(line)):
            began_s = time.perf_counter()
            losses.append(engine.step().loss)  # waits for the device
            steps_s.append(time.perf_counter() - began_s)
        end_s = time.time()
        tokens_per_s = spec.workload.tokens_per_step * len(steps_s) / sum(steps_s)
        found = {"step_s": statistics.median(steps_s), "tokens_per_s": tokens_per_s, **power.between(start_s, end_s)}
        if "power_mean_w" in found:
            found["energy_per_token_j"] = found["power_mean_w"] / tokens_per_s
        print(json.dumps({"losses": losses, "peak_bytes": engine.memory_peak_bytes(), **found}), flush=True)
    engine.close()
    dist.destroy_process_group()


class Side:
    """The process of one data type."""

    def __init__(self, dtype: str, device: str) -> None:
        """Starts it; it builds while nobody waits."""
        self.losses: list[float] = []
        self.bursts: list[dict[str, Any]] = []
        command = [sys.executable, __file__, "--serve", dtype, "--device", device]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def take(self, num_steps: int) -> dict[str, Any]:
        """Takes steps; the losses of all bursts follow one another."""
        to, came = self._process.stdin, self._process.stdout
        assert to is not None and came is not None
        to.write(f"{num_steps}\n")
        to.flush()
        line = came.readline()
        if not line:
            raise SystemExit(f"the process ended with {self._process.wait(timeout=60)}; its error stands above")
        burst: dict[str, Any] = json.loads(line)
        self.losses += burst.pop("losses")
        return burst

    def close(self) -> None:
        """Ends it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            self._process.kill()


def predicted_ratio(device: str) -> float | None:
    """Predicted step time of FP8 over that of bf16; None where nothing is predicted, as on a CPU."""
    if device == "cpu":
        return None
    specs = [specification(dtype, device) for dtype in DTYPES]
    column = estimate(specs, default_coefficients).columns["step_time_s"]
    return float(column.value[1] / column.value[0])


def shown(burst: dict[str, Any]) -> str:
    """The figures of a burst as cells; what was not measured is empty."""
    return ",".join(f"{burst[name]:.5g}" if name in burst else "" for name in FIGURES)


def main() -> int:
    """Runs the pairs; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a tiny model on a CPU")
    parser.add_argument("--serve", choices=DTYPES, help=argparse.SUPPRESS)
    parser.add_argument("--device", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        serve(arguments.serve, arguments.device)
        return 0
    where = "cpu" if arguments.quick else torch.cuda.get_device_name(0)
    known = None if arguments.quick else device_of_product(where)
    device = "cpu" if known is None else known.name
    if device == "cpu" and not arguments.quick:
        print(f"{where} is no device of the catalog: its peak in FP8 is not known")
        return 1
    print(f"{where}, torch {torch.__version__}, Python {sys.version.split()[0]}", flush=True)
    sides = {dtype: Side(dtype, device) for dtype in DTYPES}
    try:
        slowest_s = max(side.take(NUM_WARMUP)["step_s"] for side in sides.values())
        num_steps = 3 if arguments.quick else max(5, int(BURST_S / slowest_s))
        num_pairs = 2 if arguments.quick else NUM_PAIRS
        print(f"pair,dtype,{','.join(FIGURES)}", flush=True)
        for pair in range(num_pairs):
            for dtype in DTYPES if pair % 2 == 0 else reversed(DTYPES):
                burst = sides[dtype].take(num_steps)
                sides[dtype].bursts.append(burst)
                print(f"{pair},{dtype},{shown(burst)}", flush=True)
    finally:
        for side in sides.values():
            side.close()
    return summary(sides, device)


def summary(sides: dict[str, Side], device: str) -> int:
    """Prints FP8 over bf16; the exit code."""
    wide, narrow = sides["bf16"], sides["fp8"]
    print("figure,fp8_over_bf16,lowest,highest", flush=True)
    for name in (*FIGURES, "peak_bytes"):
        pairs = zip(wide.bursts, narrow.bursts, strict=True)
        ratios = [fp8[name] / bf16[name] for bf16, fp8 in pairs if name in bf16 and name in fp8]
        if ratios:
            print(f"{name},{statistics.median(ratios):.3f},{min(ratios):.3f},{max(ratios):.3f}", flush=True)
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
