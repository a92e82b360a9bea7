"""A terminal of some width, and what parts of a view look like in it."""

import io

from rich.console import Console

from wattune.view.console import show
from wattune.view.table import Note, Table


def shown(*parts: Table | Note, width: int = 200) -> str:
    console = Console(file=io.StringIO(), width=width, markup=False)
    show(console, *parts)
    return console.file.getvalue()
