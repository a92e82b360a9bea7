"""Measures the cost of the full sampler to a training step: the torch engine, the sampler on and off in turns.

    python benchmarks/telemetry_training.py [--pairs 12] [--json] [--out FOLDER]    # one NVIDIA GPU, about 75 s
    python benchmarks/telemetry_training.py --cpu                                  # a dry run: tiny model, host sensors

One device trains four layers of Llama 3 8B with embedding and head as a trial does. Beside it runs the
sampler a study starts, all tiers at their default rates. It is stopped and continued (SIGSTOP, SIGCONT) between two
steps, in blocks of about 2 s and pairs of blocks whose order alternates, so that no step is cut and slow drift cancels.
The ratio is the geometric mean over pairs of the blocks' mean step times, its interval a seeded bootstrap over pairs
(`wattune.calibration.fit.fit_overhead`). A continued sampler reads every tier at once, so a block with it has at
least the reads of its length. Beside the ratio stands a placebo: the blocks without sampler against each other.
The script prints the rows of benchmarks/results/telemetry_training.md.
"""

import argparse
import json
import platform
import statistics
import tempfile
import time
from dataclasses import asdict, replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

import numpy as np
import psutil
import torch
import torch.distributed as dist

from wattune.calibration.fit import CONFIDENCE_FRAC, Floats, fit_overhead
from wattune.catalog.hardware import ClusterSpec
from wattune.catalog.models import model
from wattune.engines.registry import load_engine
from wattune.errors import TelemetryError
from wattune.plans.axes import Plan
from wattune.telemetry.sampler.process import SamplerProcess
from wattune.trial import TrialSpec, Workload
from wattune.workers.engine import Engine, Ranks

RATIO_WITHIN: Final = 0.002
CPU_BELOW_FRAC: Final = 0.03
WARM_S: Final = 8.0
"""Steps before the first block: clocks, allocator and the power limit have settled, and most of the warming is over."""
LEASE_S: Final = 600.0
"""A stopped sampler cannot see its lease renewed; this is longer than the whole run."""


def specification(*, cpu: bool) -> TrialSpec:
    """Returns the trial that runs: one rank, steps of about 0.2 s on an H200."""
    llama = model("llama3_8b")
    if cpu:
        llama = replace(
            llama, num_layers=2, hidden_size=256, ffn_hidden_size=512, num_heads=8, num_kv_heads=4, vocab_size=1024
        )
    return TrialSpec(
        model=llama if cpu else replace(llama, num_layers=4),
        cluster=ClusterSpec(device="cpu" if cpu else "h200_sxm", devices_per_node=1),
        engine="torch",
        workload=Workload(seq_len=128 if cpu else 4096, global_batch_size=2),
        plan=Plan(micro_batch_size=1, dtype="fp32" if cpu else "bf16"),
    )


def steps(engine: Engine, count: int) -> Floats:
    """The seconds of so many steps, each from its call to its end on the device."""
    took_s = []
    for _ in range(count):
        start_ns = time.monotonic_ns()
        engine.step()
        took_s.append((time.monotonic_ns() - start_ns) / 1e9)
    return np.array(took_s)


def warm(engine: Engine, seconds: float) -> float:
    """Runs for a while and gives the median step time of the second half."""
    took_s: list[float] = []
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s or len(took_s) < 4:
        took_s += steps(engine, 1).tolist()
    return statistics.median(took_s[len(took_s) // 2 :])


def cpu_s(process: psutil.Process) -> float:
    """Processor time a process has used, all its threads, to the nanosecond where `cpu_times` counts in 10 ms."""
    threads = Path(f"/proc/{process.pid}/task").glob("*/schedstat")
    return sum(int(path.read_text().split()[0]) for path in threads) / 1e9


def interleaved(
    engine: Engine, process: psutil.Process, *, num_pairs: int, per_block: int, deadline_s: float
) -> tuple[list[tuple[Floats, Floats]], float]:
    """Pairs of blocks, without and with sampler, as many as fit before a deadline.

    Returns:
        The step times of each pair, off and on, and the sampler's share of one processor while it ran.
    """
    pairs: list[tuple[Floats, Floats]] = []
    used_s = on_s = 0.0
    try:
        for index in range(num_pairs):
            if time.monotonic() > deadline_s:
                break
            blocks: dict[bool, Floats] = {}
            for on in (False, True) if index % 2 == 0 else (True, False):
                before_s, start_s = cpu_s(process), time.monotonic()
                (process.resume if on else process.suspend)()
                blocks[on] = steps(engine, per_block)
                if on:
                    used_s += cpu_s(process) - before_s
                    on_s += time.monotonic() - start_s
            pairs.append((blocks[False], blocks[True]))
    finally:
        process.resume()
    return pairs, used_s / on_s if on_s else 0.0


def measure(given: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Trains and measures; plain data."""
    began_s = time.monotonic()
    device = "cpu" if given.cpu else "cuda:0"
    if not given.cpu:
        torch.cuda.set_device(0)
    backend, rendezvous = "gloo" if given.cpu else "nccl", f"file://{folder.absolute()}/store"
    dist.init_process_group(backend, init_method=rendezvous, rank=0, world_size=1)
    spec = specification(cpu=given.cpu)
    engine = load_engine(spec.engine)
    backends = ["host"] if given.cpu else ["nvml", "host"]
    sampler = SamplerProcess.start(folder / "sampler", node=platform.node(), backends=backends, lease_s=LEASE_S)
    try:
        engine.build(spec, Ranks(rank=0, world_size=1, local_rank=0, device=device), seed=0)
        step_s = warm(engine, given.warm_s)
        per_block = max(2, round(given.block_s / step_s))
        process = psutil.Process(sampler.manifest()["sampler"]["pid"])
        pairs, cpu_frac = interleaved(
            engine,
            process,
            num_pairs=given.pairs,
            per_block=per_block,
            deadline_s=began_s + given.most_s,
        )
    finally:
        engine.close()
        manifest = sampler.stop()
        dist.destroy_process_group()
    offs = [off for off, _ in pairs]
    # Neighbouring blocks without sampler, their order in time alternating too.
    placebo = [(a, b) if k % 2 else (b, a) for k, (a, b) in enumerate(zip(offs[::2], offs[1::2], strict=False))]
    found: dict[str, Any] = {
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "device": "cpu" if given.cpu else torch.cuda.get_device_name(0),
        "python": platform.python_version(),
        "torch": version("torch"),
        "backends": backends,
        "step_s": step_s,
        "per_block": per_block,
        "sampler_cpu_frac": cpu_frac,
        "missed_ticks": {tier: facts["missed_ticks"] for tier, facts in manifest["tiers"].items()},
        "pairs_s": [[off.tolist(), on.tolist()] for off, on in pairs],
    }
    medians = [(np.array([np.median(off)]), np.array([np.median(on)])) for off, on in pairs]
    for name, of in (("overhead", pairs), ("by_medians", medians), ("placebo", placebo)):
        try:
            found[name] = asdict(fit_overhead(of))
        except TelemetryError as error:
            found[name] = {"error": str(error)}
    return found


def told(found: dict[str, Any]) -> list[str]:
    """The figures as a Markdown text."""
    lines = [
        "# What sampling costs a training step",
        "",
        (
            f"{found['date']}, {found['device']}, Python {found['python']}, torch {found['torch']}; torch engine, "
            f"steps of {1e3 * found['step_s']:.1f} ms, {found['per_block']} a block, sampler of backends "
            f"{' and '.join(found['backends'])} at default rates."
        ),
        "",
        "| what | measured | target | |",
        "|---|---|---|---|",
    ]
    titles = {
        "overhead": "step time, sampler on over off",
        "by_medians": "the same, of blocks' median steps",
        "placebo": "the same, off over off",
    }
    for name, title in titles.items():
        cost = found[name]
        if "error" in cost:
            lines.append(f"| {title} | {cost['error']} | | |")
            continue
        inside = cost["low"] >= 1 - RATIO_WITHIN and cost["high"] <= 1 + RATIO_WITHIN
        counted = "" if name == "by_medians" else f", {cost['num_steps']} steps"
        lines.append(
            f"| {title} | {cost['ratio']:.5f}, {CONFIDENCE_FRAC:.0%} interval {cost['low']:.5f} to {cost['high']:.5f}, "
            f"{cost['num_pairs']} pairs{counted} | "
            + (f"1.000 ± {RATIO_WITHIN} | {'met' if inside else 'MISSED'} |" if name == "overhead" else "| |")
        )
    met = found["sampler_cpu_frac"] < CPU_BELOW_FRAC
    lines.append(
        f"| sampler's processor time, of one core | {found['sampler_cpu_frac']:.2%} | below {CPU_BELOW_FRAC:.0%} | "
        f"{'met' if met else 'MISSED'} |"
    )
    return [*lines, ""]


def main() -> None:
    """Measures, prints a table or one JSON object, and writes both where `--out` says."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--pairs", type=int, default=12, help="pairs of blocks")
    parser.add_argument("--block-s", type=float, default=2.0, help="seconds of a block")
    parser.add_argument("--warm-s", type=float, default=WARM_S, help="seconds of steps before the first block")
    parser.add_argument("--most-s", type=float, default=110.0, help="no pair begins later than so many seconds")
    parser.add_argument("--cpu", action="store_true", help="a tiny model on the processor, host sensors only")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    parser.add_argument("--out", type=Path, help="where telemetry_training.md and .json go")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = measure(given, Path(folder))
    lines = told(found)
    print(json.dumps(found) if given.json else "\n".join(lines), flush=True)
    if given.out:
        given.out.mkdir(parents=True, exist_ok=True)
        (given.out / "telemetry_training.md").write_text("\n".join(lines))
        (given.out / "telemetry_training.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
