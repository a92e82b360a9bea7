"""Measures the torch engine's MFU beside a bare PyTorch loop and the limit of matrix products.

The slice is four Llama-like layers (hidden 4096, feed-forward 14336, 32 heads, 8 key-value heads, 4,096 tokens,
vocabulary 32,000), micro-batch 4, four micro-batches. Every case runs in processes of its own, so that none inherits
another's memory, graphs or faults. A case that fails says so and costs no other its figures. With `--json` the script
prints the rows of benchmarks/results/engine_mfu.md.

    python benchmarks/engine_mfu.py --json --keep mfu.json   # one GPU, about two minutes; may be cut
    python benchmarks/engine_mfu.py --json --ranks 4         # data parallel on four, sharding by overlap
    python benchmarks/engine_mfu.py --quick                  # a dry run of this script on a CPU
"""

import argparse
import gzip
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812  (its usual name)
from torch import Tensor, nn

from wattune.analysis.metrics.exposed_comm import parts
from wattune.catalog.hardware import ClusterSpec, device
from wattune.catalog.models import ModelSpec, model
from wattune.cost.flops import model_flop_per_step
from wattune.engines.model.compiler import Compiler
from wattune.engines.torch.engine import TorchEngine
from wattune.plans.axes import Plan
from wattune.trial import TrialSpec
from wattune.workers.engine import Ranks
from wattune.workers.profiler import kernels_table, profiled_steps
from wattune.workload import Workload

SEED = 7
GEMM_SECONDS = 3.0
"""Duration of matrix products before the limit is read. The clock has then settled at the power limit."""


@dataclass(frozen=True)
class Slice:
    """The model and batch that every case trains."""

    quick: bool
    ranks: int

    @property
    def model(self) -> ModelSpec:
        """Four layers of Llama-3 8B's widths, or four tiny ones."""
        if self.quick:
            tiny = {"hidden_size": 64, "ffn_hidden_size": 128, "num_heads": 4, "num_kv_heads": 2, "vocab_size": 256}
            return replace(model("llama3_8b"), num_layers=4, **tiny)
        return replace(model("llama3_8b"), num_layers=4, vocab_size=32_000)

    @property
    def seq_len(self) -> int:
        """Tokens a sequence."""
        return 32 if self.quick else 4096

    @property
    def micro_batch_size(self) -> int:
        """Sequences a micro-batch."""
        return 4

    num_micro_batches = 4

    @property
    def kind(self) -> str:
        """The torch device type."""
        return "cpu" if self.quick else "cuda"

    @property
    def num_steps(self) -> tuple[int, int]:
        """Warm-up and measured steps."""
        return (2, 3) if self.quick else (4, 10)

    def spec(self, **axes: Any) -> TrialSpec:
        """The trial of the torch engine."""
        plan = Plan(**{"micro_batch_size": self.micro_batch_size, "etp": axes.get("tp", 1), "dtype": self.dtype} | axes)
        batch = self.micro_batch_size * self.num_micro_batches * plan.dp(self.ranks)
        return TrialSpec(
            model=self.model,
            cluster=ClusterSpec(device="cpu" if self.quick else "h200_sxm", devices_per_node=self.ranks),
            engine="torch",
            workload=Workload(seq_len=self.seq_len, global_batch_size=batch),
            plan=plan,
        )

    @property
    def dtype(self) -> str:
        """Data type of the matrix products."""
        return "fp32" if self.quick else "bf16"

    @property
    def backend(self) -> str:
        """The backend of `torch.compile`. On CPUs it generates no code: a dry run would take minutes."""
        return "aot_eager" if self.quick else "inductor"


def summary(case: Slice, spec: TrialSpec, times_s: list[float]) -> dict[str, Any]:
    """Figures of measured steps."""
    median_s = statistics.median(times_s)
    tokens = spec.workload.tokens_per_step
    flop = model_flop_per_step(spec.model, seq_len=case.seq_len, global_batch_size=spec.workload.global_batch_size)
    peak = device(spec.cluster.device).peak_flop_per_s(case.dtype)
    return {
        "step_ms": round(median_s * 1e3, 2),
        "step_ms_min": round(min(times_s) * 1e3, 2),
        "step_ms_max": round(max(times_s) * 1e3, 2),
        "num_steps": len(times_s),
        "tokens_per_s": round(tokens / median_s),
        "mfu": None if peak is None else round(flop / median_s / peak / case.ranks, 4),
    }


def memory(kind: str) -> dict[str, float]:
    """Highest memory of this process's device in GiB."""
    if kind == "cpu":
        return {}
    return {
        "allocated_peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2),
        "reserved_peak_gib": round(torch.cuda.max_memory_reserved() / 2**30, 2),
    }


def gemm_limit(case: Slice) -> dict[str, Any]:
    """Matrix products of the slice's largest shape, back to back until the clock has settled."""
    rows, hidden, inner = case.seq_len * case.micro_batch_size, case.model.hidden_size, case.model.ffn_hidden_size
    dtype = torch.bfloat16 if case.dtype == "bf16" else torch.float32
    a = torch.randn(rows, hidden, device=case.kind, dtype=dtype)
    b = torch.randn(hidden, inner, device=case.kind, dtype=dtype)
    rates, until = [], time.perf_counter() + (0.2 if case.quick else GEMM_SECONDS)
    while time.perf_counter() < until:
        start = time.perf_counter()
        for _ in range(50):
            a @ b
        synchronize(case.kind)
        rates.append(50 * 2 * rows * hidden * inner / (time.perf_counter() - start))
    settled = statistics.median(rates[len(rates) // 2 :])
    peak = device("cpu" if case.quick else "h200_sxm").peak_flop_per_s(case.dtype)
    return {"tflop_per_s": round(settled / 1e12, 3), "of_peak": None if peak is None else round(settled / peak, 4)}


def synchronize(kind: str) -> None:
    """Waits for the device."""
    if kind == "cuda":
        torch.cuda.synchronize()


class BareLayer(nn.Module):
    """One Llama layer as anybody writes it."""

    def __init__(self, m: ModelSpec) -> None:
        """Allocates."""
        super().__init__()
        kv = m.num_kv_heads * m.head_size
        self.norm1, self.norm2 = (nn.RMSNorm(m.hidden_size, eps=1e-5) for _ in range(2))
        self.q, self.o = (nn.Linear(m.hidden_size, m.hidden_size, bias=False) for _ in range(2))
        self.k, self.v = (nn.Linear(m.hidden_size, kv, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(m.hidden_size, m.ffn_hidden_size, bias=False) for _ in range(2))
        self.down = nn.Linear(m.ffn_hidden_size, m.hidden_size, bias=False)
        self.head_size = m.head_size

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Attention and feed-forward."""
        h = self.norm1(x)
        q, k, v = (p(h).unflatten(-1, (-1, self.head_size)).transpose(1, 2) for p in (self.q, self.k, self.v))
        q, k = (rotated(t, cos, sin) for t in (q, k))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.o(mixed.transpose(1, 2).flatten(2))
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions."""
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


class BareModel(nn.Module):
    """A Llama with its loss; shares nothing with the engine but the shapes."""

    def __init__(self, m: ModelSpec, seq_len: int, dtype: torch.dtype) -> None:
        """Allocates."""
        super().__init__()
        self.embedding = nn.Embedding(m.vocab_size, m.hidden_size)
        self.layers = nn.ModuleList(BareLayer(m) for _ in range(m.num_layers))
        self.norm = nn.RMSNorm(m.hidden_size, eps=1e-5)
        self.output = nn.Linear(m.hidden_size, m.vocab_size, bias=False)
        half = m.head_size // 2
        angle = torch.outer(torch.arange(seq_len).float(), m.rope_base ** (-torch.arange(half).float() / half))
        self.register_buffer("cos", angle.cos().to(dtype), persistent=False)
        self.register_buffer("sin", angle.sin().to(dtype), persistent=False)
        for parameter in self.parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """The mean loss."""
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, self.cos, self.sin)
        return F.cross_entropy(self.output(self.norm(x)).flatten(0, 1).float(), targets.flatten())


def bare_loop(case: Slice, *, master_fp32: bool) -> dict[str, Any]:
    """A plain training loop, the whole model compiled, fused AdamW.

    Args:
        case: What to train.
        master_fp32: Whether weights, gradients and optimizer state are fp32 and clipped, as the engine's are, with
            matrix products in bf16 by autocast; else everything is bf16 and nothing is clipped.
    """
    torch.manual_seed(SEED)
    low = torch.bfloat16 if case.dtype == "bf16" else torch.float32
    start = time.perf_counter()
    with torch.device(case.kind):
        whole = BareModel(case.model, case.seq_len, low)
    if not master_fp32:
        whole = whole.to(low)
    compiled = torch.compile(whole, backend=case.backend)
    optimizer = torch.optim.AdamW(whole.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    shape = (case.num_micro_batches, case.micro_batch_size, case.seq_len + 1)
    tokens = torch.randint(case.model.vocab_size, shape, device=case.kind)
    losses, times_s, first_s = [], [], 0.0
    warmup, measured = case.num_steps
    for step in range(warmup + measured):
        synchronize(case.kind)
        begun = time.perf_counter()
        total = torch.zeros((), device=case.kind)
        for part in tokens:
            with torch.autocast(case.kind, torch.bfloat16, enabled=master_fp32 and not case.quick):
                loss = compiled(part[:, :-1].contiguous(), part[:, 1:].contiguous()) / case.num_micro_batches
            loss.backward()
            total += loss.detach()
        if master_fp32:
            nn.utils.clip_grad_norm_(whole.parameters(), 1.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad()
        synchronize(case.kind)
        losses.append(total.item())
        if step == 0:
            first_s = time.perf_counter() - start
        if step >= warmup:
            times_s.append(time.perf_counter() - begun)
    return {
        **summary(case, case.spec(), times_s),
        "spec_to_first_step_s": round(first_s, 2),
        "loss": losses[-1],
        **memory(case.kind),
    }


def engine_steps(case: Slice, ranks: Ranks, spec: TrialSpec, backend: str | None, num_steps: int) -> dict[str, Any]:
    """Builds the engine, runs steps, closes it."""
    start = time.perf_counter()
    engine = TorchEngine(Compiler(backend=backend))
    engine.build(spec, ranks, seed=SEED)
    build_s = time.perf_counter() - start
    losses, norms, times_s, first_s = [], [], [], 0.0
    for step in range(num_steps):
        result = engine.step()
        if step == 0:
            first_s = time.perf_counter() - start
        (whole,) = (span for span in result.spans if span.phase == "step")
        times_s.append((whole.end_mono_ns - whole.start_mono_ns) / 1e9)
        losses.append(result.loss)
        norms.append(result.grad_norm)
    found = {"build_s": round(build_s, 2), "spec_to_first_step_s": round(first_s, 2), "losses": losses}
    return found | {"grad_norms": norms, "times_s": times_s, "engine": engine, **memory(case.kind)}


def engine_case(
    case: Slice, ranks: Ranks, backend: str | None, axes: dict[str, Any], out: Path | None, say: "Say"
) -> dict[str, Any]:
    """The torch engine: cold, of which `say` is told, then warm in the same process, then profiled."""
    spec = case.spec(**axes)
    warmup, measured = case.num_steps
    cold = engine_steps(case, ranks, spec, backend, warmup + measured)
    result = {
        "compiler": backend or "eager",
        **summary(case, spec, cold.pop("times_s")[warmup:]),
        "cold": {key: cold[key] for key in ("build_s", "spec_to_first_step_s")},
        "losses": [round(loss, 6) for loss in cold["losses"][:8]],
        "grad_norms": [round(norm, 6) for norm in cold["grad_norms"][:8]],
        **memory(case.kind),
    }
    cold.pop("engine").close()
    if case.kind == "cuda":
        result["allocated_left_mib"] = round(torch.cuda.memory_allocated() / 2**20, 1)
    if backend is not None or out is not None:
        say(result | {"partial": True})
        warm = engine_steps(case, ranks, spec, backend, 2)
        result["warm"] = {key: warm[key] for key in ("build_s", "spec_to_first_step_s")}
        result["warm_repeats_losses"] = warm["losses"] == cold["losses"][:2]
        if out is not None:
            result["profile"] = guarded(lambda: profiled(case, warm["engine"], spec, ranks, out, axes))
        warm.pop("engine").close()
    return result


def profiled(
    case: Slice, engine: TorchEngine, spec: TrialSpec, ranks: Ranks, out: Path, axes: dict[str, Any]
) -> dict[str, Any]:
    """Two steps under torch's profiler, outside all measured ones: where their time goes, and the trace in a file."""
    spans, read = profiled_steps(engine.step, 2, on_gpu=case.kind == "cuda")
    trace = read()
    kept = ("kernel", "gpu_memcpy", "gpu_memset", "gpu_user_annotation")
    events = [event for event in trace["traceEvents"] if case.quick or event.get("cat") in kept]
    name = "_".join(["trace", *(f"{key}-{value}" for key, value in axes.items()), f"rank{ranks.rank}.json.gz"])
    described = {key: trace.get(key) for key in ("distributedInfo", "baseTimeNanoseconds")}
    with gzip.open(out / name, "wt") as file:
        json.dump({**described, "traceEvents": events, "spans_ns": spans}, file)
    start = time.perf_counter()
    table = kernels_table(trace, spans, rank=ranks.rank, devices_per_node=case.ranks)
    shares = parts(table, spec.plan, num_micro_batches=case.num_micro_batches)
    return {
        "trace": name,
        "num_kernels": table.num_rows,
        "reading_s": round(time.perf_counter() - start, 2),
        "step_ms": [round((end - begin) / 1e6, 2) for begin, end in spans],
        "parts": {key: round(share, 5) for key, share in shares.items()},
    }


Say = Callable[[dict[str, Any]], None]
"""Told what a case has found so far."""


def guarded(function: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """A case's figures, or what went wrong."""
    try:
        return function()
    except Exception as error:  # the next case still has its say
        return {"error": f"{type(error).__name__}: {str(error)[:600]}", "where": traceback.format_exc()[-1500:]}


def run_here(case: Slice, rank: int, names: list[str], folder: Path, out: Path | None) -> None:
    """One process's cases; rank 0 prints a line of JSON for each."""
    if case.kind == "cuda":
        torch.cuda.set_device(rank)
    else:
        torch.set_num_threads(1)
    here = f"cuda:{rank}" if case.kind == "cuda" else "cpu"
    ranks = Ranks(rank=rank, world_size=case.ranks, local_rank=rank, device=here)
    store = dist.FileStore(str(folder / "store"), case.ranks)
    dist.init_process_group("nccl" if case.kind == "cuda" else "gloo", store=store, rank=rank, world_size=case.ranks)
    for name in names:
        kind, _, axes = name.partition(":")
        chosen = json.loads(axes) if axes else {}

        def say(found: dict[str, Any], name: str = name) -> None:
            if rank == 0:
                print("FOUND " + json.dumps({"case": name, **found}), flush=True)

        functions: dict[str, Callable[[], dict[str, Any]]] = {
            "limit": lambda: gemm_limit(case),
            "bare_bf16": lambda: bare_loop(case, master_fp32=False),
            "bare_fp32": lambda: bare_loop(case, master_fp32=True),
            "engine": lambda chosen=chosen, say=say: engine_case(case, ranks, case.backend, chosen, out, say),
            "engine_again": lambda chosen=chosen, say=say: engine_case(case, ranks, case.backend, chosen, None, say),
            "engine_eager": lambda chosen=chosen, say=say: engine_case(case, ranks, None, chosen, None, say),
        }
        say(guarded(functions[kind]))
    dist.destroy_process_group()


def run_apart(case: Slice, names: list[str], cache: Path, out: Path | None, limit_s: float) -> Iterator[dict[str, Any]]:
    """Runs cases in new processes, one a rank; what they find as they find it, then what failed without a word."""
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(cache)}
        environment["OMP_NUM_THREADS"] = "1" if case.quick else "4"
        workers, logs = [], []
        for rank in range(case.ranks):
            command = [sys.executable, __file__, "--here", str(rank), folder, *names, "--ranks", str(case.ranks)]
            command += ["--quick"] if case.quick else []
            command += ["--out", str(out)] if out else []
            logs.append(Path(folder) / f"{rank}.log")
            with open(logs[-1], "w") as log:
                workers.append(subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment))
        ends, missing = time.monotonic() + limit_s, list(names)
        try:
            with logs[0].open() as log:
                running, part = True, ""
                while running:
                    running = any(worker.poll() is None for worker in workers) and time.monotonic() < ends
                    part += log.read()  # after looking who runs: what the last one said is then in it
                    *lines, part = part.split("\n")
                    for line in lines:
                        if line.startswith("FOUND "):
                            found = json.loads(line.removeprefix("FOUND "))
                            if "partial" not in found:
                                missing.remove(found["case"])
                            yield found
                    time.sleep(0.1)
        finally:
            for worker in workers:
                worker.kill()
                worker.wait()
        said = "\n".join(log.read_text()[-1200:] for log in logs[:2])
        for name in missing:
            yield {"case": name, "error": f"no result within {limit_s:.0f} s", "said": said}


def plans(ranks: int) -> list[list[str]]:
    """Cases by process, the most telling first."""
    if ranks == 1:
        return [["limit", "bare_fp32"], ["engine"], ["bare_bf16"], ["engine_again"], ["engine_eager"]]
    settings = [
        {"overlap": "grad"},
        {"sharding": "zero1", "overlap": "grad_param"},
        {"sharding": "zero3", "overlap": "grad_param"},
        {"overlap": "none"},
        {"sharding": "zero1", "overlap": "grad"},
        {"sharding": "zero1", "overlap": "none"},
        {"sharding": "zero3", "overlap": "grad"},
        {"sharding": "zero3", "overlap": "none"},
        {"tp": 2, "pp": 2, "micro_batch_size": 1} if ranks == 4 else {"tp": 2, "overlap": "grad"},
    ]
    return [[f"engine:{json.dumps(setting)}" for setting in settings]]


def judged(found: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Ratios between cases; those whose cases are missing are left out."""

    def of(case: str, key: str) -> Any:
        return found.get(case, {}).get(key)

    ratios: dict[str, Any] = {}
    engine_ms = of("engine", "step_ms")
    for other in ("bare_bf16", "bare_fp32", "engine_eager"):
        if engine_ms and of(other, "step_ms"):
            ratios[f"engine_time_over_{other}"] = round(engine_ms / of(other, "step_ms"), 4)
    if of("engine", "mfu") and of("limit", "of_peak"):
        ratios["engine_mfu_over_limit"] = round(of("engine", "mfu") / of("limit", "of_peak"), 4)
    compiled, eager = of("engine", "losses"), of("engine_eager", "losses")
    if compiled and eager:
        pairs = list(zip(compiled, eager, strict=False))
        ratios["largest_loss_deviation_compiled_from_eager"] = max(abs(a - b) / abs(b) for a, b in pairs)
    return ratios


def main() -> int:
    """Runs the cases; the exit code is 1 where one failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one object on standard output")
    parser.add_argument("--quick", action="store_true", help="tiny, on a CPU")
    parser.add_argument("--ranks", type=int, default=1, help="GPUs, or gloo ranks with --quick")
    parser.add_argument("--budget", type=float, default=170.0, help="seconds after which no further case is begun")
    parser.add_argument("--out", type=Path, help="folder for traces of a profiled step")
    parser.add_argument("--keep", type=Path, help="also write the object here, after every case: a run may be cut")
    parser.add_argument("--here", nargs="+", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    case = Slice(quick=arguments.quick, ranks=arguments.ranks)
    if arguments.here:
        rank, folder, *names = arguments.here
        run_here(case, int(rank), names, Path(folder), arguments.out)
        return 0
    if arguments.out:
        arguments.out.mkdir(parents=True, exist_ok=True)
    begun = time.monotonic()
    cases: dict[str, dict[str, Any]] = {}
    result: dict[str, Any] = {
        "device": "cpu" if arguments.quick else torch.cuda.get_device_name(0),
        "torch": torch.__version__,
        "slice": asdict(case.spec().model) | {"seq_len": case.seq_len, "ranks": case.ranks},
        "cases": cases,
    }
    with tempfile.TemporaryDirectory() as caches:
        for names in plans(arguments.ranks):
            left_s = arguments.budget - (time.monotonic() - begun)
            # Engines share the cache on disk in the order they run, so that the first is cold; loops have their own.
            cache = Path(caches) / ("engine" if names[0].startswith("engine") else names[-1])
            found = run_apart(case, names, cache, arguments.out, max(left_s, 60.0))
            if left_s < 15:
                found = iter([{"case": name, "error": "skipped: the budget is spent"} for name in names])
            for each in found:
                name = each.pop("case")  # an error leaves what was known before it
                cases[name] = cases.get(name, {}) | each if "error" in each else each
                result |= {"ratios": judged(cases), "wall_s": round(time.monotonic() - begun, 1)}
                print(json.dumps({name: each, "ratios": result["ratios"]}), file=sys.stderr, flush=True)
                if arguments.keep:  # whole or not at all: what cuts a run may come while it is written
                    part = arguments.keep.with_suffix(".part")
                    part.write_text(json.dumps(result))
                    part.rename(arguments.keep)
    print(json.dumps(result) if arguments.json else json.dumps(result, indent=1))
    return int(any("error" in each for each in cases.values()))


if __name__ == "__main__":
    sys.exit(main())
