"""Node power over time above the step timeline, with excursions marked."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from wattune.analysis.detail import Detail
from wattune.arrays import Floats, envelope
from wattune.ranking.assessment import RankedTrial, Verdict
from wattune.ranking.order import Ranking
from wattune.report.figure import DASHED, FEASIBLE_COLOR, INFEASIBLE_COLOR, Chart, blank, plain

MAX_TRACE_PARTS: Final = 1500
"""Parts of a long trace; two samples of each are drawn, more than a screen has columns."""

_LIMIT: Final = "node_device_power_w"
"""Name of the hard limit that is drawn, under `limits` of a search space."""

_STEP_COLORS: Final = ("#8a94a3", "#dfe4ea")
_EXCURSION_COLOR: Final = "#CC79A7"


def power(
    ranking: Ranking, rows: Sequence[RankedTrial], evidence: Mapping[str, Detail], limits: Mapping[str, float]
) -> Chart | None:
    """Draws node power of some trials over time with every bound on it, and beneath each its steps and excursions.

    Trials without power are left out. None without a trace.
    """
    shown = [
        (row, found, node) for row in rows if (found := evidence.get(row.trial_id)) and (node := found.highest_node)
    ]
    if not shown:
        return None
    titles = [text for row, _, node in shown for text in (f"{row.verdict}: {plain(row.label)} on {plain(node)}", "")]
    figure = make_subplots(
        rows=2 * len(shown),
        shared_xaxes=True,
        subplot_titles=titles,
        row_heights=[0.78, 0.22] * len(shown),
        vertical_spacing=0.055,
        figure=blank(),
    )
    bounds = _bounds(ranking, limits)
    reach = _reach(shown, [bound_w for bound_w, _ in bounds])
    for number, (row, found, node) in enumerate(shown):
        top, strip = 2 * number + 1, 2 * number + 2
        excursions = [one for one in found.excursions.to_pylist() if one["node"] == node]
        _draw_power(figure, row, found.power_w[node], bounds, excursions, top)
        _draw_strip(figure, found, excursions, strip)
        figure.update_yaxes(title="node power [W]", range=reach, row=top, col=1)
        figure.update_yaxes(
            tickvals=[0, 1], ticktext=["excursions", "steps"], range=[-0.6, 1.6], showgrid=False, row=strip, col=1
        )
    figure.update_annotations(selector={"yanchor": "bottom", "xanchor": "center"}, x=0, xanchor="left", align="left")
    figure.update_layout(margin_t=32, bargap=0.2, barmode="overlay")
    figure.update_xaxes(title="time from the first measured step [s]", row=2 * len(shown), col=1)
    caption = (
        "Sum of a node's devices in means of 100 ms, on the node with the highest peak. Beneath it are all measured "
        "steps, and excursions of single devices: from a 100 ms mean above 1.05 of a device's enforced limit until one "
        "below 1.00 of it. Power above a bound on a 1 s peak for less than a second may still keep it. Drag to zoom "
        "in, double-click to return."
    )
    return Chart(
        title="Power against the step timeline",
        caption=caption,
        figure=figure,
        stamp=ranking.stamp,
        height=120 + 330 * len(shown),
    )


def _bounds(ranking: Ranking, limits: Mapping[str, float]) -> list[tuple[float, str]]:
    """Returns watts and text of every bound on node power, the hard limit last."""
    own = [bound for bound in ranking.constraints if bound.limit_metric is None]
    found = [(bound.factor, str(bound)) for bound in own if bound.metric.startswith("node_device_power_")]
    return found + ([(limits[_LIMIT], f"hard limit, {_LIMIT} {limits[_LIMIT]:g}")] if _LIMIT in limits else [])


def _reach(shown: Sequence[tuple[RankedTrial, Detail, str]], bounds_w: Sequence[float]) -> list[float]:
    """Returns the range of an axis that shows every trace and every bound."""
    powers_w = [found.power_w[node][1] for _, found, node in shown]
    reach = [*bounds_w, *(float(end) for power_w in powers_w for end in (power_w.min(), power_w.max()))]
    room = 0.1 * ((max(reach) - min(reach)) or 1.0)
    return [min(reach) - room, max(reach) + room]


def _draw_power(
    figure: go.Figure,
    trial: RankedTrial,
    trace: tuple[Floats, Floats],
    bounds: Sequence[tuple[float, str]],
    excursions: Sequence[Mapping[str, Any]],
    row: int,
) -> None:
    """Draws one node's power with the bounds on it, excursions shaded."""
    time_s, power_w = envelope(*trace, MAX_TRACE_PARTS)
    color = FEASIBLE_COLOR if trial.verdict is Verdict.FEASIBLE else INFEASIBLE_COLOR
    figure.add_scatter(
        x=time_s,
        y=power_w,
        mode="lines",
        line={"color": color, "width": 1.2},
        showlegend=False,
        hovertemplate="%{x:.2f} s, %{y:.0f} W<extra></extra>",
        row=row,
        col=1,
    )
    for bound_w, text in bounds:
        label = {"text": plain(text), "bgcolor": "rgba(255,255,255,0.8)", "font": {"size": 12}}
        figure.add_hline(y=bound_w, line=DASHED, annotation=label, annotation_position="top right", row=row, col=1)
    axes = figure.data[-1]
    marked = {"type": "rect", "fillcolor": _EXCURSION_COLOR, "opacity": 0.25, "line": {"width": 0}, "y0": 0, "y1": 1}
    marked |= {"xref": axes.xaxis, "yref": f"{axes.yaxis} domain"}
    shaded = [{**marked, "x0": start_s, "x1": end_s} for start_s, end_s in _joined(excursions)]
    # All at once: plotly copies every shape of the figure each time that one is added.
    figure.layout.shapes = (*figure.layout.shapes, *shaded)


def _draw_strip(figure: go.Figure, found: Detail, excursions: Sequence[Mapping[str, Any]], row: int) -> None:
    """Draws steps as a band of alternating bars, and excursions as another."""
    start_s, time_s = (found.steps[name].to_numpy() for name in ("start_s", "time_s"))
    figure.add_bar(
        x=time_s,
        base=start_s,
        y=[1] * len(start_s),
        orientation="h",
        width=0.7,
        marker={"color": [_STEP_COLORS[number % 2] for number in range(len(start_s))], "line": {"width": 0}},
        hovertext=[f"step {number}: {1e3 * each:.1f} ms" for number, each in enumerate(time_s.tolist())],
        hoverinfo="text",
        showlegend=False,
        row=row,
        col=1,
    )
    figure.add_bar(
        x=[one["end_s"] - one["start_s"] for one in excursions],
        base=[one["start_s"] for one in excursions],
        y=[0] * len(excursions),
        orientation="h",
        width=0.7,
        marker={"color": _EXCURSION_COLOR, "line": {"width": 0}},
        hovertext=[
            f"{plain(str(one['device']))}: up to {one['peak_w']:.0f} W over a limit of {one['limit_w']:.0f} W, "
            f"{one['energy_j']:.1f} J above it"
            for one in excursions
        ],
        hoverinfo="text",
        showlegend=False,
        row=row,
        col=1,
    )


def _joined(excursions: Sequence[Mapping[str, Any]]) -> list[tuple[float, float]]:
    """Returns start and end of excursions of any device, with overlapping ones joined."""
    joined: list[tuple[float, float]] = []
    for start_s, end_s in sorted((one["start_s"], one["end_s"]) for one in excursions):
        if joined and start_s <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(end_s, joined[-1][1])
        else:
            joined.append((start_s, end_s))
    return joined
