"""Every engine with every axis it has, and the combinations a user tries first: a table of named cases on 2 or 4 GPUs.

A case is a training run of a few steps: step time of the slowest rank, MFU, highest memory, loss, and how far its first
losses are from the torch engine's data-parallel run of the same model, which every case of that model should repeat.
At the end every case of another engine is compared with the torch engine's of the same model, mode and plan.
Cases run in order of importance, in one set of ranks per engine that stays up from case to case; a case that fails
costs its engine a new set of ranks and no other case its figures. With `--json` the script prints the rows of
benchmarks/results/engine_cases.md.

    python benchmarks/engine_cases.py --list
    python benchmarks/engine_cases.py --json --time-limit 1700          # four GPUs
    python benchmarks/engine_cases.py --only 'megatron/*' --only 'torch/llama/dp4'
    python benchmarks/engine_cases.py --json --ranks 2 --time-limit 560 # two
    python benchmarks/engine_cases.py --quick --ranks 2                 # a dry run of this script on gloo

The llama slice is two layers a GPU of Llama-3 8B's widths, the mixtral slice one a GPU of Mixtral 8x7B's, the gpt slice
two GPT-3-like ones a GPU of the same width; vocabulary 32,000, 16 sequences of 4,096 tokens a step, bf16 unless the
name says otherwise. `engine_case_list.py` names the cases.
"""

import argparse
import fnmatch
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from engine_case_list import ROUTINGS, TIERS, Case, cases
from harness import header, versions

from wattune.analysis.metrics.exposed_comm import parts
from wattune.analysis.metrics.utilization import expert_imbalance_frac
from wattune.catalog.hardware import ClusterSpec, device
from wattune.catalog.models import ModelSpec, model
from wattune.cost.flops import workload_flop_per_token
from wattune.plans.axes import Plan
from wattune.plans.effective import effective
from wattune.plans.engines import CAPABILITIES
from wattune.plans.parallel import num_micro_batches
from wattune.plans.rules import violations
from wattune.trial import TrialSpec
from wattune.workload import Lora, Routing, Workload

SEED = 7
COMPARED_STEPS = 3
"""Steps whose losses are compared: the first, in which engines have not yet drifted apart by rounding."""
START_TIMEOUT_S = 180
"""Longest a set of ranks may take to come up."""


@dataclass(frozen=True)
class Where:
    """The ranks and devices that cases run on."""

    ranks: int = 4
    quick: bool = False

    @property
    def kind(self) -> str:
        """The torch device type."""
        return "cpu" if self.quick else "cuda"

    def model(self, name: str) -> ModelSpec:
        """A slice of a catalog model, or a tiny one of its kind."""
        widths: dict[str, Any] = {"hidden_size": 4096, "num_heads": 32, "vocab_size": 32_000}
        if self.quick:
            widths = {"hidden_size": 64, "ffn_hidden_size": 128, "num_heads": 4, "num_kv_heads": 4, "vocab_size": 256}
        if name == "gpt":
            gpt = {"num_layers": 2 * self.ranks, "ffn_hidden_size": 16_384, "num_kv_heads": 32, "max_positions": 4096}
            return replace(model("gpt3_175b"), **(gpt | widths))
        if name == "mixtral":
            return replace(model("mixtral_8x7b"), **({"num_layers": self.ranks} | widths))
        return replace(model("llama3_8b"), **({"num_layers": 2 * self.ranks} | widths))

    def spec(self, case: Case) -> TrialSpec:
        """The trial of a case."""
        plan = {"etp": case.axes.get("tp", 1), "dtype": "fp32" if self.quick else "bf16"} | case.axes
        by, skew = ROUTINGS.get(case.routing, ("", 0.0))
        routing = Routing(by=by, skew=skew) if by else None
        kind: dict[str, Any] = {"lora": Lora(rank=16) if case.mode == "lora" else None, "routing": routing}
        seq_len, on = (32, "cpu") if self.quick else (4096, "h200_sxm")
        work = Workload(mode=case.mode, seq_len=seq_len, global_batch_size=case.batch, **kind)
        cluster, of = ClusterSpec(device=on, devices_per_node=self.ranks), self.model(case.model)
        return TrialSpec(model=of, cluster=cluster, engine=case.engine, workload=work, plan=Plan(**plan))


class Ranks:
    """The processes of one engine, which run one case after another."""

    def __init__(self, engine: str, where: Where, folder: Path) -> None:
        """Starts them; they say when they are ready by writing a file."""
        self._folder = folder
        folder.mkdir(parents=True)
        environment = os.environ | dict(CAPABILITIES[engine].environment)
        if where.quick:
            environment |= {"OMP_NUM_THREADS": "1"}
        self._workers = []
        for rank in range(where.ranks):
            command = [sys.executable, __file__, "--worker", str(rank), str(where.ranks), str(folder), where.kind]
            with open(folder / f"{rank}.log", "w") as log:
                worker = subprocess.Popen(
                    command, stdin=subprocess.PIPE, stdout=log, stderr=log, env=environment, text=True
                )
            self._workers.append(worker)
        self._number = 0
        try:
            self._wait("ready", START_TIMEOUT_S)
        except RuntimeError:
            self.stop()
            raise

    def run(
        self, spec: TrialSpec, steps: tuple[int, int, int], timeout_s: float, reach_bytes: float = 0
    ) -> list[dict[str, Any]]:
        """Runs a specification; returns the findings of every rank.

        `reach_bytes` is the most that torch's allocator may keep of a device; 0 leaves it all.

        Raises:
            RuntimeError: A rank failed, or did not finish in time; the ranks are then of no more use.
        """
        self._number += 1
        line = json.dumps({"spec": spec.to_json(), "steps": steps, "number": self._number, "reach_bytes": reach_bytes})
        for worker in self._workers:
            assert worker.stdin is not None
            worker.stdin.write(line + "\n")
            worker.stdin.flush()
        return self._wait(str(self._number), timeout_s)

    def said(self) -> str:
        """The end of what rank 0 printed."""
        return (self._folder / "0.log").read_text()[-3000:]

    def stop(self) -> None:
        """Ends them."""
        for worker in self._workers:
            worker.kill()
            worker.wait()

    def _wait(self, name: str, timeout_s: float) -> list[dict[str, Any]]:
        until = time.monotonic() + timeout_s
        paths = [self._folder / f"{name}-{rank}.json" for rank in range(len(self._workers))]
        while not all(path.exists() for path in paths):
            found = [json.loads(path.read_text()) for path in paths if path.exists()]
            failed = next((outcome["error"] for outcome in found if "error" in outcome), None)
            dead = next((rank for rank, worker in enumerate(self._workers) if worker.poll() is not None), None)
            if failed is None and dead is not None:
                failed = f"rank {dead} died: {(self._folder / f'{dead}.log').read_text()[-400:]}"
            if failed is None and time.monotonic() > until:
                failed = f"not done after {timeout_s:.0f} s"
            if failed is not None:
                raise RuntimeError(failed)
            time.sleep(0.05)
        outcomes = [json.loads(path.read_text()) for path in paths]
        for outcome in outcomes:
            if "error" in outcome:
                raise RuntimeError(outcome["error"])
        return outcomes


def worker(rank: int, world_size: int, folder: Path, kind: str) -> None:
    """One rank: runs what standard input names, until it ends."""
    import torch
    import torch.distributed as dist

    from wattune.workers.engine import Ranks

    if kind == "cuda":
        torch.cuda.set_device(rank)
    else:
        torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), world_size)
    dist.init_process_group("nccl" if kind == "cuda" else "gloo", store=store, rank=rank, world_size=world_size)
    here = Ranks(rank=rank, world_size=world_size, local_rank=rank, device=f"cuda:{rank}" if kind == "cuda" else "cpu")
    tell(folder, f"ready-{rank}", {})
    for line in sys.stdin:
        order = json.loads(line)
        try:
            kernels = folder / f"{order['number']}-{rank}.parquet"
            if kind == "cuda":
                has_bytes = torch.cuda.get_device_properties(rank).total_memory
                torch.cuda.set_per_process_memory_fraction(min(1.0, order["reach_bytes"] / has_bytes or 1.0), rank)
            outcome = train(TrialSpec.from_json(order["spec"]), here, *order["steps"], kernels)
        except Exception as error:
            traceback.print_exc()
            outcome = {"error": f"rank {rank}: {type(error).__name__}: {str(error).strip()[:600]}"}
        tell(folder, f"{order['number']}-{rank}", outcome)


def tell(folder: Path, name: str, outcome: dict[str, Any]) -> None:
    """Writes a rank's outcome, all at once."""
    part = folder / f"{name}.part"
    part.write_text(json.dumps(outcome))
    part.rename(folder / f"{name}.json")


def train(
    spec: TrialSpec, ranks: Any, num_warmup: int, num_steps: int, num_profiled: int, kernels: Path
) -> dict[str, Any]:
    """One case on one rank: step times of the measured steps, all losses, memory, and what ran in profiled ones."""
    import torch

    from wattune.engines import registry
    from wattune.workers.device import allocator_retries
    from wattune.workers.profiler import kernels_table, profiled_steps

    if ranks.device != "cpu":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    engine = registry.load_engine(spec.engine)
    start = time.perf_counter()
    engine.build(spec, ranks, seed=SEED)
    steps = [engine.step()]
    first_step_s = time.perf_counter() - start
    steps += [engine.step() for _ in range(num_warmup - 1)]
    engine.expert_tokens()
    had = allocator_retries(ranks.device)
    steps += [engine.step() for _ in range(num_steps)]
    times_s = []
    for step in steps[num_warmup:]:
        (whole,) = (span for span in step.spans if span.phase == "step")
        times_s.append((whole.end_mono_ns - whole.start_mono_ns) / 1e9)
    outcome = {
        "times_s": times_s,
        "losses": [step.loss for step in steps],
        "grad_norms": [step.grad_norm for step in steps],
        "memory_peak_bytes": engine.memory_peak_bytes(),
        "memory_kept_bytes": 0 if ranks.device == "cpu" else torch.cuda.max_memory_reserved(),
        "memory_retries_per_step_count": (allocator_retries(ranks.device) - had) / max(1, num_steps),
        "spec_to_first_step_s": first_step_s,
        "expert_tokens": engine.expert_tokens(),
    }
    if num_profiled:
        spans, read = profiled_steps(engine.step, num_profiled, on_gpu=ranks.device != "cpu")
        table = kernels_table(read(), spans, rank=ranks.rank, devices_per_node=ranks.world_size)
        pq.write_table(table, kernels)
        outcome["kernels"] = str(kernels)
    engine.close()
    return outcome


def where_it_goes(spec: TrialSpec, paths: list[str]) -> dict[str, Any]:
    """Profiled steps in parts, and the ten longest kernels of rank 0 as shares of its steps."""
    tables = [pq.read_table(path) for path in paths]
    workload = spec.workload
    count = num_micro_batches(spec.plan, spec.cluster.world_size, workload.global_batch_size)
    shares = parts(pa.concat_tables(tables), spec.plan, num_micro_batches=count)
    times_ns: dict[str, int] = {}
    for row in tables[0].to_pylist():
        times_ns[row["name"]] = times_ns.get(row["name"], 0) + row["end_ns"] - row["start_ns"]
    whole_ns = times_ns.pop("step")
    longest = sorted(times_ns.items(), key=lambda each: -each[1])[:10]
    return {
        "parts": {name: round(share, 4) for name, share in sorted(shares.items(), key=lambda each: -each[1])},
        "kernels": {name: round(time_ns / whole_ns, 4) for name, time_ns in longest},
    }


def figures(case: Case, spec: TrialSpec, outcomes: list[dict[str, Any]], first: list[float] | None) -> dict[str, Any]:
    """The row of a case that ran.

    Args:
        case: The case.
        spec: What ran.
        outcomes: Of every rank.
        first: The first losses it should repeat, where that is known.
    """
    slowest = [max(times_s) for times_s in zip(*(outcome["times_s"] for outcome in outcomes), strict=True)]
    median_s = statistics.median(slowest)
    workload = spec.workload
    flop = workload_flop_per_token(spec.model, workload) * workload.tokens_per_step
    peak = device(spec.cluster.device).peak_flop_per_s(spec.plan.dtype)
    losses = outcomes[0]["losses"]
    deviation = None
    if first is not None:
        deviation = max(abs(got / want - 1) for got, want in zip(losses[:COMPARED_STEPS], first, strict=True))
    return {
        "case": case.name,
        "engine": case.engine,
        "work": " ".join(filter(None, (case.model, case.mode, str(case.batch), case.routing))),
        "status": "ran",
        "plan": spec.label,
        "step_ms": round(median_s * 1e3, 2),
        "step_ms_min": round(min(slowest) * 1e3, 2),
        "step_ms_max": round(max(slowest) * 1e3, 2),
        "num_steps": len(slowest),
        "tokens_per_s": round(workload.tokens_per_step / median_s),
        "mfu": None if peak is None else round(flop / median_s / peak / spec.cluster.world_size, 4),
        "memory_gib": round(max(outcome["memory_peak_bytes"] for outcome in outcomes) / 2**30, 2),
        "spec_to_first_step_s": round(max(outcome["spec_to_first_step_s"] for outcome in outcomes), 2),
        "loss": losses[-1],
        "losses": losses,
        "grad_norms": outcomes[0]["grad_norms"],
        "loss_deviation": deviation,
        "ranks_agree": all(outcome["losses"] == losses for outcome in outcomes),
        "expert_imbalance_frac": expert_imbalance_frac([each["expert_tokens"] for each in outcomes], spec.plan.ep),
        "expert_tokens": tokens_of_experts(outcomes, spec),
    }


def tokens_of_experts(outcomes: list[dict[str, Any]], spec: TrialSpec) -> list[list[int]]:
    """Counts the tokens of every expert by layer in the measured steps, each once.

    Where routing is forced they are the same in every case of a model.
    """
    by_layer = [
        [sum(counts) for counts in zip(*layer, strict=True)]
        for layer in zip(*(outcome["expert_tokens"] for outcome in outcomes), strict=True)
    ]
    assigned = spec.model.num_experts_per_token * spec.workload.tokens_per_step * len(outcomes[0]["times_s"])
    # Tensor parallel ranks may each route all tokens.
    return [[count * assigned // sum(counts) for count in counts] for counts in by_layer]


def run_cases(
    chosen: list[Case], where: Where, folder: Path, arguments: argparse.Namespace, say: Callable[[dict[str, Any]], None]
) -> list[dict[str, Any]]:
    """Runs cases in order until all are done or time is up; one row a case, in that order."""
    start, rows = time.monotonic(), []
    sets: dict[str, Ranks] = {}
    first_losses: dict[str, list[float]] = {}
    warmup, measured = (1, 2) if where.quick else (arguments.warmup, arguments.steps)
    steps = (warmup, measured, arguments.profile)
    num_sets = 0
    try:
        for case in chosen:
            spec = where.spec(case)
            spec = replace(spec, plan=effective(spec)[0])
            left_s = arguments.time_limit - (time.monotonic() - start)
            violation = next(violations(spec), None)
            if violation is not None:
                row = {"case": case.name, "status": "refused", "why": f"{violation.rule}: {violation.reason}"}
            elif left_s < (5 if where.quick else 30):
                row = {"case": case.name, "status": "no time"}
            else:
                begun = time.monotonic()
                try:
                    if case.engine not in sets:
                        num_sets += 1
                        sets[case.engine] = Ranks(case.engine, where, folder / f"{num_sets}-{case.engine}")
                    outcomes = sets[case.engine].run(spec, steps, min(arguments.case_timeout, left_s))
                    row = figures(case, spec, outcomes, first_losses.get(case.reference or ""))
                    if arguments.profile:
                        row["profile"] = where_it_goes(spec, [outcome["kernels"] for outcome in outcomes])
                    if case.name == case.reference:
                        first_losses[case.name] = row["losses"][:COMPARED_STEPS]
                except (RuntimeError, BrokenPipeError) as error:
                    row = {"case": case.name, "status": "failed", "plan": spec.label, "why": str(error)}
                    broken = sets.pop(case.engine, None)
                    if broken is not None:
                        row["log"] = broken.said()
                        broken.stop()
                row["wall_s"] = round(time.monotonic() - begun, 1)
            rows.append(row)
            say(row)
    finally:
        for each in sets.values():
            each.stop()
    return rows


def text_of(row: dict[str, Any]) -> str:
    """One line of the table."""
    if row["status"] != "ran":
        return f"{row['case']:<38} {row['status']:>8}  {row.get('why', '')[:160]}"
    mfu = "" if row["mfu"] is None else f"{row['mfu']:.1%}"
    deviation = "" if row["loss_deviation"] is None else f"{row['loss_deviation']:.1e}"
    return (
        f"{row['case']:<38} {row['step_ms']:8.1f} {row['step_ms_min']:8.1f} {row['step_ms_max']:8.1f} {mfu:>7} "
        f"{row['memory_gib']:8.1f} {row['loss']:9.5f} {deviation:>9} {row['wall_s']:6.1f}"
    )


def ratios(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Step time of other engines over the torch engine's, where both ran the same work by the same plan."""
    ran = [row for row in rows if row["status"] == "ran"]
    torchs = {(row["work"], row["plan"]): row for row in ran if row["engine"] == "torch"}
    found = []
    for row in ran:
        own = torchs.get((row["work"], row["plan"]))
        if row["engine"] != "torch" and own is not None:
            ratio = round(row["step_ms"] / own["step_ms"], 3)
            found.append({"case": row["case"], "torch_case": own["case"], "step_time_over_torch": ratio})
    return found


HEADING = (
    f"{'case':<38} {'step ms':>8} {'min':>8} {'max':>8} {'MFU':>7} {'GiB':>8} {'loss':>9} {'off by':>9} {'wall s':>6}"
)


def main() -> int:
    """Runs what was asked for; the exit code is 1 where a case failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="name the cases and what they run, and end")
    parser.add_argument("--only", action="append", metavar="PATTERN", help="cases whose name matches; may be repeated")
    parser.add_argument("--ranks", type=int, choices=sorted(TIERS), default=4, help="GPUs (4)")
    parser.add_argument("--quick", action="store_true", help="tiny models over gloo on this machine's processors")
    parser.add_argument("--warmup", type=int, default=4, help="steps before those that count (4)")
    parser.add_argument("--steps", type=int, default=8, help="steps measured (8)")
    parser.add_argument("--profile", type=int, default=0, metavar="STEPS", help="say where that many more steps went")
    parser.add_argument("--time-limit", type=float, default=1700, metavar="S", help="stop beginning cases then (1700)")
    parser.add_argument("--case-timeout", type=float, default=180, metavar="S", help="give a case up then (180)")
    parser.add_argument("--json", action="store_true", help="one object at the end instead of the table")
    parser.add_argument("--out", type=Path, help="also write the object here, after every case")
    arguments = parser.parse_args()
    header(
        "Every engine runs every axis it has, and as fast as torch where the work is the same.",
        "no case fails; steps over torch's are printed",
    )
    where = Where(ranks=arguments.ranks, quick=arguments.quick)
    patterns = arguments.only or ["*"]
    named = cases(where.ranks)
    chosen = [case for case in named if any(fnmatch.fnmatchcase(case.name, pattern) for pattern in patterns)]
    if not chosen:
        print(f"no case matches {' or '.join(patterns)}; --list names all {len(named)}", file=sys.stderr)
        return 2
    if arguments.list:
        for case in chosen:
            print(f"{case.name:<38} {case.mode:<9} {where.spec(case).label}")
        print(f"{len(chosen)} cases")
        return 0
    done: list[dict[str, Any]] = []

    def say(row: dict[str, Any]) -> None:
        done.append(row)
        print(text_of(row), file=sys.stderr if arguments.json else sys.stdout, flush=True)
        if arguments.out is not None:
            arguments.out.write_text(json.dumps(result(where, done), indent=1))

    print(HEADING, file=sys.stderr if arguments.json else sys.stdout, flush=True)
    with tempfile.TemporaryDirectory() as name:
        rows = run_cases(chosen, where, Path(name), arguments, say)
    for each in ratios(rows):
        text = f"{each['case']:<38} {each['step_time_over_torch']:8.3f} times the step of {each['torch_case']}"
        print(text, file=sys.stderr if arguments.json else sys.stdout)
    if arguments.json:
        print(json.dumps(result(where, rows)))
    return 1 if any(row["status"] == "failed" for row in rows) else 0


def result(where: Where, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns a run as plain data, with the versions it ran on."""
    names = ("torch", "megatron-core", "deepspeed")
    return {
        "ranks": where.ranks,
        "device": where.kind,
        "python": sys.version.split()[0],
        **(dict.fromkeys(names, "") | versions(names)),
        "cases": rows,
        "ratios": ratios(rows),
    }


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        worker(int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]), sys.argv[5])
    else:
        sys.exit(main())
