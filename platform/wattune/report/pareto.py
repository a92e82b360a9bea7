"""The chart of the objective over power: trials, bounds, the Pareto front, and names that cover nothing."""

import html
import math
from collections.abc import Sequence
from typing import Final

import plotly.graph_objects as go

from wattune.intervals import Interval
from wattune.metrics import METRICS
from wattune.objective import Constraint
from wattune.ranking.assessment import RankedTrial
from wattune.ranking.order import Ranking, pareto_front
from wattune.report.figure import DASHED, FEASIBLE_COLOR, INFEASIBLE_COLOR, Chart, blank, error_bars, plain
from wattune.units import with_unit
from wattune.view.table import worded

LABELLED: Final = 10
"""Most trials that a scatter labels: of more, the best by verdict, and the front at even distances."""

MOST_DRAWN: Final = 500
"""Most trials of a verdict that a scatter draws, the best first: more of them cover one another."""

PLOT_PX: Final = (840.0, 400.0)
"""Pixels between the axes of an image."""

BESIDE_PX: Final = (480.0, 320.0)
"""The same on a page where names are shown: at least so many beside the answer, on a window of 1,240 pixels."""

_MOST_BAR: Final = 0.5
"""Most room that intervals take beyond the points, of the width between the outermost ones."""

_FALLBACK_AXES: Final = ("node_device_power_peak_1s_w", "node_device_power_mean_w", "energy_per_token_j")

CHAR_WIDTH_PX: Final = 7.2
"""Width of a character at `FONT_PX`: 0.6 em, as in DejaVu Sans, the widest font of the page's list."""
BOLD_CHAR_WIDTH_PX: Final = 8.3
"""The same in bold: 0.69 em."""
FONT_PX: Final = 12
_LINE_PX: Final = 15
_POINT_PX: Final = 9
"""Half the width of the greatest marker."""

_SIDES: Final = (
    ("top center", 0, -1),
    ("bottom center", 0, 1),
    ("middle right", 1, 0),
    ("middle left", -1, 0),
    ("top right", 1, -1),
    ("top left", -1, -1),
    ("bottom right", 1, 1),
    ("bottom left", -1, 1),
)
"""Plotly's names of places beside a point, in the order they are tried, and their directions."""

Box = tuple[float, float, float, float]
"""Left, top, right and bottom in pixels."""


def pareto(ranking: Ranking, plot_px: tuple[float, float] = PLOT_PX) -> Chart | None:
    """Draws the objective over power: feasible and infeasible trials, the bounds, and the Pareto front.

    Names are placed in so many pixels between the axes. None without a trial that measured both.
    """
    metric, across = ranking.objective.metric, _across(ranking)
    if across is None:
        return None
    figure = blank()
    turned = "none" not in (METRICS[metric].better, METRICS[across].better)
    front = pareto_front(ranking.compared, metric, across) if turned else []
    if len(front) > 1:
        _draw_front(figure, front, metric, across)
    labelled, on_front = _labelled(ranking, front), set(map(id, front))
    kinds = ranking.infeasible, ranking.undecided + ranking.behind, ranking.feasible
    colors, symbols = (INFEASIBLE_COLOR, INFEASIBLE_COLOR, FEASIBLE_COLOR), ("x", "circle-open", "circle")
    for rows, color, symbol in zip(kinds, colors, symbols, strict=True):
        drawn = [row for place, row in enumerate(rows) if place < MOST_DRAWN or id(row) in on_front]
        if points := [(row, x, row.objective) for row in drawn if row.objective and (x := row.interval(across))]:
            names = {id(row): plain(row.label) for row, _, _ in points if row.trial_id in labelled}
            names |= {id(row): f"<b>{plain(row.label)}</b>" for row, _, _ in points if row is ranking.best}
            texts = [names.get(id(row), "") for row, _, _ in points]
            hovers = [_hover(row, metric, across) for row, _, _ in points]
            _draw_trials(figure, points, texts, hovers, color=color, symbol=symbol)
    for bound in ranking.constraints:
        _draw_bound(figure, ranking, bound, metric, across)
    figure.update_xaxes(title=with_unit(across), automargin=True)
    figure.update_yaxes(title=with_unit(metric))
    _leave_room(figure)
    _place_bounds(figure)
    _place_names(figure, [str(bound) for bound in ranking.constraints if bound.metric == across], plot_px)
    which = f"The best {MOST_DRAWN} of each kind and the front" if max(map(len, kinds)) > MOST_DRAWN else "Every trial"
    caption = (
        f"{which} that measured both. A circle keeps every bound, a cross breaks at least one, and of a ring the "
        "runs do not decide it. Bars are 95 % intervals. The dotted line joins the trials that no other beats in both. "
        "Point at a trial for its name and figures; click it to find its row."
    )
    return Chart(
        title=f"{'Throughput' if metric.startswith('tokens_per_s') else metric} against "
        f"{'power' if METRICS[across].group == 'power' else across}",
        caption=caption,
        figure=figure,
        stamp=ranking.stamp,
        height=430,
    )


def _across(ranking: Ranking) -> str | None:
    """Returns the metric of the x axis: a bounded power, else the first bounded metric, else a power."""
    bounded = [bound.metric for bound in ranking.constraints if bound.metric != ranking.objective.metric]
    powers = [name for name in bounded if METRICS[name].group == "power"]
    wanted = [*powers, *bounded, *_FALLBACK_AXES]
    return next(
        (name for name in wanted if any(row.objective and row.interval(name) for row in ranking.compared)), None
    )


def _labelled(ranking: Ranking, front: Sequence[RankedTrial]) -> set[str]:
    """Returns ids of the trials that get a label: all if they are few, else the best by verdict and the front."""
    shown = ranking.compared
    if len(shown) > LABELLED:
        best = {
            row.trial_id: row for rows in (ranking.feasible, ranking.undecided, ranking.infeasible) for row in rows[:1]
        }
        others = [row for row in front if row.trial_id not in best]
        most = LABELLED - len(best)
        if len(others) > most:
            others = [others[round(number * (len(others) - 1) / (most - 1))] for number in range(most)]
        shown = (*best.values(), *others)
    return {row.trial_id for row in shown}


def _draw_trials(
    figure: go.Figure,
    points: Sequence[tuple[RankedTrial, Interval, Interval]],
    texts: Sequence[str],
    hovers: Sequence[str],
    *,
    color: str,
    symbol: str,
) -> None:
    """Draws trials of one verdict: each with its x and y, its text and its hover text; the best one is larger."""
    across, up = [x for _, x, _ in points], [y for _, _, y in points]
    sizes = [17 if text.startswith("<b>") else 11 for text in texts]
    figure.add_scatter(
        x=[x.value for x in across],
        y=[y.value for y in up],
        error_x=error_bars(across, color),
        error_y=error_bars(up, color),
        mode="markers+text",
        name=str(points[0][0].verdict),
        marker={
            "color": color,
            "symbol": symbol,
            "size": sizes,
            "opacity": 1,
            "line": {"color": "#ffffff", "width": 1},
        },
        text=texts,
        textfont={"color": color, "size": 12},
        cliponaxis=False,
        customdata=[row.trial_id for row, _, _ in points],
        hovertext=hovers,
        hoverinfo="text",
    )


def _draw_front(figure: go.Figure, front: Sequence[RankedTrial], metric: str, across: str) -> None:
    points = sorted((x.value, y.value) for row in front if (x := row.interval(across)) and (y := row.interval(metric)))
    more_is_better = METRICS[across].better == "higher"
    figure.add_scatter(
        x=[x for x, _ in points],
        y=[y for _, y in points],
        mode="lines",
        name="Pareto front",
        # Between two trials the line stays at what a trial reached: the one before, or the next where more x is better.
        line={"color": "#566172", "dash": "dot", "width": 1.5, "shape": "vh" if more_is_better else "hv"},
        hoverinfo="skip",
    )


def _draw_bound(figure: go.Figure, ranking: Ranking, bound: Constraint, metric: str, across: str) -> None:
    """Draws a line for a bound that is the same for all trials; a share of another metric may differ by trial."""
    at = {margin.bound for row in ranking.trials for margin in row.margins if margin.constraint == bound}
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
    """Widens the axes, so that names of points are not cut off, and intervals only where they are very wide."""
    for axis in ("x", "y"):
        values = [value for trace in figure.data for value in trace[axis]]
        values += [line[f"{axis}0"] for line in figure.layout.shapes if line[f"{axis}0"] == line[f"{axis}1"]]
        ends = [end for trace in figure.data for bar in _ends(trace, axis) for end in bar] or values
        low, high = min(values), max(values)
        width = high - low
        room = 0.14 * (width or abs(high) or 1.0)
        widest = _MOST_BAR * width or math.inf
        low, high = max(min(ends) - room / 4, low - widest), min(max(ends) + room / 4, high + widest)
        figure.layout[f"{axis}axis"].range = [min(low, min(values) - room), max(high, max(values) + room)]


def _ends(trace: go.Scatter, axis: str) -> list[tuple[float, float]]:
    """Returns the ends of each point's interval along an axis."""
    bars = trace[f"error_{axis}"]
    if bars.array is None:
        return []
    return [
        (value - below, value + above)
        for value, below, above in zip(trace[axis], bars.arrayminus, bars.array, strict=True)
    ]


def _place_bounds(figure: go.Figure) -> None:
    """Puts the text of each bound beside its line, on the side that has more room."""
    low, high = figure.layout.xaxis.range
    for note in figure.layout.annotations:
        if note.yref == "paper":
            right = note.x - low > high - note.x
            note.update(xanchor="right" if right else "left", xshift=-4 if right else 4)


def _place_names(figure: go.Figure, bounds: Sequence[str], plot_px: tuple[float, float]) -> None:
    """Puts each name beside its point where it covers nothing, and leaves it out where there is no such place."""
    width, height = plot_px
    low_x, high_x = figure.layout.xaxis.range
    low_y, high_y = figure.layout.yaxis.range
    named = [
        (not text.startswith("<b>"), number, index, text)
        for number, trace in enumerate(figure.data)
        for index, text in enumerate(trace.text or ())
    ]
    named.sort(key=lambda one: (one[0], -one[1], one[2]))
    each = [(trace.x, trace.y, trace.marker.size) for trace in figure.data]  # plotly looks for each attribute anew
    spots = [
        (
            width * (each[number][0][index] - low_x) / (high_x - low_x),
            height * (high_y - each[number][1][index]) / (high_y - low_y),
        )
        for _, number, index, _ in named
    ]
    lines = [width * (line.x0 - low_x) / (high_x - low_x) for line in figure.layout.shapes if line.x0 == line.x1]
    # The text of a bound stands at the foot of its line.
    long = CHAR_WIDTH_PX * max(map(len, bounds), default=0) + 8
    taken = [
        (x - long, 0.9 * height, x, height) if x > width / 2 else (x, 0.9 * height, x + long, height) for x in lines
    ]
    avoided: list[Box] = [(x - 1, 0, x + 1, height) for x in lines]
    for trace in figure.data:
        for (left, right), y in zip(_ends(trace, "x"), trace.y, strict=False):
            at = height * (high_y - y) / (high_y - low_y)
            scale = width / (high_x - low_x)
            avoided.append((scale * (left - low_x), at - 1, scale * (right - low_x), at + 1))
        for (foot, top), x in zip(_ends(trace, "y"), trace.x, strict=False):
            at = width * (x - low_x) / (high_x - low_x)
            scale = height / (high_y - low_y)
            avoided.append((at - 1, scale * (high_y - top), at + 1, scale * (high_y - foot)))
    plain_texts = [html.unescape(text.removeprefix("<b>").removesuffix("</b>")) for *_, text in named]
    sides = placed(
        spots,
        plain_texts,
        plot_px,
        taken,
        avoided=avoided,
        bold=[text.startswith("<b>") for *_, text in named],
        # As plotly places a name: beyond the marker's edge and its line.
        reaches=[each[number][2][index] / 1.6 + 1 for _, number, index, _ in named],
    )
    shown = {(number, index): side for (_, number, index, _), side in zip(named, sides, strict=True)}
    for number, trace in enumerate(figure.data):
        if trace.text:
            own = [shown[number, index] for index in range(len(trace.text))]
            trace.text = [text if side else "" for text, side in zip(trace.text, own, strict=True)]
            trace.textposition = [side or "top center" for side in own]


def _hover(row: RankedTrial, metric: str, across: str) -> str:
    parts = [f"<b>{plain(row.label)}</b> {row.trial_id}"]
    parts += [plain(text) for text in (row.study, row.spec.model.name, row.spec.cluster.label) if text]
    for name in (metric, across):
        if found := row.interval(name):
            parts.append(f"{name}: {worded(name, found)}")
    parts.append(f"{row.quality or 'not assessed'}{''.join(f', {mark}' for mark in row.marks)}")
    parts.append(plain(row.reason) if row.reason else "keeps every bound")
    return "<br>".join(parts)


def placed(
    points: Sequence[tuple[float, float]],
    texts: Sequence[str],
    size: tuple[float, float],
    taken: Sequence[Box] = (),
    *,
    avoided: Sequence[Box] = (),
    bold: Sequence[bool] = (),
    reaches: Sequence[float] = (),
) -> list[str]:
    """Finds a place for the name of each point: the side of it as plotly names it, empty where its name has no room.

    `points` are pixels from the left and from the top, and `texts` their names, empty where one has none; earlier ones
    are placed first, inside of `size`. Places that are `taken` hold something else. Those that are `avoided`, such as
    lines, are covered only where there is no other. `reaches` are pixels between a point's middle and its name, those
    of the greatest marker by default.
    """
    wide = [BOLD_CHAR_WIDTH_PX if one else CHAR_WIDTH_PX for one in bold or [False] * len(points)]
    reaches = reaches or [float(_POINT_PX)] * len(points)
    halves = [min(_POINT_PX, reach - 1) for reach in reaches]
    boxes = [(x - half, y - half, x + half, y + half) for (x, y), half in zip(points, halves, strict=True)]
    filled = list(taken)
    sides = []
    for number, ((x, y), text) in enumerate(zip(points, texts, strict=True)):
        others = [*filled, *boxes[:number], *boxes[number + 1 :]] if text else []
        free: list[tuple[int, int, str, Box]] = []
        for side, across, down in _SIDES if text else ():
            box = _box(x, y, wide[number] * len(text), reaches[number], across, down)
            inside = box[0] >= 0 and box[1] >= 0 and box[2] <= size[0] and box[3] <= size[1]
            if inside and not any(_overlap(box, other) for other in others):
                free.append((sum(_overlap(box, line) for line in avoided), len(free), side, box))
        if free:
            _, _, side, box = min(free)
            filled.append(box)
        sides.append(side if free else "")
    return sides


def _box(x: float, y: float, width: float, reach: float, across: int, down: int) -> Box:
    left = x - width / 2 if not across else x + reach if across > 0 else x - reach - width
    top = y - _LINE_PX / 2 if not down else y + reach if down > 0 else y - reach - _LINE_PX
    return left, top, left + width, top + _LINE_PX


def _overlap(a: Box, b: Box) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]
