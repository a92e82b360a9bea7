"""Predicted against measured gain of one layer moved off a slow device: two stages on two GPUs, one of them slowed.

After each layer of the last stage, forward and backward, a kernel holds its device for a while: so it is as slow as a
slow device, steadily. Micro-batches are long and recomputed, so that no device waits for its host. The protocol, fixed
before a call:

- Cases: every strength of `QUANTA` in turn at the depths of `LAYERS`, 20 in all; every one counts.
- Before a depth's first turn each layout runs `WARM_STEPS`: the first are up to 2 % slower than later ones.
- Then the reference: each case of the depth has `REFERENCE_STEPS` even steps with holds, and
  `wattune.placement.gain.Pipe` predicts its gain from these: the stages with and without holds, the optimizer, the
  power. The strain is the median of all cases so far. The predictions are printed, with a hash of their text,
  before the depth measures anything, and are what a call is judged by.
- A turn is windows of two steps: even, moved, moved, even, or the other way round, all with holds. Each case has two
  turns. Then the next one goes to a case whose gain's 95 % interval holds nothing, else to the one with the largest
  standard error, whatever was predicted, until all are below `ENOUGH` or the depth's time is up. Time that a depth
  leaves is that of later ones.
- The gain is the mean of the middle half of the even steps of the turns over that of the moved ones. A step in which a
  host paused is left out: it takes `PAUSE_S` more beside the replay of its own passes than the median step does.
- All 20 signs are judged. Those of the cases whose interval excludes nothing at the end are told beside them.
- A case whose even steps differ by more than 1 % between its halves is named, and counts.

OUT/passes_RANK.npz has every span of every step beside its window (-1 warms, 0 even without holds, 1 even, 2 moved,
3 the reference), and the joules that the device drew in it.

    python benchmarks/placement_on_gpus.py --out $OUT                  # the first two of the visible GPUs; 6 minutes
    python benchmarks/placement_on_gpus.py --out $OUT --minutes 4 --quanta 0.2 0.7 1.2 1.7 2.2
    python benchmarks/placement_on_gpus.py --out /tmp/out --cpu        # a dry run: two gloo ranks, one sleeps
    python benchmarks/placement_on_gpus.py --judge benchmarks/results/placement_on_gpus.csv        # the last call again
"""

import argparse
import csv
import gc
import hashlib
import importlib
import os
import socket
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from harness import header

from wattune.api.placement import FREE_BELOW
from wattune.catalog.hardware import ClusterSpec, device_of_product
from wattune.catalog.models import model
from wattune.cost.power import power_coefficients
from wattune.engines.torch.engine import TorchEngine
from wattune.placement.gain import Pipe, strain_of_waiting
from wattune.plans.axes import Plan
from wattune.plans.schedule import passes, replay
from wattune.schema import PHASES
from wattune.trial import TrialSpec
from wattune.units import NS_PER_S
from wattune.workers.engine import Ranks
from wattune.workers.process_groups import join_groups
from wattune.workload import Workload

LAYERS = (6, 8, 12, 16)
"""Layers of a stage: one of them moved pays beyond a slowness of one over that, roughly."""

QUANTA = (0.2, 0.45, 0.7, 0.95, 1.2, 1.45, 1.7, 1.95, 2.2, 2.45)
"""Slowness that is asked for, in such quanta: a half of them at each depth, in turn."""

WARM_STEPS, FREE_STEPS, REFERENCE_STEPS = 8, 4, 8
"""Steps of each layout before a depth counts, then those of the even one without holds, and those of each case."""

PAUSE_S = 0.001
"""Seconds beside a step's passes that are a host's pause: they scatter by 0.05 ms, and now and then by 2 to 20 more."""

TURNS = 3
"""Turns of a case; with a time for all cases two, and more of those known worst."""

BUILD_S_A_LAYER = 1.3
"""Seconds to build and warm both layouts of a depth, for each layer of a stage, once the first depth is built."""

MORE_TURNS = 6
"""Turns that a case may have more than another one of its depth."""

ENOUGH = 0.0012
"""Standard error of a gain below which a case needs no more turns."""

WARMS, FREE, EVEN, MOVED, REFERENCE = -1, 0, 1, 2, 3
"""Kinds of windows."""

STEADY_FRAC = 0.01
"""Largest difference of the slow stage's time between the first and the last half of a case that is not named."""

COLUMNS = (
    "num_layers_a_stage", "asked_slower_frac", "free_first_s", "free_last_s", "free_step_s", "held_first_s",
    "held_last_s", "held_step_s", "moved_first_s", "moved_last_s", "optimizer_first_s", "optimizer_last_s",
    "backward_first_frac", "backward_last_frac", "held_first_w", "held_last_w", "behind_s",
    "measured_gain_frac", "measured_error_frac", "reference_drift_frac", "step_even_s",
    "step_moved_s", "num_turns", "predicted_gain_frac",
)  # fmt: skip
"""Of one row in `placement_on_gpus.csv`: times of the two stages' micro-batches, and what was measured."""


GAINS = "measured_gain_frac", "predicted_gain_frac"  # the latter as told before it was measured, where a table has it

Row = dict[str, Any]
"""Numbers by the names of `COLUMNS`, and the kind of `device`; rows from before that had one are of H100."""


def read(path: Path) -> list[Row]:
    """Reads a table."""
    with open(path, newline="") as file:
        found = [{"device": "h100_sxm", **row} for row in csv.DictReader(file)]
    return [{key: text if key == "device" else float(text or "nan") for key, text in row.items()} for row in found]


def specification(layers: int, moved: bool, device: str) -> TrialSpec:
    """A dense model of two stages, even or with one layer moved to the first."""
    on_cpu = device == "cpu"
    width = {"hidden_size": 128, "ffn_hidden_size": 256, "num_heads": 4, "num_kv_heads": 2, "vocab_size": 256}
    if not on_cpu:
        width = {"hidden_size": 2048, "ffn_hidden_size": 8192, "num_heads": 16, "num_kv_heads": 8, "vocab_size": 4096}
    return TrialSpec(
        model=replace(model("llama3_8b"), num_layers=2 * layers, **width),
        cluster=ClusterSpec(device=device, devices_per_node=2),
        engine="torch",
        workload=Workload(seq_len=64 if on_cpu else 4096, global_batch_size=12),
        plan=Plan(
            pp=2,
            micro_batch_size=3,
            recompute="full",
            dtype="fp32" if on_cpu else "bf16",
            layout=(layers + 1, layers - 1) if moved else (),
        ),
    )


class Window:
    """Steps of an engine on this rank, and what all ranks saw of them."""

    def __init__(
        self, engine: TorchEngine, num_micro_batches: int, num_steps: int, joules: Callable[[], float]
    ) -> None:
        """Runs the steps. Collective."""
        own, own_passes, self.passes, began_j = [], [], [], joules()
        for step in range(num_steps):
            spans = engine.step().spans
            self.passes += [
                (step, PHASES.index(one.phase), -1 if one.micro_batch is None else one.micro_batch,
                 one.start_mono_ns, one.end_mono_ns)
                for one in spans
            ]  # fmt: skip
            names = ("step", "forward", "backward", "optimizer")
            all_ns = [[one.end_mono_ns - one.start_mono_ns for one in spans if one.phase == name] for name in names]
            longer_ns = all_ns[1][0] - statistics.median(all_ns[1][1:])  # kernels come to an idle device
            ends_ns = [max(one.end_mono_ns for one in spans if one.phase == name) for name in ("backward", "optimizer")]
            behind_ns = ends_ns[1] - ends_ns[0] - all_ns[3][0]
            own.append(np.array([*map(sum, all_ns), longer_ns, behind_ns]) / NS_PER_S)
            own_passes.append(np.array(all_ns[1:3]) / NS_PER_S)
        self.energy_j = joules() - began_j
        both: list[Any] = [None, None]
        dist.all_gather_object(both, (own, self.energy_j, own_passes))
        self.energies_j = np.array([one[1] for one in both])
        # Ranks, steps, phases, what the first pass takes beyond its others, and what lies before the optimizer.
        self.each_s = np.array([one[0] for one in both])
        self.steps_s = self.each_s[:, :, 0].max(axis=0)
        self.num_micro_batches = num_micro_batches
        orders = [passes(one, num_stages=2, num_chunks=1, num_micro_batches=num_micro_batches) for one in (0, 1)]
        passes_s = np.array([one[2] for one in both])
        lasts_s = [{one: passes_s[n, :, int(one.backward), one.micro_batch] for one in orders[n]} for n in (0, 1)]
        # What a step takes beside its passes, its optimizer and what lies before that: a host's pauses are in it.
        self.beside_s = self.steps_s - replay(orders, lasts_s) - self.each_s[0, :, 3] - self.each_s[0, :, 5]


class Steps:
    """The steps of some windows, of one kind, in which no host paused."""

    def __init__(self, windows: list[Window]) -> None:
        """Takes them together."""
        beside_s = np.concatenate([one.beside_s for one in windows])
        counts = beside_s < np.median(beside_s) + PAUSE_S
        self.steps_s = np.concatenate([one.steps_s for one in windows])[counts]
        self.each_s = np.concatenate([one.each_s for one in windows], axis=1)[:, counts]
        watts = sum(one.energies_j for one in windows) / sum(float(one.steps_s.sum()) for one in windows)
        self.watts = np.asarray(watts)
        self.num_micro_batches = windows[0].num_micro_batches

    @property
    def stages_s(self) -> Any:
        """Seconds of a micro-batch of the two stages, none of which is the first."""
        return middle(self.each_s[:, :, 1:3].sum(-1) - self.each_s[:, :, 4]) / self.num_micro_batches


def middle(values: Any) -> Any:
    """Means of the middle half of the last axis."""
    values = np.sort(values, axis=-1)
    quarter = values.shape[-1] // 4
    return values[..., quarter : values.shape[-1] - quarter].mean(axis=-1)


def pipe_of(row: Row, strain: float, held_strain: float | None) -> Pipe:
    """Returns the even layout of a row's reference, as `place` takes it.

    `strain` is that of `Pipe`, and `held_strain` what a device has of it while it is held; None is as much.
    """
    spec = specification(int(row["num_layers_a_stage"]), False, row["device"])
    free, held, optimizer, backward = (
        np.array([row[one.format("first")], row[one.format("last")]])
        for one in ("free_{}_s", "held_{}_s", "optimizer_{}_s", "backward_{}_frac")
    )
    works = free[1] / held[1]  # share of the time that the held device computes
    of_last = strain if held_strain is None else works * strain + (1 - works) * held_strain
    strains, behind_s = np.array([strain, of_last]), np.nan_to_num(row["behind_s"])
    return Pipe(spec, free[None], (held / free)[None], backward, optimizer, strains, behind_s=behind_s)


def predicted_gain(row: Row, strain: float = 0.0, held_strain: float | None = None) -> float:
    """Predicts the gain of one layer moved to the first stage, by the placement room alone."""
    pipe = pipe_of(row, strain, held_strain)
    pipe.rest_s = row["held_step_s"] - float(pipe.step_s()[0])
    return float((pipe.step_s() / pipe.step_s(pipe.layers + np.array([[1, -1]])))[0]) - 1.0


def strain_of(rows: list[Row]) -> tuple[float, float | None]:
    """Computes what the devices draw without their limit, over what it leaves above idle: computing, and held.

    Computing as `place` does, of the first device where it waits: the median of such cases, each solved with its own
    power. Held by what the joules of a step grow with the time that the last device is held; None where nobody kept
    them.
    """
    c = power_coefficients(specification(1, False, rows[0]["device"]).cluster.sensed_device)
    if c is None:  # processors
        return 0.0, None
    room_w = c.regulated_frac * c.limit_w - c.idle_w
    depths = np.array([one["num_layers_a_stage"] for one in rows])
    busy_s, energy_j = np.array([[4 * o["held_last_s"], o["held_last_w"] * o["held_step_s"]] for o in rows]).T
    for each in (busy_s, energy_j):
        each -= [each[depths == one].mean() for one in depths]
    held_w = float(busy_s @ energy_j / (busy_s @ busy_s))
    held_strain = None if np.isnan(held_w) else (held_w - c.idle_w) / room_w
    waiting = [one for one in rows if one["held_first_s"] < FREE_BELOW * one["held_last_s"]]
    found = []
    for row in waiting:
        busy = 4 * row["held_first_s"] / row["held_step_s"]
        drawn = (row["held_first_w"] - c.idle_w - (1 - busy) * c.wait_w) / busy / room_w
        found.append(strain_of_waiting(drawn, [0], partial(pipe_of, row, held_strain=held_strain)))
    strain = float(np.median(found)) if waiting else 0.0
    return 0.0 if np.isnan(strain) else strain, held_strain


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


def meter(device: str) -> Callable[[], float]:
    """Returns what reads the joules that a device has drawn since its driver was loaded; NaN without a GPU."""
    if device == "cpu":
        return lambda: float("nan")
    pynvml = importlib.import_module("pynvml")
    try:
        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
        pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)
    except (AttributeError, pynvml.NVMLError) as error:  # the times are what is asked for
        print(f"no joules: {error!r}", flush=True)
        return lambda: float("nan")
    return lambda: float(pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)) / 1000.0


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

    def __init__(self, layers: int, ranks: Ranks) -> None:
        """Builds and warms both, and measures the free stages. Collective."""
        kind = device_of_product(torch.cuda.get_device_name()) if ranks.device != "cpu" else None
        self.kind = kind.name if kind else "cpu"
        self.specs = [specification(layers, moved, self.kind) for moved in (False, True)]
        self.engines, self.is_slow = [TorchEngine(), TorchEngine()], ranks.rank == 1
        for engine, spec in zip(self.engines, self.specs, strict=True):
            engine.build(spec, ranks, seed=0)
            for layer in engine._running._pipeline._stages[0]._model.layers.values():
                layer.register_forward_hook(lambda _module, _inputs, out: Hold.apply(out) if Hold.seconds else None)
        self.joules = meter(ranks.device)
        self.all_s: float | None = None  # of its cases; without it each has `TURNS`
        self.windows: list[tuple[float, int, Window]] = []
        for _ in range(WARM_STEPS // 2):
            self.window(WARMS, 0)
            self.window(WARMS, 1)
        self.free = [self.window(FREE, 0) for _ in range(FREE_STEPS // 2)]

    def window(self, kind: int, which: int, asked: float = 0.0, num_steps: int = 2) -> Window:
        """Runs steps of one layout, slowed by so much of a layer."""
        layers = self.specs[0].model.num_layers // 2
        held_s = asked * float(Steps(self.free).stages_s[1]) / layers if kind > FREE else 0.0
        Hold.seconds = held_s if self.is_slow else 0.0
        found = Window(self.engines[which], self.specs[0].workload.global_batch_size // 3, num_steps, self.joules)
        self.windows.append((asked, kind, found))
        return found

    def case_for(self, cases: list["Case"], begun_s: float) -> int | None:
        """Returns the case that has the next turn, as the first rank sees it; None where the time is up. Collective.

        Each has two; then the one whose gain may be nothing, and else the one that is known worst, whatever was
        predicted of it.
        """
        fewest = min(cases, key=lambda one: one.turn)
        turns, chosen = sum(one.turn for one in cases), list[int | None]([cases.index(fewest)])
        if self.all_s is None:
            chosen = [None if fewest.turn == TURNS else chosen[0]]
        elif fewest.turn >= 2:
            ends_s = (turns + 1) / turns * (time.monotonic() - begun_s)
            few = [one for one in cases if one.turn < fewest.turn + MORE_TURNS and one.gain[1] > ENOUGH]
            worst = max(few, key=lambda one: (one.is_open, one.gain[1]), default=None)
            chosen = [cases.index(worst) if worst is not None and ends_s < self.all_s else None]
        dist.broadcast_object_list(chosen, src=0)
        return chosen[0]


class Case:
    """One strength at one depth, as far as it is measured."""

    def __init__(self, layouts: Layouts, asked: float) -> None:
        """Measures nothing yet."""
        self.layouts, self.asked, self.turn = layouts, asked, 0
        self.reference, self.even, self.moved = list[Window](), list[Window](), list[Window]()
        self.predicted = float("nan")

    def take_reference(self) -> None:
        """Runs a half of the steps that the gain is predicted from. Collective."""
        self.reference.append(self.layouts.window(REFERENCE, 0, self.asked, REFERENCE_STEPS // 2))

    def take_turn(self) -> None:
        """Measures each layout twice. Collective."""
        for kind in (EVEN, MOVED, MOVED, EVEN) if self.turn % 2 == 0 else (MOVED, EVEN, EVEN, MOVED):
            found = self.even if kind == EVEN else self.moved
            found.append(self.layouts.window(kind, kind - EVEN, self.asked))
        self.turn += 1

    @property
    def drift_frac(self) -> float:
        """Difference of the slow stage's time between the halves of the even windows."""
        halves = [Steps(one).stages_s[1] for one in (self.even[: self.turn], self.even[self.turn :])]
        return float(halves[1] / halves[0]) - 1.0

    @property
    def gain(self) -> tuple[float, float]:
        """The gain by means of the middle half of the steps, with its standard error."""
        means_s, errors = [], []
        for each in (self.even, self.moved):
            all_s = Steps(each).steps_s
            means_s.append(float(middle(all_s)))
            errors.append(1.1 * 1.48 * np.median(np.abs(all_s / means_s[-1] - 1.0)) / len(all_s) ** 0.5)
        return means_s[0] / means_s[1] - 1.0, float(np.linalg.norm(errors))

    @property
    def is_open(self) -> bool:
        """Tells whether the gain's 95 % interval holds nothing."""
        gain, error = self.gain
        return abs(gain) < 1.96 * error

    def reference_row(self, windows: list[Window]) -> Row:
        """Returns what the gain is predicted from, by these even windows with holds."""
        free, held, layers = Steps(self.layouts.free), Steps(windows), self.layouts.specs[0].model.num_layers // 2
        backward = middle(held.each_s[:, :, 2] / (held.each_s[:, :, 1:3].sum(-1) - held.each_s[:, :, 4]))
        optimizer_s, behind_s = middle(held.each_s[:, :, 3]), float(middle(held.each_s[0, :, 5]))
        steps_s = {"free_step_s": middle(free.steps_s), "held_step_s": middle(held.steps_s)}
        found: Row = {"device": self.layouts.kind, "num_layers_a_stage": layers, "asked_slower_frac": self.asked}
        for name, pair in (
            ("free_{}_s", free.stages_s),
            ("held_{}_s", held.stages_s),
            ("optimizer_{}_s", optimizer_s),
            ("backward_{}_frac", backward),
            ("held_{}_w", held.watts),
        ):
            found |= {name.format("first"): float(pair[0]), name.format("last"): float(pair[1])}
        return found | {name: float(one) for name, one in steps_s.items()} | {"behind_s": behind_s}

    def row(self) -> Row:
        """Returns the figures of a row: the even steps of its turns, what was measured, and what was predicted."""
        moved, (gain, error) = Steps(self.moved), self.gain
        stages_s, step_s = moved.stages_s, float(middle(moved.steps_s))
        found = self.reference_row(self.even)
        return found | {
            "moved_first_s": float(stages_s[0]),
            "moved_last_s": float(stages_s[1]),
            "measured_gain_frac": gain,
            "measured_error_frac": error,
            "reference_drift_frac": self.drift_frac,
            "step_even_s": found["held_step_s"],
            "step_moved_s": step_s,
            "num_turns": self.turn,
            "predicted_gain_frac": self.predicted,
        }


def predict_before(cases: list[Case], earlier: list[Row]) -> list[Row]:
    """Predicts a depth's gains from its reference, and prints them with their hash; returns all references so far."""
    references = [*earlier, *(one.reference_row(one.reference) for one in cases)]
    strain, lines = strain_of(references), []
    for case, row in zip(cases, references[len(earlier) :], strict=True):
        case.predicted = predicted_gain(row, *strain)
        lines.append(f"  before: L={row['num_layers_a_stage']}, asked {case.asked:.4f}: {100 * case.predicted:+.3f} %")
    text = "\n".join([*lines, f"  before: strain, computing and held: {strain}"])
    if dist.get_rank() == 0:
        print(f"{text}\n  sha256 of these lines: {hashlib.sha256(text.encode()).hexdigest()}", flush=True)
    return references


def work(
    rank: int,
    port: int,
    out: Path,
    on_cpu: bool,
    layers: tuple[int, ...],
    quanta: tuple[float, ...],
    all_s: float | None,
) -> None:
    """Runs every case on one rank; rank 0 writes each as it is done."""
    end_s = None if all_s is None else time.monotonic() + all_s
    device = "cpu" if on_cpu else f"cuda:{rank}"
    if on_cpu:
        torch.set_num_threads(1)
    else:
        torch.cuda.set_device(rank)
    Hold.launch = holder(device)
    store = dist.TCPStore("127.0.0.1", port, 2, is_master=rank == 0)
    join_groups(store, "placement", rank=rank, world_size=2, device=device, timeout_s=300.0)
    ranks = Ranks(rank=rank, world_size=2, local_rank=rank, device=device)
    own = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, own[rank * len(own) // 2 : (rank + 1) * len(own) // 2])
    gc.disable()  # it stops a host for long enough that the device waits
    rows, references, spans = list[Row](), list[Row](), list[tuple[float, ...]]()
    for number, each in enumerate(layers):
        begun_s = time.monotonic()
        both = Layouts(each, ranks)
        built_s = time.monotonic()
        if end_s is not None:  # deeper stages take longer, and so do their cases
            later_s = BUILD_S_A_LAYER * sum(layers[number + 1 :])
            both.all_s = (end_s - built_s - later_s) / sum(layers[number:]) * each
        if rank == 0:
            free = Steps(both.free)
            text = f"step {1e3 * free.steps_s[0]:.1f} ms, stages {(1e3 * free.stages_s).round(2)} ms"
            print(f"L={each}: built in {built_s - begun_s:.0f} s, {text}", flush=True)
        cases = [Case(both, one / each) for one in quanta[number % 2 :: 2]]
        for one in (*cases, *cases[::-1]):
            one.take_reference()
        references = predict_before(cases, references)
        measures_s = time.monotonic()
        both.all_s = both.all_s and both.all_s - (measures_s - built_s)
        while (chosen := both.case_for(cases, measures_s)) is not None:
            cases[chosen].take_turn()
            found = [one.row() for one in cases if one.turn >= 2]
            if rank == 0:
                lines = [[one["device"], *(f"{one[name]:.6g}" for name in COLUMNS)] for one in rows + found]
                with open(out / "placement_on_gpus.csv", "w", newline="") as file:
                    csv.writer(file).writerows([["device", *COLUMNS], *lines])
        rows += found
        if rank == 0:
            took_s = time.monotonic() - built_s
            print(f"  turns {[one.turn for one in cases]}, {took_s:.0f} s", flush=True)
        for window, (asked, kind, seen) in enumerate(both.windows):
            spans += [(each, asked, window, kind, seen.energy_j, *one) for one in seen.passes]
        np.savez_compressed(out / f"passes_{rank}.npz", passes=np.array(spans))
        for engine in both.engines:
            engine.close()
        del both, engine
        gc.collect()
    dist.barrier()
    dist.destroy_process_group()


def joined(rows: list[Row]) -> list[Row]:
    """Takes rows of one case, of several calls, together: means of its gains by turns, and their standard error."""
    cases, found = defaultdict[tuple[float, float], list[Row]](list), list[Row]()
    for row in rows:
        cases[row["num_layers_a_stage"], round(row["asked_slower_frac"], 6)].append(row)
    for each in cases.values():
        turns = np.nan_to_num([one["num_turns"] for one in each], nan=1.0)
        share = turns / turns.sum()
        means = {name: float(share @ [one.get(name, np.nan) for one in each]) for name in (*GAINS, "now")}
        error = float(np.linalg.norm(share * [one["measured_error_frac"] for one in each]))
        found.append(each[0] | means | {"measured_error_frac": error})
    return found


def judged(path: Path, calls: list[int] | None = None) -> bool:
    """Prints the bars of a table, of these calls together, else of its last one; whether all hold."""
    every, rows = read(path), list[Row]()
    for call in calls or [every[-1].get("num_call")]:
        of_call = [one for one in every if one.get("num_call") == call]
        strain = strain_of(of_call)
        print(
            f"without its limit a device would draw so much of what it leaves above idle, computing and held: {strain}"
        )
        rows += [one | {"now": predicted_gain(one, *strain)} for one in of_call]
    rows = joined(rows)
    names = (*GAINS, "now", "measured_error_frac")
    measured, said, predicted, error = (np.array([one[name] for one in rows]) for name in names)
    is_told, loses = not np.isnan(said).any(), int((measured < 0).sum())
    always = max(loses, len(rows) - loses)
    for row, told, gain, found, sure in zip(rows, said, predicted, measured, error, strict=True):
        slower = [100 * (row[f"held_{one}_s"] / row[f"free_{one}_s"] - 1) for one in ("last", "first")]
        text = f"  L={row['num_layers_a_stage']:2.0f}, slower {slower[0]:5.1f} %, the other {slower[1]:+.1f} %: "
        text += f"told {100 * told:+.2f}, " * is_told + f"now {100 * gain:+.2f}, "
        text += f"measured {100 * found:+.2f} ± {196 * sure:.2f} %"
        drift = abs(row["reference_drift_frac"])
        print(text + (f"; its reference differed by {drift:.1%} between its halves" if drift > STEADY_FRAC else ""))
    print(f"standard error of a gain: median {100 * np.median(error):.2f}, largest {100 * error.max():.2f} points")
    print(f"always the same sign would be right in {always}")
    is_sure, is_met = np.abs(measured) > 1.96 * error, False
    for what, gains in [("as told when it ran", said)] * is_told + [("by the code of now", predicted)]:
        right, off = np.sign(gains) == np.sign(measured), 100 * (gains - measured)
        text = (
            f"{what}: sign right in {right.sum()} of {len(rows)} (bar: 19 of 20); of the {is_sure.sum()} whose interval"
        )
        print(
            f"{text} excludes nothing in {(right & is_sure).sum()}; error of the gain: "
            f"median {np.median(np.abs(off)):.2f}, largest {np.abs(off).max():.2f} points (bar: 1 point), "
            f"on average {off.mean():+.2f}"
        )
        if what.startswith("as told") or not is_told:
            is_met = bool(right.sum() >= 0.95 * len(rows) and np.abs(off).max() <= 1.0 and len(rows) >= 20)
    return is_met


def main() -> int:
    """Runs all cases; 1 if a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder of placement_on_gpus.csv")
    parser.add_argument("--judge", type=Path, help="a table to judge again, instead of a run")
    parser.add_argument("--calls", type=int, nargs="+", help="calls of that table to judge together, by turns")
    parser.add_argument("--cpu", action="store_true", help="two gloo ranks on processors")
    parser.add_argument("--layers", type=int, nargs="+", default=LAYERS, help="layers of a stage")
    parser.add_argument("--quanta", type=float, nargs="+", default=QUANTA, help="strengths, over one layer of a stage")
    parser.add_argument("--minutes", type=float, help="for all cases; three turns a case unless given")
    arguments = parser.parse_args()
    header(
        "Moving a layer off a slow device gains what the map predicts, also where it loses.",
        "sign right in 19 of 20 cases, error of the gain at most 1 point",
    )
    if arguments.judge:
        return 0 if judged(arguments.judge, arguments.calls) else 1
    if not arguments.out:
        parser.error("give --out FOLDER, or --judge CSV")
    arguments.out.mkdir(parents=True, exist_ok=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    all_s = arguments.minutes and 60 * arguments.minutes
    given = (port, arguments.out, arguments.cpu, tuple(arguments.layers), tuple(arguments.quanta), all_s)
    torch.multiprocessing.spawn(work, given, nprocs=2)
    return 0 if judged(arguments.out / "placement_on_gpus.csv") else 1


if __name__ == "__main__":
    sys.exit(main())
