"""Records the traces of profiled steps that golden tests read: small plans over gloo, on this machine's processors.

Run as `python benchmarks/record_kernels.py tests/golden/kernels_cpu.json.gz`.
"""

import gzip
import json
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from wattune.catalog.hardware import ClusterSpec
from wattune.catalog.models import ModelSpec
from wattune.engines.torch.engine import TorchEngine
from wattune.plans.axes import Plan
from wattune.trial import TrialSpec
from wattune.workers.engine import Ranks
from wattune.workers.profiler import profiled_steps
from wattune.workload import Workload

RANKS = 2
BATCH = 4
LLAMA = ModelSpec(
    name="llama", num_layers=1, hidden_size=128, ffn_hidden_size=256, num_heads=8, num_kv_heads=4, vocab_size=512
)
MIXTRAL = ModelSpec(
    name="mixtral",
    num_layers=1,
    hidden_size=128,
    ffn_hidden_size=256,
    num_heads=4,
    num_kv_heads=2,
    vocab_size=512,
    num_experts=4,
    num_experts_per_token=2,
)
CASES: dict[str, tuple[ModelSpec, dict[str, Any]]] = {
    "tp2": (LLAMA, {"tp": 2, "etp": 2, "micro_batch_size": 4}),
    "dp2-zero3": (LLAMA, {"sharding": "zero3", "overlap": "grad_param", "micro_batch_size": 2}),
    "pp2": (replace(LLAMA, num_layers=2), {"pp": 2, "micro_batch_size": 1}),
    "ep2": (MIXTRAL, {"ep": 2, "micro_batch_size": 2}),
}
KEPT = ("name", "cat", "ph", "tid", "ts", "dur")


def record(rank: int, folder: str) -> None:
    """One rank's traces, each with the spans of its steps."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", RANKS), rank=rank, world_size=RANKS)
    found = {}
    for name, (model, axes) in CASES.items():
        spec = TrialSpec(
            model=model,
            cluster=ClusterSpec(device="cpu", devices_per_node=RANKS),
            engine="torch",
            workload=Workload(seq_len=64, global_batch_size=BATCH),
            plan=Plan(**{"dtype": "fp32"} | axes),
        )
        engine = TorchEngine()
        engine.build(spec, Ranks(rank=rank, world_size=RANKS, local_rank=rank, device="cpu"), seed=7)
        for _ in range(3):
            engine.step()
        spans, read = profiled_steps(engine.step, 1, on_gpu=False)
        trace = read()
        engine.close()
        events = [{key: event[key] for key in KEPT} for event in trace["traceEvents"] if event.get("ph") == "X"]
        events = [event for event in events if event["cat"] in ("cpu_op", "user_annotation")]
        found[name] = {
            "axes": axes,
            "spans_ns": spans,
            "baseTimeNanoseconds": trace["baseTimeNanoseconds"],
            "traceEvents": events,
        }
    (Path(folder) / f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def main() -> None:
    """Writes the file named on the command line."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(record, (folder,), nprocs=RANKS)
        by_rank = [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(RANKS)]
    content = {
        "torch": torch.__version__,
        "global_batch_size": BATCH,
        "cases": {name: [ranks[name] for ranks in by_rank] for name in CASES},
    }
    with gzip.GzipFile(sys.argv[1], "wb", compresslevel=9, mtime=0) as file:
        file.write(json.dumps(content, separators=(",", ":")).encode())


if __name__ == "__main__":
    main()
