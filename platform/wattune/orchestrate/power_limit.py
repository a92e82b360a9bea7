"""Hard limits while a trial runs: the present power of every node, compared with the limit.

Real sensors are read through the sampler's files. Simulated sensors are computed from spans after a trial. In a trial
with a limit the ranks send their last spans every second, and the same function computes their power.
"""

from collections.abc import Callable, Mapping
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from wattune.run import NO_NUMBERS, Numbers
from wattune.trial import TrialSpec

NODE_POWER: Final = "node_device_power_w"
"""The limit on the power of a node's devices: their highest mean over 1 s."""

NODE_POWER_PEAK: Final = "node_device_power_peak_1s_w"
"""The metric that this limit bounds."""


def node_power_peak_w(
    tables: Mapping[str, pa.Table], node: str, manifest: Mapping[str, Any], window: tuple[int, int]
) -> float | None:
    """Highest 1 s mean of a node's device power in a window of the wall clock in nanoseconds, by its tiers' tables.

    None if the devices' power is not read, or the window is shorter than 1 s.
    """
    from wattune.analysis.run_data import RunData  # takes 0.3 s; each process of a rank or of sensors loads this module

    examined = RunData(tables=tables, manifests={node: manifest}, window=window).examined
    return examined.powers.by_node[0][NODE_POWER_PEAK] if examined and examined.powers.by_node else None


def simulated_power_w(spec: TrialSpec, spans: Mapping[int, pa.Table], *, seed: int) -> dict[str, float]:
    """Computes the highest 1 s mean of every node's simulated device power in watts during some spans of each rank.

    The model's power does not depend on temperatures, so a part of a trial gives the power that the whole will give.
    Empty until every rank has sent a second of its steps.
    """
    if len(spans) < spec.cluster.world_size:
        return {}
    from wattune.simulation.sensors import simulate

    found = {}
    for node, (tables, manifest) in simulate(spec, pa.concat_tables(spans.values()), seed=seed).items():
        own = [table for table in spans.values() if table["node"][0].as_py() == node]
        # Outside of it some devices would count as idle although their spans have not arrived yet.
        start_ns = max(pc.min(table["start_wall_ns"]).as_py() for table in own)
        end_ns = min(pc.max(table["end_wall_ns"]).as_py() for table in own)
        power_w = node_power_peak_w(tables, node, manifest, (start_ns, end_ns)) if start_ns < end_ns else None
        if power_w is not None:
            found[node] = power_w
    return found


class PowerLimit:
    """The watch over one trial's hard limit, called again and again while it runs."""

    def __init__(self, limit_w: float | None, num_nodes: int, node_power_w: Callable[[], Mapping[str, float]]) -> None:
        self._limit_w, self._num_nodes, self._node_power_w = limit_w, num_nodes, node_power_w
        self._num_looks = self._num_seeing = self._num_before = 0

    def __call__(self) -> str | None:
        """Looks once; returns the reason to stop the trial if it is above its limit."""
        if self._limit_w is None:
            return None
        power_w = self._node_power_w()
        self._num_looks += 1
        if len(power_w) == self._num_nodes:
            self._num_seeing += 1
        elif not self._num_seeing:  # the workers have not started yet, or not finished a second of steps
            self._num_before += 1
        for node, now_w in power_w.items():
            if now_w > self._limit_w:
                return (
                    f"stopped while running: power of node {node} was {now_w:.6g} W over 1 s, the hard limit is "
                    f"{self._limit_w:.6g} W"
                )
        return None

    @property
    def numbers(self) -> Numbers:
        """Numbers of the result about the watch; none without a limit."""
        if self._limit_w is None:
            return NO_NUMBERS
        num_looks = self._num_looks - (self._num_before if self._num_seeing else 0)
        return Numbers(limit_looks=num_looks, limit_looks_seeing=self._num_seeing)
