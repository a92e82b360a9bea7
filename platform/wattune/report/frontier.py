"""The chart of what a bound costs: the best measured plan at each value of it, and beside it what is only predicted."""

from collections.abc import Sequence
from typing import Final

import plotly.graph_objects as go

from wattune.intervals import Interval
from wattune.ranking.assessment import RankedTrial
from wattune.ranking.frontier import Frontier, FrontierPoint, PredictedPlan
from wattune.report.figure import FEASIBLE_COLOR, INFEASIBLE_COLOR, Chart, blank, error_bars, plain
from wattune.run import Prediction
from wattune.units import format_probability, with_unit
from wattune.view.decisions import predicted_text
from wattune.view.table import worded

PREDICTED_COLOR: Final = "#CC79A7"
"""Colour of what was never measured (Okabe and Ito)."""


def frontier_chart(found: Frontier) -> Chart | None:
    """Draws the best plan at each value of a bound. None where no value has one that was measured."""
    best = [(point, point.best) for point in found.points if point.best is not None and point.best.objective]
    undecided = [(point, point.undecided) for point in found.points if point.undecided and point.undecided.objective]
    if not best and not undecided:
        return None
    metric, figure = found.objective.metric, blank()
    predicted = [(point, one, _predicted_text(one, metric)) for point in found.points if (one := point.predicted)]
    if predicted:
        _draw(figure, predicted, "predicted, never measured", color=PREDICTED_COLOR, symbol="diamond-open", size=10)
    for name, color, symbol, pairs in (
        ("measured, undecided", INFEASIBLE_COLOR, "circle-open", undecided),
        ("measured, holds every bound", FEASIBLE_COLOR, "circle", best),
    ):
        measured = [(point, row.objective, _measured_text(point, row, metric)) for point, row in pairs if row.objective]
        if measured:
            _draw(figure, measured, name, color=color, symbol=symbol, size=11)
            figure.data[-1].customdata = [row.trial_id for _, row in pairs]
    if best:
        figure.data[-1].update(mode="lines+markers", line={"color": FEASIBLE_COLOR, "shape": "hv", "width": 2})
    bound = found.varied.bound
    limit = f" * {bound.limit_metric}" if bound.limit_metric else ""
    figure.update_xaxes(title=f"{with_unit(bound.metric)} {bound.operator} ...{limit}")
    figure.update_yaxes(title=with_unit(metric))
    caption = (
        "The best measured plan at each value of the bound, all others as they are. A ring is a trial that measured "
        "better and whose bounds the runs do not decide. Diamonds were never measured in full: of the plans that are "
        "likely to hold every bound, the one that the study's surrogates predict to be best, with its 95 % interval."
    )
    return Chart(title="Price of the bound", caption=caption, figure=figure, stamp=found.stamp, height=460)


def _draw(
    figure: go.Figure,
    points: Sequence[tuple[FrontierPoint, Interval | Prediction, str]],
    name: str,
    *,
    color: str,
    symbol: str,
    size: int,
) -> None:
    """Draws figures with their intervals by bound; beside each stands the text that hovers over it."""
    figure.add_scatter(
        x=[point.bound.factor for point, _, _ in points],
        y=[one.value for _, one, _ in points],
        error_y=error_bars([one for _, one, _ in points], color),
        mode="markers",
        marker={"color": color, "symbol": symbol, "size": size},
        name=name,
        hovertext=[f"{plain(str(point.bound))}<br>{text}" for point, _, text in points],
        hoverinfo="text",
    )


def _measured_text(point: FrontierPoint, row: RankedTrial, metric: str) -> str:
    found = point.margin(row)
    lines = [
        plain(f"{row.spec.model.name} {row.label}"),
        f"measured {worded(metric, row.objective)}",
    ]
    if found is not None and found.holds_probability is not None:
        got = worded(point.bound.metric, found.got)
        lines.append(f"{point.bound.metric} {got}, P(holds) {format_probability(found.holds_probability)}")
    if row.best_probability is not None:
        lines.append(f"P(best) {format_probability(row.best_probability)}")
    return "<br>".join(lines)


def _predicted_text(one: PredictedPlan, metric: str) -> str:
    lines = [
        plain(f"{one.spec.model.name} {one.label}"),
        f"predicted {predicted_text(one, metric)}, never measured",
        f"P(feasible) {format_probability(one.feasible_probability)}",
    ]
    if one.better_probability is not None:
        lines.append(f"P(better than the measured best) {format_probability(one.better_probability)}")
    return "<br>".join(lines)
