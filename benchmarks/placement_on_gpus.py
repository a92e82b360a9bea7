"""Predicted against measured gain of one layer moved off a slow device: two stages on two GPUs, one of them slowed.

After each layer of the last stage, forward and backward, a kernel holds its device for a while: so it is as slow as a
slow device, steadily. How slow is measured by a short reference: the stage's own passes with the holds and without.
`wattune.placement.gain.Pipe` predicts from that the gain of the layout (L + 1, L - 1) over (L, L). Both layouts then
run step by step in turn. A case whose reference differs by more than 1 % before and after is dropped, and counted.

    python benchmarks/placement_on_gpus.py --out $OUT                  # the first two of the visible GPUs; 4 minutes
    python benchmarks/placement_on_gpus.py --out /tmp/out --cpu        # a dry run: two gloo ranks, one sleeps
"""

import argparse
import csv
import os
import socket
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from harness import header

from wattune.catalog.hardware import ClusterSpec
from wattune.catalog.models import model
from wattune.engines.torch.engine import TorchEngine
from wattune.placement.gain import Pipe
from wattune.plans.axes import Plan
from wattune.trial import TrialSpec
from wattune.units import NS_PER_S
from wattune.workers.engine import Ranks
from wattune.workers.process_groups import join_groups
from wattune.workload import Workload

LAYERS = (6, 8, 12, 16)
"""Layers of a stage: one of them moved pays beyond a slowness of one over that, roughly."""

QUANTA = (0.3, 0.6, 1.4, 1.8, 2.3)
"""Slowness that is asked for, in such quanta."""

PAIRS = 6
"""Steps of each layout, in turn."""

STEADY_FRAC = 0.01
"""Largest difference of the slow stage's time before and after a case that counts."""

COLUMNS = (
    "num_layers_a_stage", "asked_slower_frac", "slow_device_slower_frac", "other_device_slower_frac",
    "predicted_gain_frac", "measured_gain_frac", "measured_error_frac", "reference_drift_frac", "step_even_s",
    "step_moved_s",
)  # fmt: skip


def specification(layers: int, on_cpu: bool, moved: bool) -> TrialSpec:
    """A dense model of two stages, even or with one layer moved to the first."""
    width = {"hidden_size": 128, "ffn_hidden_size": 256, "num_heads": 4, "num_kv_heads": 2, "vocab_size": 256}
    if not on_cpu:
        width = {"hidden_size": 2048, "ffn_hidden_size": 8192, "num_heads": 16, "num_kv_heads": 8, "vocab_size": 4096}
    return TrialSpec(
        model=replace(model("llama3_8b"), num_layers=2 * layers, **width),
        cluster=ClusterSpec(device="cpu" if on_cpu else "h100_sxm", devices_per_node=2),
        engine="torch",
        workload=Workload(seq_len=64 if on_cpu else 4096, global_batch_size=8),
        plan=Plan(
            pp=2,
            micro_batch_size=2,
            dtype="fp32" if on_cpu else "bf16",
            layout=(layers + 1, layers - 1) if moved else (),
        ),
    )


class Window:
    """Steps of an engine on this rank, and what all ranks saw of them."""

    def __init__(self, engine: TorchEngine, num_micro_batches: int, num_steps: int) -> None:
        """Runs the steps. Collective."""
        own = []
        for _ in range(num_steps):
            spans = engine.step().spans
            each = {
                name: sum(one.end_mono_ns - one.start_mono_ns for one in spans if one.phase == name) / NS_PER_S
                for name in ("step", "forward", "backward")
            }
            own.append(each)
        both: list[Any] = [None, None]
        dist.all_gather_object(both, own)
        self.steps_s = [max(one["step"] for one in ranks) for ranks in zip(*both, strict=True)]
        self.step_s = statistics.median(self.steps_s)
        passes = [[(one["forward"], one["backward"]) for one in rank] for rank in both]
        self.stage_s = np.array([statistics.median(map(sum, rank)) for rank in passes]) / num_micro_batches
        self.backward_frac = sum(b for rank in passes for _, b in rank) / sum(f + b for rank in passes for f, b in rank)


def predicted_gain(spec: TrialSpec, free: Window, held: Window) -> float:
    """Predicts the gain of one layer moved to the first stage, by the placement room alone."""
    pipe = Pipe(spec, free.stage_s[None], (held.stage_s / free.stage_s)[None], held.backward_frac)
    pipe.rest_s = held.step_s - float(pipe.step_s()[0])
    layers = pipe.layers + np.array([[1, -1]])
    return float((pipe.step_s() / pipe.step_s(layers))[0]) - 1.0


KERNEL = """
extern "C" __global__ void hold(int length_ns) {
    unsigned long long begin, now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(begin));
    do { asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now)); } while (now - begin < length_ns);
}
"""
"""Spins on every multiprocessor, on the stream of the layers, until its time is over."""


def holder(device: str) -> Callable[[float], None]:
    """Returns what holds this rank's device for some seconds, behind the work that it was given before."""
    if device == "cpu":
        return time.sleep
    # torch puts its include folder on NVRTC's path and wants to know it; the kernel includes nothing.
    os.environ.setdefault("CUDA_HOME", "/usr/local/cuda")
    try:
        size, kernel = (
            torch.cuda.get_device_properties(device).multi_processor_count,
            torch.cuda._compile_kernel(KERNEL, "hold"),
        )

        def launch(seconds: float) -> None:
            kernel(grid=(size, 1, 1), block=(1024, 1, 1), args=[int(seconds * NS_PER_S)])

        launch(1e-4)
    except (OSError, RuntimeError, AttributeError, ImportError) as error:
        print(f"torch compiles no kernel here ({error}): one of its own holds the device", flush=True)
        torch.cuda._sleep(1000)
        torch.cuda.synchronize()
        begin = time.perf_counter()
        torch.cuda._sleep(100_000_000)
        torch.cuda.synchronize()
        per_s = 100_000_000 / (time.perf_counter() - begin)

        def launch(seconds: float) -> None:
            torch.cuda._sleep(int(seconds * per_s))

    return launch


class Hold(torch.autograd.Function):
    """Holds the device behind a layer: a third of the time in the forward pass, the rest in the backward pass."""

    seconds = 0.0
    launch: Callable[[float], None] = time.sleep

    @staticmethod
    def forward(_ctx: object, x: torch.Tensor) -> torch.Tensor:
        """Passes the activations on."""
        if Hold.seconds:
            Hold.launch(Hold.seconds / 3)
        return x.view_as(x)

    @staticmethod
    def backward(_ctx: object, grad: torch.Tensor) -> torch.Tensor:
        """Passes their gradient on."""
        if Hold.seconds:
            Hold.launch(Hold.seconds * 2 / 3)
        return grad


class Layouts:
    """The two layouts of one depth, built on this rank; holds are of the last one alone."""

    def __init__(self, layers: int, ranks: Ranks, on_cpu: bool) -> None:
        """Builds and warms both, and measures the free stages. Collective."""
        self.specs = [specification(layers, on_cpu, moved) for moved in (False, True)]
        self.engines, self.is_slow = [TorchEngine(), TorchEngine()], ranks.rank == 1
        for engine, spec in zip(self.engines, self.specs, strict=True):
            engine.build(spec, ranks, seed=0)
            for layer in engine._running._pipeline._stages[0]._model.layers.values():
                layer.register_forward_hook(lambda _module, _inputs, out: Hold.apply(out) if Hold.seconds else None)
        for which in (0, 1, 0, 1):
            self.window(which, 3)
        self.free = self.window(0, 5)

    def window(self, which: int, num_steps: int) -> Window:
        """Runs steps of one layout."""
        return Window(self.engines[which], self.specs[0].workload.global_batch_size // 2, num_steps)

    def case(self, asked: float) -> list[float]:
        """Measures one strength; returns the figures of a row."""
        layers = self.specs[0].model.num_layers // 2
        Hold.seconds = asked * float(self.free.stage_s[1]) / layers if self.is_slow else 0.0
        self.window(0, 1)
        held = self.window(0, 2)
        gain = predicted_gain(self.specs[0], self.free, held)
        steps: list[list[float]] = [[], []]
        for turn in range(PAIRS):
            for which in (0, 1) if turn % 2 else (1, 0):
                steps[which].append(self.window(which, 1).step_s)
        drift = float(self.window(0, 2).stage_s[1] / held.stage_s[1]) - 1.0
        Hold.seconds = 0.0
        ratios = np.array(steps[0]) / np.array(steps[1]) - 1.0
        even_s, moved_s = map(statistics.median, steps)
        slow, other = (held.stage_s / self.free.stage_s - 1.0)[::-1]
        error = 1.25 * float(ratios.std(ddof=1)) / PAIRS**0.5
        return [slow, other, gain, float(np.median(ratios)), error, drift, even_s, moved_s]


def work(rank: int, port: int, out: Path, on_cpu: bool, layers: tuple[int, ...]) -> None:
    """Runs every case on one rank; rank 0 writes each as it is done."""
    device = "cpu" if on_cpu else f"cuda:{rank}"
    if on_cpu:
        torch.set_num_threads(1)
    else:
        torch.cuda.set_device(rank)
    Hold.launch = holder(device)
    store = dist.TCPStore("127.0.0.1", port, 2, is_master=rank == 0)
    join_groups(store, "placement", rank=rank, world_size=2, device=device, timeout_s=300.0)
    ranks = Ranks(rank=rank, world_size=2, local_rank=rank, device=device)
    rows = [list(COLUMNS)]
    for each in layers:
        begun = time.monotonic()
        both = Layouts(each, ranks, on_cpu)
        if rank == 0:
            text = f"step {1e3 * both.free.step_s:.1f} ms, stages {(1e3 * both.free.stage_s).round(2)} ms"
            print(f"L={each}: built in {time.monotonic() - begun:.0f} s, {text}", flush=True)
        for asked in (quanta / each for quanta in QUANTA):
            found = both.case(asked)
            rows.append([f"{one:.6g}" for one in (each, asked, *found)])
            if rank == 0:
                with open(out / "placement_on_gpus.csv", "w", newline="") as file:
                    csv.writer(file).writerows(rows)
                text = f"slower {100 * found[0]:5.1f} % (asked {100 * asked:4.1f}, drift {100 * found[5]:+.1f}): "
                text += f"predicted {100 * found[2]:+6.2f} %, measured {100 * found[3]:+6.2f} ± {200 * found[4]:.2f} %"
                print(f"  {text}", flush=True)
        for engine in both.engines:
            engine.close()
    dist.barrier()
    dist.destroy_process_group()


def judged(path: Path) -> bool:
    """Prints the bars of a table; whether all hold."""
    with open(path, newline="") as file:
        every = list(csv.DictReader(file))
    rows = [one for one in every if abs(float(one["reference_drift_frac"])) <= STEADY_FRAC]
    print(f"{len(rows)} of {len(every)} cases count: the others' reference differed by more than {STEADY_FRAC:.0%}")
    if not rows:
        return False
    predicted, measured, error = (
        np.array([float(one[name]) for one in rows])
        for name in ("predicted_gain_frac", "measured_gain_frac", "measured_error_frac")
    )
    right, off = int((np.sign(predicted) == np.sign(measured)).sum()), 100 * np.abs(predicted - measured)
    loses = int((measured < 0).sum())
    always = max(loses, len(rows) - loses)
    print(f"sign right in {right} of {len(rows)} (bar: 19 of 20); always the same sign would be right in {always}")
    print(f"error of the gain: median {np.median(off):.2f}, largest {off.max():.2f} points (bar: 1 point)")
    print(f"standard error of a gain: median {100 * np.median(error):.2f}, largest {100 * error.max():.2f} points")
    return bool(right >= 0.95 * len(rows) and off.max() <= 1.0 and len(rows) >= 20)


def main() -> int:
    """Runs all cases; 1 if a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of placement_on_gpus.csv")
    parser.add_argument("--cpu", action="store_true", help="two gloo ranks on processors")
    parser.add_argument("--layers", type=int, nargs="+", default=LAYERS, help="layers of a stage")
    arguments = parser.parse_args()
    header(
        "Moving a layer off a slow device gains what the map predicts, also where it loses.",
        "sign right in 19 of 20 cases, error of the gain at most 1 point",
    )
    arguments.out.mkdir(parents=True, exist_ok=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    given = (port, arguments.out, arguments.cpu, tuple(arguments.layers))
    torch.multiprocessing.spawn(work, given, nprocs=2)
    return 0 if judged(arguments.out / "placement_on_gpus.csv") else 1


if __name__ == "__main__":
    sys.exit(main())
