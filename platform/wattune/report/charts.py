"""The report's charts of a whole study, from plain data. Every colour comes with a symbol, a pattern or a word."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from wattune.intervals import Interval
from wattune.objective import Constraint
from wattune.ranking.assessment import RankedTrial, Verdict
from wattune.ranking.comparison import Comparison, Waterfall
from wattune.ranking.evidence import Evidence
from wattune.ranking.order import Ranking, pareto_front
from wattune.report.figure import DASHED, Chart, axis_title, plain
from wattune.report.markup import FEASIBLE_COLOR, INFEASIBLE_COLOR, INK
from wattune.schema import METRICS
from wattune.units import format_quantity

LABELLED: Final = 10
"""Trials a scatter names; of more only the best and the front."""

PART_LOOKS: Final = {
    "compute": (FEASIBLE_COLOR, ""),
    "throttle": (INFEASIBLE_COLOR, "x"),
    "exposed_comm": ("#E69F00", "/"),
    "exposed_comm:tp": ("#E69F00", "\\"),
    "exposed_comm:cp": ("#E69F00", "-"),
    "exposed_comm:ep": ("#E69F00", "+"),
    "exposed_comm:dp": ("#E69F00", "x"),
    "exposed_comm:pp": ("#E69F00", "|"),
    "bubble": ("#56B4E9", "."),
    "straggler": ("#CC79A7", "\\"),
    "undivided": ("#9aa5b4", "|"),
    "other": ("#dfe4ea", ""),
}
"""Colour (Okabe and Ito) and pattern of a step's parts; a part of another name takes those of `exposed_comm`.
Communication by parallel axis is there where a profiled pass told it apart."""

_FALLBACK_AXES: Final = ("node_device_power_peak_1s_w", "node_device_power_mean_w", "energy_per_token_j")


def trade_off(ranking: Ranking) -> Chart | None:
    """The objective over power: what the bounds leave, what they cut off, and which trials no other beats.

    Returns:
        None without a trial that measured both.
    """
    metric = ranking.objective.metric
    across = _across(ranking)
    if across is None:
        return None
    figure, num_shown = go.Figure(), 0
    front = _front(ranking, metric, across)
    named = {row.trial_id for row in front} | {row.trial_id for row in (*ranking.feasible[:1], *ranking.infeasible[:1])}
    few = len(ranking.feasible) + len(ranking.infeasible) <= LABELLED
    if len(front) > 1:
        _draw_front(figure, front, metric, across)
    for rows, color, symbol in (
        (ranking.infeasible, INFEASIBLE_COLOR, "x"),
        (ranking.feasible, FEASIBLE_COLOR, "circle"),
    ):
        shown = [(row, x, row.objective) for row in rows if row.objective and (x := row.interval(across))]
        if not shown:
            continue
        num_shown += len(shown)
        best = [row is ranking.best for row, _, _ in shown]
        figure.add_scatter(
            x=[x.value for _, x, _ in shown],
            y=[y.value for _, _, y in shown],
            error_x=_bars([x for _, x, _ in shown], color),
            error_y=_bars([y for _, _, y in shown], color),
            mode="markers+text",
            name=str(rows[0].verdict),
            marker={
                "color": color,
                "symbol": symbol,
                "size": [17 if first else 11 for first in best],
                "opacity": 1,
                "line": {"color": "#ffffff", "width": 1},
            },
            text=[
                f"<b>{plain(row.label)}</b>" if first else plain(row.label) if few or row.trial_id in named else ""
                for (row, _, _), first in zip(shown, best, strict=True)
            ],
            textfont={"color": color, "size": 12},
            textposition="top center",
            cliponaxis=False,
            customdata=[row.trial_id for row, _, _ in shown],
            hovertext=[_hover(row, metric, across) for row, _, _ in shown],
            hoverinfo="text",
        )
    if not num_shown:
        return None
    for bound in ranking.constraints:
        _draw_bound(figure, ranking, bound, metric, across)
    figure.update_layout(margin_t=44)
    figure.update_xaxes(title=axis_title(across), automargin=True)
    figure.update_yaxes(title=axis_title(metric))
    _leave_room(figure)
    caption = (
        "Every trial that measured both. A circle keeps every bound, a cross breaks one or more; bars are 95 % "
        "intervals where scatter is known. The dotted line joins the trials no other beats in both. Click a point to "
        "find its row."
    )
    return Chart(
        title=f"{'Throughput' if metric.startswith('tokens_per_s') else metric} against "
        f"{'power' if METRICS[across].group == 'power' else across}",
        caption=caption,
        figure=figure,
        simulated=ranking.simulated,
        height=500,
    )


def step_parts(ranking: Ranking, evidence: Mapping[str, Evidence]) -> Chart | None:
    """Where a mean step's time goes, a bar for each trial there is evidence of. None without any."""
    rows = [row for row in ranking.trials if (found := evidence.get(row.trial_id)) and found.breakdown]
    if not rows:
        return None
    breakdowns = [broken for row in rows if (broken := evidence[row.trial_id].breakdown)]
    names = list(dict.fromkeys(part.name for broken in breakdowns for part in broken.parts))
    names.sort(key=[*PART_LOOKS, *names].index)
    labels = row_labels(rows)
    figure = go.Figure()
    for name in names:
        color, pattern = PART_LOOKS.get(name, PART_LOOKS["exposed_comm"])
        times_ms = [1e3 * sum(part.time_s for part in broken.parts if part.name == name) for broken in breakdowns]
        shares = [time_ms / (1e3 * broken.step_s) for time_ms, broken in zip(times_ms, breakdowns, strict=True)]
        figure.add_bar(
            y=labels,
            x=times_ms,
            orientation="h",
            name=name.replace("_", " "),
            marker={"color": color, "line": {"color": "#ffffff", "width": 1}, "pattern": _pattern(pattern)},
            hovertext=[
                f"{plain(label)}<br>{name.replace('_', ' ')}: {time_ms:.2f} ms, {100 * share:.1f} % of the step"
                for label, time_ms, share in zip(labels, times_ms, shares, strict=True)
            ],
            hoverinfo="text",
            text=[f"{100 * share:.0f} %" if share > 0.06 else "" for share in shares],
            textposition="inside",
            insidetextanchor="middle",
            textfont={"color": "#ffffff" if name in ("compute", "throttle") else INK, "size": 11},
            textangle=0,
        )
    figure.update_layout(barmode="stack", margin_t=44, bargap=0.35, legend_traceorder="normal")
    figure.update_xaxes(title="mean step [ms]")
    figure.update_yaxes(autorange="reversed", automargin=True)
    caption = (
        "The parts of a mean step add up to it. Throttle is what lost clock adds to compute at most; bubble what an "
        "ideal pipeline schedule idles; straggler is waiting for a slower rank; undivided is what spans cannot tell "
        "apart (communication inside forward and backward)."
    )
    return Chart(
        title="Where a step goes",
        caption=caption,
        figure=figure,
        simulated=ranking.simulated,
        height=150 + 46 * len(rows),
    )


def slot_temperatures(ranking: Ranking, evidence: Mapping[str, Evidence]) -> Chart | None:
    """Mean temperature by slot and trial: where a node is hot whatever runs. None without temperatures."""
    rows = [row for row in ranking.trials if row.trial_id in evidence]
    cells: dict[tuple[str, str], Mapping[str, Any]] = {}
    for row in rows:
        for slot in evidence[row.trial_id].slots.to_pylist():
            if slot["temp_mean_c"] is not None:
                number = slot["device"] if slot["slot"] is None else f"slot {slot['slot']}"
                cells[f"{slot['node']} {number}", row.trial_id] = slot
    if not cells:
        return None
    places = list(dict.fromkeys(place for place, _ in cells))
    shown = [row for row in rows if any((place, row.trial_id) in cells for place in places)]
    found = [[cells.get((place, row.trial_id)) for row in shown] for place in places]
    figure = go.Figure(
        go.Heatmap(
            x=row_labels(shown),
            y=[plain(place) for place in places],
            z=[[cell and cell["temp_mean_c"] for cell in line] for line in found],
            text=[[f"{cell['temp_mean_c']:.1f}" if cell else "" for cell in line] for line in found],
            texttemplate="%{text}",
            hovertext=[[_slot_hover(cell) if cell else "" for cell in line] for line in found],
            hoverinfo="text",
            colorscale="Cividis",
            colorbar={"title": {"text": "°C"}, "thickness": 14},
            xgap=2,
            ygap=2,
        )
    )
    figure.update_layout(margin_t=20)
    figure.update_xaxes(type="category", automargin=True)
    figure.update_yaxes(autorange="reversed", automargin=True)
    caption = (
        "Mean core temperature over the measured window. A row that stays brighter is a place in the node that cools "
        "less; where the window is short for temperatures to settle, the quality column says so."
    )
    height = 150 + 30 * len(places)
    return Chart(
        title="Temperature by slot", caption=caption, figure=figure, simulated=ranking.simulated, height=height
    )


def waterfall(comparison: Comparison) -> Chart | None:
    """How the mean step of A becomes that of B, in time and energy. None without spans on both sides."""
    drawn = [(fall, name) for fall, name in ((comparison.time, "time"), (comparison.energy, "energy")) if fall]
    if not drawn:
        return None
    titles = [f"{name} of a {fall.per} [{_unit(fall)}]" for fall, name in drawn]
    figure = make_subplots(rows=1, cols=len(drawn), subplot_titles=titles, horizontal_spacing=0.09)
    for column, (fall, _) in enumerate(drawn, start=1):
        scale = _scale(fall)
        changes = [scale * part.change for part in fall.parts]
        labels = ["A", *(part.name.replace("_", " ") for part in fall.parts), "B"]
        figure.add_waterfall(
            x=labels,
            y=[scale * fall.a, *changes, scale * fall.b],
            measure=["absolute", *["relative"] * len(changes), "total"],
            text=[f"{scale * fall.a:.4g}", *(f"{change:+.3g}" for change in changes), f"{scale * fall.b:.4g}"],
            textposition="outside",
            cliponaxis=False,
            increasing={"marker": {"color": INFEASIBLE_COLOR}},
            decreasing={"marker": {"color": FEASIBLE_COLOR}},
            totals={"marker": {"color": "#566172"}},
            connector={"line": {"color": "#8a94a3", "width": 1}},
            hoverinfo="x+y",
            showlegend=False,
            row=1,
            col=column,
        )
        wholes = [scale * fall.a, scale * fall.b]
        steps = [scale * fall.a]
        for change in changes:
            steps.append(steps[-1] + change)
        low, high = min(*steps, *wholes), max(*steps, *wholes)
        # The changes are small beside the wholes: the axis begins above 0, as its ticks and the caption say.
        figure.update_yaxes(range=[max(0.0, low - 0.6 * (high - low)), high + 0.15 * (high - low)], row=1, col=column)
    figure.update_layout(margin_t=36)
    figure.update_xaxes(tickangle=-35, automargin=True)
    caption = (
        f"A is {comparison.a.label}, B is {comparison.b.label}. {comparison.conclusion}. Parts that grow from A to B "
        f"rise, parts that shrink fall; they add up exactly. The axes do not begin at 0. {_shares(drawn)}"
    )
    simulated = comparison.a.simulated or comparison.b.simulated
    return Chart(title="What makes the difference", caption=caption, figure=figure, simulated=simulated, height=460)


def _shares(falls: Sequence[tuple[Waterfall, str]]) -> str:
    """Which part of each change is whose, in words."""
    said = []
    for fall, name in falls:
        shares = {part.name.replace("_", " "): fall.share_frac(part) for part in fall.parts if part.change}
        known = {part: share for part, share in shares.items() if share is not None}
        if known:
            listed = ", ".join(f"{part} {100 * share:+.0f} %".replace("-", "−") for part, share in known.items())
            said.append(f"Of the change in {name}: {listed}.")
        elif shares:
            said.append(f"In {name} the parts' changes cancel out: no part is a share of what is left.")
    return " ".join(said)


def _across(ranking: Ranking) -> str | None:
    """The metric the objective is drawn over: a bounded power, else what is bounded first, else power itself."""
    bounded = [bound.metric for bound in ranking.constraints if bound.metric != ranking.objective.metric]
    powers = [name for name in bounded if METRICS[name].group == "power"]
    wanted = [*powers, *bounded, *_FALLBACK_AXES]
    rows = (*ranking.feasible, *ranking.infeasible)
    return next((name for name in wanted if any(row.objective and row.interval(name) for row in rows)), None)


def _front(ranking: Ranking, metric: str, across: str) -> list[RankedTrial]:
    if "none" in (METRICS[metric].better, METRICS[across].better):
        return []
    return pareto_front((*ranking.feasible, *ranking.infeasible), metric, across)


def _draw_front(figure: go.Figure, front: Sequence[RankedTrial], metric: str, across: str) -> None:
    points = [(x.value, y.value) for row in front if (x := row.interval(across)) and (y := row.interval(metric))]
    points.sort()
    figure.add_scatter(
        x=[x for x, _ in points],
        y=[y for _, y in points],
        mode="lines",
        name="Pareto front",
        line={"color": "#566172", "dash": "dot", "width": 1.5, "shape": "hv"},
        hoverinfo="skip",
    )


def _draw_bound(figure: go.Figure, ranking: Ranking, bound: Constraint, metric: str, across: str) -> None:
    """A line where a bound is one number for all; one that is a share of another metric may differ by trial."""
    at = {margin.bound for row in ranking.trials for margin in row.margins if margin.constraint == str(bound)}
    if len(at) != 1 or bound.metric not in (metric, across):
        return
    (value,) = at
    text = plain(str(bound))
    if bound.metric == across:
        figure.add_vline(x=value, line=DASHED)
        label = {"bgcolor": "rgba(255,255,255,0.85)", "font": {"size": 12}}
        figure.add_annotation(x=value, y=0.02, yref="paper", yanchor="bottom", showarrow=False, text=text, **label)
    else:
        figure.add_hline(y=value, line=DASHED, annotation={"text": text}, annotation_position="top left")


def _leave_room(figure: go.Figure) -> None:
    """Wider axes than the points need, so that their names are whole."""
    for axis, values in (
        ("xaxis", [x for trace in figure.data for x in trace.x]),
        ("yaxis", [y for trace in figure.data for y in trace.y]),
    ):
        lines = [line[f"{axis[0]}0"] for line in figure.layout.shapes if line[f"{axis[0]}0"] == line[f"{axis[0]}1"]]
        low, high = min([*values, *lines]), max([*values, *lines])
        room = 0.14 * ((high - low) or abs(high) or 1.0)
        figure.layout[axis].range = [low - room, high + room]


def _hover(row: RankedTrial, metric: str, across: str) -> str:
    parts = [f"<b>{plain(row.label)}</b> {row.trial_id}"]
    parts += [plain(text) for text in (row.study, row.spec.model.name, row.spec.cluster.label) if text]
    for name in (metric, across):
        if found := row.interval(name):
            parts.append(f"{name}: {found.shown(name)}")
    parts.append(f"{row.quality or 'not judged'}{', simulated' if row.simulated else ''}")
    parts.append(plain(row.reason) if row.reason else "keeps every bound")
    return "<br>".join(parts)


def _bars(intervals: Sequence[Interval], color: str) -> dict[str, Any]:
    """Error bars over each interval; of no length where nothing tells how the figure scatters."""
    above = [found.high - found.value for found in intervals]
    below = [found.value - found.low for found in intervals]
    return {"type": "data", "symmetric": False, "array": above, "arrayminus": below, "color": color, "thickness": 1}


def _pattern(shape: str) -> dict[str, Any]:
    return {"shape": shape, "fillmode": "overlay", "fgcolor": "#ffffff", "solidity": 0.2, "size": 7}


def row_labels(rows: Sequence[RankedTrial]) -> list[str]:
    """A name for every trial that no other of them has: its plan, and what else tells them apart."""
    reads: list[Callable[[RankedTrial], str]] = [
        lambda row: row.study,
        lambda row: row.spec.model.name,
        lambda row: row.spec.cluster.label,
        lambda row: row.spec.engine,
    ]
    told = [read for read in reads if len({read(row) for row in rows}) > 1]
    names = [" ".join([row.label, *(read(row) for read in told)]) for row in rows]
    marks = [f"#{row.rank} " if row.rank else "✕ " if row.verdict is Verdict.INFEASIBLE else "" for row in rows]
    counts = Counter(names)
    return [
        plain(f"{mark}{name}" if counts[name] == 1 else f"{mark}{name} {row.trial_id}")
        for mark, name, row in zip(marks, names, rows, strict=True)
    ]


def _slot_hover(slot: Mapping[str, Any]) -> str:
    units = {"temp_mean_c": "mean", "temp_max_c": "highest", "memory_temp_max_c": "memory highest"}
    units |= {"power_mean_w": "mean power", "power_peak_1s_w": "1 s peak power", "clock_deficit_frac": "clock lost"}
    known = [f"{words}: {format_quantity(name, slot[name])}" for name, words in units.items() if slot[name] is not None]
    return "<br>".join([f"<b>{plain(str(slot['node']))} {plain(str(slot['device']))}</b>", *known])


def _unit(fall: Waterfall) -> str:
    return "ms" if fall.unit == "s" and fall.per == "step" else fall.unit


def _scale(fall: Waterfall) -> float:
    return 1e3 if _unit(fall) == "ms" else 1.0
