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
    if not rows:
        return []
    turns = [
        f"{row.label}: {one.constraint} {one.verdict} at {format_quantity(one.metric, one.got)}, and turns if the "
        f"scale-down errs by {100 * abs(one.slack / one.got):.1f} %"
        for row in rows
        for one in row.margins
        if one.got and abs(one.slack / one.got) <= NORMAL_95 * _error_frac(row, one.metric)
    ]
    figures = [row.objective.value for row in feasible[:2] if row.objective]
    lead = abs(math.log(figures[0] / figures[1])) if len(figures) > 1 else math.inf
    if lead <= NORMAL_95 * math.hypot(*(_error_frac(row, metric) for row in feasible[:2])):
        turns.append(f"{feasible[1].label} leads if the scale-downs of the first two err apart by {100 * lead:.1f} %")
    labels = list(dict.fromkeys(f"{row.label}: {row.counted[0].tags[SCALED]}" for row in rows))
    head = f"SCALED DOWN: {len(rows)} of the trials are small, and read as the large plans; intervals hold that error"
    return [head, *_some(labels), *(_some(turns) or ["no verdict turns within the 95 % interval of the scale-down"])]


def _some(texts: list[str]) -> list[str]:
    more = [f"and {len(texts) - _MOST_NAMED} more"] if len(texts) > _MOST_NAMED else []
    return [*texts[:_MOST_NAMED], *more]


def _error_frac(row: RankedTrial, metric: str) -> float:
    return max(run.reading_errors.get(metric, 0.0) / abs(run.metrics.get(metric) or math.inf) for run in row.counted)
