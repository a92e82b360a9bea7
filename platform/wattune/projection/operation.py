"""A projected job over its days: goodput, energy of useful tokens, and power of its cluster with stops and failures."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

import numpy as np

from wattune.catalog.hardware import ClusterSpec
from wattune.cost.power import power_coefficients
from wattune.intervals import Interval
from wattune.projection.cluster_power import JITTER_S, Checkpoints, NodeLoad, cluster_power
from wattune.projection.failures import DEVICE_HOURS, RESTART_S, best_work_s, down_frac, goodput_frac

CHECKPOINT_S: Final = 30.0
"""Assumed time of a checkpoint."""

_ENDS: Final = (("low", "high", 4 * JITTER_S), ("value", "value", JITTER_S), ("high", "low", 0.0))
"""Power, step and jitter of the lowest, the likely and the highest swing."""


def operated(
    figures: Mapping[str, Interval],
    load: NodeLoad,
    cluster: ClusterSpec,
    *,
    apart_h: float | None,
    every_steps: float | None,
    checkpoint_s: float = CHECKPOINT_S,
) -> dict[str, Interval]:
    """Computes figures of a job from those of its step and from what a node drew when it was measured.

    `apart_h` are hours between failures of the job, None for the published range (`DEVICE_HOURS`); without
    `every_steps` checkpoints are `best_work_s` apart. Nodes draw as at idle meanwhile. Ends of intervals are those of
    step, power, failures and jitter together. Empty where step, power or the device are not known.
    """
    step, node, token = (figures.get(one) for one in ("step_time_s", "node_device_power_mean_w", "energy_per_token_j"))
    idle = power_coefficients(cluster.sensed_device)
    if step is None or node is None or token is None or idle is None:
        return {}
    rest_w, each = idle.idle_w * cluster.devices_per_node, []
    own_w = load.parts_w.sum(axis=0).mean() / load.num_nodes
    for (power, time, jitter_s), hours in zip(_ENDS, sorted(DEVICE_HOURS.values()), strict=True):
        step_s, node_w = getattr(step, time), getattr(node, power)
        apart_s = 3600 * (hours / cluster.world_size if apart_h is None else apart_h)
        work_s = best_work_s(apart_s, checkpoint_s) if every_steps is None else every_steps * step_s
        at = np.linspace(0.0, load.parts_w.shape[1] - 1.0, round(load.parts_w.shape[1] * step_s / load.step_s))
        parts_w = [np.interp(at, np.arange(len(part)), part) * node_w / own_w for part in load.parts_w]
        saves = Checkpoints(every_steps=max(work_s / step_s, 1.0), duration_s=checkpoint_s, node_w=rest_w)
        found = cluster_power(
            replace(load, parts_w=np.array(parts_w), step_s=step_s),
            cluster.num_nodes,
            checkpoints=saves,
            jitter_s=jitter_s,
            down_w=rest_w,
            down_frac=down_frac(apart_s, RESTART_S),
        )
        useful = goodput_frac(apart_s, work_s, checkpoint_s, RESTART_S)
        found["goodput_frac"] = useful
        drawn_frac = found["cluster_power_mean_w"] / (cluster.num_nodes * node_w)
        found["energy_per_useful_token_j"] = getattr(token, power) * drawn_frac / max(useful, 1e-9)
        each.append(found)
    return {
        name: replace(step, value=value, low=min(one[name] for one in each), high=max(one[name] for one in each))
        for name, value in each[1].items()
        if all(name in one for one in each)
    }
