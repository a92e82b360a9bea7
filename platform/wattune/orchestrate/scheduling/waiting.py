"""The trials that wait, by kind of device, in order; and those that this call does not start. No Ray here."""

from collections import Counter, defaultdict, deque
from collections.abc import Hashable, Iterable, Mapping
from operator import itemgetter
from typing import Final

from wattune.orchestrate.scheduling.nodes import Slots
from wattune.orchestrate.scheduling.run_order import workers_of
from wattune.orchestrate.scheduling.study_run import QueuedTrial
from wattune.trial import TrialResult, TrialStatus

WORTH_REPEATING: Final = (TrialStatus.COMPLETED, TrialStatus.INVALID)
"""Statuses of a first run after which a repeat is worth running."""


class Waiting:
    """Waiting trials in order, one queue for each kind of device."""

    def __init__(self, done: Mapping[tuple[str, int], TrialResult], left_out: Iterable[str]) -> None:
        """Starts empty.

        Args:
            done: Final results by trial and repeat, as they come.
            left_out: Names of folders whose trials do not run.
        """
        self._done = done
        self._queues: dict[str, deque[tuple[int, QueuedTrial]]] = defaultdict(deque)
        self._num_queued = 0
        self._worthwhile: dict[tuple[str, int], Hashable] = {}
        self._stranded: list[QueuedTrial] = []
        self._given_up: list[QueuedTrial] = []
        self._held: dict[Hashable, list[QueuedTrial]] = {}
        self.left_out = set(left_out)
        """Folder names of trials that this call does not queue (again)."""
        self.num_worthwhile: Counter[Hashable] = Counter()
        """Trials that wait and are going to run, by their workers."""

    def __len__(self) -> int:
        """Returns the number of queued trials whose nodes exist."""
        return sum(map(len, self._queues.values()))

    @property
    def num_left(self) -> int:
        """Trials that are going to run now or in a later call."""
        return sum(self.num_worthwhile.values()) + len(self._stranded) + len(self.failed)

    @property
    def num_held(self) -> int:
        """Trials that do not start because all of their kind failed."""
        return sum(map(len, self._held.values()))

    @property
    def holds_any(self) -> bool:
        """True if trials of some kind of workers do not start any more."""
        return bool(self._held)

    @property
    def stranded(self) -> tuple[QueuedTrial, ...]:
        """Trials whose nodes do not exist."""
        return tuple(self._stranded)

    @property
    def failed(self) -> tuple[QueuedTrial, ...]:
        """Trials that this call does not start any more: the cluster failed them, or all of their kind failed."""
        return (*self._given_up, *(queued for held in self._held.values() for queued in held))

    def has(self, device: str) -> bool:
        """Returns whether a trial waits for this kind of device."""
        return bool(self._queues[device])

    def in_order(self) -> list[QueuedTrial]:
        """Lists the queued trials that are worth running, in order over all kinds of devices."""
        every = sorted((one for queue in self._queues.values() for one in queue), key=itemgetter(0))
        return [queued for _, queued in every if not self._is_needless(queued)]

    def add(self, trials: Iterable[QueuedTrial]) -> None:
        """Queues trials after all others of their kind of device, unless they are done, left out or held."""
        for queued in trials:
            known = (queued.trial_id, queued.repeat) in self._done or queued.name in self.left_out
            if not known and not self._holds(queued):
                self._queues[queued.spec.cluster.device].append((self._num_queued, queued))
                self._num_queued += 1
                if not self._is_needless(queued):
                    self._count(queued)

    def add_first(self, queued: QueuedTrial) -> None:
        """Queues a trial before all others of its kind of device."""
        if self._holds(queued):
            return
        self._num_queued += 1
        self._queues[queued.spec.cluster.device].appendleft((-self._num_queued, queued))
        self._count(queued)

    def reconsider(self) -> None:
        """Queues stranded trials again: nodes have come or gone."""
        for queued in reversed(self._stranded):
            self.add_first(queued)
        self._stranded.clear()

    def give_up(self, queued: QueuedTrial) -> None:
        """Leaves a trial that the cluster failed to a later call."""
        self._given_up.append(queued)
        self.left_out.add(queued.name)

    def hold(self, workers: Hashable) -> int | None:
        """Keeps all trials for these workers from starting.

        Returns:
            The number of trials that were going to run; None if they were held before.
        """
        if workers in self._held:
            return None
        held = self._held[workers] = []
        for queue in self._queues.values():
            kept = [one for one in queue if workers_of(one[1].spec) != workers]
            held += [one[1] for one in queue if workers_of(one[1].spec) == workers and not self._is_needless(one[1])]
            queue.clear()
            queue.extend(kept)
        for queued in held:
            self.left_out.add(queued.name)
            self.uncount(queued.trial_id, queued.repeat)
        return len(held)

    def devices(self) -> list[str]:
        """Lists the kinds of devices for which trials wait; the one whose first trial was queued first comes first."""
        heads = sorted((queue[0][0], device) for device, queue in self._queues.items() if queue)
        return [device for _, device in heads]

    def head(self, device: str, slots: Slots) -> QueuedTrial | None:
        """Finds the first trial that is worth running and whose nodes exist; trials before it leave the queue."""
        queue = self._queues[device]
        while queue:
            queued = queue[0][1]
            if self._is_needless(queued):
                queue.popleft()
            elif not slots.exists(queued.spec.cluster):
                self._stranded.append(queue.popleft()[1])
                self.uncount(queued.trial_id, queued.repeat)
            else:
                return queued
        return None

    def take(self, queued: QueuedTrial) -> None:
        """Removes a trial that runs now: the head of its queue."""
        first = self._queues[queued.spec.cluster.device].popleft()
        assert first[1] is queued, "the head of its queue"
        self.uncount(queued.trial_id, queued.repeat)

    def uncount(self, trial_id: str, repeat: int) -> None:
        """Stops counting a trial: it runs now, or never will."""
        workers = self._worthwhile.pop((trial_id, repeat), None)
        if workers is not None:
            self.num_worthwhile[workers] -= 1

    def _count(self, queued: QueuedTrial) -> None:
        """Counts a trial that is going to run."""
        key, workers = (queued.trial_id, queued.repeat), workers_of(queued.spec)
        if key not in self._worthwhile:
            self._worthwhile[key] = workers
            self.num_worthwhile[workers] += 1

    def _holds(self, queued: QueuedTrial) -> bool:
        """Keeps a trial from starting, if all of its kind failed; returns whether it does."""
        held = self._held.get(workers_of(queued.spec))
        if held is None:
            return False
        held.append(queued)
        self.left_out.add(queued.name)
        return True

    def _is_needless(self, queued: QueuedTrial) -> bool:
        """Returns whether a repeat would only confirm that its trial fails."""
        first = self._done.get((queued.trial_id, 0)) if queued.repeat else None
        return first is not None and first.status not in WORTH_REPEATING
