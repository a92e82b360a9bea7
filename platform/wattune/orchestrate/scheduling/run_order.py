"""The order in which trials run."""

import itertools
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Final

from wattune.search.strategy import draw
from wattune.trial import TrialSpec

BLOCK: Final = 10
"""Most trials in a row for the same workers, if a node needs several kinds of workers.

A change of workers costs seconds. Without any change, a difference between kinds could not be told from drift.
"""

CHUNK: Final = 5
"""Most trials in a row with the same compiled graphs: half of the default distance of two runs of the reference trial.

Graphs of new shapes cost seconds. Drift that runs of the reference trial show is about the same over a chunk, since it
is shorter than their distance. A larger group is drawn into several chunks, which are spread over the study.
`benchmarks/results/run_order.md` has the time and the bias of other lengths.
"""

_Place = tuple[bytes, int]
"""A trial's drawn place, and its index."""


def workers_of(spec: TrialSpec) -> Hashable:
    """Returns a key that is equal for trials which the same workers can run one after another."""
    return spec.cluster, spec.engine


def run_order(
    specs: Sequence[TrialSpec],
    *,
    seed: int,
    order: str,
    graphs_of: Callable[[TrialSpec], Hashable] = lambda _spec: None,
    chunk: int = CHUNK,
) -> list[TrialSpec]:
    """Puts trials in the order in which they run, the same on every machine and however many are done already.

    `listed` keeps the order of the list. `shuffled` sorts by a hash of seed and trial id, in chunks of at most `chunk`
    trials that share compiled graphs, in blocks of at least `BLOCK` trials for the same workers. `graphs_of` gives a
    key that is equal for trials that share graphs, None where nothing is compiled: those need not stand together.
    """
    if order == "listed":
        return list(specs)
    drawn = sorted((draw(seed, spec.trial_id), index) for index, spec in enumerate(specs))

    def placed(group: Sequence[_Place]) -> tuple[_Place, Sequence[_Place]]:
        """A group at the place of one of its trials, drawn apart: by the first, large groups would come first."""
        return min(group, key=lambda place: draw(seed, f"{specs[place[1]].trial_id} stands for others")), group

    blocks: list[tuple[_Place, Sequence[_Place]]] = []
    for of_workers in _groups(drawn, lambda index: workers_of(specs[index])):
        chunks = []
        for group in _groups(of_workers, lambda index: graphs_of(specs[index])):
            most = chunk if graphs_of(specs[group[0][1]]) is not None else 1
            chunks += [placed(part) for part in _cut(group, most)]
        blocks += [placed(block) for block in _filled([part for _, part in sorted(chunks)], BLOCK)]
    return [specs[index] for _, block in sorted(blocks) for _, index in block]


def _groups(places: Iterable[_Place], key: Callable[[int], Hashable]) -> list[list[_Place]]:
    """Groups places by a key of their index; each group keeps their order."""
    groups: dict[Hashable, list[_Place]] = defaultdict(list)
    for place in places:
        groups[key(place[1])].append(place)
    return list(groups.values())


def _cut(group: Sequence[_Place], most: int) -> list[Sequence[_Place]]:
    """Cuts a group into the fewest parts of at most so many, of equal length or one less."""
    num_parts = -(-len(group) // most)
    ends = [len(group) * part // num_parts for part in range(num_parts + 1)]
    return [group[start:end] for start, end in itertools.pairwise(ends)]


def _filled(chunks: Iterable[Sequence[_Place]], least: int) -> list[list[_Place]]:
    """Joins chunks to blocks of at least so many places, the last one of fewer."""
    blocks: list[list[_Place]] = [[]]
    for chunk in chunks:
        if len(blocks[-1]) >= least:
            blocks.append([])
        blocks[-1] += chunk
    return blocks
