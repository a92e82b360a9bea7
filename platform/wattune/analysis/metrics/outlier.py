"""Devices unlike their peers: figures with a slow, starved or broken device describe that device, not the plan."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from wattune.analysis.metrics.energy import Powers
from wattune.analysis.metrics.phases import traces_by_device
from wattune.analysis.metrics.step_breakdown import Division
from wattune.analysis.signals.align import Aligned
from wattune.plans.parallel import coordinates, expert_place
from wattune.schema import DeviceKey
from wattune.trial import TrialSpec

VARIES_FRAC: Final = 0.22
"""Largest difference between sound devices of one kind under one load.

Five clusters, 18,800 hours: performance varies by 8 % on average, 22 % at most between applications and clusters, with
outliers up to 1.5 times slower than the median (Sinha et al., SC 2022, arXiv 2208.11035).
"""

BROKEN_FRAC: Final = 0.5
"""Deviation of the slowest device in the same study; a larger one is not the variation of sound devices. A node whose
power had failed made its devices more than four times slower (arXiv 2509.10371)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlier:
    """Difference of one device from its peers in one figure."""

    node: str
    device: str
    what: str
    """`compute_time_s`, `sm_clock_mhz` or `power_w`."""
    value: float
    peers_median: float
    num_peers: int
    deviation_frac: float
    """The larger of value and median over the smaller, minus 1."""

    def __str__(self) -> str:
        number = "peer" if self.num_peers == 1 else f"{self.num_peers} peers"
        return (
            f"{self.node}/{self.device}: {self.what} {self.value:.4g}, median of its {number} {self.peers_median:.4g}"
        )


def peer_groups(aligned: Aligned, spec: TrialSpec | None) -> list[list[int]]:
    """Returns columns of the ranks with equal work.

    They have the same pipeline stage, the same tensor parallel slice, the same part of a sequence, and the same experts
    and slice of them. So they differ in the data they see alone. What a plan makes uneven, such as stages, slices of an
    unequal vocabulary or busy experts, is imbalance and no fault of a device.

    There are none without both spans and a specification, and none on CPUs.
    """
    if aligned.steps is None or spec is None or len(aligned.steps.rank) != spec.cluster.world_size:
        return []
    if spec.cluster.rank_device.vendor == "cpu":
        return []  # processes of one host share its CPUs with everything else that runs: they vary without bounds
    plan, world_size = spec.plan, spec.cluster.world_size
    groups: dict[tuple[int, ...], list[int]] = {}
    for column, rank in enumerate(aligned.steps.rank.tolist()):
        place = coordinates(rank, plan, world_size)
        experts = expert_place(rank, plan, world_size) if spec.model.is_moe else ()
        groups.setdefault((place.pp, place.tp, place.cp, *experts), []).append(column)
    return [group for group in groups.values() if len(group) > 1]


def outliers(
    aligned: Aligned, powers: Powers, spec: TrialSpec | None, division: Division | None
) -> tuple[Outlier, ...]:
    """Compares every device with its peers, the largest deviation first.

    Compared are the median compute time of a step (if spans separate compute from waiting), the mean SM clock, and the
    mean power. Temperatures are not compared: by design of the chassis a device behind its neighbours is up to 27 %
    hotter (arXiv 2509.10371), and a study wants to see the cost of that. If it costs clock, the clock shows it.
    """
    groups = peer_groups(aligned, spec)
    if not groups or aligned.steps is None:
        return ()
    devices = aligned.steps.device
    measured: dict[str, Mapping[DeviceKey, float]] = {
        "sm_clock_mhz": _mean_clocks_mhz(aligned),
        "power_w": {
            device: trace.mean_w / trace.share for device, (trace, _) in traces_by_device(aligned, powers).items()
        },
    }
    if division is not None:
        medians_s = np.median(division.compute_s, axis=0).tolist()
        measured["compute_time_s"] = dict(zip(devices, medians_s, strict=True))
    found = [
        outlier
        for what, values in measured.items()
        for group in groups
        for outlier in _compared(what, [devices[column] for column in group], values)
    ]
    return tuple(sorted(found, key=lambda one: -one.deviation_frac))


def _compared(what: str, devices: Sequence[DeviceKey], values: Mapping[DeviceKey, float]) -> list[Outlier]:
    if any(device not in values or values[device] <= 0 for device in devices):
        return []
    found = []
    ordered = np.sort([values[device] for device in devices])
    middle = np.array([len(devices) - 2, len(devices) - 1]) // 2
    for node, name in devices:
        value = values[node, name]
        # The middle of the others: a list of them for each device would be one of all pairs.
        median = float(ordered[middle + (middle >= np.searchsorted(ordered, value))].mean())
        found.append(
            Outlier(
                node=node,
                device=name,
                what=what,
                value=value,
                peers_median=median,
                num_peers=len(devices) - 1,
                deviation_frac=max(value, median) / min(value, median) - 1.0,
            )
        )
    return found


def _mean_clocks_mhz(aligned: Aligned) -> dict[DeviceKey, float]:
    found = {}
    for where, readings in aligned.readings("fast"):
        if (clock := readings.within("sm_clock_mhz", aligned.duration_s)) is not None:
            found[where] = clock.mean()
    return found
