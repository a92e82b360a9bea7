"""Views of two trials side by side, measured or estimated: what differs, the parts of a step, and every metric."""

from collections.abc import Callable
from typing import Final

from wattune.fitting.estimate_and_result import Beside, Figure
from wattune.metrics import METRICS
from wattune.ranking.comparison import Comparison, Waterfall
from wattune.ranking.difference import Difference
from wattune.view.table import (
    FIGURE,
    PERCENT_CHANGE,
    Cell,
    Column,
    Note,
    Table,
    View,
    reading,
    signed,
    warnings,
    worded,
)

_WHOLE: Final = "whole"
_QUANTITY: Final = {"s": ("time_s", "Time"), "J": ("energy_j", "Energy")}
"""Quantity and word of a waterfall's unit."""

_LEAST_TOLD: Final = 0.1
"""Least share of all parts' changes, without signs, of a part that a sentence names."""


def comparison_view(comparison: Comparison) -> View:
    """Lays out the differences between two trials, and the change of a step part by part."""
    falls = [fall for fall in (comparison.time, comparison.energy) if fall is not None]
    sides = (("A", comparison.a), ("B", comparison.b))
    return [
        *(Note(f"{name}  {side.label}", rest=f"({side.known_as})") for name, side in sides),
        Note(f"{comparison.conclusion}.", "conclusion"),
        differing(comparison),
        *(part for fall in falls for part in _parts(fall)),
        tested(comparison),
        reading(comparison.error_note),
        *warnings(comparison.warnings),
    ]


def reason_text(comparison: Comparison) -> str:
    """Returns from A to B the parts of a step that made the difference in the asked metric, greatest first.

    Of an energy in joules, else in time. Empty without spans on both sides.
    """
    fall = comparison.energy if METRICS[comparison.asked].group == "energy" else comparison.time
    if fall is None:
        return ""
    parts = sorted(fall.changes.items(), key=lambda part: -abs(part[1]))
    least = _LEAST_TOLD * sum(abs(change) for _, change in parts)
    told = [f"{name.replace('_', ' ')} {_signed(fall, change)}" for name, change in parts if abs(change) > least]
    of = ", of it " if told else ""
    return f"{_QUANTITY[fall.unit][1].lower()} of a {fall.per} {_signed(fall, fall.b - fall.a)}{of}{', '.join(told)}"


def _signed(fall: Waterfall, change: float) -> str:
    return signed(_QUANTITY[fall.unit][0], change).replace("-", "−")


def differing(comparison: Comparison) -> Table:
    """Lays out the fields of the two specifications that differ."""
    columns = [
        Column("field", lambda one: one[0]),
        Column("A", lambda one: worded("", one[1][0]), place="prose"),
        Column("B", lambda one: worded("", one[1][1]), place="prose"),
    ]
    return Table("What differs", columns, sorted(comparison.differences.items()))


def tested(comparison: Comparison) -> Table:
    """Lays out the metrics whose difference is tested."""
    return Table("Metrics", DIFFERENCE, comparison.tested)


def others(comparison: Comparison) -> Table:
    """Lays out the metrics of the first compared run of both sides that are not tested."""
    known = {one.metric for one in comparison.tested}
    columns = [
        Column("metric", lambda one: one[0]),
        Column("A", lambda one: worded(one[0], one[1][0]), FIGURE),
        Column("B", lambda one: worded(one[0], one[1][1]), FIGURE),
    ]
    rows = [(name, values) for name, values in comparison.metrics.items() if name not in known]
    return Table("Other metrics", columns, rows)


def _interval(one: Difference) -> str | None:
    """Returns the 95 % interval of the change, or of its share of A where that is clearer."""
    if one.low is None or one.high is None:
        return None
    if one.change_frac is None or one.low_frac is None or one.high_frac is None:
        return f"{signed(one.metric, one.low)} to {signed(one.metric, one.high)}"
    return f"{100 * one.low_frac:+.1f} to {100 * one.high_frac:+.1f} %"


DIFFERENCE: Final = (
    Column("metric", lambda one: one.metric, place="lead"),
    Column("A", lambda one: worded(one.metric, one.a.value), FIGURE),
    Column("B", lambda one: worded(one.metric, one.b.value), FIGURE),
    Column("B minus A", lambda one: signed(one.metric, one.change), FIGURE),
    Column("relative", lambda one: None if one.low is None else one.change_frac, PERCENT_CHANGE),
    Column("95 % interval", _interval, FIGURE),
    Column("verdict", lambda one: Cell(one.verdict, tone="conclusion" if one.told_apart else "reading"), place="lead"),
)
"""Columns of differences in one metric each."""


def _parts(fall: Waterfall) -> list[Table | Note]:
    name, title = _QUANTITY[fall.unit]

    def share(part: tuple[str, tuple[float, float]]) -> Cell:
        if part[0] == _WHOLE:
            return Cell(text="-" if fall.cancels else "100 %")
        return Cell(fall.share_frac(part[0]))

    columns = [
        Column("part", lambda part: part[0].replace("_", " ")),
        Column("A", lambda part: part[1][0], name),
        Column("B", lambda part: part[1][1], name),
        Column("change", lambda part: signed(name, part[1][1] - part[1][0]), FIGURE),
        Column("of the change", share, PERCENT_CHANGE),
    ]
    whole = (_WHOLE, (fall.a, fall.b))
    parts: list[Table | Note] = [Table(f"{title} of a {fall.per}", columns, [*fall.parts.items()], total=whole)]
    if fall.cancels:
        parts.append(Note("The parts' changes cancel out, so shares of the rest are not meaningful."))
    return parts


def beside_view(found: Beside) -> View:
    """Lays out figures and parts of a step: estimated in one column, measured in another."""
    return [
        _beside(f"{found.trial} {found.plan}: estimated and measured", found.metrics, lambda one: one.name),
        _beside("Parts of a step", found.parts, lambda one: f"{one.name}_time_s"),
        Note(f"estimated from {found.source}", is_long=True),
        *(
            [Note("the fit used this study's trials: the error on others is that of `wattune fit`", "warning")]
            if found.was_fitted
            else []
        ),
    ]


def _beside(title: str, figures: tuple[Figure, ...], quantity: Callable[[Figure], str]) -> Table:
    def known(one: Figure, *values: float | None) -> str | None:
        return None if None in values else " to ".join(worded(quantity(one), value) for value in values)

    def error(one: Figure) -> str | None:
        """Returns the error, marked with * where the measurement is outside of the interval."""
        if one.estimated is None or one.error_frac is None:
            return None
        mark = " *" if one.is_inside is False else ""
        kelvin = quantity(one).endswith("_c") and one.measured is not None
        return (f"{one.estimated - (one.measured or 0.0):+.1f} K" if kelvin else f"{one.error_frac:+.1%}") + mark

    columns = [
        Column("", lambda one: one.name),
        Column("estimated", lambda one: known(one, one.estimated), FIGURE),
        Column("95 % interval", lambda one: known(one, one.low, one.high), FIGURE),
        Column("measured", lambda one: known(one, one.measured), FIGURE),
        Column("error", error, FIGURE),
    ]
    return Table(title, columns, figures)
