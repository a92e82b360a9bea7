"""The trials that wait, in order, by workers and nodes; and those that this call does not start. No Ray here."""

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Hashable, Iterable, Mapping, Set
from operator import itemgetter
from typing import Final

from wattune.catalog.hardware import ClusterSpec
from wattune.orchestrate.attempt import Attempt
from wattune.orchestrate.scheduling.nodes import Slots
from wattune.orchestrate.scheduling.run_order import workers_of
from wattune.run import Run, RunStatus
from wattune.trial import TrialSpec

WORTH_REPEATING: Final = (RunStatus.COMPLETED, RunStatus.INVALID)
"""Statuses of a first run after which a repeat is worth running."""


class Waiting:
    """Waiting trials. Each kind of device has an order of its own.

    Trials that need the same workers and avoid the same nodes stand in one line: where the first of them cannot start,
    none can.
    """

    def __init__(self, done: Mapping[tuple[str, int], Run], left_out: Iterable[str]) -> None:
        self._done = done
        self._lines: dict[Hashable, deque[tuple[int, Attempt]]] = defaultdict(deque)
        self._num_queued = 0
        self._worthwhile: dict[tuple[str, int], Hashable] = {}
        self._stranded: list[Attempt] = []
        self._given_up: list[Attempt] = []
        self._held: dict[Hashable, list[Attempt]] = {}
        self.left_out = set(left_out)
        """Folder names of trials that this call does not queue (again)."""
        self.num_worthwhile: Counter[Hashable] = Counter()
        """Trials that wait and are going to run, by their workers."""

    def __len__(self) -> int:
        """Returns the number of queued trials whose nodes exist."""
        return sum(map(len, self._lines.values()))

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
    def stranded(self) -> tuple[Attempt, ...]:
        """Trials whose nodes do not exist."""
        return tuple(self._stranded)

    @property
    def failed(self) -> tuple[Attempt, ...]:
        """Trials that this call does not start any more: the cluster failed them, or all of their kind failed."""
        return (*self._given_up, *(queued for held in self._held.values() for queued in held))

    def count(self, device: str) -> int:
        """Returns the number of trials that wait for this kind of device."""
        return sum(len(line) for line in self._lines.values() if line and _device(line) == device)

    @property
    def clusters(self) -> Set[ClusterSpec]:
        """The clusters that trials wait for."""
        return dict.fromkeys(line[0][1].spec.cluster for line in self._lines.values() if line).keys()

    def in_order(self) -> list[Attempt]:
        """Lists the queued trials that are worth running, in order over all kinds of devices."""
        every = sorted((one for line in self._lines.values() for one in line), key=itemgetter(0))
        return [queued for _, queued in every if not self._is_needless(queued)]

    def add(self, trials: Iterable[Attempt]) -> None:
        """Queues trials after all others of their kind of device, unless they are done, left out or held."""
        for queued in trials:
            known = (queued.trial_id, queued.repeat) in self._done or queued.name in self.left_out
            if not known and not self._holds(queued):
                self._lines[_line_of(queued)].append((self._num_queued, queued))
                self._num_queued += 1
                if not self._is_needless(queued):
                    self._count(queued)

    def add_first(self, queued: Attempt) -> None:
        """Queues a trial before all others of its kind of device."""
        if self._holds(queued):
            return
        self._num_queued += 1
        self._lines[_line_of(queued)].appendleft((-self._num_queued, queued))
        self._count(queued)

    def put_last(self, late: Callable[[TrialSpec], bool]) -> None:
        """Moves trials to the end of their line, in their order."""
        for line in self._lines.values():
            for number, queued in [one for one in line if late(one[1].spec)]:
                line.remove((number, queued))
                line.append((self._num_queued, queued))
                self._num_queued += 1

    def reconsider(self) -> None:
        """Queues stranded trials again: nodes have come or gone."""
        for queued in reversed(self._stranded):
            self.add_first(queued)
        self._stranded.clear()

    def give_up(self, queued: Attempt) -> None:
        """Leaves a trial that the cluster failed to a later call."""
        self._given_up.append(queued)
        self.left_out.add(queued.name)

    def hold(self, workers: Hashable) -> int | None:
        """Keeps all trials for these workers from starting; returns how many were to run, None if held before."""
        if workers in self._held:
            return None
        held = self._held[workers] = []
        for line in self._lines.values():
            if line and workers_of(line[0][1].spec) == workers:
                held += [queued for _, queued in line if not self._is_needless(queued)]
                line.clear()
        for queued in held:
            self.left_out.add(queued.name)
            self.uncount(queued.trial_id, queued.repeat)
        return len(held)

    def devices(self) -> list[str]:
        """Lists the kinds of devices for which trials wait; the one whose first trial was queued first comes first."""
        heads = sorted((line[0][0], _device(line)) for line in self._lines.values() if line)
        return list(dict.fromkeys(device for _, device in heads))

    def heads(self, device: str, slots: Slots) -> list[Attempt]:
        """Lists the first trial of each line for a kind of device, in order.

        Trials before it that are not worth running leave the line, and so do those whose nodes do not exist.
        """
        lines = [line for line in self._lines.values() if line and _device(line) == device]
        for line in lines:
            while line and (self._is_needless(line[0][1]) or not slots.exists(line[0][1].spec.cluster)):
                _, queued = line.popleft()
                if not self._is_needless(queued):
                    self._stranded.append(queued)
                self.uncount(queued.trial_id, queued.repeat)
        return [queued for _, queued in sorted((line[0] for line in lines if line), key=itemgetter(0))]

    def take(self, queued: Attempt) -> None:
        """Removes a trial that runs now: the first of its line."""
        first = self._lines[_line_of(queued)].popleft()
        assert first[1] is queued, "the first of its line"
        self.uncount(queued.trial_id, queued.repeat)

    def uncount(self, trial_id: str, repeat: int) -> None:
        """Stops counting a trial: it runs now, or never will."""
        workers = self._worthwhile.pop((trial_id, repeat), None)
        if workers is not None:
            self.num_worthwhile[workers] -= 1

    def _count(self, queued: Attempt) -> None:
        """Counts a trial that is going to run."""
        key, workers = (queued.trial_id, queued.repeat), workers_of(queued.spec)
        if key not in self._worthwhile:
            self._worthwhile[key] = workers
            self.num_worthwhile[workers] += 1

    def _holds(self, queued: Attempt) -> bool:
        """Keeps a trial from starting, if all of its kind failed; returns whether it does."""
        held = self._held.get(workers_of(queued.spec))
        if held is None:
            return False
        held.append(queued)
        self.left_out.add(queued.name)
        return True

    def _is_needless(self, queued: Attempt) -> bool:
        """Returns whether a repeat would only confirm that its trial fails."""
        first = self._done.get((queued.trial_id, 0)) if queued.repeat else None
        return first is not None and first.status not in WORTH_REPEATING


def _line_of(queued: Attempt) -> Hashable:
    """Returns a key that is equal for trials which the same free nodes suit."""
    return workers_of(queued.spec), queued.avoid


def _device(line: deque[tuple[int, Attempt]]) -> str:
    """The kind of device of a line that is not empty."""
    return line[0][1].spec.cluster.device
