"""An estimate beside a result on a terminal. Nothing here computes a figure."""

from rich.console import Console

from wattune.fitting.estimate_and_result import Beside, Figure
from wattune.terminal.tables import make_table, print_table
from wattune.units import format_quantity

_RIGHT = ("estimated", "95 % interval", "measured", "error")


def print_beside(console: Console, found: Beside) -> None:
    """Prints figures and parts of a step: estimated in one column, measured in another."""
    table = make_table(f"{found.trial} {found.plan}: estimated and measured", "", *_RIGHT, right=_RIGHT)
    for figure in found.metrics:
        table.add_row(figure.name, *_cells(figure, figure.name))
    print_table(console, table)
    parts = make_table("Parts of a step", "", *_RIGHT, right=_RIGHT)
    for figure in found.parts:
        parts.add_row(figure.name, *_cells(figure, f"{figure.name}_time_s"))
    print_table(console, parts)
    console.print(f"estimated from {found.source}", highlight=False, soft_wrap=True)
    if found.was_fitted:
        console.print("the fit used this study's trials: the error on others is that of `wattune fit`", style="yellow")


def _cells(figure: Figure, unit_name: str) -> tuple[str, str, str, str]:
    """Formats one figure: estimated, interval, measured, error. A figure outside of its interval is marked with *."""
    estimated = "-" if figure.estimated is None else format_quantity(unit_name, figure.estimated)
    interval = ""
    if figure.low is not None and figure.high is not None:
        interval = f"{format_quantity(unit_name, figure.low)} to {format_quantity(unit_name, figure.high)}"
    measured = "-" if figure.measured is None else format_quantity(unit_name, figure.measured)
    error = "" if figure.error_frac is None else f"{figure.error_frac:+.1%}"
    if unit_name.endswith("_c") and figure.estimated is not None and figure.measured is not None:
        error = f"{figure.estimated - figure.measured:+.1f} K"
    return estimated, interval, measured, error + ("" if figure.is_inside is not False else " *")
