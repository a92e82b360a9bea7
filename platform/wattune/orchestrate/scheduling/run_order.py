"""The order in which trials run."""

from collections import defaultdict
from collections.abc import Hashable, Sequence
from typing import Final

from wattune.search.strategy import draw
from wattune.trial import TrialSpec

BLOCK: Final = 10
"""Most trials in a row for the same workers, if a node needs several kinds of workers.

A change of workers costs seconds. Without any change, a difference between kinds could not be told from drift.
"""


def workers_of(spec: TrialSpec) -> Hashable:
    """Returns a key that is equal for trials which the same workers can run one after another."""
    return spec.cluster, spec.engine


def run_order(specs: Sequence[TrialSpec], *, seed: int, order: str) -> list[TrialSpec]:
    """Puts trials in the order in which they run.

    Args:
        specs: Trials as the strategy lists them.
        seed: Seed of the order, which is the same on every machine and however many trials are done already.
        order: `listed` keeps the order of the list. `shuffled` sorts by a hash of seed and trial id, in blocks of at
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
