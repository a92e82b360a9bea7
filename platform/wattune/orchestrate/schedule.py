"""The order of trials, the nodes a trial gets, how long it will take, and whether the budget allows it. No Ray here."""

import math
import statistics
import time
from bisect import insort
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from wattune.catalog.hardware import ClusterSpec
from wattune.search.strategy import draw
from wattune.trial import TrialSpec

if TYPE_CHECKING:
    from wattune.orchestrate.cluster import Cluster, Node

BLOCK: Final = 10
"""Most trials in a row for the same workers, where several kinds of workers take turns on a node: changing them costs
seconds, and what is never mixed cannot be told from drift."""

COOLDOWN_LOOK_S: Final = 2.0
"""Between two looks at temperatures while a trial waits for its devices to cool."""

_S_PER_HOUR: Final = 3600.0


def workers_of(spec: TrialSpec) -> Hashable:
    """Equal for trials that the same group of workers can run one after another."""
    return spec.cluster, spec.engine


def run_order(specs: Sequence[TrialSpec], *, seed: int, order: str) -> list[TrialSpec]:
    """In which order trials run.

    Args:
        specs: Trials as the strategy lists them.
        seed: Draws the order; it is the same on every machine and for every number of trials that are done already.
        order: `listed` leaves the list as it is. `shuffled` draws it by a hash of seed and trial id, in blocks of at
            most `BLOCK` trials for the same workers.
    """
    if order == "listed":
        return list(specs)
    drawn = sorted((draw(seed, spec.trial_id), index) for index, spec in enumerate(specs))
    groups: dict[Hashable, list[tuple[bytes, int]]] = defaultdict(list)
    for place in drawn:
        groups[workers_of(specs[place[1]])].append(place)
    blocks = [group[first : first + BLOCK] for group in groups.values() for first in range(0, len(group), BLOCK)]
    return [specs[index] for block in sorted(blocks) for _, index in block]


class Slots:
    """Which nodes are free. Trials that share a power or thermal domain never overlap, so domains are what is taken."""

    def __init__(self, cluster: "Cluster") -> None:
        """Everything is free."""
        self._cluster = cluster
        self._taken: dict[str, tuple[Node, ...]] = {}
        self._sets: dict[tuple[str, int, int], list[tuple[Node, ...]]] = defaultdict(list)

    def update(self, nodes: Sequence["Node"]) -> bool:
        """Takes note of the nodes that are alive now; says whether that changed anything."""
        if {node.node_id for node in nodes} == {node.node_id for node in self._cluster.nodes}:
            return False
        self._cluster = replace(self._cluster, nodes=tuple(nodes))
        for sets in self._sets.values():
            sets[:] = [one for one in sets if all(node in self._cluster.nodes for node in one)]
        return True

    @property
    def nodes(self) -> tuple["Node", ...]:
        """The nodes that are alive."""
        return self._cluster.nodes

    def take(self, spec: ClusterSpec) -> tuple["Node", ...] | None:
        """Nodes for a trial, theirs until `release`; None where too few are free.

        Sets that were used before come first: their workers may still be warm, and figures of one set compare.
        """
        nodes = self._choose(spec, set(self._taken))
        if nodes is None:
            return None
        used = self._sets[_kind(spec)]
        if nodes in used:
            used.remove(nodes)
        used.insert(0, nodes)
        for node in nodes:
            self._taken[node.domain] = nodes
        return nodes

    def release(self, nodes: tuple["Node", ...]) -> None:
        """Frees what `take` gave."""
        for node in nodes:
            self._taken.pop(node.domain, None)

    def is_free(self, spec: ClusterSpec) -> bool:
        """Whether `take` would give nodes now."""
        return self._choose(spec, set(self._taken)) is not None

    def exists(self, spec: ClusterSpec) -> bool:
        """Whether `take` would give nodes if nothing ran."""
        return self._choose(spec, set()) is not None

    def lanes(self, spec: ClusterSpec) -> list[tuple["Node", ...]]:
        """The node sets on which trials of a kind can run side by side if nothing else runs."""
        taken: set[str] = set()
        found = []
        while (nodes := self._choose(spec, taken)) is not None:
            taken |= {node.domain for node in nodes}
            found.append(nodes)
        return found

    def missing(self, spec: ClusterSpec) -> str:
        """What a trial wants, and what there is."""
        return self._cluster.missing(spec)

    def _choose(self, spec: ClusterSpec, taken: set[str]) -> tuple["Node", ...] | None:
        free = [node for node in self._cluster.fitting(spec) if node.domain not in taken]
        if len(free) < spec.num_nodes:
            return None
        ids = {node.node_id for node in free}
        for used in self._sets[_kind(spec)]:
            if all(node.node_id in ids for node in used):
                return used
        domains: dict[str, list[Node]] = defaultdict(list)
        for node in free:
            domains[node.domain].append(node)
        # As few domains as possible, and of those that do, the smallest: what is left serves others.
        enough = [nodes for nodes in domains.values() if len(nodes) >= spec.num_nodes]
        if enough:
            return tuple(min(enough, key=len)[: spec.num_nodes])
        largest_first = sorted(domains.values(), key=len, reverse=True)
        chosen = [node for nodes in largest_first for node in nodes][: spec.num_nodes]
        return tuple(sorted(chosen, key=lambda node: node.name))


def _kind(spec: ClusterSpec) -> tuple[str, int, int]:
    """What of a cluster decides which nodes fit."""
    return spec.device, spec.num_nodes, spec.devices_per_node


def wait_until_cool(
    read_c: Callable[[], Mapping[str, float]],
    *,
    below_c: float,
    max_s: float,
    clock_s: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> dict[str, str]:
    """Waits until no device is warmer than a temperature.

    Args:
        read_c: Temperatures by device as they are now; empty where no sensor tells.
        below_c: The temperature.
        max_s: Longest to wait.
        clock_s: The clock it waits by.
        sleep: How it waits.

    Returns:
        Tags for the trial's result: how long was waited, how warm the warmest device was then, and what of it did not
        work (`too warm`, `no temperature`).
    """
    begun_s = clock_s()
    while True:
        temperatures_c = read_c()
        waited_s = clock_s() - begun_s
        if not temperatures_c:
            return {"cooldown": "no temperature", "cooldown_s": f"{waited_s:.1f}"}
        warmest_c = max(temperatures_c.values())
        tags = {"cooldown_s": f"{waited_s:.1f}", "start_temp_max_c": f"{warmest_c:.1f}"}
        if warmest_c <= below_c:
            return tags
        if waited_s >= max_s:
            return {"cooldown": "too warm", **tags}
        sleep(min(COOLDOWN_LOOK_S, max_s - waited_s))


class Budget:
    """What one call may spend: hours on the wall clock, and trials started, repeats and anchors counted."""

    def __init__(
        self,
        *,
        max_hours: float | None = None,
        max_trials: int | None = None,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begins to count now; None is without bound."""
        self._end_s = math.inf if max_hours is None else clock_s() + max_hours * _S_PER_HOUR
        self._trials = math.inf if max_trials is None else max_trials
        self._clock_s = clock_s

    @property
    def num_left(self) -> float:
        """Trials that may still start; infinite without a bound."""
        return self._trials

    @property
    def left_s(self) -> float:
        """Seconds that are left; infinite without a bound."""
        return max(0.0, self._end_s - self._clock_s())

    def allows(self, expected_s: float) -> bool:
        """Whether a trial that is expected to take so long may start."""
        return self._trials > 0 and self._clock_s() + expected_s <= self._end_s

    def spend(self) -> None:
        """Counts one trial."""
        self._trials -= 1


class Pace:
    """How long trials took so far, and so how long the next ones will."""

    def __init__(self) -> None:
        """Knows nothing."""
        self._took_s: dict[Hashable, list[float]] = defaultdict(list)

    def add(self, spec: TrialSpec, took_s: float) -> None:
        """A trial of that kind took so long."""
        insort(self._took_s[workers_of(spec)], took_s)

    @property
    def typical_s(self) -> float:
        """The median of all; 0 where none was seen."""
        seen = [value for one in self._took_s.values() for value in one]
        return statistics.median(seen) if seen else 0.0

    def expected_s(self, spec: TrialSpec, least_s: float) -> float:
        """The median of trials of that kind, else of all, else the least the settings allow; never less than that."""
        seen = self._took_s.get(workers_of(spec))
        return max(least_s, statistics.median(seen) if seen else self.typical_s)
