"""The part of a space that was measured, and everything that was not: rejected, failed, interrupted, not reached."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from wattune.ranking.order import Ranking
from wattune.view.html import Html, fill, join


@dataclass(frozen=True, slots=True, kw_only=True)
class Coverage:
    """Counts of a study's space, each trial once."""

    measured: int
    """Trials of the space whose repeats completed."""
    failed: int
    interrupted: int
    """Trials that the same command runs again."""
    unreadable: int
    not_reached: int
    """Trials that nothing has run yet."""
    rejected: int
    """Combinations that a rule rejects before anything runs."""
    equivalent: int
    """Combinations that do the same work as one that is kept."""
    elsewhere: int
    """Measured trials that the space does not have, or no longer."""
    burst: int = 0
    """Trials of which only a few steps were measured."""

    @property
    def kept(self) -> int:
        """Trials of the space."""
        lost = self.failed + self.interrupted + self.unreadable
        return self.measured + self.burst + lost + self.not_reached


def coverage_of(ranking: Ranking, candidates: Sequence[Mapping[str, Any]]) -> Coverage:
    """Counts what was measured of the space.

    Args:
        ranking: Every trial of the study that ran.
        candidates: Rows of `candidates.parquet`.
    """
    statuses = Counter(row["status"] for row in candidates)
    kept = {row["trial_id"] for row in candidates if row["status"] == "kept"}
    groups = {
        "failed": {row.trial_id for row in ranking.failed},
        "interrupted": {row.trial_id for row in ranking.interrupted},
        "burst": {row.trial_id for row in ranking.burst},
    }
    ran = {row.trial_id for row in ranking.trials}
    measured = ran.difference(*groups.values())
    unreadable = {name.rpartition("-")[0] for name in ranking.unreadable} - ran
    return Coverage(
        measured=len(measured & kept),
        failed=len(groups["failed"] & kept),
        interrupted=len(groups["interrupted"] & kept),
        unreadable=len(unreadable & kept),
        not_reached=len(kept - ran - unreadable),
        rejected=statuses["rejected"],
        equivalent=statuses["equivalent"],
        elsewhere=len(measured - kept),
        burst=len(groups["burst"] & kept),
    )


def _are(count: int) -> str:
    return " is" if count == 1 else "s are"


def coverage_section(ranking: Ranking, candidates: Sequence[Mapping[str, Any]]) -> Html:
    """Shows what was measured and what was not, of how many. Empty without candidates."""
    if not candidates:
        return Html()
    found = coverage_of(ranking, candidates)
    share = f" ({100 * found.measured / found.kept:.1f} %)" if found.kept else ""
    missing = [
        (found.not_reached, "not reached"),
        (found.burst, "only in a burst"),
        (found.failed, "failed"),
        (found.interrupted, "interrupted"),
        (found.unreadable, "unreadable"),
    ]
    said = [f"{count:,} {word}" for count, word in missing if count]
    lines = [f"Not measured: {', '.join(said) or 'none'}."]
    rejected, equivalent, elsewhere = found.rejected, found.equivalent, found.elsewhere
    before = [f"{rejected:,} combination{_are(rejected)} rejected by rules"] if rejected else []
    before += [f"{equivalent:,} {'does' if equivalent == 1 else 'do'} the same work as one of these trials"] * (
        equivalent > 0
    )
    lines += [f"{' and '.join(before)}: {'it does' if rejected + equivalent == 1 else 'they do'} not run."] * bool(
        before
    )
    lines += [f"{elsewhere:,} more {'was' if elsewhere == 1 else 'were'} measured outside this space."] * bool(
        elsewhere
    )
    widths = [
        (100 * count / max(found.kept, 1), name) for count, name in ((found.measured, "done"), (found.failed, "lost"))
    ]
    bar = join(fill('<b class="{}" style="width:{}%"></b>', name, f"{width:.2f}") for width, name in widths)
    return fill(
        '<section class="coverage"><p><strong>Measured {} of {} trials of the space{}</strong></p>'
        '<i class="meter" aria-hidden="true">{}</i><p class="note">{}</p></section>\n',
        f"{found.measured:,}",
        f"{found.kept:,}",
        share,
        bar,
        " ".join(lines),
    )
