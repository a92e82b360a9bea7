"""Holds an engine on GPUs to the torch engine's losses and gradient norms on one: the contract cases through NCCL.

The cases are those of `tests/contracts/test_engines.py` that fit the machine, moved to `h200_sxm`. Each line
names a case and its largest relative deviation from the reference. The exit code is 1 if any exceeds its tolerance.
With `--engine torch` the script prints the rows of benchmarks/results/torch_engine_on_gpus.md.

    python benchmarks/torch_engine_on_gpus.py                       # as many GPUs as there are
    python benchmarks/torch_engine_on_gpus.py --engine deepspeed    # or megatron, whose cases are in test_megatron.py
    python benchmarks/torch_engine_on_gpus.py --engine megatron --transformer-engine
    python benchmarks/torch_engine_on_gpus.py --cpu 2               # a dry run of this script on two gloo ranks
"""

import json
import subprocess
import sys
import tempfile
from argparse import ArgumentParser, Namespace
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from harness import Found, Rows, benchmark

from wattune.catalog.hardware import ClusterSpec
from wattune.plans.rules import violations

CONTRACTS = Path(__file__).parents[1] / "tests" / "contracts"
TOLERANCE = {"fp32": 1e-5, "bf16": 5e-3}
"""Largest relative deviation of a loss or gradient norm over three optimizer steps."""
GROUP_TIMEOUT_S = 280


def contract_cases(name: str = "test_engines") -> Any:
    """The module with the cases; pytest would find what it imports from `tests/fakes`."""
    sys.path[:0] = [str(CONTRACTS), str(CONTRACTS.parent / "fakes")]
    return import_module(name)


def run_group(specs: dict[str, Any], world_size: int, kind: str) -> tuple[list[dict[str, Any]] | None, str]:
    """Runs specifications on one group of ranks; the ranks' outcomes, or what they said when they failed."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "cases.json").write_text(json.dumps(specs))
        logs = [folder / f"{rank}.log" for rank in range(world_size)]
        workers = []
        for rank, log in enumerate(logs):
            command = [sys.executable, str(CONTRACTS / "engine_worker.py"), name, str(rank), str(world_size), kind]
            with open(log, "w") as out:
                workers.append(subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT))
        try:
            codes = [worker.wait(GROUP_TIMEOUT_S) for worker in workers]
        except subprocess.TimeoutExpired:
            codes = [1]
        for worker in workers:
            worker.kill()
        if any(codes):
            return None, "\n".join(log.read_text()[-2500:] for log in logs[:1])
        return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(world_size)], ""


def outcomes_of(specs: dict[str, Any], world_size: int, kind: str) -> dict[str, list[dict[str, Any]] | str]:
    """Runs specifications together, one by one where that fails; returns the outcomes of each, or an error."""
    found, said = run_group(specs, world_size, kind)
    if found is None and len(specs) > 1:
        return {name: outcomes_of({name: spec}, world_size, kind)[name] for name, spec in specs.items()}
    if found is None:
        return dict.fromkeys(specs, f"FAILED {said}")
    each = {name: [rank[name] for rank in found] for name in found[0]}
    return {name: f"REFUSED {one[0]['error']}" if "error" in one[0] else one for name, one in each.items()}


def _options(parser: ArgumentParser) -> None:
    parser.add_argument("--cpu", type=int, metavar="RANKS", help="gloo ranks on this machine's processors instead")
    parser.add_argument("--engine", default="torch", help="the engine that is held to it (torch)")
    parser.add_argument("--transformer-engine", action="store_true", help="with TransformerEngine's layers in Megatron")
    parser.add_argument("--cases", nargs="+", help="those to run (all)")


@benchmark(
    claim="An engine on GPUs trains as one device does, whatever the plan.",
    bar="loss and gradient norm of three steps within 1e-5 in fp32 and 5e-3 in bf16, bit-identical ranks, nothing left",
    options=_options,
)
def main(given: Namespace) -> Found:
    """Runs every case that fits."""
    kind, device = ("cpu", "cpu") if given.cpu else ("cuda", "h200_sxm")
    contracts = contract_cases()
    source = contract_cases("test_megatron") if given.engine == "megatron" else contracts
    parity = source.ON_GPUS if source is not contracts else contracts.PARITY_OF[given.engine]
    parity = {name: case for name, case in parity.items() if name in (given.cases or parity)}
    needed = {each.reference for each in parity.values()}
    every = {each.reference: each for each in source.REFERENCES if each.reference in needed} | parity
    rows, missed, notes = Rows("case", "largest_deviation_frac", "verdict"), [], []
    references: dict[str, Any] = {}
    for world_size in (size for size in (1, 2, 4, 8) if size <= (given.cpu or torch.cuda.device_count())):
        there, specs = ClusterSpec(device=device, devices_per_node=world_size), {}
        for name, case in every.items():
            engine = "torch" if name in needed else given.engine
            held = replace(there, transformer_engine=given.transformer_engine and name not in needed)
            trial = replace(case.spec(engine), cluster=held)
            if case.world_size != world_size:
                continue
            if given.transformer_engine and (refusal := next(iter(violations(trial)), None)):
                notes.append(f"{name}: not with TransformerEngine: {refusal.reason}")
                continue
            compiler = case.compiler and ("aot_eager" if given.cpu else "inductor")
            specs[name] = {"spec": trial.to_json(), "compiler": compiler}
        for name, ranks in (outcomes_of(specs, world_size, kind) if specs else {}).items():
            if isinstance(ranks, str):
                rows.add(name, None, ranks)
                missed.append(name)
                continue
            case, outcome = every[name], ranks[0]
            if name in needed:
                references[name] = outcome
            deviation = max(
                abs(got - want) / abs(want or 1.0)
                for key in ("losses", "grad_norms")
                for got, want in zip(outcome[key], references[case.reference][key], strict=True)
            )
            bound = TOLERANCE[case.axes.get("dtype", "fp32")]
            agree = all(rank["losses"] == outcome["losses"] for rank in ranks)
            left = outcome["tensors_left"], outcome["groups_left"], outcome["functions_replaced"]
            good = deviation <= bound and agree and left == (0, 0, [])
            rows.add(name, deviation, "ok" if good else f"bound {bound:g}, ranks agree {agree}, left {left}")
            missed += [] if good else [name]
            print(rows.cells[-1], file=sys.stderr, flush=True)
    return Found(rows, notes, missed)


if __name__ == "__main__":
    main()
