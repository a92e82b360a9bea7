"""The torch and the DeepSpeed engine on the same specifications, one after the other in the same processes.

Per case: median step time of the last steps, tokens per second, MFU, peak memory of the worst rank, loss of the last
step, and DeepSpeed's step time over the torch engine's. A case that fails on all ranks says so and the next one runs;
one that hangs ends the run at its time limit, and what was done is printed.

    python benchmarks/engines_side_by_side.py               # all GPUs of the machine: Llama-like layers, hidden 4096
    python benchmarks/engines_side_by_side.py --quick       # tiny, two gloo ranks
    python benchmarks/engines_side_by_side.py --json        # one object on standard output
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from wattune.catalog.hardware import ClusterSpec, device
from wattune.catalog.models import ModelSpec
from wattune.cost.flops import model_flop_per_step
from wattune.plan.axes import Plan
from wattune.plan.engines import effective
from wattune.plan.rules import violations
from wattune.trial import TrialSpec, Workload
from wattune.workers.engine import Ranks, load_engine

ENGINES = ("torch", "deepspeed")
WARMUP_STEPS, STEPS = 4, 8
GROUP_TIMEOUT_S = 560

LLAMA = ModelSpec(
    name="llama_slice",
    num_layers=4,
    hidden_size=4096,
    ffn_hidden_size=14336,
    num_heads=32,
    num_kv_heads=8,
    vocab_size=32000,
)
MIXTRAL = replace(LLAMA, name="mixtral_slice", num_layers=2, num_experts=8, num_experts_per_token=2)
TINY = {"hidden_size": 64, "ffn_hidden_size": 128, "num_heads": 4, "num_kv_heads": 2, "vocab_size": 256}


def cases(ranks: int, quick: bool) -> dict[str, TrialSpec]:
    """Specifications by name; the batch is the same for all of a model."""
    dense, mixture = (replace(model, **TINY) if quick else model for model in (LLAMA, MIXTRAL))
    size = 1 if quick else 4
    zero3 = {"sharding": "zero3", "overlap": "grad_param"}
    plans: dict[str, tuple[ModelSpec, dict[str, Any]]] = {
        "none": (dense, {}),
        "zero1": (dense, {"sharding": "zero1", "overlap": "grad"}),
        "zero2": (dense, {"sharding": "zero2", "overlap": "grad"}),
        "zero3": (dense, zero3),
        "zero3-full": (dense, zero3 | {"recompute": "full"}),
        "tp2": (dense, {"tp": 2}),
        "pp2": (dense, {"pp": 2, "sharding": "zero1"}),
        "experts-zero1": (mixture, {"sharding": "zero1", "ep": ranks, "micro_batch_size": size // 2 or 1}),
    }
    cluster = ClusterSpec(device="cpu" if quick else "h200_sxm", devices_per_node=ranks)
    workload = Workload(seq_len=32 if quick else 4096, global_batch_size=4 * size * ranks)
    neutral = {"micro_batch_size": size, "dtype": "fp32" if quick else "bf16"}
    return {
        name: TrialSpec(
            model=model,
            cluster=cluster,
            engine="torch",
            workload=workload,
            plan=Plan(**(neutral | {"etp": plan.get("tp", 1)} | plan)),
        )
        for name, (model, plan) in plans.items()
    }


def measure(spec: TrialSpec, ranks: Ranks) -> dict[str, Any]:
    """One specification on this rank."""
    start_s = time.monotonic()
    engine = load_engine(spec.engine)
    try:
        engine.build(spec, ranks, seed=7)
        engine.step()
        ready_s = time.monotonic() - start_s
        steps = [engine.step() for _ in range(WARMUP_STEPS - 1 + STEPS)]
        times_s = []
        for step in steps[-STEPS:]:
            (mark,) = (mark for mark in step.marks if mark.phase == "step")
            times_s.append((mark.end_mono_ns - mark.start_mono_ns) / 1e9)
        return {
            "step_time_s": statistics.median(times_s),
            "first_step_s": ready_s,
            "memory_peak_bytes": engine.memory_peak_bytes(),
            "loss": steps[-1].loss,
        }
    except Exception as error:
        return {"error": f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"}
    finally:
        engine.close()


def work(folder: Path, rank: int, world_size: int, quick: bool) -> None:
    """One rank: every case by both engines, as they come."""
    if quick:
        torch.set_num_threads(1)
    else:
        torch.cuda.set_device(rank)
    store = dist.FileStore(str(folder / "store"), world_size)
    dist.init_process_group("gloo" if quick else "nccl", store=store, rank=rank, world_size=world_size)
    ranks = Ranks(rank=rank, world_size=world_size, local_rank=rank, device="cpu" if quick else f"cuda:{rank}")
    for name, written in cases(world_size, quick).items():
        for engine in ENGINES:
            asked = replace(written, engine=engine)
            spec = replace(asked, plan=effective(asked)[0])
            broken = [violation.reason for violation in violations(spec)]
            outcome = {"error": broken[0]} if broken else measure(spec, ranks)
            with (folder / f"{rank}.jsonl").open("a") as file:
                file.write(json.dumps({"case": name, "engine": engine, "plan": spec.label} | outcome) + "\n")
    dist.barrier()
    dist.destroy_process_group()


def gather(folder: Path, ranks: int, quick: bool) -> list[dict[str, Any]]:
    """What all ranks agree to have finished, the slowest rank's time and the largest memory."""
    by_rank = [
        [json.loads(line) for line in path.read_text().splitlines()]
        if (path := folder / f"{rank}.jsonl").exists()
        else []
        for rank in range(ranks)
    ]
    specs, rows = cases(ranks, quick), []
    for together in zip(*by_rank, strict=False):
        row = dict(together[0])
        if "error" not in row:
            spec = specs[row["case"]]
            row["step_time_s"] = max(each["step_time_s"] for each in together)
            row["memory_peak_bytes"] = max(each["memory_peak_bytes"] for each in together)
            row["tokens_per_s"] = spec.workload.tokens_per_step / row["step_time_s"]
            peak = device(spec.cluster.device).peak_flop_per_s(spec.plan.dtype)
            if peak is not None:
                flop = model_flop_per_step(
                    spec.model, seq_len=spec.workload.seq_len, global_batch_size=spec.workload.global_batch_size
                )
                row["mfu_frac"] = flop / row["step_time_s"] / ranks / peak
        rows.append(row)
    return rows


def show(rows: list[dict[str, Any]]) -> None:
    """The table."""
    torch_s: dict[str, float] = {}
    for row in rows:
        head = f"{row['case']:<14} {row['engine']:<10} {row['plan']:<34}"
        if "error" in row:
            print(f"{head} {row['error']}")
            continue
        if row["engine"] == "torch":
            torch_s[row["case"]] = row["step_time_s"]
        over = row["step_time_s"] / torch_s[row["case"]] if row["case"] in torch_s else float("nan")
        mfu = f"{row['mfu_frac']:6.1%}" if "mfu_frac" in row else "     -"
        print(
            f"{head} {row['step_time_s'] * 1e3:9.1f} ms {row['tokens_per_s']:10.0f} tokens/s  MFU {mfu}  "
            f"{row['memory_peak_bytes'] / 1e9:6.1f} GB  first step {row['first_step_s']:5.1f} s  "
            f"loss {row['loss']:.4f}  x{over:.3f}"
        )


def main() -> int:
    """Starts the ranks and prints what they found; 1 if any of them failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="tiny, two gloo ranks")
    parser.add_argument("--ranks", type=int, help="GPUs, or gloo ranks with --quick (all, or 2)")
    parser.add_argument("--json", action="store_true", help="one object on standard output")
    parser.add_argument("--here", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    ranks = arguments.ranks or (2 if arguments.quick else torch.cuda.device_count())
    if arguments.here:
        work(Path(arguments.here[0]), int(arguments.here[1]), ranks, arguments.quick)
        return 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        command = [sys.executable, __file__, "--ranks", str(ranks), *(["--quick"] if arguments.quick else [])]
        environment = os.environ | ({"OMP_NUM_THREADS": "1"} if arguments.quick else {})
        logs = [(folder / f"{rank}.log").open("w") for rank in range(ranks)]
        workers = [
            subprocess.Popen([*command, "--here", name, str(rank)], stdout=log, stderr=log, env=environment)
            for rank, log in enumerate(logs)
        ]
        try:
            codes = [worker.wait(GROUP_TIMEOUT_S) for worker in workers]
        except subprocess.TimeoutExpired:
            codes = [1]
        for worker in workers:
            worker.kill()
        rows = gather(folder, ranks, arguments.quick)
        said = (folder / "0.log").read_text()[-3000:] if any(codes) else ""
    if arguments.json:
        print(json.dumps({"ranks": ranks, "torch": torch.__version__, "cases": rows, "failure": said}))
    else:
        print(f"{ranks} ranks, torch {torch.__version__}")
        show(rows)
        if said:
            print(said)
    return 1 if any(codes) else 0


if __name__ == "__main__":
    sys.exit(main())
