"""Runs of a table in the columns of published ones, such as step times of one plan on 512 and on 2,048 devices."""

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import hypot, isfinite, nan
from pathlib import Path
from typing import Any, Final

from wattune.arrays import Floats
from wattune.catalog.hardware import DEVICES, ClusterSpec
from wattune.catalog.models import MODELS
from wattune.catalog.networks import NETWORKS
from wattune.catalog.published_names import PRECISIONS, SYSTEMS, named
from wattune.cost.defaults import coefficients_of_software
from wattune.cost.estimate import Estimates, Find, estimate
from wattune.errors import PlanError
from wattune.field_types import LARGEST_WORLD
from wattune.plans.axes import Plan
from wattune.plans.effective import effective
from wattune.plans.rules import engine_combination, violations
from wattune.projection.scaling import NOISE_LOG_STD, SizedStep, behind
from wattune.trial import TrialSpec
from wattune.workload import Routing, Workload

NEEDED: Final = ("model", "gpu", "gpus")
PLAN: Final = ("tp", "pp", "cp", "ep", "vpp", "mbs")
_WHOLE: Final = (*PLAN, "gpus", "microbatches", "global_batch", "seq_len", "num_layers", "steps_read")
_NUMBERS: Final = (*_WHOLE, "step_time_s", "tokens_per_s_per_gpu", "step_time_min_s", "step_time_max_s")

OTHER_LOG_STD, FIXED_SHARE, SHOWN_FRAC = 0.03, 0.01, 0.5
"""Deviation of a run of another plan or submitter from a curve; share of the shortest step that happens once, where no
estimate says more; and share of what replicas exchange that a step shows, chosen on the families of
`benchmarks/results/projection.md`. That is held at the largest measured size, since Megatron's buckets grow with the
replicas (`distributed_data_parallel.py`)."""

FURTHEST_OFF: Final = 30
"""Times that a step may be off its estimate: published ones are within a factor of 3, another unit is a thousand."""

_of_software = partial(coefficients_of_software, software="nemo")


@dataclass(frozen=True, slots=True)
class TableRun:
    """One row of a table."""

    texts: Mapping[str, str]
    numbers: Mapping[str, float]
    """Known figures of its columns, degrees of the plan always; and what follows: `replicas`, `global_batch` (0 if
    unknown), `micro_batches` of a replica (1), `step_time_s` (NaN) and `log_std`, the deviation of its logarithm."""
    name: str
    """Model, device, precision and plan in short."""
    family: tuple[object, ...]
    """Key of the runs that share a curve: model, device, precision, sequence and layers."""

    def resized(self, num_devices: int, global_batch: float | None) -> "TableRun":
        """Returns the plan on other devices: the batch grows with its replicas unless it is given.

        Raises `PlanError` where the plan does not divide the devices, or a replica has no micro-batch left.
        """
        numbers = {name: value for name, value in self.numbers.items() if name in (*PLAN, "seq_len", "num_layers")}
        grown = self.numbers["global_batch"] * num_devices / self.numbers["gpus"]
        found = _completed(self.texts, numbers | {"gpus": num_devices, "global_batch": global_batch or grown})
        if reason := _impossible(found.numbers):
            raise PlanError(f"--to: {self.name}: {reason}; name another size or batch")
        return found


def read_runs(path: Path) -> list[TableRun]:
    """Reads a table of runs; rows without a step time are left out.

    Raises `PlanError` where it cannot be read, lacks columns, or holds what is no size or time; all of it in one line.
    """
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file)
            rows, names = list(reader), reader.fieldnames or []
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise PlanError(f"{path}: no table of runs can be read: {error}; give a CSV file in UTF-8") from None
    if missing := [name for name in NEEDED if name not in names]:
        got = f'"{",".join(names)[:60]}"' if names else "an empty file"
        raise PlanError(f"{path}: got {got}, columns {', '.join(missing)} are missing; add them, separated by commas")
    problems = [f"column {name} is there twice; keep one" for name in dict.fromkeys(names) if names.count(name) > 1]
    runs = [_run(row, f"line {line}", problems) for line, row in enumerate(rows, 2)]
    timed = [one for one in runs if isfinite(one.numbers["step_time_s"])]
    if not timed:
        problems += ["no row has step_time_s, nor tokens_per_s_per_gpu with its batch; add what was measured"]
    if problems:
        raise PlanError(f"{path}: {'; '.join(problems[:5])}{'; and more' if len(problems) > 5 else ''}")
    return timed


def _run(row: Mapping[Any, Any], where: str, problems: list[str]) -> TableRun:
    texts = {name: value.strip() for name, value in row.items() if isinstance(name, str) and isinstance(value, str)}
    numbers, wrong = {"gpus": 1.0}, list[str]()
    for name in _NUMBERS:
        text = texts.get(name, "")
        if text.lower() in ("", "n/a", "none", "-"):
            continue
        try:
            numbers[name] = float(text)
        except ValueError:
            numbers[name] = nan
        if not 0 < numbers[name] < 1e12 or (name in _WHOLE and numbers[name] % 1):
            kind = "a whole number" if name in _WHOLE else "a number"
            wrong.append(f'{where}: {name}: got "{text[:40]}", allowed: {kind} above 0')
            numbers[name] = 1.0
    wrong += [f"{where}: {name} is blank; fill it in" for name in NEEDED if not texts.get(name)]
    problems += wrong
    found = _completed(texts, numbers)
    if not wrong and (reason := _impossible(found.numbers)):
        problems.append(f"{where}: {reason}")
    return found


def _completed(texts: Mapping[str, str], given: Mapping[str, float]) -> TableRun:
    n = {**dict.fromkeys(PLAN, 1.0), **given}
    replicas = n["gpus"] / (n["tp"] * n["pp"] * n["cp"])
    batch = n.get("global_batch") or n.get("microbatches", 0.0) * replicas * n["mbs"]
    speed = n.get("tokens_per_s_per_gpu", 0.0) * n["gpus"]
    step_s = n.get("step_time_s") or (batch * n.get("seq_len", 0.0) / speed if speed else 0.0) or nan
    count, low_s, high_s = (n.get(name, 0.0) for name in ("steps_read", "step_time_min_s", "step_time_max_s"))
    # Of n normal draws the range is expected to be n times the deviation of their mean, to 5 % from 3 to 10 (Tippett).
    ranged = (high_s - low_s) / count / step_s if count > 1 and low_s else 0.0
    n |= {"replicas": replicas, "global_batch": batch, "micro_batches": batch / (replicas * n["mbs"]) or 1.0}
    n |= {"step_time_s": step_s, "log_std": hypot(NOISE_LOG_STD, ranged)}
    words = [texts.get(name, "") for name in ("model", "gpu", "precision")]
    model, gpu, precision = map(str.lower, words)
    family = named(model, MODELS) or model, named(gpu, DEVICES) or gpu, precision, n.get("seq_len"), n.get("num_layers")
    return TableRun(texts, n, " ".join([*words, *(f"{name}{n[name]:g}" for name in PLAN if n[name] > 1)]), family)


def _impossible(n: Mapping[str, float]) -> str:
    """Says why no such run exists; empty where one may."""
    if n["gpus"] > LARGEST_WORLD:
        return f"got {n['gpus']:,.0f} devices, allowed: up to {LARGEST_WORLD:,}"
    if n["replicas"] < 1 or n["replicas"] % 1:
        return f"got {n['gpus']:,.0f} devices, allowed: multiples of tp x pp x cp = {n['tp'] * n['pp'] * n['cp']:,.0f}"
    if n["micro_batches"] < 1:
        least = n["replicas"] * n["mbs"]
        return f"got a batch of {n['global_batch']:,.10g}, allowed: {least:,.0f} or more, one micro-batch each"
    return ""


def sized_runs(runs: Sequence[TableRun]) -> tuple[list[SizedStep], Estimates | None]:
    """Estimates the parts of runs of one family, the last of which is the one that is asked for.

    Without estimates the pipeline's shape alone tells how work grows: the catalog cannot say the model or its plan.
    """
    specs = [found for one in runs if (found := _spec(one)) is not None]
    numbers, steps = [one.numbers for one in runs], []
    work: Any = [(n["micro_batches"] + (n["pp"] - 1) / n["vpp"]) * n["mbs"] / n["cp"] for n in numbers]
    known: Estimates | None = None
    fixed: Any = [FIXED_SHARE * min(work[:-1])] * len(runs)
    if len(specs) == len(runs):
        known, work, once_s = step_shares(specs, _of_software)
        for run, step_s in zip(runs, known.columns["step_time_s"].value.tolist(), strict=False):
            got_s = run.numbers["step_time_s"]
            if isfinite(got_s) and not step_s / FURTHEST_OFF < got_s < step_s * FURTHEST_OFF:
                allowed = f"within {FURTHEST_OFF} times the estimate of {step_s:,.3g}"
                raise PlanError(f"{run.name}: got a step of {got_s:,.6g} s, allowed: {allowed}; check units and batch")
        fixed = [SHOWN_FRAC * once_s[-2]] * len(runs)
    for place, (run, n) in enumerate(zip(runs, numbers, strict=True)):
        sites = {one.texts.get("submitter", "") for one in (run, runs[-1])} - {""}
        other = len(sites) > 1 or any(n[name] != numbers[-1][name] for name in PLAN)
        routed = any(word in run.texts.get("routing", "").lower() for word in ("learned", "unbalanced"))
        late = routed * behind(n["gpus"] / (n["pp"] * n["ep"]), n["micro_batches"])
        error = hypot(n["log_std"], OTHER_LOG_STD * other)
        steps.append(SizedStep(int(n["gpus"]), work[place], fixed[place], late, n["step_time_s"], error))
    return steps, known


def step_shares(specs: Sequence[TrialSpec], find: Find) -> tuple[Estimates, Floats, Floats]:
    """Estimates specifications, and at twice their batch: that tells what does not grow with it.

    Returns the estimates, seconds that grow with the batch, bubble included, and seconds once a step, [specifications].
    Raises `PlanError` where a device cannot be predicted.
    """
    works = [replace(one.workload, global_batch_size=2 * one.workload.global_batch_size) for one in specs]
    both = estimate([*specs, *(replace(one, workload=work) for one, work in zip(specs, works, strict=True))], find)
    step_s, twice_s = both.columns["step_time_s"].value.reshape(2, -1)
    once_s = (2 * step_s - twice_s - both.step_parts_s["bubble"][: len(specs)]).clip(1e-4 * step_s, 0.9 * step_s)
    return both, step_s - once_s, once_s


def _spec(run: TableRun) -> TrialSpec | None:
    """Returns a run as NeMo's performance recipes train it; None where the catalog or the rules cannot say it."""
    model, device = (named(run.texts[name], names) for name, names in (("model", MODELS), ("gpu", DEVICES)))
    n, dtype = run.numbers, PRECISIONS.get(run.texts.get("precision", "").lower())
    adapts = "lora" in run.texts["model"].lower()
    if not (model and device and dtype and n["global_batch"] and "seq_len" in n) or adapts:
        return None
    fabric, fabric_network = SYSTEMS.get(device, (8, "ndr"))
    per_node, printed = min(fabric, int(n["gpus"])), run.texts.get("recompute", "").lower()
    layers = int(n.get("num_layers", MODELS[model].num_layers))
    axes: dict[str, Any] = {name: int(n[name]) for name in PLAN[:-1]} | {"micro_batch_size": int(n["mbs"])}
    axes["recompute"] = next((one for one in ("full", "selective") if one in printed), "none")
    axes["layout"] = layout_of(layers, axes["pp"] * axes["vpp"])
    routing = Routing(by="balanced") if MODELS[model].is_moe else None
    spec = TrialSpec(
        model=replace(MODELS[model], num_layers=layers),
        cluster=ClusterSpec(
            device=device,
            num_nodes=int(n["gpus"]) // per_node,
            devices_per_node=per_node,
            transformer_engine=True,
            network=NETWORKS[fabric_network],
        ),
        engine="megatron",
        workload=Workload(seq_len=int(n["seq_len"]), global_batch_size=round(n["global_batch"]), routing=routing),
        plan=Plan(etp=axes["tp"], dtype=dtype, sharding="zero1", **axes),
    )
    spec = replace(spec, plan=effective(spec)[0])
    return spec if all(one.rule == engine_combination.__name__ for one in violations(spec)) else None


def layout_of(num_layers: int, num_virtual: int) -> tuple[int, ...]:
    """Divides layers over virtual stages, fewest on the ends, where embedding and head are; nothing if evenly."""
    small, more = divmod(num_layers, num_virtual)
    if more == 0 or small == 0:
        return ()
    inner = [small + (index < more) for index in range(num_virtual - 1)][: num_virtual - 2]
    return (small, *inner, num_layers - small - sum(inner))
