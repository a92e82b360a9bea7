"""View of a scale-down: the small run of each plan, and the invariants of the one that is furthest from its plan."""

from collections.abc import Sequence
from typing import Final

from wattune.scale_down.invariants import Scaled, invariants
from wattune.view.table import FIGURE, Column, Table, View, reading, worded

_READING: Final = reading(
    "away: sum over invariants of |d ln t / d ln pi| |ln(small / large)|, in percent of a step, by shares of the "
    "estimated step; a network that the small cluster lacks is predicted, and counts in intervals instead"
)


def scaled_view(found: Sequence[Scaled]) -> View:
    """Lays out small runs beside the plans that they stand for, and the invariants of the furthest one."""
    ordered = sorted(found, key=lambda one: -one.percent)
    columns = [
        Column("plan", lambda one: one.large.label, place="lead"),
        Column("runs as", lambda one: one.text, place="prose"),
        Column("and is", lambda one: one.label, place="prose"),
        Column("least kept", lambda one: one.worst.name if one.percent else "", place="prose"),
    ]
    title = f"{len(found)} plans, each with the small run that stands for it, furthest first"
    rows = invariants(ordered[0])
    return [Table(title, columns, ordered[:20]), Table(f"Of {ordered[0].large.label}", _COLUMNS, rows), _READING]


_COLUMNS: Final = [
    Column("invariant", lambda row: row.name, place="lead"),
    Column("fabric", lambda row: row.fabric or "-"),
    Column("large", lambda row: worded(row.quantity, row.large), FIGURE),
    Column("small", lambda row: worded(row.quantity, row.small), FIGURE),
    Column("away", lambda row: "-" if row.percent is None else f"{row.percent:.2f} %", FIGURE),
]
