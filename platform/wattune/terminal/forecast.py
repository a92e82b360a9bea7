"""Views of estimates in a terminal. Nothing here computes a figure."""

from collections.abc import Callable
from typing import Final

from rich.console import Console
from rich.table import Table

from wattune.cost.estimate import LIMITS, Estimates
from wattune.fitting.store import StoredFit
from wattune.search.forecast import Forecast
from wattune.terminal.tables import fits, make_table, print_notes, print_table
from wattune.trial import TrialSpec
from wattune.units import format_quantity

SHOWN: Final = {
    "step": ("step_time_s", 15),
    "tokens/s": ("tokens_per_s", 12),
    "memory": ("memory_peak_bytes", 16),
    "node peak 1 s": ("node_device_power_peak_1s_w", 15),
    "warmest": ("device_temp_max_c", 14),
}
"""Figures of a candidate: the metric, and the width of its column."""

_INDENT: Final = "    "
_BREAKS: Final = "breaks"

READING: Final = "± is half of the 95 % interval; tokens/s has the step's; (%) is the probability to break the bound"


def print_forecast(console: Console, forecast: Forecast, *, top: int = 10) -> None:
    """Prints the most promising candidates with their estimates, and what cannot fit."""

    def line(text: str) -> None:
        console.print(text, highlight=False, soft_wrap=not console.is_terminal)

    line(f"{len(forecast.kept)} may fit; best first by estimate: {forecast.objective}\n")
    name = _namer(forecast)
    table = _table(forecast, top, name)
    listed = forecast.kept[:top]
    if fits(console, table, (_BREAKS,)):
        console.print(table, highlight=False)
        listed = ()
    else:
        line("trial         plan")
        line(_INDENT + "".join(f"{title:<{width}}" for title, (_, width) in SHOWN.items()).rstrip())
    for position, one in enumerate(listed):
        line(f"{one.trial_id}  {name(one.spec)}")
        line(_INDENT + _figures(forecast.estimates, position))
        line(_INDENT + _verdict(forecast, position))
    if len(forecast.kept) > top:
        line(f"... and {len(forecast.kept) - top} more; --top N lists more, --out FILE writes all")
    line(f"\n{READING}")
    for source in forecast.sources:
        line(f"estimated for {source.text}")
    if forecast.unestimated:
        line(f"without an estimate: {', '.join(forecast.unestimated)}")
    print_notes(console, forecast.kept)
    if forecast.rejected:
        first = forecast.rejected[0]
        line(f"\n{len(forecast.rejected)} rejected by rule {first.rule}, for example: {first.reason}")


def _namer(forecast: Forecast) -> Callable[[TrialSpec], str]:
    """Returns what names candidates, with all that differs between them beside the plan."""
    several = len({(one.spec.model, one.spec.cluster, one.spec.engine) for one in forecast.kept}) > 1
    plan = forecast.namer()

    def name(spec: TrialSpec) -> str:
        return (f"{spec.model.name}, {spec.cluster.label}, {spec.engine}: " if several else "") + plan(spec)

    return name


def _table(forecast: Forecast, top: int, name: Callable[[TrialSpec], str]) -> Table:
    """Returns the candidates as one line each, for terminals that have the room."""
    listed = forecast.kept[:top]
    broken = [_broken(forecast, position) for position, _ in enumerate(listed)]
    table = make_table("", "trial", "plan", *SHOWN, "limited by", *([_BREAKS] if any(broken) else []))
    for position, one in enumerate(listed):
        limit = LIMITS[forecast.estimates.limited_by[position]]
        cells = [*_cells(forecast.estimates, position), limit, *([broken[position]] if any(broken) else [])]
        table.add_row(one.trial_id, name(one.spec), *cells)
    return table


def print_fit(console: Console, fit: StoredFit) -> None:
    """Prints what coefficients were fitted to, their error on held-out configurations, and what would sharpen them."""
    title = f"{fit.device}: {fit.num_trials} trials of {fit.num_configurations} configurations"
    title += f", {fit.links}" if fit.links else ""
    table = make_table(title, "metric", "median error", "95 % within", right=["median error", "95 % within"])
    for metric, error in fit.hold_out.items():
        median = "-" if error.median_frac is None else f"{error.median_frac:.1%}"
        table.add_row(metric, median, f"{error.p95_frac:.1%}")
    print_table(console, table)
    console.print("errors are on configurations that the fit did not see", highlight=False)
    for wish in fit.sharpen:
        console.print(f"would sharpen it: {wish}", highlight=False)


def _figures(estimates: Estimates, position: int) -> str:
    """Formats a candidate's figures in columns of 80."""
    widths = (width for _, width in SHOWN.values())
    cells = zip(_cells(estimates, position), widths, strict=True)
    return "".join(f"{text:<{width}}" for text, width in cells).rstrip()


def _cells(estimates: Estimates, position: int) -> list[str]:
    """Formats a candidate's figures, each with half of its interval: relative, or in kelvin."""
    cells = []
    for metric, _ in SHOWN.values():
        column = estimates.columns[metric]
        value, half = float(column.value[position]), float(column.high[position] - column.low[position]) / 2
        if metric == "tokens_per_s":
            text = f"{value:,.0f}"
        else:
            spread = f"±{half:.0f} K" if metric.endswith("_c") else f"±{half / value:.0%}"
            text = f"{format_quantity(metric, value)} {spread}"
        cells.append(text)
    return cells


def _verdict(forecast: Forecast, position: int) -> str:
    """Says what limits a candidate, and which bounds it is expected to break."""
    limit = f"limited by {LIMITS[forecast.estimates.limited_by[position]]}"
    broken = _broken(forecast, position)
    return f"{limit}; breaks {broken}" if broken else limit


def _broken(forecast: Forecast, position: int) -> str:
    return ", ".join(f"{bound} ({risk:.0%})" for bound, risk in forecast.breaks(position).items())
