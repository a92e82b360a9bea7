"""A job over its days: failures, goodput, energy of useful tokens, and its cluster's power with stops and failures."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Final

import numpy as np

from wattune.catalog.hardware import ClusterSpec
from wattune.cost.power import power_coefficients
from wattune.intervals import Interval
from wattune.projection.cluster_power import CLUSTER_FIGURES, JITTER_S, Checkpoints, NodeLoad, cluster_power

DEVICE_HOURS: Final = {
    "RSC-1": 8 * 24 * 1000 / 6.50,
    "Llama 3": 16_384 * 54 * 24 / 419,
    "RSC-2": 8 * 24 * 1000 / 2.34,
}
"""Device-hours between failures, published: 6.50 and 2.34 in 1,000 days of nodes of eight A100 (arXiv 2410.21680), and
419 unexpected interruptions in 54 days of 16,384 H100 (arXiv 2407.21783). Small jobs fail more often, by software."""

OF_DAYS: Final = ("goodput_frac", "energy_per_useful_token_j", *CLUSTER_FIGURES)
"""Names of the figures of days."""

RESTART_S, CHECKPOINT_S = 600.0, 30.0
"""Assumed times from a failure to the first step again, and of a checkpoint."""


def down_frac(apart_s: float, restart_s: float) -> float:
    """Computes the share of time in which a job starts again, 1 - exp(-restart / apart); a start can fail too."""
    return -math.expm1(-restart_s / apart_s)


def goodput_frac(apart_s: float, work_s: float, checkpoint_s: float, restart_s: float) -> float:
    """Computes the useful share of time with a checkpoint after every `work_s` of work, failures `apart_s` apart.

    Daly's expected time with exponential failures, also during checkpoints and starts (equation 13 of
    doi 10.1016/j.future.2004.11.016). To first order in time over `apart_s` it is
    1 / (1 + restart / apart + checkpoint / work + work / (2 apart)).
    """
    part = (work_s + checkpoint_s) / apart_s
    # From e^700 on, near the largest number, no part is ever finished.
    return 0.0 if part > 700 else math.exp(-restart_s / apart_s) * work_s / (apart_s * math.expm1(part))


def best_work_s(apart_s: float, checkpoint_s: float) -> float:
    """Computes the work between checkpoints that loses least, by Daly's equation 37; its first term is Young's."""
    part = checkpoint_s / (2 * apart_s)
    if part >= 1.0:
        return apart_s
    return math.sqrt(2 * checkpoint_s * apart_s) * (1 + math.sqrt(part) / 3 + part / 9) - checkpoint_s


def operated(
    figures: Mapping[str, Interval],
    load: NodeLoad,
    cluster: ClusterSpec,
    *,
    apart_h: float | None,
    checkpoint_s: float = CHECKPOINT_S,
) -> dict[str, Interval]:
    """Computes figures of a job from those of its step and from what a node drew when it was measured.

    `apart_h` are hours between failures of the job, None for the published range (`DEVICE_HOURS`). Checkpoints are
    `best_work_s` apart, and nodes idle meanwhile. Ends of intervals are those of step, power, failures and jitter
    together. The node's power is that of the highest one. Empty where step, power or the device are not known.
    """
    step, node = figures.get("step_time_s"), figures.get("node_device_power_mean_w")
    idle, token = power_coefficients(cluster.sensed_device), figures.get("energy_per_token_j")
    if step is None or node is None or idle is None:
        return {}
    rest_w, own_w = idle.idle_w * cluster.devices_per_node, load.parts_w.mean(axis=1)
    own_w = own_w.max() if load.num_nodes > 1 else own_w.sum()
    apart = [3600 * (one / cluster.world_size if apart_h is None else apart_h) for one in sorted(DEVICE_HOURS.values())]
    ends = (step.high, node.low, "low"), (step.value, node.value, "value"), (step.low, node.high, "high")
    each: list[dict[str, float]] = []
    points = load.parts_w.shape[1]
    for (step_s, node_w, end), apart_s, jitter_s in zip(ends, apart, (0.02, JITTER_S, 0.0), strict=True):
        at = np.linspace(0.0, points - 1.0, round(points * step_s / load.step_s))
        parts_w = np.array([np.interp(at, np.arange(points), part) for part in load.parts_w]) * node_w / own_w
        work_s = best_work_s(apart_s, checkpoint_s)
        found = cluster_power(
            replace(load, parts_w=parts_w, step_s=step_s),
            cluster.num_nodes,
            checkpoints=Checkpoints(every_steps=max(work_s / step_s, 1.0), duration_s=checkpoint_s, node_w=rest_w),
            jitter_s=jitter_s,
            down_w=rest_w,
            down_frac=down_frac(apart_s, RESTART_S),
        )
        useful = max(goodput_frac(apart_s, work_s, checkpoint_s, RESTART_S), 1e-9)
        drawn_frac, found["goodput_frac"] = found["cluster_power_mean_w"] / (cluster.num_nodes * node_w), useful
        if token is not None:
            found["energy_per_useful_token_j"] = getattr(token, end) * drawn_frac / useful
        each.append(found)
    return {
        name: replace(step, value=value, low=min(one[name] for one in each), high=max(one[name] for one in each))
        for name, value in each[1].items()
        if all(name in one for one in each)
    }
