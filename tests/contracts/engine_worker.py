"""Ranks of an engine contract: run the specifications of a file one after another in one set of processes.

Started as `engine_worker.py FOLDER RANK WORLD_SIZE [cuda]`; reads `cases.json` (a specification and what compiles it,
by name), writes `<rank>.json`. With `cuda` each rank drives the GPU of its number through NCCL. With `all` for a rank,
as in `test_engines.py`, libraries are loaded once and every rank is a fork that writes its errors to `<rank>.err`:
loading them takes a processor longer than ten cases. A WORLD_SIZE of 0 has each case run by as many ranks as its
cluster has, one size after another, each in a folder of its own. Each case gets a default group of its own, as a trial
does: all ranks, or every rank alone. What it leaves of groups ends with it, since gloo's threads wake a hundred times a
second.
"""

import gc
import importlib
import json
import os
import sys
import time
import traceback
import warnings
from collections import defaultdict
from dataclasses import astuple
from multiprocessing import util
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist

from wattune.engines.model.compiler import Compiler
from wattune.engines.registry import load_engine
from wattune.engines.torch import float8
from wattune.errors import EngineError
from wattune.trial import TrialSpec
from wattune.workers.engine import Engine, Ranks
from wattune.workers.process_groups import join_groups, leave_groups

NUM_STEPS = 3
SEED = 7
TIMEOUT_S = 1800.0
"""Of a collective; who starts the ranks ends them sooner."""
LET_GO_S = {"gloo": 20.0, "nccl": 1.0}
"""Longest wait for tensors other threads still hold, as gloo's do; one that is really kept is kept for good."""

OF_LIBRARIES: set[int] = set()
"""Ids of the tensors that libraries made while imported, and hold for good."""


def tensors_alive() -> list[torch.Tensor]:
    with warnings.catch_warnings(action="ignore"):  # isinstance touches deprecated objects of torch
        return [thing for thing in gc.get_objects() if type(thing) in (torch.Tensor, torch.nn.Parameter)]


def live_tensors() -> int:
    """Weights, gradients and activations alive; the rank numbers torch keeps of closed meshes are integers.

    Compiled graphs keep tensors without memory, which stand for shapes, and wrappers of such. What libraries hold is
    frozen, and seen once an engine has unfrozen it with its graphs.
    """
    gc.collect()
    plain = [each for each in tensors_alive() if id(each) not in OF_LIBRARIES]
    floats = [each for each in plain if each.is_floating_point() and not torch._is_functional_tensor(each)]
    return sum(each.untyped_storage().nbytes() > 0 for each in floats)


def tensors_left(before: int) -> int:
    """Tensors alive beyond those before; gloo's threads let go of what they sent a moment after it has arrived."""
    until_s = time.monotonic() + LET_GO_S[dist.get_backend()]
    while (left := live_tensors() - before) > 0 and time.monotonic() < until_s:
        time.sleep(0.05)
    return left


def functions_of_torch() -> dict[str, Any]:
    """Returns the functions that every model calls by name and that a library may replace by its own."""
    places = (torch.nn.functional, torch.Tensor, torch.nn.Linear, torch.nn.Embedding)
    return {
        f"{place.__name__}.{name}": thing for place in places for name, thing in vars(place).items() if callable(thing)
    }


def engine_for(spec: TrialSpec, compiler: str | None) -> Engine:
    """The engine, with layers compiled by a backend, or eager."""
    engine: Any = type(load_engine(spec.engine))
    return cast(Engine, engine(Compiler(backend=compiler)))


def run_case(spec: TrialSpec, compiler: str | None, ranks: Ranks) -> dict[str, Any]:
    engine = engine_for(spec, compiler)
    tensors, functions = live_tensors(), functions_of_torch()
    outcome: dict[str, Any] = {}
    try:
        engine.build(spec, ranks, seed=SEED)
        steps = [engine.step() for _ in range(NUM_STEPS)]
        outcome["losses"] = [step.loss for step in steps]
        outcome["grad_norms"] = [step.grad_norm for step in steps]
        outcome["spans"] = [astuple(span) for span in steps[-1].spans]
        outcome["memory_peak_bytes"] = engine.memory_peak_bytes()
        outcome["expert_tokens"] = engine.expert_tokens()
        del steps
    except EngineError as error:
        outcome["error"] = str(error)
    except Exception:
        if ranks.world_size > 1 or dist.get_backend() != "nccl":  # the other ranks would wait for this one
            raise
        outcome["error"] = traceback.format_exc(limit=-3)
    engine.close()
    engine.close()
    outcome["tensors_left"] = tensors_left(tensors)
    outcome["functions_replaced"] = [
        name for name, now in functions_of_torch().items() if functions.get(name, now) is not now
    ]
    return outcome


def join(store: dist.Store, number: int, rank: int, size: int, world_size: int, kind: str) -> Ranks:
    """Makes the default group of one case: of all ranks, or of every rank alone."""
    alone = size < world_size
    ranks = Ranks(
        rank=0 if alone else rank, world_size=size, local_rank=rank, device=f"cuda:{rank}" if kind == "cuda" else "cpu"
    )
    join_groups(
        dist.HashStore() if alone else store,
        f"case{number}",
        rank=ranks.rank,
        world_size=size,
        device=ranks.device,
        timeout_s=TIMEOUT_S,
    )
    return ranks


def main(folder: Path, rank: str, world_size: int, kind: str = "cpu") -> None:
    torch.set_num_threads(1)
    cases = json.loads((folder / "cases.json").read_text())
    for engine in {case["spec"]["engine"] for case in cases.values()}:
        load_engine(engine)
    if any(case["spec"]["plan"]["dtype"] == "fp8" for case in cases.values()):
        with float8._quiet_import():
            importlib.import_module("torchao.float8")  # once, not in every rank
    OF_LIBRARIES.update(id(each) for each in tensors_alive())
    gc.freeze()  # what libraries made while imported is not looked through after every case
    gc.disable()  # nor at times of Python's choice: each case looks for garbage itself, before it counts what is left
    if rank == "all":
        by_size: dict[int, dict[str, Any]] = defaultdict(dict)
        for name, case in cases.items():
            by_size[world_size or TrialSpec.from_json(case["spec"]).cluster.world_size][name] = case
        sys.exit(sum(fork_ranks(folder / str(size), size, by_size[size]) for size in sorted(by_size)))
    run_rank(folder, int(rank), world_size, cases, kind)


def fork_ranks(folder: Path, world_size: int, cases: dict[str, Any]) -> int:
    """Runs every rank in a process of its own that starts with what this one has loaded; returns how many failed."""
    pids = []
    folder.mkdir()
    for rank in range(world_size):
        pid = os.fork()
        if pid:
            pids.append(pid)
            continue
        code = 1
        try:
            os.dup2(os.open(folder / f"{rank}.err", os.O_WRONLY | os.O_CREAT, 0o600), sys.stderr.fileno())
            run_rank(folder, rank, world_size, cases, "cpu")
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            util._run_finalizers()  # of semaphores that torch made, which the resource tracker would miss
            sys.stderr.flush()
            os._exit(code)  # what comes after is this process's parent's
    return sum(os.waitpid(pid, 0)[1] != 0 for pid in pids)


def run_rank(folder: Path, rank: int, world_size: int, cases: dict[str, Any], kind: str) -> None:
    if kind == "cuda":
        torch.cuda.set_device(rank)
    outcomes = {}
    store = dist.FileStore(str(folder / "store"), world_size)
    for number, (name, case) in enumerate(cases.items()):
        spec = TrialSpec.from_json(case["spec"])
        ranks = join(store, number, rank, spec.cluster.world_size, world_size, kind)
        outcomes[name] = run_case(spec, case["compiler"], ranks)
        dist.barrier()  # no rank closes connections that others still use
        outcomes[name]["groups_left"] = leave_groups()  # without those that are kept for the next trial of a meeting
        gc.freeze()  # nor what this case left for good, as graphs do: a million objects that every look would visit
    (folder / f"{rank}.json").write_text(json.dumps(outcomes))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), *sys.argv[4:])
