"""The page of projections: figures against the number of devices, what was measured and projected apart."""

from collections.abc import Sequence
from typing import Final

from wattune.projection.projected import TRANSFERRED, Projected
from wattune.report.figure import FEASIBLE_COLOR, Chart, blank, plain
from wattune.report.page import page
from wattune.scale_down.reading import SCALED
from wattune.view.html import section, table
from wattune.view.projection import READING, projection_table

DRAWN: Final = ("step_time_s", "cluster_power_mean_w", "node_device_power_mean_w")
CAPTION: Final = "circles: measured; diamonds: projected, with the 90 % interval as a band; crosses: measured there"


def render_projections(found: Sequence[Projected]) -> str:
    """Renders projections as HTML text: a chart of each figure, and the table."""
    charts = [scaling(found, metric).html() for metric in DRAWN if any(metric in one.figures for one in found)]
    rows = section("Projections", table(projection_table(found), READING.text))
    return page("Beyond what was measured", [*charts, rows], drawn=True)


def scaling(rows: Sequence[Projected], metric: str) -> Chart:
    """Draws a figure against devices: measured, projected with its band, and what was measured there."""
    figure = blank()
    for row in [one for one in rows if metric in one.figures][:12]:
        own, size, is_step = row.figures[metric], row.num_devices, metric == "step_time_s"
        points = [(*one, "circle") for one in sorted(row.measured.items()) if is_step]
        last = points[-1][:2] if points else (size, own.value)
        x, y = zip(last, (size, own.high), (size, own.low), strict=True)
        figure.add_scatter(
            x=x, y=y, fill="toself", mode="none", opacity=0.2, fillcolor=FEASIBLE_COLOR, showlegend=False
        )
        points += [(size, own.value, "diamond-open"), *([(size, row.truth_s, "x")] if is_step and row.truth_s else [])]
        x, y, symbols = zip(*points, strict=True)
        figure.add_scatter(x=x, y=y, mode="markers", name=plain(row.name), marker={"symbol": symbols, "size": 10})
    figure.update_xaxes(title="devices", type="log")
    figure.update_yaxes(title=metric, type="log")
    marks = {TRANSFERRED for one in rows if one.untested} | {SCALED for one in rows if SCALED in one.notes}
    stamp = ", ".join(sorted(marks)).upper().replace("_", " ")
    return Chart(title=f"{metric} against size", caption=CAPTION, figure=figure, stamp=stamp)
