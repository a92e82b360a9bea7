"""Breakdown of a step's time and energy into parts that add up exactly, so that trials compare part by part."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from wattune.analysis.metrics.phases import BETWEEN, COMPUTING
from wattune.analysis.metrics.step_breakdown import UNDIVIDED_WAIT, Division
from wattune.analysis.metrics.throttle import Throttle
from wattune.analysis.signals.align import Aligned
from wattune.arrays import Floats, Ints
from wattune.schema import DeviceKey

COMPUTE: Final = "compute"
THROTTLE: Final = "throttle"
UNDIVIDED: Final = "undivided"
OTHER: Final = "other"

UNEXPLAINED_FRAC: Final = 0.05
"""Share of a step in `other` above which the parts explain too little to rely on (the bound of `other_frac`)."""


StepParts = dict[str, tuple[float, float | None]]
"""Parts of a mean step by name: seconds, mean over ranks, and joules of all devices, None without usable power."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Breakdown:
    """A mean step in parts."""

    parts: StepParts
    step_s: float
    """The window over the number of steps, that is tokens of a step over `tokens_per_s`; the parts add up to it."""
    step_energy_j: float | None
    """`energy_per_step_j`; the parts add up to it."""

    @property
    def indicative(self) -> bool:
        """True if too much of the step is unexplained to rely on the other parts."""
        vague_s = sum(self.parts.get(name, (0.0, None))[0] for name in (OTHER, UNDIVIDED, UNDIVIDED_WAIT))
        return vague_s > UNEXPLAINED_FRAC * self.step_s

    def to_json(self) -> dict[str, Any]:
        """Plain data, ready for `json.dumps`."""
        parts = [{"name": name, "time_s": time_s, "energy_j": of_j} for name, (time_s, of_j) in self.parts.items()]
        return asdict(self) | {"parts": parts, "indicative": self.indicative}


def breakdown(
    aligned: Aligned,
    division: Division | None,
    phases: pa.Table,
    throttles: Mapping[DeviceKey, Throttle],
    *,
    profiled: Mapping[str, float] | None = None,
) -> Breakdown | None:
    """Divides the mean step of a trial into parts.

    - `compute`, `exposed_comm`, `bubble`, `straggler`: as in `wattune.analysis.metrics.step_breakdown.divide`, mean
      over ranks.
    - `wait`: instead of the last three where waiting cannot be divided.
    - `throttle`: time that lost clock added to compute: compute times the mean of lost clock while the device computes
      (`Throttle.computing_loss_frac`). It is an upper bound: compute that follows the clock loses this much, work that
      is bound by memory loses less.
    - `undivided`: time in steps whose spans cannot be divided.
    - `other`: time of a step outside all phases, and of the window outside all steps.

    Energy of a rank's compute is the integral over its forward, backward and optimizer, divided between `compute` and
    `throttle` by time; that over its waits by the time of their parts.

    None without measured steps. A device without throttling has no `throttle`. `profiled` has the share of rank-time in
    steps by part, from a profiled pass: any names, used instead of `division`. The rest to 1 is `other`, and energy is
    divided by time.
    """
    steps = aligned.steps
    if steps is None:
        return None
    known = [throttles[device].computing_loss_frac if device in throttles else None for device in steps.device]
    losses = np.array([0.0 if loss is None else loss for loss in known])
    if profiled is not None:
        parts = _by_share(aligned, phases, profiled, float(losses.mean()))
    elif division is not None:
        parts = _by_spans(aligned, division, phases, losses)
    else:
        parts = _by_share(aligned, phases, {UNDIVIDED: 1.0}, 0.0)
    step_s = aligned.duration_s / len(steps.number)
    energy_j = _energy_j(phases)
    step_j = None if energy_j is None else energy_j / len(steps.number)
    rest_s = step_s - sum(time_s for time_s, _ in parts.values())
    rest_j = None if step_j is None else step_j - sum(of_j or 0.0 for _, of_j in parts.values())
    return Breakdown(parts={**parts, OTHER: (rest_s, rest_j)}, step_s=step_s, step_energy_j=step_j)


def _by_spans(aligned: Aligned, division: Division, phases: pa.Table, losses: Floats) -> StepParts:
    """Returns all parts except `other`, from spans."""
    assert aligned.steps is not None
    ranks, count = aligned.steps.rank, len(aligned.steps.number)
    compute_s = division.compute_s.sum(axis=0)
    lost_s = compute_s * np.clip(losses, 0.0, 1.0)
    waits_s = {name: each_s.sum(axis=0) for name, each_s in division.waits_s.items()}
    all_waits_s = np.sum(list(waits_s.values()), axis=0)
    busy_j = _energy_by_rank_j(phases, ranks, COMPUTING)
    wait_j = _energy_by_rank_j(phases, ranks, ("wait",))

    def part(time_s: Floats, of_s: Floats, of_j: Floats | None) -> tuple[float, float | None]:
        share = np.divide(time_s, of_s, out=np.zeros_like(time_s), where=of_s > 0)
        energy_j = None if of_j is None else float((share * of_j).sum()) / count
        return float(time_s.mean()) / count, energy_j

    found = {COMPUTE: part(compute_s - lost_s, compute_s, busy_j)}
    if np.any(losses > 0):
        found[THROTTLE] = part(lost_s, compute_s, busy_j)
    return found | {name: part(each_s, all_waits_s, wait_j) for name, each_s in waits_s.items()}


def _by_share(aligned: Aligned, phases: pa.Table, shares: Mapping[str, float], loss_frac: float) -> StepParts:
    """Returns all parts except `other`, from shares of the time in steps."""
    assert aligned.steps is not None
    if COMPUTE in shares and loss_frac > 0:
        lost = shares[COMPUTE] * min(loss_frac, 1.0)
        shares = {COMPUTE: shares[COMPUTE] - lost, THROTTLE: lost, **{k: v for k, v in shares.items() if k != COMPUTE}}
    in_steps_s = float(aligned.steps.duration_s().mean())
    in_steps = phases.filter(pc.not_equal(phases["phase"], BETWEEN))
    energy_j = _energy_j(in_steps)
    step_j = None if energy_j is None else energy_j / len(aligned.steps.number)
    return {
        name: (share * in_steps_s, None if step_j is None else share * step_j)
        for name, share in shares.items()
        if name != OTHER
    }


def _energy_j(phases: pa.Table) -> float | None:
    """Sums the energy of some rows; None where one has none."""
    if phases["energy_j"].null_count or not phases.num_rows:
        return None
    return float(pc.sum(phases["energy_j"]).as_py())


def _energy_by_rank_j(phases: pa.Table, ranks: Ints, names: tuple[str, ...]) -> Floats | None:
    if phases["energy_j"].null_count:
        return None
    chosen = phases.filter(pc.is_in(phases["phase"], pa.array(names)))
    column = np.searchsorted(ranks, chosen["rank"].to_numpy())
    result: Floats = np.zeros(len(ranks))
    np.add.at(result, column, chosen["energy_j"].to_numpy())
    return result
