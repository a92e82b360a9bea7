"""The report's charts, drawn by plotly from plain data. Every colour comes with a symbol or a word."""

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

import numpy as np
import plotly.graph_objects as go
from numpy.typing import NDArray
from plotly.offline import get_plotlyjs
from plotly.subplots import make_subplots

from wattune.objective import Constraint
from wattune.ranking import Interval, Ranking, Verdict
from wattune.report.markup import FEASIBLE_COLOR, FONT, INFEASIBLE_COLOR, INK, LINE, Html, fill, section
from wattune.schema import METRICS

MAX_TRACE_PARTS: Final = 1500
"""Parts a long trace is cut into; two samples of each are drawn, more than a screen has columns."""

_LIMIT: Final = "node_device_power_w"
"""The hard limit that is drawn, by its name under `limits` of a search space."""

_DASHED: Final = {"dash": "dash", "color": INK, "width": 1.5}
_AXIS: Final = {"gridcolor": LINE, "zeroline": False, "linecolor": "#8a94a3", "ticks": "outside"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """One node's power over time."""

    time_s: NDArray[np.floating[Any]]
    """Seconds, ascending, shape (n,)."""
    node_power_w: NDArray[np.floating[Any]]
    """Sum over the node's devices, shape (n,)."""


def script() -> Html:
    """The whole of plotly.js, so that charts need no network."""
    return fill("<script>{}</script>", Html(get_plotlyjs()))


def trade_off(ranking: Ranking) -> Html | None:
    """Objective over the first constraint's metric: what the bound leaves, and what it cuts off.

    Returns:
        None without a constraint, or without a trial that measured both.
    """
    if not ranking.constraints:
        return None
    bound, metric = ranking.constraints[0], ranking.objective.metric
    figure = go.Figure()
    for rows, color, symbol in (
        (ranking.infeasible, INFEASIBLE_COLOR, "x"),
        (ranking.feasible, FEASIBLE_COLOR, "circle"),
    ):
        shown = [(row, x, row.objective) for row in rows if (x := row.interval(bound.metric)) and row.objective]
        if not shown:
            continue
        xs = [x.high if bound.operator.startswith("<") else x.low for _, x, _ in shown]
        ys = [y.low if ranking.objective.maximize else y.high for _, _, y in shown]
        figure.add_scatter(
            x=xs,
            y=ys,
            error_x=_bars(xs, [x for _, x, _ in shown], color),
            error_y=_bars(ys, [y for _, _, y in shown], color),
            mode="markers+text",
            name=str(rows[0].verdict),
            marker={
                "color": color,
                "symbol": symbol,
                "size": [17, *[10] * (len(shown) - 1)],
                "opacity": 1,
                "line": {"color": "#ffffff", "width": 1},
            },
            text=[f"<b>{_plain(shown[0][0].label)}</b>"],
            textfont={"color": color},
            textposition="top center",
            hovertext=[f"{_plain(row.label)}<br>{_plain(row.reason or 'keeps every bound')}" for row, _, _ in shown],
            hoverinfo="text+x+y",
        )
    if not figure.data:
        return None
    bounds = {margin.bound for row in ranking.trials for margin in row.margins if margin.constraint == str(bound)}
    if len(bounds) == 1:  # a bound that is a share of another metric may differ by trial: no one line is right
        (at,) = bounds
        figure.add_vline(x=at, line=_DASHED)
        figure.add_annotation(x=at, y=1, yref="paper", yanchor="bottom", showarrow=False, text=_plain(str(bound)))
    figure.update_layout(margin_t=64)
    figure.update_xaxes(title=_axis_title(bound.metric))
    figure.update_yaxes(title=_axis_title(metric))
    caption = (
        "Every trial that measured both, at its worst repeat, with bars to its best. A circle keeps every bound, a "
        "cross breaks one or more."
    )
    return _chart(figure, "What the first bound leaves", caption, ranking.simulated)


def power(ranking: Ranking, traces: Mapping[str, Trace], limits: Mapping[str, float]) -> Html | None:
    """Node power over time, with every bound on it.

    Args:
        ranking: Where the traces' trials stand.
        traces: By trial id.
        limits: Hard limits by metric name.

    Returns:
        None without a trace.
    """
    if not traces:
        return None
    rows = {row.trial_id: row for row in ranking.trials}
    titles = [f"{rows[trial_id].verdict}: {_plain(rows[trial_id].label)}" for trial_id in traces]
    figure = make_subplots(
        rows=len(traces), shared_xaxes=True, shared_yaxes="all", subplot_titles=titles, vertical_spacing=0.09
    )
    for number, (trial_id, trace) in enumerate(traces.items(), start=1):
        time_s, power_w = envelope(trace)
        color = FEASIBLE_COLOR if rows[trial_id].verdict is Verdict.FEASIBLE else INFEASIBLE_COLOR
        figure.add_scatter(
            x=time_s, y=power_w, mode="lines", line={"color": color, "width": 1}, showlegend=False, row=number, col=1
        )
    figure.update_annotations(x=0, xanchor="left", font={"size": 13})
    lines = [(bound.factor, str(bound), "right") for bound in ranking.constraints if _bounds_node_power(bound)]
    lines += [(limits[_LIMIT], f"hard limit, {_LIMIT} {limits[_LIMIT]:g}", "left")] if _LIMIT in limits else []
    for bound_w, text, side in lines:
        label = {"text": _plain(text), "bgcolor": "rgba(255,255,255,0.8)", "font": {"size": 12}}
        figure.add_hline(y=bound_w, line=_DASHED, annotation=label, annotation_position=f"top {side}")
    figure.update_layout(margin_t=28)
    figure.update_xaxes(title="time [s]", row=len(traces))
    figure.update_yaxes(title="node device power [W]")
    caption = (
        "The finest samples there are, summed over the devices of the node with the highest peak. Single samples may "
        "pass a bound on a mean over time, such as a 1 s peak, that is kept."
    )
    return _chart(figure, "Node power over time", caption, ranking.simulated, height=150 + 250 * len(traces))


def temperatures(ranking: Ranking, temperatures_c: Mapping[str, float]) -> Html | None:
    """Mean temperature by device slot: where the node is hot. None without any."""
    if not temperatures_c:
        return None
    values = list(temperatures_c.values())
    shown = [f"{value:.1f}" for value in values]
    figure = go.Figure(go.Bar(x=[*map(_plain, temperatures_c)], y=values, text=shown, marker_color=FEASIBLE_COLOR))
    figure.update_layout(margin_t=12, bargap=0.6)
    figure.update_xaxes(title="device slot", type="category")
    figure.update_yaxes(title="mean temperature [°C]", rangemode="tozero")
    caption = "Mean over the measured window of the best feasible trial."
    return _chart(figure, "Temperature by slot", caption, ranking.simulated, height=320)


def envelope(trace: Trace) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The trace, or of a long one the least and largest sample of each of many parts, so that peaks stay.

    Returns:
        Seconds and watts, at most `2 * MAX_TRACE_PARTS` of each.
    """
    time_s, power_w = (np.asarray(values, dtype=np.float64) for values in (trace.time_s, trace.node_power_w))
    if len(time_s) <= 2 * MAX_TRACE_PARTS:
        return time_s, power_w
    parts = list(pairwise(np.linspace(0, len(time_s), MAX_TRACE_PARTS + 1, dtype=int)))
    kept = np.unique([start + pick(power_w[start:stop]) for start, stop in parts for pick in (np.argmin, np.argmax)])
    return time_s[kept], power_w[kept]


def _chart(figure: go.Figure, title: str, caption: str, simulated: bool, height: int = 440) -> Html:
    figure.update_layout(
        template="none",
        font={"family": FONT, "size": 13, "color": INK},
        margin={"l": 78, "r": 20, "b": 56},
        height=height,
        legend={"orientation": "h", "y": 1.07, "yanchor": "bottom", "x": 0},
    )
    figure.update_xaxes(**_AXIS, title_standoff=12)
    figure.update_yaxes(**_AXIS, title_standoff=12)
    if simulated:
        stamp = {"size": 64, "color": "rgba(179,71,0,0.16)"}
        figure.add_annotation(
            text="SIMULATED", xref="paper", yref="paper", x=0.5, y=0.5, textangle=-18, font=stamp, showarrow=False
        )
    name = "chart-" + "-".join(title.lower().split())
    config = {"displayModeBar": False, "responsive": True}
    drawn = figure.to_html(full_html=False, include_plotlyjs=False, div_id=name, config=config)
    return section(
        title,
        fill('<figure><div role="img" aria-label="{}">{}</div>', f"{title}. {caption}", Html(drawn)),
        fill("<figcaption>{}</figcaption></figure>", caption),
    )


def _plain(text: str) -> str:
    """Text that plotly draws as it is: it reads some HTML in whatever it draws."""
    return html.escape(text, quote=False)


def _axis_title(metric: str) -> str:
    unit = METRICS[metric].unit
    return metric if unit in (None, "1") else f"{metric} [{unit}]"


def _bars(points: Sequence[float], intervals: Sequence[Interval], color: str) -> dict[str, Any]:
    """Error bars over each interval; of no length where a trial ran once."""
    above = [interval.high - point for point, interval in zip(points, intervals, strict=True)]
    below = [point - interval.low for point, interval in zip(points, intervals, strict=True)]
    return {"type": "data", "symmetric": False, "array": above, "arrayminus": below, "color": color, "thickness": 1}


def _bounds_node_power(bound: Constraint) -> bool:
    return bound.metric.startswith("node_device_power_") and bound.limit_metric is None
