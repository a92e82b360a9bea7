"""The chart of what a strategy predicted of each trial that it proposed, against what was then measured."""

import plotly.graph_objects as go

from wattune.fidelity import is_burst
from wattune.ranking.assessment import RankedTrial
from wattune.ranking.order import Ranking
from wattune.report.figure import DASHED, FEASIBLE_COLOR, INFEASIBLE_COLOR, Chart, blank, error_bars, plain
from wattune.run import Prediction, RunStatus
from wattune.units import format_probability, with_unit
from wattune.view.decisions import predicted_text
from wattune.view.table import worded


def predictions(ranking: Ranking) -> Chart | None:
    """Draws predictions of the objective with their intervals, against the measurement that followed each.

    None where no trial that was measured in full was predicted.
    """
    metric = ranking.objective.metric
    points = [one for row in ranking.trials for one in _points(row, metric)]
    if not points:
        return None
    figure = blank()
    ends = [end for _, found, measured in points for end in (found.value, measured)]
    figure.add_scatter(
        x=[min(ends), max(ends)], y=[min(ends), max(ends)], mode="lines", line=DASHED, hoverinfo="skip", name="equal"
    )
    inside = [found.low <= measured <= found.high for _, found, measured in points]
    for within, name, color, symbol in (
        (True, "inside the interval", FEASIBLE_COLOR, "circle"),
        (False, "outside", INFEASIBLE_COLOR, "x"),
    ):
        drawn = [point for point, is_inside in zip(points, inside, strict=True) if is_inside is within]
        if drawn:
            _draw(figure, drawn, metric, name, color=color, symbol=symbol)
    figure.update_xaxes(title=f"measured {with_unit(metric)}")
    figure.update_yaxes(title=f"predicted {with_unit(metric)}")
    caption = (
        f"Each trial that the strategy proposed with a prediction, and the run that followed. {sum(inside)} of "
        f"{len(inside)} measurements are inside their 95 % interval ({sum(inside) / len(inside):.0%}). Bars are the "
        "intervals. A prediction was made before its trial ran, and uses no later result."
    )
    return Chart(title="Predicted against measured", caption=caption, figure=figure, stamp=ranking.stamp)


def _points(row: RankedTrial, metric: str) -> list[tuple[RankedTrial, Prediction, float]]:
    """Returns the predicted run of a trial, if it completed and the prediction is of the metric.

    A burst is left out: the prediction is of a full measurement, and a few steps are no outcome of it.
    """
    found = []
    for result in row.repeats:
        predicted = result.prediction
        if predicted is None or predicted.metric != metric or result.status is not RunStatus.COMPLETED:
            continue
        if metric in result.metrics and not is_burst(result):
            found.append((row, predicted, result.metrics[metric]))
    return found


def _draw(
    figure: go.Figure,
    points: list[tuple[RankedTrial, Prediction, float]],
    metric: str,
    name: str,
    *,
    color: str,
    symbol: str,
) -> None:
    """Draws points with a bar from the low to the high end of each interval."""
    figure.add_scatter(
        x=[measured for _, _, measured in points],
        y=[found.value for _, found, _ in points],
        error_y=error_bars([found for _, found, _ in points], color),
        mode="markers",
        name=name,
        marker={"color": color, "symbol": symbol, "size": 10},
        customdata=[row.trial_id for row, _, _ in points],
        hovertext=[
            plain(f"{row.spec.model.name} {row.label}")
            + f"<br>predicted {predicted_text(found, metric)}"
            + f"<br>measured {worded(metric, measured)}"
            + f"<br>P(feasible) {format_probability(found.feasible_probability)} before it ran"
            for row, found, measured in points
        ],
        hoverinfo="text",
    )
