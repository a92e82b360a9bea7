"""Compares a backward pass in the calling thread with one in autograd's own thread, where the host is the bottleneck.

Times both in turns on the same engine. Also prints the host's cost of a kernel launch, and the memory of a process
before and after. The cases are those of `engine_cases.py`.

    python benchmarks/backward_thread.py torch/gpt/tp2 torch/llama/tp2      # two GPUs
    python benchmarks/backward_thread.py --quick torch/gpt/tp2              # a dry run on gloo
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from engine_case_list import cases
from engine_cases import SEED, Where

from wattune.engines import registry
from wattune.plans.effective import effective
from wattune.plans.engines import CAPABILITIES
from wattune.workers.engine import Ranks

NUM_LAUNCHES = 20_000
NUM_BLOCKS, NUM_STEPS = 3, 5
"""Blocks of each kind, and steps of a block, the first of which does not count."""


def memory_mib() -> dict[str, int]:
    """Resident memory of this process by kind, from the kernel."""
    lines = Path("/proc/self/status").read_text().splitlines()
    found = {name: rest for name, _, rest in (line.partition(":") for line in lines)}
    return {name: int(found[name].split()[0]) // 1024 for name in ("VmRSS", "RssAnon", "RssShmem") if name in found}


def run_rank(rank: int, store: str, name: str, *, quick: bool) -> None:
    """One rank; the first one prints."""
    at_start = memory_mib()
    device = "cpu" if quick else f"cuda:{rank}"
    if quick:
        torch.set_num_threads(1)
    else:
        torch.cuda.set_device(rank)
    dist.init_process_group("gloo" if quick else "nccl", store=dist.FileStore(store, 2), rank=rank, world_size=2)
    if not quick and rank == 0:
        x = torch.zeros(16, device=device)
        torch.cuda.synchronize()
        start_s = time.perf_counter()
        for _ in range(NUM_LAUNCHES):
            x.add_(1)
        print(f"a launch costs the host {(time.perf_counter() - start_s) / NUM_LAUNCHES * 1e6:.1f} us", flush=True)
    where = Where(ranks=2, quick=quick)
    spec = where.spec(next(case for case in cases(2) if case.name == name))
    spec = replace(spec, plan=effective(spec)[0])
    engine = registry.load_engine(spec.engine)
    engine.build(spec, Ranks(rank=rank, world_size=2, local_rank=rank, device=device), seed=SEED)
    for _ in range(3):
        engine.step()
    found: dict[bool, list[float]] = {True: [], False: []}
    for own_thread in (True, False) * NUM_BLOCKS:
        with torch.autograd.set_multithreading_enabled(own_thread):
            for step in range(NUM_STEPS):
                start_s = time.perf_counter()
                engine.step()  # ends when its loss is on the host
                if step:
                    found[own_thread].append((time.perf_counter() - start_s) * 1e3)
    if rank == 0:
        medians = {}
        for own_thread, times_ms in found.items():
            medians[own_thread] = statistics.median(times_ms)
            thread = "autograd's own thread" if own_thread else "the calling thread"
            print(f"{name} {thread}: {medians[own_thread]:.1f} ms ({min(times_ms):.1f} to {max(times_ms):.1f})")
        print(f"{name} calling over own: {medians[False] / medians[True]:.3f}")
        print(f"MiB {at_start} before, {memory_mib()} after")
    engine.close()
    dist.destroy_process_group()


def main() -> int:
    """Every case in two processes of its own, which see what the engine's environment asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="+", metavar="CASE", choices=[case.name for case in cases(2)])
    parser.add_argument("--quick", action="store_true", help="gloo on this machine's processors")
    parser.add_argument("--rank", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rank:
        run_rank(int(given.rank[0]), given.rank[1], given.cases[0], quick=given.quick)
        return 0
    codes = []
    for name in given.cases:
        environment = os.environ | dict(CAPABILITIES[name.partition("/")[0]].environment)
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, __file__, name, *(["--quick"] if given.quick else [])]
            workers = [
                subprocess.Popen([*command, "--rank", str(rank), f"{folder}/store"], env=environment) for rank in (0, 1)
            ]
            codes += [worker.wait() for worker in workers]
    return max(codes)


if __name__ == "__main__":
    sys.exit(main())
