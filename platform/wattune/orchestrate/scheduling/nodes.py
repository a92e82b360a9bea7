"""Free nodes, the choice of nodes for a trial, and backfill. No Ray here.

Trials start on idle nodes while an earlier one waits for more, and never starve it.

EASY backfilling (Lifka 1995, "The ANL/IBM SP scheduling system"; Mu'alem and Feitelson 2001, "Utilization,
predictability, workloads, and user runtime estimates in scheduling the IBM SP2 with backfilling"). The first trial that
cannot start gets a reservation: nodes, and the time at which they are expected to be free. A later trial starts beside
those nodes, or on them if it is expected to end by then.

Their rule trusts estimates, because a batch system ends a job at its limit. Expected times of trials are medians and
may be wrong both ways. So a reservation is made once and never moved: after its time nothing else starts on its nodes.

**Bound.** A trial that is first among those for its kind of device from time t on starts by max(t, promise) + T. T is
the longest time that a trial takes in fact. The promise is at most t + E, where E is the longest time that was expected
of a trial that runs at t. It holds for any estimate, and for any number of trials behind it. It begins anew when a node
of the reservation leaves, and when a trial that the cluster failed is tried again first (`MOST_TRIES` is the most).
"""

import math
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from wattune.catalog.hardware import ClusterSpec
from wattune.orchestrate.attempt import Attempt

if TYPE_CHECKING:
    from wattune.orchestrate.cluster import Cluster, Node


class Slots:
    """Free and taken nodes. Trials that share a power or thermal domain never overlap, so domains are taken."""

    def __init__(self, cluster: "Cluster", begun_ns: int = 0) -> None:
        self._cluster = cluster
        self._begun_ns = begun_ns or time.monotonic_ns()
        """Time since which nodes without a trial before had nothing to do."""
        self._freed_ns: dict[str, int] = {}
        """Time of the latest release of each domain."""
        self._taken: dict[str, float] = {}
        """Domains with a trial on them, and the expected end of each."""
        self._sets: dict[tuple[str, int, int], list[tuple[Node, ...]]] = defaultdict(list)
        self._others: Mapping[str, Mapping[str, float]] = {}
        """Processors and GPUs that other jobs hold, by the id of the node."""

    def update(self, nodes: Sequence["Node"], others: Mapping[str, Mapping[str, float]] | None = None) -> bool:
        """Notes the nodes that are alive now, and what other jobs hold of them; returns whether they changed.

        Time that a node was not there, or another job's, is none in which it had nothing to do.
        """
        now_ns, known = time.monotonic_ns(), {node.node_id for node in self._cluster.nodes}
        for node in nodes:
            if node.node_id not in known or node.node_id in self._others:
                self._freed_ns[node.domain] = now_ns
        self._others = others or {}
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

    @property
    def domains(self) -> frozenset[str]:
        """Power or thermal domains of the nodes that are alive."""
        return frozenset(node.domain for node in self._cluster.nodes)

    def take(
        self,
        spec: ClusterSpec,
        avoid: Set[str] = frozenset(),
        *,
        closed: Set[str] = frozenset(),
        until_s: float = math.inf,
    ) -> tuple["Node", ...] | None:
        """Takes nodes for a trial until `release`; None if too few are free.

        Sets that were used before come first: their workers may still be warm, and results of one set compare best.
        Nodes to `avoid` are taken only if there would not be enough others with nothing running; `closed` domains are
        not, although they are free. `until_s` is the expected end of the trial, on any clock.
        """
        nodes = self._choose(spec, self._taken.keys() | closed, avoid, beside=True)
        if nodes is None:
            return None
        used = self._sets[_kind(spec)]
        if nodes in used:
            used.remove(nodes)
        used.insert(0, nodes)
        for node in nodes:
            self._taken[node.domain] = until_s
        return nodes

    def release(self, nodes: tuple["Node", ...]) -> None:
        """Frees nodes that `take` returned."""
        for node in nodes:
            self._taken.pop(node.domain, None)
            self._freed_ns[node.domain] = time.monotonic_ns()

    def free_since_ns(self, nodes: tuple["Node", ...]) -> int:
        """Returns the time since which nodes had nothing to do before they were taken, on the monotonic clock."""
        return max(self._freed_ns.get(node.domain, self._begun_ns) for node in nodes)

    def is_free(self, spec: ClusterSpec, avoid: Set[str] = frozenset(), *, closed: Set[str] = frozenset()) -> bool:
        """Returns whether `take` would find nodes now."""
        return self._choose(spec, self._taken.keys() | closed, avoid, beside=True) is not None

    def kept_by_others(self, spec: ClusterSpec) -> tuple[str, ...]:
        """Names the nodes that other jobs keep from a trial; empty if it would not start without them either."""
        if self.is_free(spec) or self._choose(spec, self._taken.keys()) is None:
            return ()
        return tuple(node.name for node in self._cluster.fitting(spec) if not self._has_room(node, spec))

    def _has_room(self, node: "Node", spec: ClusterSpec) -> bool:
        """Returns whether a node can hold a trial beside other jobs: none has its GPUs, or processors of its ranks."""
        others = self._others.get(node.node_id)
        if others is None:
            return True
        ranks_cpus = self._cluster.cpus_per_rank(spec, node) * spec.devices_per_node
        return not (spec.device != "cpu" and others["GPU"]) and node.num_cpus - others["CPU"] >= ranks_cpus

    def opening(self, spec: ClusterSpec, avoid: Set[str], now_s: float) -> tuple[float, tuple["Node", ...]]:
        """Predicts when `take` finds nodes if nothing else starts, and which. The nodes exist.

        A trial that runs longer than expected is taken to end now, on the clock of `until_s`.
        """
        taken = dict(self._taken)
        for until_s in [now_s, *sorted({max(now_s, until_s) for until_s in taken.values()})]:
            taken = {domain: end_s for domain, end_s in taken.items() if end_s > until_s}
            nodes = self._choose(spec, taken.keys(), avoid)
            if nodes is not None:
                return until_s, nodes
        raise ValueError(f"no nodes for {spec.label} even if nothing runs; ask `exists` first")

    def exists(self, spec: ClusterSpec) -> bool:
        """Returns whether `take` would find nodes if nothing ran."""
        return self._choose(spec, set()) is not None

    def lanes(self, spec: ClusterSpec) -> list[tuple["Node", ...]]:
        """The sets of nodes on which trials of a kind can run side by side if nothing else runs."""
        taken: set[str] = set()
        found = []
        while (nodes := self._choose(spec, taken)) is not None:
            taken |= {node.domain for node in nodes}
            found.append(nodes)
        return found

    def missing(self, spec: ClusterSpec) -> str:
        """Describes the nodes a trial wants and the nodes there are."""
        return self._cluster.missing(spec)

    def _choose(
        self, spec: ClusterSpec, taken: Set[str], avoid: Set[str] = frozenset(), *, beside: bool = False
    ) -> tuple["Node", ...] | None:
        """Chooses nodes; `beside` says that other jobs keep what they hold."""
        fitting = [node for node in self._cluster.fitting(spec) if not beside or self._has_room(node, spec)]
        others = [node for node in fitting if node.name not in avoid]
        free = [node for node in (others if len(others) >= spec.num_nodes else fitting) if node.domain not in taken]
        if len(free) < spec.num_nodes:
            return None
        ids = {node.node_id for node in free}
        for used in self._sets[_kind(spec)]:
            if all(node.node_id in ids for node in used):
                return used
        domains: dict[str, list[Node]] = defaultdict(list)
        for node in free:
            domains[node.domain].append(node)
        # As few domains as possible, and the smallest that suffice: larger trials need the rest.
        enough = [nodes for nodes in domains.values() if len(nodes) >= spec.num_nodes]
        if enough:
            return tuple(min(enough, key=len)[: spec.num_nodes])
        largest_first = sorted(domains.values(), key=len, reverse=True)
        chosen = [node for nodes in largest_first for node in nodes][: spec.num_nodes]
        return tuple(sorted(chosen, key=lambda node: node.name))


def _kind(spec: ClusterSpec) -> tuple[str, int, int]:
    """The part of a cluster that decides which nodes fit."""
    return spec.device, spec.num_nodes, spec.devices_per_node


@dataclass(frozen=True, slots=True, kw_only=True)
class Reservation:
    """Nodes that are kept for a trial which waits for them."""

    queued: Attempt
    domains: frozenset[str]
    """Power or thermal domains of the nodes."""
    promise_s: float
    """Time at which they are expected to be free, on the clock of the queue. It never moves."""


class Reservations:
    """The reservation of the first waiting trial of each kind of device."""

    def __init__(self) -> None:
        self._by_device: dict[str, Reservation] = {}

    def keep(self, queued: Attempt, slots: Slots, now_s: float) -> Reservation:
        """Returns the reservation of a trial that is first in its queue and cannot start; the first call makes it."""
        device = queued.spec.cluster.device
        known = self._by_device.get(device)
        if known is None or known.queued is not queued or not known.domains <= slots.domains:
            promise_s, nodes = slots.opening(queued.spec.cluster, queued.avoid, now_s)
            domains = frozenset(node.domain for node in nodes)
            known = self._by_device[device] = Reservation(queued=queued, domains=domains, promise_s=promise_s)
        return known


def closed_domains(ahead: Iterable[Reservation], end_s: float) -> frozenset[str]:
    """Returns the domains where a trial that is expected to end at `end_s` leaves room to those ahead of it."""
    return frozenset[str]().union(*(one.domains for one in ahead if end_s > one.promise_s))
