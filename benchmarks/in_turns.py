"""Processes that each hold one engine on one GPU and take bursts of steps in turns, while the others wait.

So each side meets the same device, as warm as the others found it. A side is told in a line of JSON what to build or
how many steps to take, and answers with a line. Power is read from the driver's ring of 20 ms samples; without a GPU
there is none.
"""

import json
import os
import statistics
import subprocess
import sys
import threading
import time
import traceback
from contextlib import suppress
from typing import Any, Final

import numpy as np

from wattune.plans.engines import CAPABILITIES
from wattune.trial import TrialSpec

SEED: Final = 7
FIGURES: Final = ("step_s", "tokens_per_s", "energy_per_token_j", "power_mean_w", "power_peak_1s_w")
"""Figures of a burst; those of power where there is any."""


class Side:
    """The process of one engine."""

    def __init__(self, engine: str, *, on_cpu: bool = False) -> None:
        """Starts it.

        Args:
            engine: Its name.
            on_cpu: True for a dry run without a GPU.
        """
        self.losses: list[float] = []
        self.grad_norms: list[float] = []
        self.bursts: list[dict[str, Any]] = []
        self._command = [sys.executable, __file__, engine, "cpu" if on_cpu else "cuda:0"]
        self._environment = os.environ | dict(CAPABILITIES[engine].environment)
        self._process = self._start()

    def _start(self) -> "subprocess.Popen[str]":
        pipe = subprocess.PIPE
        return subprocess.Popen(self._command, stdin=pipe, stdout=pipe, env=self._environment, text=True)

    def begin(self, spec: TrialSpec) -> None:
        """Has it build a specification, in place of the one before. It builds while nobody waits: see `built`."""
        self.losses, self.grad_norms, self.bursts = [], [], []
        if self._process.poll() is not None:
            self._process = self._start()
        self._tell({"spec": spec.to_json()})

    def built(self) -> None:
        """Waits until it has built.

        Raises:
            RuntimeError: It could not, or its process ended.
        """
        self._answer()

    def take(self, num_steps: int) -> dict[str, Any]:
        """Takes steps. Losses of all bursts follow one another; who warms up clears `bursts` after it.

        Args:
            num_steps: How many.

        Raises:
            RuntimeError: A step failed, or its process ended.
        """
        self._tell({"steps": num_steps})
        burst = self._answer()
        self.losses += burst.pop("losses")
        self.grad_norms += burst.pop("grad_norms")
        self.bursts.append(burst)
        return burst

    def close(self) -> None:
        """Ends it."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            self._process.kill()

    def _tell(self, order: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # the answer says so
            self._process.stdin.write(json.dumps(order) + "\n")
            self._process.stdin.flush()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):  # libraries print too
                answer: dict[str, Any] = json.loads(line)
                if "error" in answer:
                    raise RuntimeError(answer["error"])
                return answer
        raise RuntimeError(f"the process ended with {self._process.wait(timeout=60)}; its error stands above")


class Power:
    """Samples of the driver's power ring, kept from now on."""

    def __init__(self, *, has_gpu: bool) -> None:
        """Finds the first device."""
        self._samples: dict[int, float] = {}
        self._ended = threading.Event()
        if not has_gpu:
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


def ratios(of: Side, over: Side) -> dict[str, tuple[float, float, float]]:
    """Figures of one side's bursts over another's of the same turns: median, lowest and highest, by name."""
    found = {}
    for name in (*FIGURES, "peak_bytes"):
        pairs = zip(of.bursts, over.bursts, strict=True)
        each = [one[name] / other[name] for one, other in pairs if name in one and name in other]
        if each:
            found[name] = (statistics.median(each), min(each), max(each))
    return found


def shown(burst: dict[str, Any]) -> str:
    """The figures of a burst as cells; what was not measured is empty."""
    return ",".join(f"{burst[name]:.5g}" if name in burst else "" for name in FIGURES)


def serve(name: str, device: str) -> None:
    """Holds one engine and does what standard input says, until it ends."""
    import torch
    import torch.distributed as dist

    from wattune.engines.registry import load_engine
    from wattune.workers.engine import Ranks

    on_cpu = device == "cpu"
    if on_cpu:
        torch.set_num_threads(1)
    else:
        torch.cuda.set_device(0)
    dist.init_process_group("gloo" if on_cpu else "nccl", store=dist.HashStore(), rank=0, world_size=1)
    engine, power = load_engine(name), Power(has_gpu=not on_cpu)
    is_built, tokens_per_step = False, 0
    for line in sys.stdin:
        order = json.loads(line)
        try:
            if "spec" in order:
                spec = TrialSpec.from_json(order["spec"])
                if is_built:
                    engine.close()
                is_built, tokens_per_step = True, spec.workload.tokens_per_step
                engine.build(spec, Ranks(rank=0, world_size=1, local_rank=0, device=device), seed=SEED)
                answer: dict[str, Any] = {}
            else:
                answer = _burst(engine, order["steps"], tokens_per_step, power)
        except Exception as error:
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {str(error).strip()[:600]}"}
        print(json.dumps(answer), flush=True)
    if is_built:
        engine.close()
    dist.destroy_process_group()


def _burst(engine: Any, num_steps: int, tokens_per_step: int, power: Power) -> dict[str, Any]:
    losses, grad_norms, steps_s, start_s = [], [], [], time.time()
    for _ in range(num_steps):
        began_s = time.perf_counter()
        step = engine.step()  # its loss waits for the device
        losses.append(step.loss)
        grad_norms.append(step.grad_norm)
        steps_s.append(time.perf_counter() - began_s)
    end_s = time.time()
    tokens_per_s = tokens_per_step * len(steps_s) / sum(steps_s)
    found = {"step_s": statistics.median(steps_s), "tokens_per_s": tokens_per_s, **power.between(start_s, end_s)}
    if "power_mean_w" in found:
        found["energy_per_token_j"] = found["power_mean_w"] / tokens_per_s
    memory = {"peak_bytes": engine.memory_peak_bytes()}
    return {"losses": losses, "grad_norms": grad_norms, **memory, **found}


if __name__ == "__main__":
    serve(*sys.argv[1:])
