"""Tables in terminals of any width."""

import pytest
from screen import shown

from wattune.view.table import COUNT, Cell, Column, Table, columns_of

CELLS = ("1", "6cf82d068342", "dp2 mbs2 zero3", "923 W (23.3 W past)", "48.0 °C (37.0 °C within)", "indicative")
NAMES = ("rank", "trial", "plan", "bound 1", "bound 2", "quality")


def printed(table: Table, width: int) -> list[str]:
    return shown(table, width=width).splitlines()


@pytest.mark.parametrize("width", [80, 100, 160])
def test_nothing_is_cut_however_narrow_the_terminal_is(width: int) -> None:
    columns = columns_of({name: str(place) for place, name in enumerate(NAMES)}, lambda row, place: row[int(place)], "")
    lines = printed(Table("ranked", columns, [CELLS]), width)
    assert all(len(line) <= width for line in lines)
    assert any(line.split()[0] == "1" for line in lines if line.strip())
    text = " ".join(" ".join(lines).split())
    for cell in CELLS:
        assert cell in text, "what people copy is in one piece"


def test_a_heading_that_does_not_fit_is_short_and_told_below() -> None:
    long = "node_device_power_peak_1s_w <= 2750"
    column = Column(long, lambda _: Cell(2390.0, tone="holds", detail="360 W within"), "power_w", short="bound 1")
    table = Table("", [Column("trial", str), column], ["6cf82d068342"])
    assert long in printed(table, 80)[1] and "bound 1" not in "".join(printed(table, 80))
    narrow = printed(table, 44)
    assert (
        "bound 1" in narrow[1] and narrow[-1] == f"bound 1: {long}" and any("(360 W within)" in line for line in narrow)
    )


def test_what_has_no_rows_is_not_shown_and_what_was_not_measured_is_a_dash() -> None:
    columns = [Column("trial", str), Column("rank", lambda _: None, COUNT)]
    assert printed(Table("ranked", columns, []), 80) == []
    assert printed(Table("ranked", columns, ["a"]), 80)[-2].split() == ["a", "-"]
