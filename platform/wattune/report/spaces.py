"""The section of a report about a study that grew: its spaces, and which trial ran under which."""

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

from wattune.ranking.order import Ranking
from wattune.run import Run
from wattune.storage.space_changes import changes
from wattune.storage.spaces import StoredSpace, space_number
from wattune.view.html import Html, section, table
from wattune.view.table import COUNT, FIGURE, Column, Table, worded

_MAX_ROWS = 200
"""Most trials that the table lists; `space` in `candidates.parquet` and the tags of results have all."""


def spaces_section(spaces: Sequence[StoredSpace], ranking: Ranking) -> Html:
    """Lists the spaces of a study, what each changed, and the runs of every trial under them. Empty for one space."""
    if len(spaces) < 2:
        return Html()
    counts = Counter(space_number(result) for row in ranking.trials for result in row.repeats)
    told = {1: "the study was begun"}
    told |= {one.number: "; ".join(changes(before.document, one.document)) for before, one in pairwise(spaces)}
    changed = [
        Column("space", lambda one: str(one[0]), FIGURE),
        Column("changed", lambda one: one[1]),
        Column("runs", lambda one: counts[one[0]], COUNT),
    ]
    ran = [
        Column("configuration", lambda row: row.label),
        Column("trial", lambda row: row.trial_id),
        Column("runs by space", lambda row: _runs(row.repeats)),
        Column("window", lambda row: _windows(row.repeats)),
    ]
    more = f" The first {_MAX_ROWS} of {len(ranking.trials):,}." if len(ranking.trials) > _MAX_ROWS else ""
    return section(
        "Spaces of the study",
        table(
            Table("", changed, list(told.items())),
            "The study has grown. Every result counts, whichever space its trial ran under; space.<n>.yaml has each.",
        ),
        table(
            Table("", ran, ranking.trials[:_MAX_ROWS]),
            f"Runs of each trial, and the length of their windows. A run counts as one, however long it was.{more}",
        ),
    )


def _runs(repeats: Sequence[Run]) -> str:
    """Counts runs by space: `1: 1, 2: 2`."""
    counts = Counter(map(space_number, repeats))
    return ", ".join(f"{number}: {counts[number]}" for number in sorted(counts))


def _windows(repeats: Sequence[Run]) -> str:
    """Returns the shortest and the longest window of runs; empty where none says it."""
    windows_s = [result.numbers.window_s for result in repeats if result.numbers.window_s is not None]
    ends = (min(windows_s), max(windows_s)) if windows_s else ()
    return " to ".join(dict.fromkeys(worded("time_s", one) for one in ends))
