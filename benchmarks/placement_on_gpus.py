"""Predicted against measured gain of one layer moved off a slow device: two stages on two GPUs, one of them slowed.

A kernel of another process holds the device of the last stage for part of its time, so its slowness is imposed, and
measured by a short reference: the stage's own passes with the kernel and without it. `wattune.placement.gain.Pipe`
predicts the gain of the layout (L + 1, L - 1) over (L, L) from that. Both layouts then run in turn.

    python benchmarks/placement_on_gpus.py --out $OUT                  # the first two of the visible GPUs; 5 minutes
    python benchmarks/placement_on_gpus.py --out /tmp/out --cpu        # a dry run: two gloo ranks, one stopped at times
"""

import argparse
import csv
import os
import signal
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

QUANTA = (0.25, 0.5, 0.7, 1.4, 1.8, 2.3)
"""Slowness that is asked for, in such quanta."""

PAUSE_S = 0.006
"""Between two holds of the device."""

COLUMNS = (
    "num_layers_a_stage", "asked_slower_frac", "slow_device_slower_frac", "other_device_slower_frac",
    "predicted_gain_frac", "measured_gain_frac", "measured_error_frac", "step_even_s", "step_moved_s",
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
        workload=Workload(seq_len=64 if on_cpu else 2048, global_batch_size=8),
        plan=Plan(
            pp=2, dtype="fp32" if on_cpu else "bf16", layout=(layers + 1, layers - 1) if moved else (), sharding="none"
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
"""Spins in every block until its time is over. Two processes take turns on a device, so all of it is held; where they
run beside each other (MPS), its blocks hold the multiprocessors that they fill."""


def spinner() -> Callable[[float], None]:
    """Returns what holds the second device for some seconds, by a kernel on all of it, else by one of torch's."""
    torch.cuda.set_device(1)
    # torch puts its include folder on NVRTC's path and wants to know it; the kernel includes nothing.
    os.environ.setdefault("CUDA_HOME", "/usr/local/cuda")
    try:
        size, kernel = (
            torch.cuda.get_device_properties(1).multi_processor_count,
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

    def spin(seconds: float) -> None:
        launch(seconds)
        torch.cuda.synchronize()

    return spin


def hold(state: Any, on_cpu: bool) -> None:
    """Holds the device of the last rank again and again, as long as `state` says; until that is negative."""
    spin = None if on_cpu else spinner()
    state[2] = 1.0
    while state[0] >= 0:
        if state[0] == 0:
            time.sleep(0.001)
        elif spin is None:
            os.kill(int(state[1]), signal.SIGSTOP)
            time.sleep(state[0])
            os.kill(int(state[1]), signal.SIGCONT)
        else:
            spin(state[0])
        time.sleep(PAUSE_S)


class Layouts:
    """The two layouts of one depth, built on this rank, and the state of the process that holds the slow device."""

    def __init__(self, layers: int, ranks: Ranks, state: Any, on_cpu: bool) -> None:
        """Builds and warms both, and measures the free stages. Collective."""
        self.specs = [specification(layers, on_cpu, moved) for moved in (False, True)]
        self.engines, self.state, self.first = [TorchEngine(), TorchEngine()], state, ranks.rank == 0
        for engine, spec in zip(self.engines, self.specs, strict=True):
            engine.build(spec, ranks, seed=0)
        for which in (0, 1):
            self.window(which, 4)
        self.free = self.window(0, 5)

    def window(self, which: int, num_steps: int) -> Window:
        """Runs steps of one layout."""
        return Window(self.engines[which], self.specs[0].workload.global_batch_size, num_steps)

    def hold(self, seconds: float) -> None:
        """Sets the holds between two meetings of the ranks."""
        dist.barrier()
        if self.first:
            self.state[0] = seconds
        dist.barrier()

    def case(self, hold_s: float) -> tuple[np.ndarray, list[float]]:
        """Measures one strength: how much slower each stage is, and the figures of a row."""
        self.hold(hold_s)
        held = self.window(0, 5)
        slower = held.stage_s / self.free.stage_s - 1.0
        gain = predicted_gain(self.specs[0], self.free, held)
        windows: list[list[float]] = [[], []]
        for turn in range(6):
            for which in (0, 1) if turn % 2 else (1, 0):
                windows[which].append(self.window(which, 2).step_s)
        self.hold(0.0)
        ratios = np.array(windows[0]) / np.array(windows[1]) - 1.0
        even_s, moved_s = (statistics.fmean(one) for one in windows)
        error = float(ratios.std(ddof=1)) / 6**0.5
        return slower, [slower[1], slower[0], gain, even_s / moved_s - 1.0, error, even_s, moved_s]


def work(rank: int, port: int, state: Any, out: Path, on_cpu: bool, layers: tuple[int, ...]) -> None:
    """Runs every case on one rank; rank 0 writes each as it is done."""
    device = "cpu" if on_cpu else f"cuda:{rank}"
    if on_cpu:
        torch.set_num_threads(1)
    else:
        torch.cuda.set_device(rank)
    if rank:
        state[1] = os.getpid()
    store = dist.TCPStore("127.0.0.1", port, 2, is_master=rank == 0)
    join_groups(store, "placement", rank=rank, world_size=2, device=device, timeout_s=300.0)
    ranks = Ranks(rank=rank, world_size=2, local_rank=rank, device=device)
    overhead_s, rows = 0.0, [list(COLUMNS)]
    for each in layers:
        begun = time.monotonic()
        both = Layouts(each, ranks, state, on_cpu)
        if rank == 0:
            print(
                f"L={each}: built in {time.monotonic() - begun:.0f} s, stages {1e3 * both.free.stage_s} ms", flush=True
            )
        for asked in (quanta / each for quanta in QUANTA):
            slower, found = both.case(max(asked * PAUSE_S - overhead_s, 2e-5))
            # Switching between processes takes time too: the next cases ask for that much less.
            overhead_s = float(np.clip(overhead_s + 0.7 * (slower[1] - asked) * PAUSE_S, 0.0, PAUSE_S / 3))
            rows.append([f"{one:.6g}" for one in (each, asked, *found)])
            if rank == 0:
                with open(out / "placement_gpu.csv", "w", newline="") as file:
                    csv.writer(file).writerows(rows)
                text = f"slower {100 * slower[1]:5.1f} % (asked {100 * asked:4.1f}): predicted {100 * found[2]:+6.2f} %"
                print(f"  {text}, measured {100 * found[3]:+6.2f} ± {200 * found[4]:.2f} %", flush=True)
        for engine in both.engines:
            engine.close()
    dist.barrier()
    dist.destroy_process_group()


def judged(path: Path) -> bool:
    """Prints the bars of a table; whether all hold."""
    with open(path, newline="") as file:
        rows = list(csv.DictReader(file))
    predicted, measured = (
        np.array([float(one[f"{name}_gain_frac"]) for one in rows]) for name in ("predicted", "measured")
    )
    right, error = int((np.sign(predicted) == np.sign(measured)).sum()), 100 * np.abs(predicted - measured)
    still = int((measured < 0).sum())
    always = max(still, len(rows) - still)
    print(f"sign right in {right} of {len(rows)} (bar: 19 of 20); always the same sign would be right in {always}")
    print(f"error of the gain: median {np.median(error):.2f}, largest {error.max():.2f} points (bar: 1 point)")
    return bool(right >= 0.95 * len(rows) and error.max() <= 1.0)


def main() -> int:
    """Runs all cases; 1 if a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of placement_gpu.csv")
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
    context = torch.multiprocessing.get_context("spawn")
    state = context.Array("d", [0.0, 0.0, 0.0], lock=False)
    holder = context.Process(target=hold, args=(state, arguments.cpu), daemon=True)
    holder.start()
    while state[2] == 0.0 and holder.is_alive():
        time.sleep(0.1)
    if not holder.is_alive():
        print("the process that holds the device ended: see its error above; nothing was measured")
        return 2
    given = (port, state, arguments.out, arguments.cpu, tuple(arguments.layers))
    workers = [context.Process(target=work, args=(rank, *given)) for rank in range(2)]
    for worker in workers:
        worker.start()
    while any(one.is_alive() for one in workers) and not any(one.exitcode for one in workers):
        time.sleep(0.2)
    state[0] = -1.0
    failed = any(one.exitcode for one in workers) or bool(holder.exitcode)
    for one in (*workers, holder):
        one.join(10)
        one.kill()
    path = arguments.out / "placement_gpu.csv"
    good = path.exists() and judged(path)
    return 0 if good and not failed else 1


if __name__ == "__main__":
    sys.exit(main())
