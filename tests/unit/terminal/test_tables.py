"""Tables in terminals of any width."""

import io

import pytest
from rich.console import Console

from wattune.terminal.tables import make_table


@pytest.mark.parametrize("width", [80, 100, 160])
def test_nothing_is_cut_however_narrow_the_terminal_is(width: int) -> None:
    console = Console(file=io.StringIO(), width=width)
    table = make_table("ranked", "rank", "trial", "plan", "bound 1", "bound 2", "quality", right=["rank"])
    cells = ("1", "6cf82d068342", "dp2 mbs2 zero3", "923 W (23.3 W past)", "48.0 °C (37.0 °C within)", "indicative")
    table.add_row(*cells)
    console.print(table)
    lines = console.file.getvalue().splitlines()
    assert all(len(line) <= width for line in lines)
    (row,) = [line for line in lines if "6cf82d068342" in line]
    assert row.split()[0] == "1", "what people copy is in one piece"
    shown = "".join("".join(lines).split())
    for word in (word for cell in cells for word in cell.split()):
        assert word in shown
