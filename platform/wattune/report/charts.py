"""The report's charts of a whole study, from plain data. Each colour has a symbol, a pattern or a word beside it."""

import textwrap
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any, Final

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from wattune.analysis.detail import Detail
from wattune.analysis.metrics.waterfall import Breakdown
from wattune.ranking.assessment import RankedTrial, Verdict
from wattune.ranking.comparison import Comparison, Waterfall
from wattune.ranking.order import Ranking
from wattune.report.figure import FEASIBLE_COLOR, INFEASIBLE_COLOR, INK, Chart, blank, plain
from wattune.view.table import worded

LABEL_CHARS: Final = 18
"""Characters of a line of a label: eight trials share the width of a page."""

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
"""Colour (Okabe and Ito) and pattern of a step's parts; a part of another name has those of `exposed_comm`.
Communication by parallel axis comes from a profiled pass."""

_PATTERN: Final = {"fillmode": "overlay", "fgcolor": "#ffffff", "solidity": 0.2, "size": 7}

_MARKS: Final = {Verdict.INFEASIBLE: "✕ ", Verdict.UNDECIDED: "? ", Verdict.BEHIND: "? "}
"""Mark before the name of a trial that has no rank."""


def step_parts(ranking: Ranking, evidence: Mapping[str, Detail]) -> Chart | None:
    """Draws the parts of a mean step, a bar for each trial with a breakdown. None without any."""
    rows = [row for row in ranking.trials if (found := evidence.get(row.trial_id)) and found.breakdown]
    if not rows:
        return None
    breakdowns = [broken for row in rows if (broken := evidence[row.trial_id].breakdown)]
    names = list(dict.fromkeys(name for broken in breakdowns for name in broken.parts))
    names.sort(key=[*PART_LOOKS, *names].index)
    labels = row_labels(rows)
    figure = blank()
    for name in names:
        _draw_part(figure, name, labels, breakdowns)
    figure.update_layout(barmode="stack", bargap=0.35, legend_traceorder="normal")
    figure.update_xaxes(title="mean step [ms]")
    figure.update_yaxes(autorange="reversed", automargin=True)
    caption = (
        "The parts of a mean step add up to it. Throttle is the most that lost clock adds to compute. Bubble is the "
        "idle time of an ideal pipeline schedule. Straggler is waiting for a slower rank. Undivided is time that spans "
        "cannot divide (communication inside forward and backward)."
    )
    return Chart(
        title="Where a step goes",
        caption=caption,
        figure=figure,
        stamp=ranking.stamp,
        height=150 + 46 * len(rows),
    )


def _draw_part(figure: go.Figure, name: str, labels: Sequence[str], breakdowns: Sequence[Breakdown]) -> None:
    """Draws one part of every trial's step as a piece of its bar."""
    color, pattern = PART_LOOKS.get(name, PART_LOOKS["exposed_comm"])
    shown = name.replace("_", " ")
    times_ms = [1e3 * broken.parts.get(name, (0.0, None))[0] for broken in breakdowns]
    shares = [time_ms / (1e3 * broken.step_s) for time_ms, broken in zip(times_ms, breakdowns, strict=True)]
    figure.add_bar(
        y=wrapped(labels),
        x=times_ms,
        orientation="h",
        name=shown,
        marker={"color": color, "line": {"color": "#ffffff", "width": 1}, "pattern": {"shape": pattern, **_PATTERN}},
        hovertext=[
            f"{plain(label)}<br>{shown}: {time_ms:.2f} ms, {100 * share:.1f} % of the step"
            for label, time_ms, share in zip(labels, times_ms, shares, strict=True)
        ],
        hoverinfo="text",
        text=[f"{100 * share:.0f} %" if share > 0.06 else "" for share in shares],
        textposition="inside",
        insidetextanchor="middle",
        textfont={"color": "#ffffff" if name in ("compute", "throttle") else INK, "size": 11},
        textangle=0,
    )


def slot_temperatures(ranking: Ranking, evidence: Mapping[str, Detail]) -> Chart | None:
    """Draws mean temperature by slot and trial, which shows places that are always hot. None without temperatures."""
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
    figure = blank()
    figure.add_trace(
        go.Heatmap(
            x=wrapped(row_labels(shown)),
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
        "Mean core temperature over the measured window. A row that stays brighter is a place in the node with less "
        "cooling. If the window is too short for temperatures to settle, the quality column says so."
    )
    height = 150 + 30 * len(places)
    return Chart(title="Temperature by slot", caption=caption, figure=figure, stamp=ranking.stamp, height=height)


def waterfall(comparison: Comparison) -> Chart | None:
    """Draws the change from the mean step of A to that of B, in time and energy. None without spans on both sides."""
    drawn = [(fall, name) for fall, name in ((comparison.time, "time"), (comparison.energy, "energy")) if fall]
    if not drawn:
        return None
    titles = [f"{name} of a {fall.per} [{_unit(fall)}]" for fall, name in drawn]
    figure = make_subplots(rows=1, cols=len(drawn), subplot_titles=titles, horizontal_spacing=0.15, figure=blank())
    for column, (fall, _) in enumerate(drawn, start=1):
        _draw_waterfall(figure, fall, column)
    figure.update_layout(margin_t=36)
    figure.update_xaxes(tickangle=-35, automargin=True)
    caption = (
        f"A is {comparison.a.label}, B is {comparison.b.label}. {comparison.conclusion}. Parts that grow from A to B "
        f"rise, parts that shrink fall; they add up exactly. The axes do not begin at 0. {_shares(drawn)}"
    )
    stamp = "SIMULATED" if comparison.a.simulated or comparison.b.simulated else ""
    return Chart(title="What makes the difference", caption=caption, figure=figure, stamp=stamp, height=460)


def _draw_waterfall(figure: go.Figure, fall: Waterfall, column: int) -> None:
    """Draws A, the change of each part, and B as one subplot."""
    scale = 1e3 if _unit(fall) == "ms" else 1.0
    a, b, changes = scale * fall.a, scale * fall.b, [scale * change for change in fall.changes.values()]
    figure.add_waterfall(
        x=["A", *(name.replace("_", " ") for name in fall.parts), "B"],
        y=[a, *changes, b],
        measure=["absolute", *["relative"] * len(changes), "total"],
        text=[f"{a:.4g}", *(f"{change:+.3g}" for change in changes), f"{b:.4g}"],
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
    heights = [b, *accumulate([a, *changes])]
    low, high = min(heights), max(heights)
    # The changes are small beside the wholes, so the axis begins above 0, as its ticks and the caption say.
    figure.update_yaxes(range=[max(0.0, low - 0.6 * (high - low)), high + 0.15 * (high - low)], row=1, col=column)


def _shares(falls: Sequence[tuple[Waterfall, str]]) -> str:
    """Describes each part's share of the changes."""
    said = []
    for fall, name in falls:
        shares = {name.replace("_", " "): fall.share_frac(name) for name, change in fall.changes.items() if change}
        known = {part: share for part, share in shares.items() if share is not None}
        if known:
            listed = ", ".join(f"{part} {_percent(share)}" for part, share in known.items())
            said.append(f"Of the change in {name}: {listed}.")
        elif shares:
            said.append(f"In {name} the parts' changes cancel out, so shares of the rest are not meaningful.")
    return " ".join(said)


def _percent(share: float) -> str:
    """Returns a share with its sign, and a share that rounds to nothing without one."""
    text = f"{100 * share:+.0f} %".replace("-", "−")
    return "0 %" if text[1:] == "0 %" else text


def row_labels(rows: Sequence[RankedTrial]) -> list[str]:
    """Returns a unique name for every trial: its plan, and the settings that differ."""
    reads: list[Callable[[RankedTrial], str]] = [
        lambda row: row.study,
        lambda row: row.spec.model.name,
        lambda row: row.spec.cluster.label,
        lambda row: row.spec.engine,
    ]
    told = [read for read in reads if len({read(row) for row in rows}) > 1]
    names = [" ".join([row.label, *(read(row) for read in told)]) for row in rows]
    marks = [f"#{row.rank} " if row.rank else _MARKS.get(row.verdict, "") for row in rows]
    counts = Counter(names)
    return [
        plain(f"{mark}{name}" if counts[name] == 1 else f"{mark}{name} {row.trial_id}")
        for mark, name, row in zip(marks, names, rows, strict=True)
    ]


def wrapped(labels: Sequence[str]) -> list[str]:
    """Breaks labels into lines, so that they leave the room to the figure and do not meet their neighbours."""
    return ["<br>".join(textwrap.wrap(label, LABEL_CHARS, break_long_words=False)) for label in labels]


def _slot_hover(slot: Mapping[str, Any]) -> str:
    units = {"temp_mean_c": "mean", "temp_max_c": "highest", "memory_temp_max_c": "memory highest"}
    units |= {"power_mean_w": "mean power", "power_peak_1s_w": "1 s peak power", "clock_deficit_frac": "clock lost"}
    known = [f"{words}: {worded(name, slot[name])}" for name, words in units.items() if slot[name] is not None]
    return "<br>".join([f"<b>{plain(str(slot['node']))} {plain(str(slot['device']))}</b>", *known])


def _unit(fall: Waterfall) -> str:
    return "ms" if fall.unit == "s" and fall.per == "step" else fall.unit
