"""Reference trials: which plan is measured again and again, and when it is due. No Ray here."""

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from statistics import median
from typing import Any, Final

from wattune.cost.out_of_memory import UNLIKELY
from wattune.fidelity import FIRST_REFERENCE_REPEAT, role_of
from wattune.orchestrate.scheduling.run_order import workers_of
from wattune.plans.axes import AXES
from wattune.run import Run, RunStatus
from wattune.search.strategy import draw
from wattune.trial import TrialSpec

OPENING_RUNS: Final = 2
"""Runs of a reference trial at the start, one after the other: they show the scatter from run to run at once."""


def ordinary_plans(
    specs: Sequence[TrialSpec],
    *,
    seed: int,
    waits: Callable[[TrialSpec], bool] | None = None,
    out_of_memory: Callable[[TrialSpec], float] | None = None,
) -> dict[Hashable, TrialSpec]:
    """Chooses the specification nearest to the middle of the space, for each kind of workers.

    A plan at an edge of the space may be one that hardly fits, or one that nobody would run. The place of a value is
    its rank among the values that occur, from 0 to 1. The distance of a plan is the sum over model and axes of the
    distances from the median place. Ties are drawn by the seed. A plan that may wait for its host is passed over where
    another one does not: its runs scatter by the host's pace and show no drift. So is one that runs out of memory with
    a probability above `UNLIKELY`; where all do, the least likely is taken.
    """
    groups: dict[Hashable, list[TrialSpec]] = defaultdict(list)
    for spec in specs:
        groups[workers_of(spec)].append(spec)
    nearest = {workers: _from_the_middle(group, seed) for workers, group in groups.items()}
    return {workers: _ordinary(group, waits, out_of_memory) for workers, group in nearest.items()}


def _ordinary(
    group: Sequence[TrialSpec],
    waits: Callable[[TrialSpec], bool] | None,
    out_of_memory: Callable[[TrialSpec], float] | None,
) -> TrialSpec:
    """Returns the first plan that fits for sure and does not wait; else the first that fits."""
    if out_of_memory is not None:
        risks = {spec: out_of_memory(spec) for spec in group}
        most = max(UNLIKELY, min(risks.values()))
        group = [spec for spec in group if risks[spec] <= most]
    return group[0] if waits is None else next((spec for spec in group if not waits(spec)), group[0])


def _from_the_middle(specs: Sequence[TrialSpec], seed: int) -> list[TrialSpec]:
    distances = [0.0] * len(specs)
    columns = [[spec.model.name for spec in specs]]
    columns += [[_key(name, getattr(spec.plan, name)) for spec in specs] for name in AXES]
    flags = dict.fromkeys(name for spec in specs for name, _ in spec.flags)
    columns += [[_flag_key(dict(spec.flags).get(name)) for spec in specs] for name in flags]
    for values in columns:
        ranks = {value: rank for rank, value in enumerate(sorted(set(values)))}
        places = [ranks[value] / max(1, len(ranks) - 1) for value in values]
        middle = median(places)
        distances = [one + abs(place - middle) for one, place in zip(distances, places, strict=True)]
    ranked = zip(specs, distances, strict=True)  # equal distances differ by how they were added
    return [spec for spec, _ in sorted(ranked, key=lambda one: (round(one[1], 9), draw(seed, one[0].trial_id)))]


def _key(name: str, value: Any) -> Any:
    """Returns a key that sorts the values of an axis: numbers by size, choices as the axis lists them."""
    axis = AXES[name]
    if axis.kind == "choice":
        return axis.choices.index(value)
    return str(value) if axis.choices else value or 0


def _flag_key(value: Any) -> Any:
    """Returns a key that sorts the values of a flag: numbers by size, before names."""
    is_number = type(value) in (int, float)
    return (not is_number, value if is_number else 0, "" if is_number else str(value))


class References:
    """The reference trial of each kind of workers, and its runs.

    It is measured `OPENING_RUNS` times at the start, and again after every so many trials on a set of nodes. A kind of
    workers with fewer trials than that has none.
    """

    def __init__(self, *, every: int, plans: Mapping[Hashable, TrialSpec], named: TrialSpec | None) -> None:
        """Starts without any run. `every` is the trials on a set of nodes from one run to the next; 0 is never.

        Where the plan of its workers does not complete, the first trial that completes stands in. The one that the
        space names comes before it.
        """
        self._every = every
        self._specs = dict(plans) | ({workers_of(named): named} if named is not None else {})
        self._opens = set(self._specs)
        """Workers whose reference trial was known before any run."""
        self._named = named
        self._planned: Mapping[Hashable, int] = {}
        self._since: Counter[Hashable] = Counter()
        self._running: dict[tuple[str, int], Hashable] = {}
        self._ended: set[tuple[str, int]] = set()
        self._num_ended: Counter[Hashable] = Counter()
        self._completed: set[Hashable] = set()

    def plan(self, num_trials: Mapping[Hashable, int]) -> None:
        """Takes the number of trials with repeats that the study plans, by workers."""
        self._planned = num_trials

    def note(self, spec: TrialSpec, result: Run, nodes: str) -> None:
        """Counts a run that ended with a final result."""
        workers, key = workers_of(spec), (result.trial_id, result.repeat)
        completed = result.status is RunStatus.COMPLETED
        if role_of(result) != "reference":
            self._since[workers, nodes] += 1
            if completed:
                self._specs.setdefault(workers, spec)
            return
        self._since[workers, nodes] = 0
        self._running.pop(key, None)
        if key not in self._ended:
            self._ended.add(key)
            self._num_ended[workers] += 1
        if completed:
            self._completed.add(workers)
            self._specs[workers] = spec  # a study that goes on keeps its reference trial
        elif workers not in self._completed and spec != self._named and self._specs.get(workers) == spec:
            del self._specs[workers]
            self._opens.discard(workers)

    def due(self, workers: Hashable, nodes: str, *, opens: bool) -> tuple[TrialSpec, int] | None:
        """Returns the reference trial and its next repeat, if it is due before the next trial on these nodes.

        `opens` says that this is one of the search, so that the study may be at its start.
        """
        spec = self._specs.get(workers)
        if not self._every or spec is None:
            return None
        opening = opens and self.num_opening(workers) > 0 and workers not in self._running.values()
        if not opening and self._since[workers, nodes] < self._every:
            return None
        self._since[workers, nodes] = 0
        trial_id, repeat = spec.trial_id, FIRST_REFERENCE_REPEAT
        while (trial_id, repeat) in self._ended or (trial_id, repeat) in self._running:
            repeat += 1
        self._running[trial_id, repeat] = workers
        return spec, repeat

    def give_up(self, trial_id: str, repeat: int) -> None:
        """Forgets a run that this call does not start again."""
        self._running.pop((trial_id, repeat), None)

    def spec_of(self, workers: Hashable) -> TrialSpec | None:
        """Returns the reference trial of these workers, as far as it is known."""
        return self._specs.get(workers)

    def num_opening(self, workers: Hashable) -> int:
        """Returns the runs at the start that are left to begin."""
        if not self._every or workers not in self._opens or self._planned.get(workers, 0) <= self._every:
            return 0
        running = sum(one == workers for one in self._running.values())
        return max(0, OPENING_RUNS - self._num_ended[workers] - running)

    def num_left(self, waiting: Mapping[Hashable, int]) -> int:
        """Returns the runs expected among waiting trials, by workers. None follows the last trial."""
        if not self._every:
            return 0
        due = sum(max(count - 1, 0) // self._every for count in waiting.values())
        return due + sum(self.num_opening(workers) for workers, count in waiting.items() if count)
