"""Measures what it costs a training step to be told: by the API, by the optimizer hook, by the Trainer's callback.

    python benchmarks/step_hooks.py [--device cuda] [--rounds 3000] [--hidden 512] [--csv FILE] [--json]

One loop in one process trains a small model. Each round runs one step of every kind in shuffled order: without a hook,
with `spans.step`, with the hook on torch's optimizers, and with the callback of Hugging Face's Trainer. The callback is
called as its Trainer calls it, and no Trainer is needed. The hooks write real files. The ratio of step time is the
interquartile mean over rounds of the logarithm of a kind's step over the round's step without a hook: other programs
slow single steps by more than any hook. Its interval is a seeded bootstrap over rounds. On a GPU a step ends with a
synchronisation. On a processor the time is the process's CPU time: what other programs take is not the hooks' cost.

Beside the ratio it times the hooks themselves, each right after the work of a step, when caches hold none of them, and
with `--against` those of another version in the same rounds. `write` is a write of 33 steps, which comes every 50 ms.

Ends with 1 where an interval leaves the bar, or a step of the API or a hook after work costs more than its bar.
"""

import os
import sys
import tempfile
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from harness import Found, Rows, benchmark, ratio_of
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

RATIO_WITHIN = 0.003
COST_BELOW_US = 20.0
SILENT_BELOW_US = 2.0
AFTER_WORK_BELOW_US = 4.0
STEPS_OF_WRITE = 33
"""Steps that a write holds where they take 1.5 ms each: those of 50 ms."""
PLATFORM = Path(__file__).parents[1] / "platform"
WARMUP_ROUNDS = 50
KINDS = ("none", "spans", "optimizer", "transformers")


class Work:
    """A step: forward, backward and update of a few linear layers."""

    def __init__(self, device: str, hidden: int) -> None:
        torch.manual_seed(0)
        layers = [layer for _ in range(4) for layer in (nn.Linear(hidden, hidden), nn.GELU())]
        self.model = nn.Sequential(*layers).to(device)
        self.batch = torch.randn(hidden // 4, hidden, device=device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5)
        self.inputs = {"input_ids": self.batch}

    def training_step(self, _model: Any, inputs: Any) -> None:
        """Trains one batch, in the form of the Trainer's method."""
        self.model(inputs["input_ids"]).square().mean().backward()

    def step(self) -> None:
        """Runs a whole step."""
        self.training_step(None, self.inputs)
        self.optimizer.step()
        self.optimizer.zero_grad()


Pieces = tuple[Callable[[], Any], Callable[[], Any]]
"""Calls of a kind before the work of a step, and after it."""


def loaded(name: str, platform_folder: Path) -> SimpleNamespace:
    """Loads the hooks of a version of wattune under a name of their own, as a measured program does: by path."""
    package = ModuleType(name)
    package.__path__ = [str(platform_folder / "wattune" / "steps" / "process")]
    sys.modules[name] = package
    parts = {part: import_module(f"{name}.{part}") for part in ("writer", "optimizer", "huggingface")}
    spans = ModuleType(f"{name}.spans")
    sys.modules[spans.__name__] = spans
    source = (platform_folder / "wattune" / "spans.py").read_text().replace("wattune.steps.process", name)
    exec(compile(source, "spans.py", "exec"), spans.__dict__)
    return SimpleNamespace(spans=spans, **parts)


def hooked(hooks: SimpleNamespace, work: Work) -> dict[str, Any]:
    """Returns a step of every kind, and its pieces. Hooks attach by their own code, to libraries of the same form."""
    spans = hooks.spans
    found: list[Any] = []
    hooks.optimizer.attach(SimpleNamespace(register_optimizer_step_post_hook=found.append))

    class Trainer:
        def __init__(self, train: Callable[[Any, Any], None]) -> None:
            self.train = train

        def training_step(self, model: Any, inputs: Any) -> None:
            self.train(model, inputs)

    library = SimpleNamespace(Trainer=Trainer, TrainerCallback=object, DEFAULT_CALLBACKS=[])
    hooks.huggingface.attach(library)
    callback, trainer = library.DEFAULT_CALLBACKS[0](), Trainer(work.training_step)
    idle, told = Trainer(lambda *_: None), []

    def by_spans() -> None:
        with spans.step(tokens=4096):
            work.step()

    def by_callback() -> None:
        callback.on_step_begin(None, None, None)
        trainer.training_step(None, work.inputs)
        work.optimizer.step()
        work.optimizer.zero_grad()
        callback.on_step_end(None, None, None)

    def enter() -> None:
        told.append(spans.step(tokens=4096))
        told[-1].__enter__()

    def begin() -> None:
        callback.on_step_begin(None, None, None)
        idle.training_step(None, work.inputs)

    pieces: dict[str, Pieces] = {
        "none": (lambda: None, lambda: None),
        "spans": (enter, lambda: told.pop().__exit__(None, None, None)),
        "optimizer": (lambda: None, lambda: found[0](work.optimizer, (), {})),
        "transformers": (begin, lambda: callback.on_step_end(None, None, None)),
    }
    steps = {"none": work.step, "spans": by_spans, "optimizer": work.step, "transformers": by_callback}
    return {**steps, "hook": found[0], "pieces": pieces}


def timed(steps: dict[str, Any], kind: str, device: str) -> float:
    """Runs one step; returns its seconds."""
    handle = register_optimizer_step_post_hook(steps["hook"]) if kind == "optimizer" else None
    clock = time.perf_counter if device != "cpu" else time.process_time
    if device != "cpu":
        torch.cuda.synchronize()
    start_s = clock()
    steps[kind]()
    if device != "cpu":
        torch.cuda.synchronize()
    took_s = clock() - start_s
    if handle is not None:
        handle.remove()
    return took_s


def after_work(work: Work, versions: dict[str, Any], device: str, num_steps: int) -> dict[tuple[str, str], np.ndarray]:
    """Runs steps of every version and kind in shuffled order; returns the nanoseconds of their pieces in each.

    Nothing is written meanwhile: steps of one kind are further apart here than alone, so each would write. The kind
    `write` is a write of `STEPS_OF_WRITE` steps right after work.
    """
    taken = {version: hooks.writer.FLUSH_EVERY_NS for version, (hooks, _) in versions.items()}
    for hooks, _ in versions.values():
        hooks.writer.FLUSH_EVERY_NS = 10**18
    cases = [(version, kind) for version in versions for kind in (*KINDS, "write")]
    found = {case: np.zeros(num_steps) for case in cases}
    order = np.random.default_rng(2)
    for number in range(-WARMUP_ROUNDS, num_steps):
        for at in order.permutation(len(cases)):
            (version, kind), clock = cases[at], time.perf_counter_ns
            hooks, steps = versions[version]
            before, after = steps["pieces"]["none" if kind == "write" else kind]
            if kind == "write":
                teller, after = hooks.spans.WRITER, hooks.spans.WRITER.flush
                teller.flush()
                for step in range(STEPS_OF_WRITE):
                    teller.step(step, step + 1, 4096)
            start_ns = clock()
            before()
            took_ns = clock() - start_ns
            work.step()
            if device != "cpu":
                torch.cuda.synchronize()
            start_ns = clock()
            after()
            took_ns += clock() - start_ns
            if number >= 0:
                found[cases[at]][number] = took_ns
    for version, (hooks, _) in versions.items():
        hooks.writer.FLUSH_EVERY_NS = taken[version]
    return found


def measure(
    device: str, rounds: int, hidden: int, against: Path | None
) -> tuple[np.ndarray, dict[tuple[str, str], float]]:
    """Returns seconds, shape (rounds, kinds), and the median microseconds of each version and kind after work."""
    work = Work(device, hidden)
    times_s = np.zeros((rounds, len(KINDS)))
    order = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["WATTUNE_STEPS"] = folder
        folders = {"this": PLATFORM} | ({} if against is None else {"other": against})
        hooks = {name: loaded(f"hooks_of_{name}", path) for name, path in folders.items()}
        versions = {name: (one, hooked(one, work)) for name, one in hooks.items()}
        steps = versions["this"][1]
        # A kind has every fourth step, so its writes are as many a step as alone only where they are four times rarer.
        hooks["this"].writer.FLUSH_EVERY_NS *= len(KINDS)
        for number in range(-WARMUP_ROUNDS, rounds):
            for at in order.permutation(len(KINDS)):
                took_s = timed(steps, KINDS[at], device)
                if number >= 0:
                    times_s[number, at] = took_s
        direct = after_work(work, versions, device, rounds)
        written = {path.stem.rpartition("-")[2].partition(".")[0] for path in Path(folder).glob("*.steps")}
    assert written >= {*KINDS[1:]}, f"hooks wrote nothing: {sorted(written)}"
    medians_us = {case: float(np.median(taken_ns)) / 1000 for case, taken_ns in direct.items()}
    return times_s, {(version, kind): one - medians_us[version, "none"] for (version, kind), one in medians_us.items()}


def cost_us(listening: bool) -> float:
    """Returns the CPU time of an empty step of the API in microseconds: the best of several tries."""
    import subprocess

    code = (
        "import time\nfrom wattune import spans\nbest = 1e9\n"
        "for _ in range(7):\n    start = time.process_time_ns()\n"
        "    for _ in range(20000):\n        with spans.step(tokens=4096): pass\n"
        "    best = min(best, (time.process_time_ns() - start) / 2e7)\nprint(best)"
    )
    with tempfile.TemporaryDirectory() as folder:
        own = {name: value for name, value in os.environ.items() if name != "WATTUNE_STEPS"}
        own |= {"WATTUNE_STEPS": folder} if listening else {}
        done = subprocess.run([sys.executable, "-c", code], env=own, capture_output=True, text=True, check=True)
    return float(done.stdout)


def _options(parser: ArgumentParser) -> None:
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--rounds", type=int, default=3000)
    parser.add_argument("--hidden", type=int, default=512, help="width of the layers: what a step takes")
    parser.add_argument("--against", type=Path, help="folder `platform` of another version, to time its hooks too")


@benchmark(
    claim="A hook that tells steps changes no step's time.",
    bar=f"step time with it over without 1.000 +- {RATIO_WITHIN}; after work {AFTER_WORK_BELOW_US:g} us; an empty "
    f"`spans.step` {COST_BELOW_US:g} us, without wattune {SILENT_BELOW_US:g} us",
    options=_options,
)
def main(given: Namespace) -> Found:
    """Times every hook in turns."""
    torch.set_num_threads(1)
    times_s, direct = measure(given.device, given.rounds, given.hidden, given.against)
    costs_us = {"spans.step": (cost_us(True), COST_BELOW_US), "without wattune": (cost_us(False), SILENT_BELOW_US)}
    rows = Rows("hook", "step_time_ratio", "low_ratio", "high_ratio", "step_time_s", "num_rounds", "after_work_s")
    missed = [f"{name} {cost:.2f} us" for name, (cost, most) in costs_us.items() if cost >= most]
    for at, kind in enumerate(KINDS[1:], start=1):
        ratio, after_us = ratio_of(times_s[:, at], times_s[:, 0]), direct["this", kind]
        step_s = float(np.median(times_s[:, 0]))
        rows.add(kind, ratio.value, ratio.low, ratio.high, step_s, given.rounds, after_us * 1e-6)
        if ratio.low < 1 - RATIO_WITHIN or ratio.high > 1 + RATIO_WITHIN or after_us > AFTER_WORK_BELOW_US:
            missed.append(f"{kind} {ratio}, {after_us:.2f} us after work")
    notes = [f"{name}: {cost:.2f} us of CPU time" for name, (cost, _) in costs_us.items()]
    notes += [
        f"{version} {kind}: {cost:.2f} us after work" for (version, kind), cost in direct.items() if kind != "none"
    ]
    return Found(rows, notes, missed)


if __name__ == "__main__":
    main()
