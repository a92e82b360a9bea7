"""View of a scale-down: the small run of each plan, and the invariants of the one that is furthest from its plan."""

from collections.abc import Sequence
from typing import Any

from wattune.cost.defaults import default_coefficients
from wattune.scale_down.invariants import Invariant, Scaled, kept_facts
from wattune.view.table import COUNT, FIGURE, PERCENT, Column, Table, View, reading, worded

READING = reading(
    "Away: sum over invariants of |d ln t / d ln pi| |ln(small / large)|, in percent of a step, by the shares of the "
    "estimated step; a network that the small cluster lacks is predicted, and counts in intervals instead"
)


def scaled_view(found: Sequence[Scaled], *, most: int = 20) -> View:
    """Lays out small runs beside the plans that they stand for, and the invariants of the furthest one."""
    furthest = max(found, key=lambda one: one.percent)
    columns = [
        Column("plan", lambda one: one.large.label, place="lead"),
        Column("runs as", lambda one: one.text.partition("; ")[0], place="prose"),
        Column("network predicted", lambda one: one.predicted_frac or None, PERCENT),
        Column("least kept", lambda one: one.worst.name if one.percent else "", place="prose"),
        Column("away", lambda one: one.percent / 100, PERCENT),
    ]
    rows = sorted(found, key=lambda one: -one.percent)[:most]
    return [
        Table(f"{len(found)} plans, each with the small run that stands for it, furthest first", columns, rows),
        Table(f"Invariants of {furthest.large.label}", _COLUMNS, _invariants(furthest)),
        READING,
    ]


def scaled_json(found: Sequence[Scaled]) -> dict[str, Any]:
    """Returns small runs and invariants as plain data."""
    return {
        "plans": [
            {
                "plan": one.large.label,
                "trial_id": one.small.trial_id,
                "runs_as": one.text,
                "distance_percent": one.percent,
                "network_predicted_frac": one.predicted_frac,
                "invariants": [row._asdict() for row in _invariants(one)],
            }
            for one in found
        ]
    }


def _invariants(one: Scaled) -> list[Invariant]:
    return [*one.parts, *kept_facts(one, default_coefficients)]


def _value(row: Invariant, value: float) -> str:
    known = {"percent": PERCENT, "count": COUNT}
    if row.quantity == "count":
        return f"{value:,.4g}"
    return (
        f"{value:,.0f}{row.quantity}"
        if row.quantity.startswith(" ")
        else worded(known.get(row.quantity, row.quantity), value)
    )


def _away(row: Invariant) -> str:
    return "predicted" if row.is_predicted else "-" if row.percent is None else f"{row.percent:.2f} %"


_COLUMNS = [
    Column("invariant", lambda row: row.name, place="lead"),
    Column("fabric", lambda row: row.fabric or "-"),
    Column("large", lambda row: _value(row, row.large), FIGURE),
    Column("small", lambda row: _value(row, row.small), FIGURE),
    Column("of a step", _away, FIGURE),
]
