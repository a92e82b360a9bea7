"""View of projections: each plan at its size, with its interval, what limits it next, and what was measured there."""

from collections.abc import Sequence
from typing import Final

from wattune.projection.projected import TRANSFERRED, Projected
from wattune.scale_down.reading import SCALED
from wattune.units import format_quantity
from wattune.view.table import PERCENT_CHANGE, Cell, Column, Table, View, columns_of, reading, warnings

WIDE: Final = 0.5
"""Half width over value from which an interval's ends are told: it is of a logarithm, and as uneven as it is wide."""
READING: Final = reading(
    "each figure with half of its 90 % interval, or the ends of a wide one; it widens with the distance; next limit: "
    "the part of a step whose share grows most; goodput and cluster: with checkpoints of 30 s and restarts of 600 s, "
    "assumed; error: projected over measured step, coloured where it is outside the interval"
)
SHOWN: Final = (
    "step_time_s", "tokens_per_s", "energy_per_token_j", "node_device_power_mean_w", "goodput_frac",
    "cluster_power_mean_w", "cluster_power_peak_1s_w", "cluster_swing_rms_w",
)  # fmt: skip


def projection_view(found: Sequence[Projected]) -> View:
    """Lays out projections, and what cannot be said."""
    notes = [f"{one.name}: {one.label}, {one.untested}" for one in found if one.untested]
    notes += [f"{one.name}: {kind}: {text}" for one in found for kind, text in one.notes.items()]
    if any(one.breaks is None for one in found):
        notes.append(f"neither ordered nor checked against bounds without --include {TRANSFERRED}")
    return [projection_table(found), READING, *warnings(dict.fromkeys(notes))]


def projection_table(found: Sequence[Projected]) -> Table:
    """Lays out projections as one table."""
    names = [name for name in SHOWN if any(name in one.figures for one in found)]
    columns = [
        Column("plan", lambda one: one.name, place="lead"),
        Column("devices", lambda one: f"{one.num_devices:,}", place="lead"),
        *columns_of({name: name for name in names}, _figure),
        Column("next limit", lambda one: one.limits[0]),
        Column("label", _label, place="prose"),
    ]
    if any(one.truth_s is not None for one in found):
        columns += [Column("measured", lambda one: one.truth_s, "step_time_s"), Column("error", _error, PERCENT_CHANGE)]
    return Table("projected", columns, found)


def _figure(row: Projected, name: str) -> Cell:
    if (found := row.figures.get(name)) is None:
        return Cell()
    if found.half_width_frac < WIDE:
        return Cell(found.value, found.shown(name))
    value, low, high = (format_quantity(name, each) for each in (found.value, found.low, found.high))
    return Cell(found.value, f"{value} ({low} to {high})")


def _label(row: Projected) -> str:
    kinds = [row.label, *(kind for kind in row.notes if kind == SCALED)]
    return ", ".join([*("breaks " + each for each in row.breaks or ()), *row.unsure, *kinds])


def _error(row: Projected) -> Cell | None:
    return row.error and Cell(row.error[0], tone="" if row.error[1] else "infeasible")
