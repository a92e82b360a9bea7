"""Measures Megatron with TransformerEngine's layers beside Megatron with its local ones and the torch engine.

For each case three processes hold the same slice from the same weights and see the same tokens, on one GPU: the torch
engine, Megatron's local layers, TransformerEngine's. They take bursts of steps in turns. A line is printed for each
burst, then of TransformerEngine over each other side the ratios of step, energy and memory (median of the rounds, with
the lowest and highest), and how far the first losses and gradient norms are from the torch engine's. The exit code is
1 if a case fails or a loss is further than `LARGEST_DEVIATION`.

    python benchmarks/megatron_layers.py                     # one GPU with Megatron-Core and TransformerEngine
    python benchmarks/megatron_layers.py --cases llama gpt   # some of them
    python benchmarks/megatron_layers.py --quick             # a dry run on a CPU, the torch engine alone
"""

import argparse
import importlib.metadata
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

import torch
from in_turns import FIGURES, Side, ratios, shown

from wattune.catalog.hardware import ClusterSpec, device_of_product
from wattune.catalog.models import ModelSpec, model
from wattune.plans.axes import Plan
from wattune.plans.rules import violations
from wattune.trial import Routing, TrialSpec, Workload

NUM_WARMUP: Final = 5
NUM_ROUNDS: Final = 4
BURST_S: Final = 2.5
COMPARED_STEPS: Final = 3
LARGEST_DEVIATION: Final = {"bf16": 5e-3, "fp8": 0.02}
"""Largest relative deviation of one of the first losses from the torch engine's in bf16."""

SIDES: Final = {"torch": ("torch", False), "local": ("megatron", False), "transformer_engine": ("megatron", True)}
"""Engine, and whether the cluster has TransformerEngine, by the name of a side."""


@dataclass(frozen=True)
class Case:
    """One model and plan."""

    model: str
    axes: Mapping[str, Any] = field(default_factory=dict)
    mode: str = "pretrain"

    def spec(self, side: str, device: str) -> TrialSpec:
        """The trial of one side."""
        engine, has = SIDES[side]
        return TrialSpec(
            model=_slice(self.model, quick=device == "cpu"),
            cluster=ClusterSpec(device=device, devices_per_node=1, transformer_engine=has),
            engine=engine,
            workload=Workload(
                mode=self.mode,
                seq_len=32 if device == "cpu" else 4096,
                global_batch_size=4,
                routing=Routing(by="balanced") if self.model == "mixtral" else None,
            ),
            plan=Plan(**{"micro_batch_size": 2, "dtype": "bf16"} | dict(self.axes)),
        )


CASES: Final = {
    "llama": Case("llama"),
    "gpt": Case("gpt"),
    "mixtral": Case("mixtral"),
    "llama-selective": Case("llama", {"recompute": "selective"}),
    "llama-full": Case("llama", {"recompute": "full"}),
    "llama-zero1": Case("llama", {"sharding": "zero1", "overlap": "grad_param"}),
    "llama-fp8": Case("llama", {"dtype": "fp8"}),
    "gpt-fp8": Case("gpt", {"dtype": "fp8"}),
    "llama-full-fp8": Case("llama", {"dtype": "fp8", "recompute": "full"}),
    "llama-prefill": Case("llama", mode="prefill"),
}


def _slice(name: str, *, quick: bool) -> ModelSpec:
    """Four layers of Llama-3 8B's or a GPT-3's widths or one of Mixtral 8x7B's; or tiny ones."""
    widths: dict[str, Any] = {"hidden_size": 4096, "num_heads": 32, "vocab_size": 32_000}
    if quick:
        widths = {"hidden_size": 64, "ffn_hidden_size": 128, "num_heads": 4, "num_kv_heads": 4, "vocab_size": 256}
    if name == "gpt":
        gpt: dict[str, Any] = {"ffn_hidden_size": 16_384, "num_kv_heads": 32, "max_positions": 4096, "num_layers": 4}
        return replace(model("gpt3_175b"), **(gpt | widths))
    if name == "mixtral":
        return replace(model("mixtral_8x7b"), **({"num_layers": 1} | widths))
    return replace(model("llama3_8b"), **({"num_layers": 4} | widths))


def run(name: str, case: Case, sides: Mapping[str, Side], device: str) -> bool:
    """Runs a case and prints it; True if all of it is as it should be."""
    began_s, is_quick = time.monotonic(), device == "cpu"
    ready = build(name, case, sides, device)
    steps = {side: 2 if is_quick else max(3, int(BURST_S / sides[side].take(2)["step_s"])) for side in ready}
    for side in ready:
        sides[side].bursts.clear()
    for turn in range(2 if is_quick else NUM_ROUNDS):
        for side in ready if turn % 2 == 0 else reversed(ready):
            print(f"{name},{turn},{side},{shown(sides[side].take(steps[side]))}", flush=True)
    for number, side in enumerate(ready):
        for other in ready[:number]:
            for figure, (middle, lowest, highest) in ratios(sides[side], sides[other]).items():
                print(f"{name}: {side} over {other}: {figure} {middle:.3f} ({lowest:.3f} to {highest:.3f})")
    others = ready[1:] if ready and ready[0] == "torch" else []
    near = [compare(name, side, sides, LARGEST_DEVIATION[case.axes.get("dtype", "bf16")]) for side in others]
    print(f"{name}: {time.monotonic() - began_s:.0f} s", flush=True)
    return len(ready) == len(sides) and all(near)


def build(name: str, case: Case, sides: Mapping[str, Side], device: str) -> list[str]:
    """Builds all sides at once and warms them up in turns; names those that stand, and prints why others do not."""
    ready, begun = [], []
    for side in sides:
        spec = case.spec(side, device)
        refusal = next(iter(violations(spec)), None)
        if refusal is not None:
            print(f"{name}: {side} breaks a rule: {refusal.reason}", flush=True)
            continue
        sides[side].begin(spec)
        begun.append(side)
    for side in begun:
        try:
            sides[side].built()
            sides[side].take(NUM_WARMUP)
            ready.append(side)
        except RuntimeError as error:
            print(f"{name}: {side} FAILED: {error}", flush=True)
    return ready


def compare(name: str, side: str, sides: Mapping[str, Side], bound: float) -> bool:
    """Prints how far a side is from the torch engine; True if its first losses are near enough."""

    def away(of: list[float], over: list[float]) -> float:
        return max(abs(one / other - 1) for one, other in zip(of[:COMPARED_STEPS], over[:COMPARED_STEPS], strict=True))

    loss = away(sides[side].losses, sides["torch"].losses)
    norms = (
        f", gradient norm {away(sides[side].grad_norms, sides['torch'].grad_norms):.1e}"
        if all(sides["torch"].grad_norms[:COMPARED_STEPS])
        else ""
    )
    verdict = "ok" if loss <= bound else f"BAD (bound {bound:g})"
    print(f"{name}: {side}: first {COMPARED_STEPS} losses within {loss:.1e} of torch's{norms}: {verdict}", flush=True)
    return loss <= bound


def main() -> int:
    """Runs the cases; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES), help="those to run (all)")
    parser.add_argument("--quick", action="store_true", help="tiny models on a CPU, the torch engine alone")
    parser.add_argument("--time-limit", type=float, default=540.0, metavar="S", help="begin no case then (540)")
    arguments = parser.parse_args()
    began_s = time.monotonic()
    where = "cpu" if arguments.quick else torch.cuda.get_device_name(0)
    known = None if arguments.quick else device_of_product(where)
    device = "cpu" if known is None else known.name
    if device == "cpu" and not arguments.quick:
        print(f"{where} is no device of the catalog")
        return 1
    names = ["torch"] if arguments.quick else list(SIDES)
    libraries = ("torch",) if arguments.quick else ("torch", "megatron-core", "transformer-engine")
    versions = ", ".join(f"{each} {importlib.metadata.version(each)}" for each in libraries)
    print(f"{where}, {versions}, Python {sys.version.split()[0]}", flush=True)
    print(f"case,num_rounds_before,side,{','.join(FIGURES)}", flush=True)
    sides = {name: Side(SIDES[name][0], on_cpu=arguments.quick) for name in names}
    bad = []
    try:
        for name in arguments.cases:
            if time.monotonic() - began_s > arguments.time_limit:
                print(f"{name}: no time left")
                bad.append(name)
            elif not run(name, CASES[name], sides, device):
                bad.append(name)
    finally:
        for side in sides.values():
            side.close()
    print(f"{len(bad)} bad{': ' if bad else ''}{', '.join(bad)}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
