"""Holds an engine on GPUs to the torch engine's losses and gradient norms on one: the contract cases through NCCL.

The cases are those of `tests/contracts/test_engines.py` that fit the machine, moved to `h200_sxm`. Each line
names a case and its largest relative deviation from the reference. The exit code is 1 if any exceeds its tolerance.
With `--engine torch` the script prints the rows of benchmarks/results/torch_engine_on_gpus.md.

    python benchmarks/torch_engine_on_gpus.py                       # as many GPUs as there are
    python benchmarks/torch_engine_on_gpus.py --engine deepspeed    # or megatron, whose cases are in test_megatron.py
    python benchmarks/torch_engine_on_gpus.py --engine megatron --transformer-engine
    python benchmarks/torch_engine_on_gpus.py --cpu 2               # a dry run of this script on two gloo ranks
"""

import argparse
import importlib.util
import json
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from harness import header

from wattune.catalog.hardware import ClusterSpec
from wattune.plans.rules import violations

CONTRACTS = Path(__file__).parents[1] / "tests" / "contracts"
TOLERANCE = {"fp32": 1e-5, "bf16": 5e-3}
"""Largest relative deviation of a loss or gradient norm over three optimizer steps."""
GROUP_TIMEOUT_S = 280


def contract_cases(name: str = "test_engines") -> Any:
    """The module with the cases; pytest would find what it imports from `tests/fakes`."""
    if str(CONTRACTS.parent / "fakes") not in sys.path:
        sys.path.insert(0, str(CONTRACTS.parent / "fakes"))
    spec = importlib.util.spec_from_file_location(name, CONTRACTS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


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


def main() -> int:
    """Runs every case that fits; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cpu", type=int, metavar="RANKS", help="gloo ranks on this machine's processors instead")
    parser.add_argument("--engine", default="torch", help="the engine that is held to it (torch)")
    parser.add_argument("--transformer-engine", action="store_true", help="with TransformerEngine's layers in Megatron")
    parser.add_argument("--cases", nargs="+", help="those to run (all)")
    arguments = parser.parse_args()
    header(
        "An engine on GPUs trains as one device does, whatever the plan.",
        "loss and gradient norm of three steps within 1e-5 in fp32 and 2.5e-3 in bf16",
    )
    kind = "cpu" if arguments.cpu else "cuda"
    largest = arguments.cpu or torch.cuda.device_count()
    contracts = contract_cases()
    megatron = contract_cases("test_megatron") if arguments.engine == "megatron" else None
    device = "cpu" if arguments.cpu else "h200_sxm"
    where = "cpu" if arguments.cpu else torch.cuda.get_device_name(0)
    print(f"{largest} x {where}, torch {torch.__version__}", flush=True)
    references: dict[str, Any] = {}
    num_bad = 0
    for world_size in (size for size in (1, 2, 4, 8) if size <= largest):
        parity = megatron.ON_GPUS if megatron is not None else contracts.PARITY_OF[arguments.engine]
        parity = {name: case for name, case in parity.items() if name in (arguments.cases or parity)}
        needed = {each.reference for each in parity.values()}
        both = {
            each.reference: each for each in (megatron or contracts).REFERENCES if each.reference in needed
        } | parity
        chosen = {name: case for name, case in both.items() if case.world_size == world_size}
        there = ClusterSpec(device=device, devices_per_node=world_size)
        held = replace(there, transformer_engine=arguments.transformer_engine)
        trials = {
            name: replace(case.spec("torch"), cluster=there)
            if name in needed
            else replace(case.spec(arguments.engine), cluster=held)
            for name, case in chosen.items()
        }
        specs = {}
        for name, trial in trials.items():
            if arguments.transformer_engine and (refusal := next(iter(violations(trial)), None)):
                print(f"{name:<36} not with TransformerEngine: {refusal.reason}", flush=True)
                continue
            compiler = chosen[name].compiler and ("aot_eager" if arguments.cpu else "inductor")
            specs[name] = {"spec": trial.to_json(), "compiler": compiler}
        outcomes, said = run_group(specs, world_size, kind)
        if outcomes is None:  # one by one, to know which
            outcomes = [{} for _ in range(world_size)]
            for name, spec in specs.items():
                alone, said = run_group({name: spec}, world_size, kind)
                if alone is None:
                    print(f"{name:<36} FAILED\n{said}", flush=True)
                    num_bad += 1
                else:
                    outcomes = [{**before, **new} for before, new in zip(outcomes, alone, strict=True)]
        for name, outcome in outcomes[0].items():
            case = chosen[name]
            if "error" in outcome:
                print(f"{name:<36} REFUSED {outcome['error']}", flush=True)
                num_bad += 1
                continue
            if name in needed:
                references[name] = outcome
            deviation = max(
                abs(got - want) / abs(want or 1.0)
                for key in ("losses", "grad_norms")
                for got, want in zip(outcome[key], references[case.reference][key], strict=True)
            )
            bound = TOLERANCE[case.axes.get("dtype", "fp32")]
            agree = all(rank[name]["losses"] == outcome["losses"] for rank in outcomes)
            left = outcome["tensors_left"], outcome["groups_left"], outcome["functions_replaced"]
            good = deviation <= bound and agree and left == (0, 0, [])
            num_bad += not good
            verdict = "ok" if good else f"BAD (bound {bound:g}, ranks agree {agree}, left {left})"
            print(f"{name:<36} {deviation:9.2e}  {verdict}", flush=True)
    print(f"{num_bad} bad")
    return 1 if num_bad else 0


if __name__ == "__main__":
    sys.exit(main())
