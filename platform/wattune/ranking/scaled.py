"""Words for a ranking of small trials that are read as large ones: how far they are, and what their error may turn."""

import math
from collections.abc import Sequence
from typing import Final

from wattune.intervals import NORMAL_95
from wattune.ranking.assessment import RankedTrial
from wattune.scale_down.reading import SCALED
from wattune.units import format_quantity

_MOST_NAMED: Final = 3


def scaled_texts(feasible: Sequence[RankedTrial], others: Sequence[RankedTrial], metric: str) -> list[str]:
    """Says how far small trials are from the large ones they are read as, and which verdict turns if that errs.

    A verdict turns where the bound, or the next plan, lies within the 95 % interval of the reading alone.
    """
    rows = [row for row in (*feasible, *others) if SCALED in row.marks]
    turns = [text for row in rows for text in _turning(row)]
    for a, b in zip(rows[:1], feasible[1:2], strict=False):
        if a.objective and b.objective:
            lead = abs(math.log(a.objective.value / b.objective.value))
            if lead <= NORMAL_95 * math.hypot(_error_frac(a, metric), _error_frac(b, metric)):
                turns.append(f"{b.label} overtakes {a.label} if their scale-downs err apart by {100 * lead:.1f} %")
    labels = dict.fromkeys(f"{row.label}: {row.counted[0].tags[SCALED]}" for row in rows)
    head = (
        f"SCALED DOWN: {len(rows)} small trials are read as the large plans they stand for; intervals hold that error"
    )
    none = ["no verdict turns within the 95 % interval of the scale-down"]
    return [head, *_some(list(labels)), *(_some(turns) or none)] if rows else []


def _some(texts: list[str]) -> list[str]:
    more = len(texts) - _MOST_NAMED
    return [*texts[:_MOST_NAMED], *([f"and {more} more"] if more > 0 else [])]


def _error_frac(row: RankedTrial, metric: str) -> float:
    return max(run.reading_errors.get(metric, 0.0) / abs(run.metrics.get(metric) or math.inf) for run in row.counted)


def _turning(row: RankedTrial) -> list[str]:
    return [
        f"{row.label}: {one.constraint} {one.verdict} at {format_quantity(one.metric, one.got)}, and turns if the "
        f"scale-down errs by {100 * abs(one.slack / one.got):.1f} %"
        for one in row.margins
        if one.got and abs(one.slack / one.got) <= NORMAL_95 * _error_frac(row, one.metric)
    ]
