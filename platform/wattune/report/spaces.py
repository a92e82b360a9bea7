"""The sections of a report about its space: how it grew, what of it was measured, and everything that was not."""

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from wattune.ranking.assessment import Verdict
from wattune.ranking.order import Ranking
from wattune.run import Run
from wattune.storage.space_changes import changes
from wattune.storage.spaces import StoredSpace, space_number
from wattune.view.html import Html, fill, join, section, table
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


def coverage_of(ranking: Ranking, candidates: Sequence[Mapping[str, Any]]) -> Counter[str]:
    """Counts the trials of a study's space (`kept`), each once, and the combinations that are none.

    Of the space: `measured`, whose repeats completed; `burst`, of which only a few steps were measured; `failed`;
    `interrupted`, which the same command runs again; `unreadable`; `not_reached`, which nothing has run yet. Beside it:
    `rejected` by a rule before anything runs; `equivalent` to one that is kept; `elsewhere`, measured trials that the
    space does not have, or no longer. `candidates` are the rows of `candidates.parquet`.
    """
    kept = {row["trial_id"] for row in candidates if row["status"] == "kept"}
    ran = {row.trial_id for row in ranking.trials}
    groups = {name: {row.trial_id for row in getattr(ranking, name)} for name in ("failed", "interrupted", "burst")}
    groups["measured"] = ran.difference(*groups.values())
    groups["unreadable"] = {name.rpartition("-")[0] for name in ranking.unreadable} - ran
    groups["not_reached"] = kept - ran - groups["unreadable"]
    found = Counter({name: len(ids & kept) for name, ids in groups.items()})
    found["elsewhere"] = len(groups["measured"] - kept)
    return found + Counter(row["status"] for row in candidates)


def coverage_section(ranking: Ranking, candidates: Sequence[Mapping[str, Any]]) -> Html:
    """Shows how many trials have each verdict, and what was measured and what was not, of how many."""
    figures = [(str(verdict), len(getattr(ranking, verdict))) for verdict in Verdict]
    item = "<li><strong>{}</strong> {}</li>"
    counts = join(fill(item, f"{number:,}", name) for name, number in figures if number)
    tiles = fill('<ul class="counts">{}</ul>', counts) if counts else Html()
    if not candidates:
        return fill('<section class="coverage">{}</section>\n', tiles) if counts else Html()
    found = coverage_of(ranking, candidates)
    kept, rejected, equivalent, elsewhere = (found[name] for name in ("kept", "rejected", "equivalent", "elsewhere"))
    share = f" ({100 * found['measured'] / kept:.1f} %)" if kept else ""
    missing = {"not_reached": "not reached", "burst": "only in a burst"}
    said = [
        f"{found[name]:,} {missing.get(name, name)}"
        for name in ("not_reached", "burst", "failed", "interrupted", "unreadable")
        if found[name]
    ]
    lines = [f"Not measured: {', '.join(said) or 'none'}."]
    before = [f"{rejected:,} combination{' is' if rejected == 1 else 's are'} rejected by rules"] if rejected else []
    if equivalent:
        before.append(f"{equivalent:,} {'does' if equivalent == 1 else 'do'} the same work as one of these trials")
    if before:
        lines.append(f"{' and '.join(before)}: {'it does' if rejected + equivalent == 1 else 'they do'} not run.")
    if elsewhere:
        lines.append(f"{elsewhere:,} more {'was' if elsewhere == 1 else 'were'} measured outside this space.")
    widths = [(100 * found[name] / max(kept, 1), look) for name, look in (("measured", "done"), ("failed", "lost"))]
    bar = join(fill('<b class="{}" style="width:{}%"></b>', look, f"{width:.2f}") for width, look in widths)
    return fill(
        '<section class="coverage"><p><strong>Measured {} of {} trials of the space{}</strong></p>'
        '<i class="meter" aria-hidden="true">{}</i><p class="note">{}</p>{}</section>\n',
        f"{found['measured']:,}",
        f"{kept:,}",
        share,
        bar,
        " ".join(lines),
        tiles,
    )
