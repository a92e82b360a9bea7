"""Backfill: trials start on idle nodes while an earlier one waits for more, and never starve it. No Ray here.

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

from collections.abc import Iterable
from dataclasses import dataclass

from wattune.orchestrate.attempt import Attempt
from wattune.orchestrate.scheduling.nodes import Slots


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
        """Starts without any."""
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
