"""Views of the map of the slots, and of the placements that it offers to a plan."""

from wattune.placement.gain import Move, PlacementAdvice
from wattune.placement.slots import SlotMap
from wattune.ranking.difference import Difference
from wattune.units import format_quantity
from wattune.view.table import PERCENT_CHANGE, PROBABILITY, Cell, Column, Note, Table, View, reading, warnings


def map_view(found: SlotMap) -> View:
    """Lays out the map, one row a device in its slot, and what it cannot tell."""

    def half(name: str, end: str, half_end: str, times: float, unit: str) -> Column:
        keys, text = (f"{name}_{end}", f"{name}_half_{half_end}"), f"{{:.1f}} ± {{:.1f}} {unit}"
        return Column(name, lambda row: row.get(keys[0]) and text.format(*(times * row[key] for key in keys)))

    columns = [
        Column("slot", lambda row: f"{row['node']}/{row['slot']}", place="lead"),
        Column("chip", lambda row: row["chip"] or None),
        half("slower", "frac", "frac", 100, "%"),
        half("inlet", "c", "k", 1, "degC"),
        half("resistance", "k_per_w", "k_per_w", 1000, "mK/W"),
        Column("coupling", lambda row: _coupling(row.get("coupling_k_per_w", {}))),
    ]
    how = "slower is the time of the same work against the mean of the slots it can be compared with; the others are "
    how += "fitted to settled temperatures, coupling is to the slot that heats it most; ± is half a 95 % interval"
    return [Table("device slots", columns, found.rows), reading(how), *warnings(found.notes)]


def _coupling(each: dict[str, float]) -> str | None:
    slot = max(each, key=lambda one: each[one], default="")
    return f"{1000 * each[slot]:.1f} mK/W of slot {slot}" if each else None


def placement_view(found: PlacementAdvice, told: tuple[Move, Difference] | None = None) -> View:
    """Lays out the moves by gain, the answer, and what a move gained where it was measured."""
    columns = [
        Column("move", lambda move: move.what, place="lead"),
        Column("gain", lambda move: Cell(move.gain_frac, detail=_interval(move)), PERCENT_CHANGE),
        Column("P(gain > 0)", lambda move: move.probability, PROBABILITY),
        Column("runs as", lambda move: move.needs or move.plan.label, place="prose"),
    ]
    how = "gain is in steps a second, with its 95 % interval; P(gain > 0) counts the maps that agree with the runs; "
    how += f"a restart took the runs of this plan {format_quantity('restart_s', found.restart_s)}, without a checkpoint"
    notes = [Note(found.why, "best" if found.chosen else ""), *([] if told is None else [Note(_verified(*told))])]
    return [Table(f"placements of {found.spec.label}", columns, found.moves), reading(how), *notes]


def _interval(move: Move) -> str:
    return f"{100 * move.low_frac:+.1f} to {100 * move.high_frac:+.1f}"


def _verified(move: Move, told: Difference) -> str:
    ends = [one for one in (told.change_frac, told.high_frac, told.low_frac) if one is not None]
    gain = [f"{100 / (1 + one) - 100:+.1f}" for one in ends]
    measured = f"measured {gain[0]} % ({' to '.join(gain[1:])}), " if gain else ""
    return f"{move.what}: {measured}predicted {100 * move.gain_frac:+.1f} % ({_interval(move)}); {told.verdict}"
