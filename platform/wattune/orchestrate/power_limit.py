"""Hard limits while a trial runs: what every node draws at the moment, and whether it is too much.

Real sensors are read through the sampler's files. Simulated ones are computed after a trial from its spans; for a trial
with a limit its ranks say every second what they did last, and the same function computes what they drew.
"""

from collections.abc import Callable, Mapping
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from wattune.analysis.summary import summarize
from wattune.simulation.sensors import simulate
from wattune.trial import TrialSpec

NODE_POWER: Final = "node_device_power_w"
"""The limit on the power of a node's devices: their highest mean over 1 s."""

WATCHED_TAG: Final = "limit_looks"
"""Tag of a result: how often the power of all nodes was known when it was looked at, of how many looks since it was for
the first time; of all looks where it never was."""


def node_power_peak_w(
    tables: Mapping[str, pa.Table], node: str, manifest: Mapping[str, Any], window: tuple[int, int]
) -> float | None:
    """Highest 1 s mean of a node's device power in a window.

    Args:
        tables: The node's tables by tier.
        node: Its name in them.
        manifest: What its sampler knows.
        window: Start and end on the wall clock in nanoseconds.

    Returns:
        Watts; None where the devices' power is not read, or the window is shorter than 1 s.
    """
    found = summarize(None, None, tables, {node: manifest}, window=window).metrics
    return found.get("node_device_power_peak_1s_w")


def simulated_power_w(spec: TrialSpec, spans: Mapping[int, pa.Table], *, seed: int) -> dict[str, float]:
    """Highest 1 s mean of every node's simulated device power while its ranks did what their spans say.

    Temperatures play no part in the model's power, so that a part of a trial gives the power the whole will.

    Args:
        spec: What runs.
        spans: What each rank did in the last seconds, by rank.
        seed: The trial's.

    Returns:
        Watts by node; nothing before every rank has shown a second of its steps.
    """
    if len(spans) < spec.cluster.world_size:
        return {}
    found = {}
    for node, (tables, manifest) in simulate(spec, pa.concat_tables(spans.values()), seed=seed).items():
        own = [table for table in spans.values() if table["node"][0].as_py() == node]
        # Before and after that some devices would count as idle of which nothing is known yet.
        start_ns = max(pc.min(table["start_wall_ns"]).as_py() for table in own)
        end_ns = min(pc.max(table["end_wall_ns"]).as_py() for table in own)
        power_w = node_power_peak_w(tables, node, manifest, (start_ns, end_ns)) if start_ns < end_ns else None
        if power_w is not None:
            found[node] = power_w
    return found


class PowerLimit:
    """The watch over one trial's hard limit: called again and again while it runs."""

    def __init__(self, limit_w: float | None, num_nodes: int, node_power_w: Callable[[], Mapping[str, float]]) -> None:
        """Has not looked yet.

        Args:
            limit_w: Most that the devices of a node may draw over 1 s; None is without bound.
            num_nodes: How many nodes the trial has.
            node_power_w: Looks at every node whose power is known.
        """
        self._limit_w, self._num_nodes, self._node_power_w = limit_w, num_nodes, node_power_w
        self._num_looks = self._num_seeing = self._num_before = 0

    def __call__(self) -> str | None:
        """Looks; says what is wrong where the limit is broken."""
        if self._limit_w is None:
            return None
        power_w = self._node_power_w()
        self._num_looks += 1
        if len(power_w) == self._num_nodes:
            self._num_seeing += 1
        elif not self._num_seeing:  # the workers are not there yet, or have not finished a second of steps
            self._num_before += 1
        for node, now_w in power_w.items():
            if now_w > self._limit_w:
                return (
                    f"stopped while running: power of node {node} was {now_w:.6g} W over 1 s, the hard limit is "
                    f"{self._limit_w:.6g} W"
                )
        return None

    @property
    def tags(self) -> dict[str, str]:
        """What the result says of the watch; nothing where there was no limit."""
        if self._limit_w is None:
            return {}
        num_looks = self._num_looks - (self._num_before if self._num_seeing else 0)
        return {WATCHED_TAG: f"{self._num_seeing} of {num_looks}"}
