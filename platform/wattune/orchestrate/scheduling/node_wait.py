"""The wait of trials for nodes that do not live or that other jobs use: how long, for what, and until when."""

import time
from collections import Counter
from collections.abc import Set
from typing import TYPE_CHECKING

from wattune.catalog.hardware import ClusterSpec
from wattune.orchestrate.scheduling.nodes import Slots
from wattune.orchestrate.scheduling.trial_queue import TrialQueue
from wattune.units import ns_to_s

if TYPE_CHECKING:
    from wattune.orchestrate.demand import StudyNodes


class NodeWait:
    """The waits of a study, by the cluster that trials want. They are in no trial's time."""

    def __init__(self) -> None:
        self.waits_for = ""
        """The nodes, in short."""
        self._since_ns: dict[ClusterSpec, int] = {}
        self._over_ns: Counter[ClusterSpec] = Counter()
        """Waits that are over, until a trial has them as its own."""
        self._idle_since_s: float | None = None
        """Since when nothing runs for want of nodes."""
        self._may_come = False

    @property
    def clusters(self) -> Set[ClusterSpec]:
        """The clusters that trials wait for."""
        return self._since_ns.keys()

    def note(self, queue: TrialQueue, slots: Slots, nodes: "StudyNodes") -> bool:
        """Notes which trials wait, and shows an autoscaler the nodes that do not live; returns whether it changed."""
        lacking = list(dict.fromkeys(queued.spec.cluster for queued in queue.waiting.stranded))
        kept = {spec: names for spec in queue.waiting.clusters if (names := slots.kept_by_others(spec))}
        now_ns = time.monotonic_ns()
        for spec in self._since_ns.keys() - {*lacking, *kept}:
            self._over_ns[spec] += now_ns - self._since_ns.pop(spec)
        self._since_ns |= {spec: now_ns for spec in (*lacking, *kept) if spec not in self._since_ns}
        self._may_come = nodes.want(lacking[0] if lacking else None)
        texts = [
            f"{spec.num_nodes} node{'s'[: spec.num_nodes > 1]} x {spec.devices_per_node} {spec.device}"
            for spec in lacking
        ]
        texts += [f"{', '.join(names)}, which other jobs use" for names in kept.values()]
        before, self.waits_for = self.waits_for, "; ".join(texts)
        return self.waits_for != before

    def goes_on(self, most_s: float | None, *, of_others: bool) -> bool:
        """Returns whether a study in which nothing runs waits on: `most_s`, or as long as nodes may come.

        `of_others` says that trials wait whose nodes live: for another job, or for a moment.
        """
        if not self._since_ns:
            return of_others
        now_s = time.monotonic()
        self._idle_since_s = now_s if self._idle_since_s is None else self._idle_since_s
        return self._may_come or of_others if most_s is None else now_s - self._idle_since_s < most_s

    def end(self, cluster: ClusterSpec) -> float | None:
        """Returns how long the trial that starts now waited; None if it did not."""
        self._idle_since_s = None
        return round(ns_to_s(self._over_ns.pop(cluster, 0)), 3) or None
