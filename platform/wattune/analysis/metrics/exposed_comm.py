"""Division of a profiled step's time by kernel names: compute, and communication that no compute hides.

Names come from traces of torch 2.11 and 2.13 (operators on CPUs; cuBLAS, CUTLASS, cuDNN, FlashAttention, NCCL and
Inductor kernels on H200). Names of AMD's libraries (Tensile, AOTriton, RCCL) come from their sources.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from wattune.arrays import Floats
from wattune.cost.step_time.pipeline import bubble_ratio
from wattune.plans.axes import Plan
from wattune.units import NS_PER_S

COMPUTE: Final = ("grouped_gemm", "gemm", "attention", "norm", "optimizer", "reduce", "elementwise", "copy", "other")
"""Kinds of compute. If several run at once, their time counts for the first in this order."""

GROUPS: Final = ("tp", "ep", "cp", "pp", "dp", "world")
"""Groups that communicate: a parallel axis, or all ranks. If several run at once, their time counts for the first."""

HOST: Final = "host"
"""CPU work between two operators of a step: autograd and Python. It is compute if the CPU is the device."""

_KINDS: Final = (
    # A collective of any vendor's library, and gloo's.
    ("communication", r"nccl|rccl|msccl|^gloo:|symm_mem|cross_device_(reduce|all)"),
    # Inductor names a kernel after all that was fused into it, including neighbours of attention and copies.
    ("grouped_gemm", r"^triton_tem_.*grouped_mm"),
    ("attention", r"^triton_tem_.*attention"),
    ("gemm", r"^triton_tem_"),
    ("norm", r"^triton_.*(rms_norm|layer_norm|rsqrt)"),
    ("reduce", r"^triton_(red|per)_"),
    ("elementwise", r"^triton_poi_"),
    ("grouped_gemm", r"grouped_?mm|grouped_?gemm|groupproblemshape|moe_gemm"),
    ("attention", r"flash_|_flash|fmha|sdpa|attn_fwd|attn_bwd|bwd_kernel_d[kq]|scaled_dot_product|flex_attention"),
    ("optimizer", r"multi_tensor_apply|adam|_foreach_|lpnorm|lp_norm|^aten::_?linalg_vector_norm"),
    # Tensile's names begin with Cijk; nvjet are cuBLAS's kernels for Hopper.
    ("gemm", r"gemm|gemv|nvjet|^cijk_|splitk|cublas|^aten::(add)?(b|m)?mm$|^aten::(addmm|matmul|linear)$"),
    ("norm", r"rms_?norm|layer_?norm|_norm_|rsqrt|grad_input_kernel|gammabeta"),
    ("copy", r"memcpy|memset|copy|catarray|chunk_cat|^aten::(cat|clone|contiguous|zero_|fill_|to|_to_copy|empty\w*)$"),
    (
        "reduce",
        r"reduce|softmax|nll_loss|cross_entropy|^aten::(sum|mean|max|argsort|sort|topk|cumsum)",
    ),
    ("elementwise", r"elementwise|^aten::|index|embedding|gather|scatter|silu|gelu"),
)
_PATTERNS: Final = tuple((kind, re.compile(pattern, re.IGNORECASE)) for kind, pattern in _KINDS)
_HOST_NAMES: Final = re.compile(r"Backward\d*$|Redistribute|TorchTensor|PythonSubclass|^torch::|RegisterPost|^fsdp::")

_ROLES: Final = (
    # The torch engine's meshes, Megatron-Core's groups, then callers of gloo's collectives.
    ("dp", r"mesh_(replicate|shard|dp|fsdp)|(EXPERT_)?DATA_PARALLEL|FSDP::"),
    ("ep", r"mesh_ep|EXPERT_MODEL_PARALLEL|alltoall|all_to_all"),
    ("tp", r"mesh_tp|TENSOR|_c10d_functional::|^MODEL_PARALLEL_GROUP$"),
    ("cp", r"mesh_cp|CONTEXT_PARALLEL"),
    ("pp", r"mesh_pp|PIPELINE|EMBEDDING|c10d::(send|recv)"),
)
_ROLE_PATTERNS: Final = tuple((role, re.compile(pattern)) for role, pattern in _ROLES)


Replayed = Mapping[int, tuple[float, float]]
"""From `wattune.analysis.metrics.step_breakdown.replayed_shares`."""


def kind_of(name: str) -> str:
    """Returns the kind of a kernel or operator: `communication`, one of `COMPUTE`, or `HOST`."""
    for kind, pattern in _PATTERNS:
        if pattern.search(name):
            return kind
    return HOST if _HOST_NAMES.search(name) else "other"


def role_of(name: str, collective: str, group: str) -> str:
    """Returns the group that a collective belongs to, one of `GROUPS`.

    A trace names collectives such as `allreduce` or `all_to_allv`, empty where unknown. `group` is the process group's
    description, or for gloo its caller.
    """
    for role, pattern in _ROLE_PATTERNS:
        if pattern.search(group):
            return role
    # Experts and pipeline stages use collectives of their own, so these show their group whatever its name is.
    if re.search(r"all_?to_?all", f"{name} {collective}", re.IGNORECASE):
        return "ep"
    if re.search(r"send|recv", f"{name} {collective}", re.IGNORECASE):
        return "pp"
    return "world"


def kernel_metrics(
    kernels: pa.Table, plan: Plan, *, num_micro_batches: int, replay: Replayed | None = None
) -> dict[str, float]:
    """Computes shares of rank-time in the profiled steps; the first five sum to 1.

    - `compute_frac`: some compute runs.
    - `exposed_comm_frac`: communication runs and no compute does, less the time spent waiting for others. Its parts by
      axis are `exposed_comm_{tp,pp,cp,dp,ep}_frac`; the rest is communication of all ranks together.
    - `bubble_frac`: exposed pipeline communication, up to the bubble of the rank's replay. Without a replay up to what
      an ideal schedule idles: `bubble_ratio` of the slowest rank's forward and backward compute.
    - `straggler_frac`: in collectives, the time beyond that of the rank that came last to the same collective. The
      kernel of that rank runs only for the transfer, the others also wait for it. Between pipeline stages, exposed time
      beyond the bubble, up to the rest of the rank's idle time in the replay. Without a replay up to the difference
      between the slowest rank's compute and this rank's. If the ranks of a group are unknown (gloo), waiting in its
      collectives stays in `exposed_comm_frac`.
    - `other_frac`: nothing runs. Above 0.05 the decomposition explains too little to rely on.

    There is nothing where no step was profiled.
    """
    shares = parts(kernels, plan, num_micro_batches=num_micro_batches, replay=replay)
    if not shares:
        return {}

    def summed(prefix: str) -> float:
        return float(sum(share for name, share in shares.items() if name.startswith(prefix)))

    metrics = {
        "compute_frac": summed("compute_"),
        "exposed_comm_frac": summed("comm_"),
        "bubble_frac": shares["bubble"],
        "straggler_frac": shares["straggler"],
        "other_frac": shares["other"],
    }
    for role in GROUPS[:-1]:
        if any(name.startswith(f"comm_{role}_") for name in shares):
            metrics[f"exposed_comm_{role}_frac"] = summed(f"comm_{role}_")
    return metrics


def parts(kernels: pa.Table, plan: Plan, *, num_micro_batches: int, replay: Replayed | None = None) -> dict[str, float]:
    """Divides the step into parts that sum to 1, finer than `kernel_metrics`.

    Shares of rank-time: `compute_<kind>` of `COMPUTE` and `compute_host`, `comm_<axis>_<fabric>` with the fabric
    `node`, `network` or `unknown`, then `bubble`, `straggler` and `other`. Empty parts are left out, except the last
    three. Empty if no step was profiled.
    """
    rows = _Rows(kernels)
    if not rows.spans:
        return {}
    exposed = [_exposed(rows, cell) for cell in rows.spans]
    waits = _waits(rows)
    busy = np.array([sum(each[name] for name in each if name.startswith("compute_")) for each in exposed])
    model = busy - np.array([each.get("compute_optimizer", 0.0) for each in exposed])
    steps = np.array([step for _, step in rows.spans])
    total: dict[str, float] = {"bubble": 0.0, "straggler": 0.0, "other": 0.0}
    whole_ns = float(sum(rows.spans.values()))
    for index, (cell, each) in enumerate(zip(rows.spans, exposed, strict=True)):
        same = steps == cell[1]
        if replay is None:
            ideal = float(bubble_ratio(plan.pp, plan.vpp, np.array(num_micro_batches)) * model[same].max())
            slower = float(busy[same].max() - busy[index])
        else:
            ideal, slower = (share * rows.spans[cell] for share in replay[cell[0]])
        for name, time_ns in each.items():
            left_ns = time_ns
            if name.startswith("comm_pp_"):
                bubble, late = min(left_ns, ideal), min(max(left_ns - ideal, 0.0), slower)
                ideal, slower = ideal - bubble, slower - late
                total["bubble"] += bubble
                total["straggler"] += late
                left_ns -= bubble + late
            elif name.startswith("comm_"):
                late = left_ns * waits.get((*cell, name), 0.0)
                total["straggler"] += late
                left_ns -= late
            total[name] = total.get(name, 0.0) + left_ns
    return {name: max(time_ns / whole_ns, 0.0) for name, time_ns in total.items()}


class _Rows:
    """The table as arrays, with a category for each row's name."""

    def __init__(self, kernels: pa.Table) -> None:
        columns = {name: kernels[name].combine_chunks() for name in kernels.column_names}
        texts = {name: _texts(columns[name]) for name in ("name", "collective", "group", "group_ranks", "fabric")}
        keys = list(zip(*texts.values(), strict=True))
        known = {key: _category(*key) for key in set(keys)}
        self.category = [known[key] for key in keys]
        self.instance = [(each[2], each[3], each[1]) for each in keys]
        self.cell = list(zip(columns["rank"].to_pylist(), columns["step"].to_pylist(), strict=True))
        self.start_ns: npt.NDArray[np.int64] = columns["start_ns"].to_numpy()
        self.end_ns: npt.NDArray[np.int64] = columns["end_ns"].to_numpy()
        self.spans = {
            self.cell[i]: int(self.end_ns[i]) for i, category in enumerate(self.category) if category == "step"
        }
        self.rows: dict[tuple[int, int], list[int]] = {cell: [] for cell in self.spans}
        for i, category in enumerate(self.category):
            if category != "step" and self.cell[i] in self.rows:
                self.rows[self.cell[i]].append(i)


def _texts(column: pa.Array) -> list[str]:
    return [text or "" for text in column.cast(pa.string()).to_pylist()]


def _category(name: str, collective: str, group: str, _ranks: str, fabric: str) -> str:
    if name == "step":
        return "step"
    kind = kind_of(name)
    if kind != "communication":
        return f"compute_{kind}"
    return f"comm_{role_of(name, collective, group)}_{fabric or 'unknown'}"


def _exposed(rows: _Rows, cell: tuple[int, int]) -> dict[str, float]:
    """Returns nanoseconds of one rank's step by category, each moment once; `other` is time in which nothing runs."""
    chosen = rows.rows[cell]
    whole_ns = float(rows.spans[cell])
    if not chosen:
        return {"other": whole_ns}
    start_ns, end_ns = rows.start_ns[chosen], rows.end_ns[chosen]
    names = sorted({rows.category[i] for i in chosen}, key=_order)
    code = np.array([names.index(rows.category[i]) for i in chosen])
    edges = np.unique(np.concatenate([start_ns, end_ns]))
    change = np.zeros((len(names), len(edges)), np.int64)
    np.add.at(change, (code, np.searchsorted(edges, start_ns)), 1)
    np.add.at(change, (code, np.searchsorted(edges, end_ns)), -1)
    active = np.cumsum(change, axis=1)[:, :-1] > 0
    first = np.where(active.any(axis=0), active.argmax(axis=0), len(names))
    times = np.bincount(first, np.diff(edges), minlength=len(names) + 1)[: len(names)]
    found = {name: float(time_ns) for name, time_ns in zip(names, times, strict=True) if time_ns > 0}
    return found | {"other": whole_ns - float(times.sum())}


def _order(category: str) -> tuple[int, int, str]:
    """Returns a sort key: compute before communication before the host, as earlier categories hide later ones."""
    head, kind = category.split("_", 1)
    if head == "comm":
        return 1, GROUPS.index(kind.split("_", 1)[0]), category
    return (2, 0, category) if kind == HOST else (0, COMPUTE.index(kind), category)


def _waits(rows: _Rows) -> dict[tuple[int, int, str], float]:
    """Returns by rank, step and category the share of collectives' time that the rank waited for a later rank.

    The same collective ends on all its ranks together, and the rank that comes last only transfers. The extra time of
    any other rank is waiting. No clocks are compared.
    """
    spent: dict[tuple[int, int, str], list[float]] = {}
    for step, members, durations in _shared(rows):
        late = durations - durations.min(axis=0)
        for row, (rank, chosen) in enumerate(members.items()):
            sums = spent.setdefault((rank, step, rows.category[chosen[0]]), [0.0, 0.0])
            sums[0] += float(late[row].sum())
            sums[1] += float(durations[row].sum())
    return {key: late / whole for key, (late, whole) in spent.items() if whole > 0}


def _shared(rows: _Rows) -> Iterator[tuple[int, dict[int, list[int]], Floats]]:
    """Yields the collectives of each step and group whose ranks are all there, with as many of them each.

    Rows by rank are in order of start; durations are nanoseconds of shape (ranks, collectives).
    """
    by_group: dict[tuple[int, tuple[str, str, str]], dict[int, list[int]]] = {}
    for (rank, step), chosen in rows.rows.items():
        for i in chosen:
            category, (_, ranks, _) = rows.category[i], rows.instance[i]
            if category.startswith("comm_") and not category.startswith("comm_pp_") and ranks:
                by_group.setdefault((step, rows.instance[i]), {}).setdefault(rank, []).append(i)
    for (step, (_, ranks, _)), found in by_group.items():
        expected = len(re.findall(r"\d+", ranks))
        if len(found) != expected or expected < 2 or len({len(chosen) for chosen in found.values()}) != 1:
            continue
        members = {rank: sorted(chosen, key=lambda i: int(rows.start_ns[i])) for rank, chosen in found.items()}
        yield step, members, np.array([rows.end_ns[each] - rows.start_ns[each] for each in members.values()], float)


class _Running:
    """Time in which any of some kernels run."""

    def __init__(self, rows: _Rows, chosen: Sequence[int]) -> None:
        order = np.array(sorted(chosen, key=lambda i: int(rows.start_ns[i])), int)
        starts, ended = rows.start_ns[order], np.maximum.accumulate(rows.end_ns[order])
        is_first = np.ones(len(order), bool)
        is_first[1:] = starts[1:] > ended[:-1]
        lengths = ended[np.append(is_first[1:], True)[: len(order)]] - starts[is_first]
        sums = np.cumsum(lengths)
        self._edges = np.column_stack([starts[is_first], starts[is_first] + lengths]).ravel()
        self._sums = np.column_stack([sums - lengths, sums]).ravel()
        self.total_ns = int(lengths.sum())

    def idle_ns(self, start_ns: Floats, end_ns: Floats) -> Floats:
        """Nanoseconds of intervals in which none of them runs."""
        if not len(self._edges):
            return end_ns - start_ns
        ran = np.interp(end_ns, self._edges, self._sums) - np.interp(start_ns, self._edges, self._sums)
        idle: Floats = np.maximum(end_ns - start_ns - ran, 0.0)
        return idle


def running_s(kernels: pa.Table) -> tuple[float, float, float] | None:
    """Returns times in which a device runs anything, all but collectives, and collectives that wait for another's host.

    They are means over ranks and profiled steps. The profiler slows the host down and not the kernels, so these are
    times of a step without it too. Steps of ranks without any kernel are left out: their trace is lost. None where
    nothing was profiled, or where the processor is the device.

    The kernel of a rank that comes early runs until the latest rank has come. Of that wait counts what the latest
    rank's device had nothing to run: its host had launched nothing. A wait for work that the latest rank still does is
    none of the host's, nor is one beside other kernels of the rank that waits. A collective ends on all ranks together,
    so that no clocks are compared.
    """
    if pc.any(pc.starts_with(pc.cast(kernels["name"], pa.string()), "aten::")).as_py():
        return None
    rows = _Rows(kernels)
    every = {cell: _Running(rows, chosen) for cell, chosen in rows.rows.items()}
    own = {
        cell: _Running(rows, [i for i in chosen if not rows.category[i].startswith("comm_")])
        for cell, chosen in rows.rows.items()
    }
    busy_ns, own_ns = (sum(one.total_ns for one in each.values()) for each in (every, own))
    if not busy_ns:
        return None
    waits_ns = 0.0
    for step, members, durations in _shared(rows):
        shortest, latest = durations.min(axis=0), durations.argmin(axis=0)
        ranks, order = list(members), np.array(list(members.values()))
        for row, rank in enumerate(ranks):
            start_ns = rows.start_ns[order[row]].astype(float)
            alone_ns = own[rank, step].idle_ns(start_ns, start_ns + durations[row] - shortest)
            for other in set(latest.tolist()) - {row}:
                of = latest == other
                came_ns = rows.start_ns[order[other]][of].astype(float)
                idle_ns = every[ranks[other], step].idle_ns(came_ns - (durations[row] - shortest)[of], came_ns)
                waits_ns += float(np.minimum(alone_ns[of], idle_ns).sum())
    profiled_ns = sum(map(bool, rows.rows.values())) * NS_PER_S
    return busy_ns / profiled_ns, own_ns / profiled_ns, waits_ns / profiled_ns
