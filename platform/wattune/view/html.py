"""Views on a page, as HTML from templates that escape their values.

Names and reasons come from users and programs. Every text is escaped unless it is already `Html`, so callers need not
remember it.
"""

import html
from collections.abc import Callable, Iterable
from typing import Any, Final

from wattune.view.table import Column, Table

MAX_WHOLE: Final = 5
"""Most columns with a short heading whose whole names and values fit side by side on a window of 1,400 pixels."""

_MARKS: Final = {"holds": "✓ ", "undecided": "? ", "breaks": "✕ "}
"""Marks before cells of a tone, which a reader may not tell by its colour."""


class Html(str):
    """Text that is already markup."""

    __slots__ = ()


def escape(text: str) -> Html:
    """Returns markup that shows the text, with quotes escaped; markup stays as it is."""
    return text if isinstance(text, Html) else Html(html.escape(text))


def fill(template: str, *values: str) -> Html:
    """Fills a trusted template: escaped values replace its `{}`."""
    return Html(template.format(*map(escape, values)))


def join(parts: Iterable[str]) -> Html:
    """Joins the parts, escaped."""
    return Html("".join(map(escape, parts)))


def section(title: str, *parts: str) -> Html:
    """Makes a titled section of the page."""
    return fill("<section><h2>{}</h2>{}</section>\n", title, join(parts))


def table(found: Table, caption: str = "", *, name: Callable[[Any], str] | None = None) -> Html:
    """Makes a table that fits its page. On a narrow one each row is a card, with its columns below each other.

    Its title is not shown, as a page has titles of its own; the caption is below it, and `name` gives a row's element
    id.
    """
    columns = found.columns
    brief = sum(bool(column.short) for column in columns) > MAX_WHOLE
    kinds = [' class="number"' if column.quantity else "" for column in columns]
    heads = [
        fill('<th{} title="{}">{}</th>', Html(kind), column.name, column.short)
        if brief and column.short
        else fill("<th{}>{}</th>", Html(kind), Html(escape(column.name).replace("_", "_<wbr>")))
        for kind, column in zip(kinds, columns, strict=True)
    ]

    def line(row: Any) -> Html:
        cells = (
            fill('<td{} data-column="{}">{}</td>', Html(kind), column.name, _cell(column, row, brief=brief))
            for kind, column in zip(kinds, columns, strict=True)
        )
        return fill("<tr{}>{}</tr>\n", fill(' id="{}"', name(row)) if name is not None else Html(), join(cells))

    legend = [f"{column.short}: {column.name}." for column in columns if brief and column.short]
    return fill(
        '<div class="scroll"><table><caption>{}</caption><thead>{}</thead><tbody>{}</tbody></table></div>',
        " ".join(filter(None, [caption, *legend])),
        fill("<tr>{}</tr>", join(heads)),
        join(map(line, found.rows)),
    )


def _cell(column: Column, row: Any, *, brief: bool) -> Html:
    """Returns a cell's content as elements, so that a card can place each; a `brief` one is its mark alone."""
    cell = column.cell(row)
    if isinstance(cell.value, Html):
        return cell.value
    text = cell.text or ("–" if column.quantity else "")
    if cell.title:
        kind = "verdict fails" if cell.tone == "breaks" else "verdict"
        shown = _MARKS.get(cell.tone, "") if brief and column.short else _MARKS.get(cell.tone, "") + text
        told = f"{text}, {cell.title}"
        small = told if brief and column.short else cell.title
        template = '<span class="{}" title="{}">{}</span><small class="detail">{}</small>'
        return fill(template, kind, f"{column.name}: {told}", shown, small)
    words = fill("<strong>{}</strong>" if column.place == "lead" and cell.small else "<span>{}</span>", text)
    return join([words, *([fill("<small>{}</small>", cell.small)] if cell.small else [])])
