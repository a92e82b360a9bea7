"""The chart of a race of finalists: P(best) over its repeats, computed anew from the stored results."""

from typing import Any, Final

import plotly.graph_objects as go

from wattune.ranking.order import Ranking
from wattune.ranking.posterior import history
from wattune.report.figure import DASHED, FEASIBLE_COLOR, INFEASIBLE_COLOR, Chart, blank, plain
from wattune.units import format_probability

MOST_LINES: Final = 6
"""Most trials that are drawn: those that were ever the most likely ones."""

_LOOKS: Final = (
    (FEASIBLE_COLOR, "solid", "circle"),
    ("#E69F00", "dash", "square"),
    ("#56B4E9", "dot", "diamond"),
    ("#CC79A7", "dashdot", "triangle-up"),
    ("#8a94a3", "longdash", "cross"),
    ("#566172", "longdashdot", "star"),
)
"""Colour (Okabe and Ito), dash and marker of each line."""


def race(ranking: Ranking) -> Chart | None:
    """Draws P(best) of the most likely trials after each repeat of the race. None without a race."""
    runs = [(row.spec, result) for row in ranking.trials for result in row.repeats]
    untils = {until for _, result in runs if (until := result.numbers.race_until_probability) is not None}
    if not untils or ranking.studies:
        return None
    moments = history(runs, ranking.question)
    likely = [{key: one for (_, key), one in found.likely.items()} for _, found in moments]
    names = {row.trial_id: plain(f"{row.spec.model.name} {row.label}") for row in ranking.trials}
    peaks = {trial_id: max(one.get(trial_id, 0.0) for one in likely) for one in likely for trial_id in one}
    drawn = sorted(peaks, key=lambda trial_id: (-likely[-1].get(trial_id, 0.0), -peaks[trial_id], trial_id))
    repeats = [number for number, _ in moments]
    figure = blank()
    for trial_id, (color, dash, symbol) in zip(drawn[:MOST_LINES], _LOOKS, strict=False):
        values = [one.get(trial_id, 0.0) for one in likely]
        _draw(figure, repeats, values, names[trial_id], color=color, dash=dash, symbol=symbol)
    nobody = [found.none_probability for _, found in moments]
    if max(nobody) >= 0.01:
        _draw(figure, repeats, nobody, "none keeps every bound", color=INFEASIBLE_COLOR, dash="dot", symbol="x")
    for until in sorted(untils):
        figure.add_hline(
            y=until, line=DASHED, annotation={"text": f"told apart at {until:g}"}, annotation_position="top left"
        )
    figure.update_xaxes(title="repeats of the race", rangemode="tozero")
    figure.update_yaxes(title="P(best)", range=[0.0, 1.08])
    caption = (
        "The probability that a trial is the best of those that keep every bound, after each repeat of the race. It is "
        "computed anew from the results that were there, with objective and bounds uncertain. A trial that is not "
        "feasible yet can be the best here; in the table it has no P(best)."
    )
    return Chart(title="Race of finalists", caption=caption, figure=figure, stamp=ranking.stamp, height=420)


def _draw(figure: go.Figure, x: list[int], y: list[float], name: str, *, color: str, dash: str, symbol: str) -> None:
    """Draws one line with a marker at each repeat."""
    look: dict[str, Any] = {"color": color, "dash": dash, "width": 2}
    figure.add_scatter(
        x=x,
        y=y,
        mode="lines+markers",
        name=name,
        line=look,
        marker={"color": color, "symbol": symbol, "size": 8},
        hovertext=[
            f"{name}<br>P(best) {format_probability(value)} after {number} repeats"
            for number, value in zip(x, y, strict=True)
        ],
        hoverinfo="text",
    )
