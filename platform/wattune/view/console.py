"""Views on a terminal: a table where it fits, else the same cells as a listing, a few lines for each row."""

from collections.abc import Iterable, Sequence
from typing import Final

from rich import box
from rich.cells import cell_len
from rich.console import Console, Group, RenderableType
from rich.table import Table as RichTable
from rich.text import Text

from wattune.view.table import Cell, Column, Note, Table

_STYLES: Final = {
    "feasible": "green",
    "undecided": "blue",
    "behind": "bright_black",
    "infeasible": "yellow",
    "unknown": "magenta",
    "burst": "bright_black",
    "interrupted": "cyan",
    "failed": "red",
    "holds": "green",
    "breaks": "bold red",
    "good": "green",
    "lacking": "yellow",
    "reading": "dim",
    "warning": "yellow",
    "simulated": "bold yellow",
    "conclusion": "bold",
}
"""Style of each tone; others have none."""

_LEAST_PROSE: Final = 36
"""Least columns for a text of several words; below that the table becomes a listing."""

_INDENT: Final = 4
_BETWEEN: Final = "   "
"""Between two figures of one line of a listing."""


def show(console: Console, *parts: Table | Note) -> None:
    """Prints tables and notes; a table without rows is nothing."""
    for part in parts:
        if isinstance(part, Note):
            style, text = _STYLES.get(part.tone), part.text
            if part.rest:
                text += ("  " if len(text) + len(part.rest) + 2 <= console.width else "\n   ") + part.rest
            console.print(
                text, style=style, markup=False, highlight=False, soft_wrap=part.is_long and not console.is_terminal
            )
        elif part.rows:
            console.print(fitted(console, part), highlight=False)


def fitted(console: Console, table: Table) -> RenderableType:
    """Returns a table where it fits the terminal, else as a listing.

    No figure is ever broken over two lines, and no column is squeezed to some letters.
    """
    rows = [[_text(column, column.cell(row)) for column in table.columns] for row in table.rows]
    total = None if table.total is None else [_text(column, column.cell(table.total)) for column in table.columns]
    every = [*rows, *([] if total is None else [total])]
    short = [column for column in table.columns if column.short]
    for shortened in (False, True)[: 1 + bool(short)]:
        if _fits(console, table, every, shortened=shortened):
            drawn = _drawn(table, rows, total, shortened=shortened)
            legend = [Text(f"{column.short}: {column.name}") for column in short if shortened]
            return Group(drawn, *legend) if legend else drawn
    lines = [Text(table.title, style="bold")] if table.title else []
    lead = [column for column in table.columns if column.place == "lead"] or table.columns[:1]
    for row in every:
        cells = list(zip(table.columns, row, strict=True))
        lines += _wrapped(console, Text("  ").join(cell for column, cell in cells if column in lead), 0)
        items = [
            (column.place in ("own", "prose"), Text.assemble((_heading(column), "dim"), cell))
            for column, cell in cells
            if column not in lead and cell.plain not in ("", "-")
        ]
        for packed in _packed(items, console.width - _INDENT):
            lines += _wrapped(console, packed, _INDENT)
    return Group(*lines)


def _text(column: Column, cell: Cell) -> Text:
    if not cell.text:
        return Text("-" if column.quantity else "")
    words = Text(cell.text + (f" ({cell.detail})" if cell.detail else ""), style=_STYLES.get(cell.tone, ""))
    return Text.assemble(words, (f"\n{cell.small}", "dim")) if cell.small else words


def _drawn(table: Table, rows: Sequence[Sequence[Text]], total: Sequence[Text] | None, *, shortened: bool) -> RichTable:
    drawn = RichTable(title=table.title, box=box.SIMPLE_HEAD, title_justify="left", title_style="bold", pad_edge=False)
    for column in table.columns:
        drawn.add_column(
            column.short if shortened and column.short else column.name,
            justify="right" if column.quantity and not column.short else "left",
            overflow="fold",
            no_wrap=column.place != "prose",
        )
    for row in rows:
        drawn.add_row(*row)
    if total is not None:
        drawn.add_section()
        drawn.add_row(*total)
    return drawn


def _fits(console: Console, table: Table, rows: Sequence[Sequence[Text]], *, shortened: bool) -> bool:
    """Tells whether a table fits with every cell whole, but for texts of several words; rich would take a second."""
    total = -1
    for number, column in enumerate(table.columns):
        texts = (column.short if shortened and column.short else column.name, *(row[number].plain for row in rows))
        width = max(cell_len(part) for text in texts for part in text.split("\n"))
        total += 3 + (min(width, _LEAST_PROSE) if column.place == "prose" else width)  # with space and rule between two
    return total <= console.width


def _heading(column: Column) -> str:
    return f"{column.name}: " if column.place == "own" else f"{column.name} " if column.name else ""


def _packed(items: Iterable[tuple[bool, Text]], width: int) -> list[Text]:
    """Puts as many items on a line as fit; some have a line of their own."""
    lines: list[Text] = []
    is_open = False
    for alone, item in items:
        if is_open and not alone and lines[-1].cell_len + len(_BETWEEN) + item.cell_len <= width:
            lines[-1].append(_BETWEEN).append_text(item)
        else:
            lines.append(item.copy())
        is_open = not alone
    return lines


def _wrapped(console: Console, line: Text, indent: int) -> list[Text]:
    """Wraps a line between words, its rest two columns further in."""
    room = max(console.width - indent - 2, 8)
    parts = [line] if line.cell_len <= console.width - indent else list(line.wrap(console, room, overflow="fold"))
    spaces = [" " * indent, *[" " * (indent + 2)] * (len(parts) - 1)]
    return [Text(space).append_text(part) for space, part in zip(spaces, parts, strict=True)]
