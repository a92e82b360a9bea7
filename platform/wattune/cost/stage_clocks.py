"""Clocks by stage of a pipeline: the least energy of a step of given length, and the clock of every pass for it.

A pass off the critical path may take longer at no cost, and at a lower clock it draws less. For every pass energy is
convex in time, so that the least energy of a step is a linear program over the schedule's graph: each pass begins when
its stage is free and its input is there (Perseus: Chung et al. 2024, arXiv 2312.06902, section 4, which solves the
same trade-off by cuts). Nothing of it was run: all figures are predictions.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from wattune.arrays import Floats, Ints
from wattune.cost.batch import Batch
from wattune.cost.clock import compute_w, slowed_frac
from wattune.cost.estimate import Coefficients
from wattune.cost.step_time.predict import StepModel, StepPipeline
from wattune.errors import PlanError
from wattune.plans.schedule import Pass, needs, passes, replay
from wattune.plans.settings import CLOCK_STEP_MHZ

LEAST_CLOCK_FRAC: Final = 0.4
"""Lowest clock that is considered: the law of energy was seen down to half of the highest."""

BREAKPOINTS: Final = 12
"""Most points of the convex curve of a pass."""

SLOWER: Final = (0.0, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2)
"""Steps of a frontier, by how much longer than now the pipeline may take."""

Curve = tuple[Floats, Floats]  # rising seconds of a pass, and the joules of its device at each


@dataclass(frozen=True, slots=True, kw_only=True)
class StageClocks:
    """A step of a pipeline at a clock of its own for every pass, as predicted."""

    step_time_s: float
    energy_per_step_j: float
    """Of all devices."""
    clocks_mhz: tuple[tuple[tuple[str, int], ...], ...]
    """Of every stage, in the order that it runs them: `forward` or `backward`, and the clock to lock for it. Empty of
    the step as it is now."""

    @property
    def zeus(self) -> str:
        """The file that Zeus' `PointSolution` and `PointSolution3D` read: a Python list, a line for each stage.

        `zeus/optimizer/pipeline_frequency/server/scheduler.py` of ml-energy/zeus, commit 132cffb (Apache-2.0).
        """
        lines = "".join(f"{list(stage)},\n" for stage in self.clocks_mhz)
        figures = f"{self.step_time_s:.6g} s, {self.energy_per_step_j:.6g} J of all devices"
        return f"[\n{lines}]\n# a step predicted by wattune, never run: {figures}\n"


def graph(orders: Sequence[Sequence[Pass]]) -> tuple[list[tuple[int, Pass]], Ints]:
    """Lists passes with their stages, and pairs of places: a pass and one that it waits for, -1 for none."""
    last = max(one.chunk for order in orders for one in order) * len(orders) + len(orders) - 1
    nodes = [(stage, one) for stage, order in enumerate(orders) for one in order]
    keys = [(one.backward, one.micro_batch, one.chunk * len(orders) + stage) for stage, one in nodes]
    place = {key: n for n, key in enumerate(keys)}
    pairs = []
    for n, (stage, one) in enumerate(nodes):
        input_of = needs(one, keys[n][2], last)
        before = [place[input_of]] if input_of is not None else []
        before += [n - 1] if n and nodes[n - 1][0] == stage else []
        pairs += [(n, m) for m in before or [-1]]
    return nodes, np.array(pairs)


def least_energy(pairs: Ints, curves: Sequence[Curve], wait_w: float, makespan_s: float) -> Floats:
    """Finds the seconds of every pass with which a pipeline of this length takes the least energy.

    `pairs` are those of `graph`, `curves` the convex curve of every pass. A device that waits draws `wait_w`. Raises
    `PlanError` where the pipeline cannot be as short.
    """
    from scipy.optimize import linprog  # other estimates do not wait for it
    from scipy.sparse import eye_array, hstack

    count, (after, before) = len(curves), pairs.T
    # A variable for the end of every pass, and one for each segment of its curve: they fill in order of their slopes.
    lengths = [np.diff(time_s) for time_s, _ in curves]
    owner = np.repeat(np.arange(count), [len(one) for one in lengths])
    length = np.concatenate(lengths)
    slope = np.concatenate([np.diff(energy_j) for _, energy_j in curves]) / length
    shortest_s = np.array([time_s[0] for time_s, _ in curves])
    one = eye_array(count, format="csr")
    ends = one[before].multiply((before >= 0)[:, None]) - one[after]
    found = linprog(
        np.r_[np.zeros(count), slope - wait_w],
        A_ub=hstack([ends, one[owner].T.tocsr()[after]]).tocsr(),  # end of the one before + own seconds <= own end
        b_ub=-shortest_s[after],
        bounds=np.c_[np.zeros(count + len(length)), np.r_[np.full(count, makespan_s), length]],
        method="highs",
    )
    if found.x is None:
        raise PlanError(f"no clocks make the pipeline as short as {makespan_s:.4g} s; allow a longer step")
    return np.asarray(shortest_s + np.bincount(owner, weights=found.x[count:], minlength=count))


def convex(time_s: Floats, energy_j: Floats) -> Curve:
    """Returns the falling part of the lower convex hull of points, in at most `BREAKPOINTS`; times must not fall."""
    _, kept = np.unique(time_s[: energy_j.argmin() + 1], return_index=True)
    while (bent := np.diff(np.diff(energy_j[kept]) / np.diff(time_s[kept])) <= 0).any():
        kept = np.delete(kept, bent.argmax() + 1)  # it lies on or above the line between its neighbours
    kept = kept[np.unique(np.linspace(0, len(kept) - 1, BREAKPOINTS).round().astype(int))]
    return time_s[kept], energy_j[kept]


def clock_frontier(
    batch: Batch,
    coefficients: Coefficients,
    energy_per_step_j: float,
    listener: Callable[[str, float], None] = lambda *_: None,
) -> list[StageClocks]:
    """Finds the least energy of a step that is as long as now, and longer, by clocks of every pass; the first is now.

    `batch` holds one candidate. `energy_per_step_j` is that of all devices in a step as it is now; what other clocks
    change is added to it. `listener` hears what is done, and how much of all that may come. Raises `PlanError` where it
    has one stage, or no clocks of its device are known.
    """
    highest_mhz, num_stages = batch.device.sm_clock_max_mhz, int(batch.pp[0])
    if num_stages == 1:
        raise PlanError("a plan with pp=1 has one stage, which waits for no other; name a trial with pp of 2 or more")
    if batch.device.vendor != "nvidia" or highest_mhz is None:
        raise PlanError(f"{batch.device.name} has no clocks that Zeus locks; name a trial on a device of NVIDIA")
    power = coefficients.power
    model = StepModel(batch, coefficients.step_time, power)
    pipeline = StepPipeline(model, np.zeros(1, np.int64))
    mhz = np.arange(highest_mhz, LEAST_CLOCK_FRAC * highest_mhz, -CLOCK_STEP_MHZ)
    # No stage reaches more than the limit leaves. [clocks, chunks, stages], then [clocks, kinds of passes].
    clocks = np.minimum(mhz[:, None, None] / highest_mhz, pipeline.clock[0])
    kinds = [_of_direction(pipeline, name, clocks) for name in ("forward", "backward")]
    time_s, energy_j = (np.stack(each, axis=1).reshape(len(mhz), -1) for each in zip(*kinds, strict=True))
    shape: dict[str, Any] = {"num_chunks": int(batch.vpp[0]), "num_micro_batches": int(pipeline.m[0])}
    orders = [passes(n, num_stages=num_stages, **shape, trains=model.trains) for n in range(num_stages)]
    nodes, pairs = graph(orders)
    kind = np.array([(one.backward * shape["num_chunks"] + one.chunk) * num_stages + n for n, one in nodes])
    curves = [convex(time_s[:, one], energy_j[:, one]) for one in range(time_s.shape[1])]
    wait_w = power.idle_w + power.wait_w

    def at(place: Ints) -> tuple[float, float]:
        """Returns seconds and joules of a device of each stage, together, with passes at these clocks."""
        durations: list[dict[Pass, Floats]] = [{} for _ in orders]
        for (stage, one), seconds in zip(nodes, time_s[place, kind], strict=True):
            durations[stage][one] = seconds
        end_s = float(replay(orders, durations))
        return end_s, float((energy_j - wait_w * time_s)[place, kind].sum() + wait_w * num_stages * end_s)

    now_s, now_j = at(np.zeros(len(nodes), np.int64))
    outside_s = float(np.sum(list(pipeline.parts().values()))) - now_s
    found = [StageClocks(step_time_s=outside_s + now_s, energy_per_step_j=energy_per_step_j, clocks_mhz=())]
    for number, slower in enumerate(SLOWER):
        listener(f"clocks of {len(nodes):,} passes in a step {slower:.1%} longer", number / len(SLOWER))
        wanted_s = least_energy(pairs, [curves[one] for one in kind], wait_w, now_s * (1 + slower + 1e-9))
        # The lowest listed clock that is fast enough.
        place = (time_s[:, kind] <= wanted_s * (1 + 1e-9)).sum(axis=0) - 1
        end_s, joules = at(place)
        energy = energy_per_step_j + batch.cluster.world_size // num_stages * (joules - now_j)
        if energy >= found[-1].energy_per_step_j:
            break
        listed: list[tuple[tuple[str, int], ...]] = [()] * num_stages
        for (stage, one), clock in zip(nodes, mhz[place], strict=True):
            listed[stage] += (("backward" if one.backward else "forward", int(clock)),)
        found.append(StageClocks(step_time_s=end_s + outside_s, energy_per_step_j=energy, clocks_mhz=tuple(listed)))
    return found


def _of_direction(pipeline: StepPipeline, direction: str, clocks: Floats) -> tuple[Floats, Floats]:
    """Predicts seconds and joules of passes at each clock, [clocks, chunks, stages]."""
    c, work = pipeline.model.power, getattr(pipeline, direction)
    compute_s, traffic_s, excess_s, _ = pipeline.pass_s(direction, clocks)
    matrix_s = work.matrix_s / clocks
    above_idle_w = compute_w(
        c,
        matrix_s=matrix_s,
        memory_s=compute_s - matrix_s,
        matrix_frac=work.flop / np.maximum(work.matrix_s, 1e-12) / pipeline.model.machine.flop_per_s,
        overlapped_s=getattr(pipeline, f"over_{direction}_s"),
    )
    time_s = compute_s + traffic_s + excess_s
    energy_j = c.idle_w * time_s + compute_s * above_idle_w * slowed_frac(
        c.exponent, clocks, pipeline.own_clock[:, None, :]
    )
    return time_s, energy_j + traffic_s * (c.active_w + c.link_w) + excess_s * c.wait_w
