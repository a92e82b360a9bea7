"""A table as data: columns that read a value of a row, and what a reader needs beside it.

A view is a sequence of tables and notes. `wattune.view.console`, `wattune.view.html` and `wattune.view.arrow` render
it; each decides what fits, and none of them computes or words a figure.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

from wattune.arrays import Floats
from wattune.intervals import Interval
from wattune.units import format_change, format_probability, format_quantity, unit_of

PROBABILITY: Final = "probability"
COUNT: Final = "count"
PERCENT: Final = "percent"
PERCENT_CHANGE: Final = "change in percent"
FIGURE: Final = "figure"
"""Quantities of a column besides the names of metrics, which say their unit themselves. A `FIGURE` comes in words: its
quantity is another one in each row."""

_WORDED: Final[dict[str, Callable[[Any], str]]] = {
    PROBABILITY: format_probability,
    COUNT: "{:,}".format,
    PERCENT: lambda frac: f"{100 * frac:.1f} %",
    PERCENT_CHANGE: lambda frac: f"{100 * frac:+.1f} %",
}


def worded(quantity: str, value: Any) -> str:
    """Returns a value in words: with the unit of its quantity, an interval as its middle with its half width."""
    if value is None:
        return "-"
    if isinstance(value, Interval):
        return value.shown(quantity)
    if not quantity or isinstance(value, str):
        return str(value)
    return _WORDED[quantity](value) if quantity in _WORDED else format_quantity(quantity, value)


def signed(quantity: str, change: float) -> str:
    """Returns a difference of two values with its sign and its unit."""
    return f"{'+' if change > 0 else '-' if change < 0 else ''}{format_change(quantity, abs(change))}"


def between(quantity: str, value: float, low: float, high: float) -> str:
    """Returns a prediction with the ends of its interval."""
    return f"{worded(quantity, value)} ({worded(quantity, low)} to {worded(quantity, high)})"


def halved(quantity: str, value: float, low: float, high: float) -> str:
    """Returns an estimate with half of its interval: relative, of a temperature in kelvin, of a share in points."""
    half, unit = (high - low) / 2, unit_of(quantity)
    spread = f"±{half:.0f} K" if unit == "degC" else f"±{100 * half:.0f}" if unit == "1" else f"±{half / value:.0%}"
    return f"{worded(quantity, value)} {spread}"


@dataclass(frozen=True, slots=True)
class Cell:
    """A value of which a reader needs to know more than its column says."""

    value: Any = None
    """None where there is none."""
    text: str = ""
    """Its words, where its quantity does not give them."""
    tone: str = ""
    """Kind of the value, such as a verdict: a renderer gives it a colour, and a page a mark."""
    detail: str = ""
    """Behind it in brackets on a terminal."""
    title: str = ""
    """The same for a page, where it is shown to whoever points at the cell."""
    small: str = ""
    """A second line under it."""


@dataclass(frozen=True, slots=True)
class Column:
    """One column: its heading, and what reads a row's value or cell."""

    name: str
    of: Callable[[Any], Any]
    quantity: str = ""
    """A metric, or one of the quantities of this module; empty for texts. It gives unit, style and alignment."""
    place: Literal["", "lead", "prose", "own"] = ""
    """A narrow terminal lists each row: `lead` is on its first line, `own` has a line, and `prose` may be wrapped."""
    kind: str = ""
    """Type in a file, a key of `wattune.view.arrow.TYPES`: else by whether there is a quantity."""
    short: str = ""
    """Heading where the whole one does not fit; a line below then says what it means."""
    every: Callable[[Sequence[Any]], Floats] | None = None
    """Function that reads all rows of its table at once, for a file; NaN where there is none."""

    def cell(self, row: Any) -> Cell:
        """Returns a row's cell, with its words."""
        found = self.of(row)
        cell = found if isinstance(found, Cell) else Cell(found)
        if cell.text or cell.value is None:
            return cell
        return replace(cell, text=worded(self.quantity, cell.value))


def columns_of(names: Mapping[str, str], read: Callable[[Any, str], Any], quantity: str | None = None) -> list[Column]:
    """Returns a column for each heading, which reads what it names of a row; that is its quantity too unless given."""

    def column(heading: str, name: str) -> Column:
        return Column(heading, lambda row: read(row, name), name if quantity is None else quantity)

    return [column(heading, name) for heading, name in names.items()]


@dataclass(frozen=True, slots=True)
class Note:
    """A line of its own, such as how to read a table, or a warning."""

    text: str
    tone: str = ""
    rest: str = ""
    """Behind the text, or on a line below where that has no room for both."""
    is_long: bool = False
    """True for a line to copy from: it is not wrapped where no terminal shows it."""


@dataclass(frozen=True, slots=True)
class Table:
    """Rows under a title."""

    title: str
    columns: Sequence[Column]
    rows: Sequence[Any]
    total: Any = None
    """A row after a line, the sum of the others."""


View = Sequence[Table | Note]


def reading(text: str) -> Note:
    """Returns how columns read."""
    return Note(text, "reading")


def warnings(texts: Iterable[str]) -> list[Note]:
    """Returns what is to be known before rows are compared."""
    return [Note(f"note: {text}", "warning") for text in texts]


SIMULATED: Final = Note(
    "Power, clocks and temperatures are SIMULATED: they show how wattune decides, not what hardware does.", "simulated"
)
