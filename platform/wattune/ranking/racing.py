"""The race of finalists, as it went: who may have been the best after each of its repeats.

The standings themselves are those of `wattune.ranking.best`, from the results that were there.
"""

from typing import Final

import numpy as np

from wattune.fidelity import is_of_race, is_soak
from wattune.objective import Question
from wattune.ranking.best import Standings
from wattune.ranking.posterior import Posterior
from wattune.ranking.spreads import Results

MOST_MOMENTS: Final = 24
"""Most repeats of a race for which its history is computed."""


def race_standings(results: Results, question: Question) -> Standings:
    """Computes who may be the best, without long runs: they follow the race, and must not open it again."""
    return Posterior([(spec, result) for spec, result in results if not is_soak(result)], question).front


def history(results: Results, question: Question) -> list[tuple[int, Standings]]:
    """Computes how P(best) moved over the repeats of a race, from the results alone, in the order in which they ended.

    The first moment is before the first repeat of the race. Of more than `MOST_MOMENTS` repeats some are left out, so
    that a long race costs no more than a short one. Returns the repeats of the race so far and the standings then; none
    without a repeat of a race.
    """
    ended = sorted(results, key=lambda pair: (pair[1].end_wall_ns, pair[1].trial_id, pair[1].repeat))
    ends = [index + 1 for index, (_, result) in enumerate(ended) if is_of_race(result)]
    if not ends:
        return []
    num_runs = [ends[0] - 1, *ends]
    numbers = sorted({round(at) for at in np.linspace(0, len(ends), min(len(ends), MOST_MOMENTS) + 1)})
    return [(number, race_standings(ended[: num_runs[number]], question)) for number in numbers]
