"""One rank of an engine contract: runs the specifications of a file one after another in one process group.

Started by `test_engines.py` as `engine_worker.py FOLDER RANK WORLD_SIZE [cuda]`; reads `cases.json`, writes
`<rank>.json`. With `cuda` each rank drives the GPU of its number through NCCL.
"""

import gc
import json
import sys
import warnings
from dataclasses import astuple
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from wattune.errors import EngineError
from wattune.trial import TrialSpec
from wattune.workers.engine import Ranks, load_engine

NUM_STEPS = 3
SEED = 7


def live_tensors() -> int:
    """Weights, gradients and activations alive; the rank numbers torch keeps of closed meshes are integers."""
    gc.collect()
    with warnings.catch_warnings(action="ignore"):  # isinstance touches deprecated objects of torch
        return sum(isinstance(thing, torch.Tensor) and thing.is_floating_point() for thing in gc.get_objects())


def live_groups() -> int:
    return len(dist.distributed_c10d._world.pg_map)


def run_case(spec: TrialSpec, ranks: Ranks) -> dict[str, Any]:
    engine = load_engine(spec.engine)
    tensors, groups = live_tensors(), live_groups()
    outcome: dict[str, Any] = {}
    try:
        engine.build(spec, ranks, seed=SEED)
        steps = [engine.step() for _ in range(NUM_STEPS)]
        outcome["losses"] = [step.loss for step in steps]
        outcome["grad_norms"] = [step.grad_norm for step in steps]
        outcome["marks"] = [astuple(mark) for mark in steps[-1].marks]
        outcome["memory_peak_bytes"] = engine.memory_peak_bytes()
        del steps
    except EngineError as error:
        outcome["error"] = str(error)
    engine.close()
    engine.close()
    outcome["tensors_left"] = live_tensors() - tensors
    outcome["groups_left"] = live_groups() - groups
    return outcome


def main(folder: Path, rank: int, world_size: int, kind: str = "cpu") -> None:
    torch.set_num_threads(1)
    device = "cpu" if kind == "cpu" else f"cuda:{rank}"
    if kind == "cuda":
        torch.cuda.set_device(rank)
    store = dist.FileStore(str(folder / "store"), world_size)
    backend = "gloo" if kind == "cpu" else "nccl"
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size)
    ranks = Ranks(rank=rank, world_size=world_size, local_rank=rank, device=device)
    cases = json.loads((folder / "cases.json").read_text())
    outcomes = {name: run_case(TrialSpec.from_json(spec), ranks) for name, spec in cases.items()}
    (folder / f"{rank}.json").write_text(json.dumps(outcomes))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:])
