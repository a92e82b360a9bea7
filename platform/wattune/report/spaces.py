"""The section of a report about a study that grew: its spaces, and which trial ran under which."""

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

from wattune.ranking.order import Ranking
from wattune.report.markup import Html, section, table
from wattune.storage.space_changes import changes
from wattune.storage.spaces import StoredSpace, space_number
from wattune.trial import TrialResult
from wattune.units import format_quantity

_MAX_ROWS = 200
"""Most trials that the table lists; `space` in `candidates.parquet` and the tags of results have all."""


def spaces_section(spaces: Sequence[StoredSpace], ranking: Ranking) -> Html:
    """Lists the spaces of a study, what each changed, and the runs of every trial under them.

    Args:
        spaces: Every space, the first one first.
        ranking: Every assessed trial.

    Returns:
        Empty markup for a study that has one space.
    """
    if len(spaces) < 2:
        return Html()
    counts = Counter(space_number(result) for row in ranking.trials for result in row.repeats)
    told = [["1", "the study was begun", f"{counts[1]:,}"]]
    for before, one in pairwise(spaces):
        told.append([str(one.number), "; ".join(changes(before.document, one.document)), f"{counts[one.number]:,}"])
    rows = [[row.label, row.trial_id, _runs(row.repeats), _windows(row.repeats)] for row in ranking.trials[:_MAX_ROWS]]
    more = f" The first {_MAX_ROWS} of {len(ranking.trials):,}." if len(ranking.trials) > _MAX_ROWS else ""
    return section(
        "Spaces of the study",
        table(
            "The study has grown. Every result counts, whichever space its trial ran under; space.<n>.yaml has each.",
            ["space", "changed", "runs"],
            told,
            ["space", "runs"],
        ),
        table(
            f"Runs of each trial, and the length of their windows. A run counts as one, however long it was.{more}",
            ["configuration", "trial", "runs by space", "window"],
            rows,
            [],
        ),
    )


def _runs(repeats: Sequence[TrialResult]) -> str:
    """Counts runs by space: `1: 1, 2: 2`."""
    counts = Counter(map(space_number, repeats))
    return ", ".join(f"{number}: {counts[number]}" for number in sorted(counts))


def _windows(repeats: Sequence[TrialResult]) -> str:
    """Returns the shortest and the longest window of runs; empty where none says it."""
    windows_s = []
    for result in repeats:
        try:
            windows_s.append(float(result.tags["window_s"]))
        except (KeyError, ValueError):  # it failed, or an earlier version wrote it
            continue
    ends = (
        dict.fromkeys(format_quantity("time_s", one) for one in (min(windows_s), max(windows_s))) if windows_s else ()
    )
    return " to ".join(ends)
