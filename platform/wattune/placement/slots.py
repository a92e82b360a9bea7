"""The map of a machine's slots: how slow each device is, what its slot's air and cooler do, and what cannot be told.

Times: log t = work + device + noise, by least squares over all runs. Two devices can be compared where both did the
same work, or where a chain of such devices joins them: hence a reference trial is rotated over the slots.
Temperatures: T_k = inlet_k + R_k P_k + sum_j h_kj P_j in the steady state (`wattune.cost.temperature`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from wattune.arrays import Floats
from wattune.errors import PlanError
from wattune.intervals import t_cumulative, t_quantile

NUM_DRAWS: Final = 2000
DRIFTS: Final = 1e-4
"""Chance of a slope of time from which it is drift: a map has dozens of slopes. Our choice."""

TOLD_APART: Final = 30.0
"""Largest condition number of scaled powers whose effects are told apart: they correlate by 0.998. Our choice."""

DeviceInSlot = tuple[str, int, str]
"""Node, slot, and the chip's identity, empty where nobody told it."""


@dataclass(frozen=True, slots=True)
class SlotReading:
    """One device in one run."""

    run: str
    device: DeviceInSlot
    work: tuple[str, int]
    """Id of the plan without its rank order, and the stage: equal for equal work."""
    at_s: float
    time_s: float
    """Median over the steps of forward and backward of one micro-batch, without waiting."""
    alone: bool = True
    """False where ranks wait for each other inside passes, so that all take the time of the slowest."""
    temp_c: float | None = None
    power_w: float | None = None


@dataclass(frozen=True, slots=True)
class SlotMap:
    """Slowness and cooling of each device in its slot. The first draw is the fit; others agree with the runs too.

    Draws are seconds of a micro-batch of each work, (draws, works), and the time of devices over it, (draws, devices).
    """

    works: Sequence[tuple[str, int]]
    devices: Sequence[DeviceInSlot]
    work_s: Floats
    slowness: Floats
    degrees: int
    """Degrees of freedom of the scatter; 0 where nothing was measured twice, and draws say nothing."""
    rows: Sequence[Mapping[str, Any]]
    """Each device: its `group`, inside which devices compare, `slower_frac` than the mean of those, and where told
    `inlet_c` and `resistance_k_per_w`, with half their intervals, and `coupling_k_per_w` by slot."""
    notes: Sequence[str]
    """Drifts, and all that the runs cannot tell."""


def fit_map(readings: Sequence[SlotReading], seed: int = 0) -> SlotMap:
    """Fits the map of the slots; draws are of Student's t, as the scatter is measured. Without readings `PlanError`."""
    from scipy.sparse import coo_array  # takes 0.2 s; other commands show no map
    from scipy.sparse.csgraph import connected_components

    if not readings:
        raise PlanError("no run has the times of its devices; run a study on them")
    readings = sorted(readings, key=lambda one: one.at_s)
    works, devices = sorted({one.work for one in readings}), sorted({one.device for one in readings})
    size = len(works)
    columns = np.zeros((len(readings), size + len(devices)))
    for row, one in enumerate(readings):
        columns[row, [works.index(one.work), size + devices.index(one.device)]] = 1.0
    log_s, alone = np.log([one.time_s for one in readings]), np.array([one.alone for one in readings])
    notes, kept = [], np.arange(len(readings))
    if alone.any() and not alone.all():  # of ranks that wait for each other only the slowest has a time of its own
        slowness = columns[:, size:] @ _solved(columns[alone], log_s[alone])[0][size:]
        slowest: dict[Any, int] = {}
        for row, one in enumerate(readings):
            key = row if one.alone else (one.run, one.work)
            slowest[key] = max(slowest.get(key, row), row, key=lambda each: slowness[each])
        kept = np.array(sorted(slowest.values()))
    elif not alone.any():
        notes.append("ranks wait for each other inside passes: slots of one such group are not told apart")
    columns, log_s = columns[kept], log_s[kept]
    fitted, inverse = _solved(columns, log_s)
    rest, degrees = log_s - columns @ fitted, len(kept) - int(np.linalg.matrix_rank(columns))
    if not degrees:
        notes.append("nothing was measured twice, so the scatter is not known; run it again (measure.repeats)")
    names = [f"{node}/{slot}" for node, slot, _ in devices]
    group = connected_components(coo_array(columns.T @ columns), directed=False)[1][size:]
    if len(set(group)) > 1:
        groups = [", ".join(np.array(names)[group == each]) for each in sorted(set(group))]
        notes.append(
            f"slots {'; '.join(groups)} did different work: a slow device and a large stage look alike; run the plan "
            "with another rank_order too, or one with dp over all slots"
        )
    at_s = np.array([readings[row].at_s for row in kept])
    for name, mine in [*zip(names, columns.T[size:] > 0, strict=True), ("every slot", columns[:, size:].any(axis=1))]:
        notes += _drift(name, at_s[mine] - at_s[mine].mean(), rest[mine])
    generator = np.random.default_rng(seed)
    scatter = np.sqrt(rest @ rest / generator.chisquare(max(degrees, 1), NUM_DRAWS))[:, None]
    apart = scatter * (generator.standard_normal((NUM_DRAWS, len(kept))) @ columns @ inverse)
    draws, rows = np.exp(np.concatenate([fitted[None], fitted + apart])), []
    for index, (node, slot, chip) in enumerate(devices):
        peers = np.setdiff1d(np.flatnonzero(group == group[index]), index)
        own: dict[str, Any] = {"node": node, "slot": slot, "chip": chip, "group": int(group[index])}
        if len(peers):
            slower = draws[:, size + index] / draws[:, size + peers].mean(axis=1) - 1.0
            half = float(np.ptp(np.quantile(slower, [0.025, 0.975]))) / 2 if degrees else float("inf")
            own |= {"slower_frac": float(slower[0]), "slower_half_frac": half}
        rows.append(own | _heat(readings, devices[index]))
    lacking = "coupling_k_per_w" if len(devices) > 1 else "inlet_c"
    untold = ", ".join(name for name, own in zip(names, rows, strict=True) if lacking not in own)
    few = f"inlet, resistance or coupling of {untold} cannot be told: too few runs of different powers"
    notes += [*([few] if untold else []), _chips(devices, fitted[size:])]
    return SlotMap(works, devices, draws[:, :size], draws[:, size:], degrees, rows, notes)


def _solved(columns: Floats, log_s: Floats) -> tuple[Floats, Any]:
    """Least squares, the shortest solution, and the inverse of the normal matrix."""
    inverse: Any = np.linalg.pinv(columns.T @ columns, hermitian=True, rcond=1e-10)
    return inverse @ columns.T @ log_s, inverse


def _drift(name: str, since_s: Floats, rest: Floats) -> list[str]:
    square = float(since_s @ since_s)
    if len(since_s) < 6 or not square:
        return []
    slope = float(since_s @ rest) / square
    error = np.linalg.norm(rest - slope * since_s) / np.sqrt((len(since_s) - 2) * square)
    change, verb = abs(slope) * np.ptp(since_s), "slower" if slope > 0 else "faster"
    drifts = 2 * (1 - t_cumulative(abs(slope) / max(float(error), 1e-30), len(rest) - 2)) < DRIFTS
    return [f"drift: {name} became {change:.1%} {verb} in {np.ptp(since_s) / 3600:.1f} h"] if drifts else []


def _chips(devices: Sequence[DeviceInSlot], log_slowness: Floats) -> str:
    """Says what is the chip's and what is the slot's, where chips were moved so that all are joined."""
    pairs = [(f"slot {node}/{slot}", f"chip {chip}") for node, slot, chip in devices]
    slots, chips = (list(dict.fromkeys(each)) for each in zip(*pairs, strict=True))
    columns = np.array([[float(part in pair) for part in (*slots, *chips)] for pair in pairs])
    if "chip " in chips or np.linalg.matrix_rank(columns) < columns.shape[1] - 1:
        return "chip and slot are told together: exchange chips between slots to tell them apart"
    parts = np.split(np.linalg.pinv(columns) @ log_slowness, [len(slots)])
    told = zip((*slots, *chips), np.concatenate([one - one.mean() for one in parts]), strict=True)
    return "apart: " + ", ".join(f"{name} {each:+.1%}" for name, each in told)


def _heat(readings: Sequence[SlotReading], device: DeviceInSlot) -> dict[str, Any]:
    """Fits inlet, resistance and coupling of a slot, or the first two, as far as its runs tell them apart."""
    runs: dict[str, dict[DeviceInSlot, SlotReading]] = {}
    for one in readings:
        if one.device[0] == device[0] and one.power_w is not None:
            runs.setdefault(one.run, {})[one.device] = one
    here = [run for run in runs.values() if device in run and run[device].temp_c is not None]
    others = sorted(set.intersection(*map(set, here)) - {device}) if here else []
    for used in ([device, *others], [device]):
        powers = np.array([[run[each].power_w for each in used] for run in here], float).reshape(-1, len(used))
        spread = powers.std(axis=0) if len(here) > len(used) + 2 else np.zeros(1)
        if (spread < 1.0).any() or np.linalg.cond((powers - powers.mean(axis=0)) / spread) > TOLD_APART:
            continue
        temp_c, columns = np.array([run[device].temp_c for run in here], float), np.insert(powers, 0, 1.0, axis=1)
        columns /= (scale := np.linalg.norm(columns, axis=0))  # else an inlet is lost where powers are nearly alike
        theta, inverse = _solved(columns, temp_c)
        left, degrees = temp_c - columns @ theta, len(here) - len(theta)
        half, theta = t_quantile(degrees) * np.sqrt(np.diag(inverse) * (left @ left) / degrees) / scale, theta / scale
        keys = ("inlet_c", "resistance_k_per_w", "inlet_half_k", "resistance_half_k_per_w")
        told_apart = zip(used[1:], theta[2:], half[2:], strict=True)
        coupling = {str(each[1]): float(one) for each, one, width in told_apart if abs(one) > width}
        told = dict(zip(keys, [*theta[:2].tolist(), *half[:2].tolist()], strict=True))
        return told | ({"coupling_k_per_w": coupling} if coupling else {})
    return {}
