"""Compares two ways to free a rank that waits for a failed one: abort communicators together, or one by one.

Two ranks of the torch engine take two steps. Then rank 1 fails while rank 0 waits for it in a collective. Both abort,
leave, meet again and train once more. Prints the seconds of each part on each rank, and the stack of a rank that hangs.

    python benchmarks/abort_groups.py               # two GPUs
    python benchmarks/abort_groups.py --quick       # a dry run over gloo, where there is nothing to abort
"""

import argparse
import faulthandler
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from trial_overhead import specification

from wattune.engines.model.compiler import EAGER
from wattune.engines.torch.engine import TorchEngine
from wattune.workers import process_groups
from wattune.workers.engine import Ranks

LONGEST_S = 28
"""Longest a part may take before it counts as hung. The slowest part that came through took 1.5 s on H200s."""


def one_by_one() -> None:
    """As torch's own `_abort_process_group` does it."""
    found = sorted(dict(distributed_c10d._world.pg_names).items(), key=lambda item: item[1], reverse=True)
    backends = [backend for group, _ in found if (backend := process_groups._nccl(group)) is not None]
    if backends:
        backends[0]._group_start()
        for backend in backends:
            backend.abort()
        backends[0]._group_end()


WAYS = {"together": process_groups.abort_groups, "one_by_one": one_by_one}


def run_rank(rank: int, folder: Path, way: str, device: str) -> None:
    """One rank, which says what it did."""
    begun_s = time.monotonic()

    def say(what: str) -> None:
        print(f"{way:<11} rank {rank} {time.monotonic() - begun_s:6.2f} s  {what}", flush=True)

    def abort() -> None:
        start_s = time.monotonic()
        WAYS[way]()
        say(f"aborted in {time.monotonic() - start_s:.2f} s")

    faulthandler.dump_traceback_later(LONGEST_S, exit=True)
    here = device if device == "cpu" else f"cuda:{rank}"
    if here != "cpu":
        torch.cuda.set_device(rank)
    ranks = Ranks(rank=rank, world_size=2, local_rank=rank, device=here)
    spec = specification(argparse.Namespace(device="cpu" if here == "cpu" else "h200_sxm", ranks=2), "torch")
    store = dist.FileStore(str(folder / "store"), 2)

    def built(meeting: str) -> TorchEngine:
        process_groups.join_groups(store, meeting, rank=rank, world_size=2, device=here, timeout_s=600)
        engine = TorchEngine(EAGER)
        engine.build(spec, ranks, seed=0)
        return engine

    engine = built("one")
    engine.step(), engine.step()
    failed = folder / "failed"
    if rank == 1:
        time.sleep(1)  # rank 0 is in its third step by then
        failed.touch()
        abort()
    else:
        watch = threading.Thread(target=lambda: (_until(failed), abort()))
        watch.start()
        try:
            engine.step()
            say("the step that waited returned")
        except RuntimeError as error:  # gloo's connection is closed
            say(f"the step that waited raised {type(error).__name__}")
        watch.join()
    engine.close()
    process_groups.leave_groups()
    say("left")
    engine = built("two")
    say(f"trained again, losses {[round(engine.step().loss, 6) for _ in range(3)]}")
    engine.close()
    process_groups.leave_groups()
    faulthandler.cancel_dump_traceback_later()


def _until(path: Path) -> None:
    while not path.exists():
        time.sleep(0.05)


def main() -> int:
    """Tries both ways; the exit code is 1 where aborting together does not free the rank."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="gloo on this machine's processors")
    parser.add_argument("--rank", nargs=3, help=argparse.SUPPRESS)
    given = parser.parse_args()
    device = "cpu" if given.quick else "cuda"
    if given.rank:
        rank, folder, way = given.rank
        run_rank(int(rank), Path(folder), way, device)
        return 0
    environment = os.environ | {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}
    codes = {}
    for way in WAYS:
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, __file__, *(["--quick"] if given.quick else [])]
            workers = [
                subprocess.Popen([*command, "--rank", str(rank), folder, way], env=environment) for rank in (0, 1)
            ]
            ends_s = time.monotonic() + 2 * LONGEST_S
            for worker in workers:
                try:
                    worker.wait(max(ends_s - time.monotonic(), 0.1))
                except subprocess.TimeoutExpired:
                    worker.kill()
            codes[way] = [worker.wait() for worker in workers]
        print(f"{way:<11} {'freed' if codes[way] == [0, 0] else f'NOT freed, exit codes {codes[way]}'}", flush=True)
    return int(codes["together"] != [0, 0])


if __name__ == "__main__":
    sys.exit(main())
