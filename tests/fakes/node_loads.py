"""Loads of a node whose steps are phases of a known power."""

from collections.abc import Sequence

import numpy as np

from wattune.analysis.signals.energy_grid import GRID_S
from wattune.projection.cluster_power import NodeLoad


def load_of_phases(phases: Sequence[tuple[float, float]]) -> NodeLoad:
    """Makes 20 s of a node whose step is phases of (seconds, watts), one after another."""
    ends_s, ends_j = np.cumsum([(0.0, 0.0), *((seconds, seconds * watts) for seconds, watts in phases)], axis=0).T
    num_steps = max(round(20.0 / ends_s[-1]), 1)
    edges_s = np.linspace(0.0, num_steps * ends_s[-1], round(num_steps * ends_s[-1] / GRID_S) + 1)
    whole, rest_s = np.divmod(edges_s, ends_s[-1])
    energy_j = whole * ends_j[-1] + np.interp(rest_s, ends_s, ends_j)
    return NodeLoad(parts_w=(np.diff(energy_j) / np.diff(edges_s))[None], step_s=float(ends_s[-1]))
