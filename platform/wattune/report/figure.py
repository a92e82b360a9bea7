"""One figure of the report, drawn by plotly, shown on a page or written as an image; and the style of page and figures.

Colours are Okabe and Ito's (jfly.uni-koeln.de/color, 2008), which colour-blind readers can distinguish.
"""

import html
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any, Final

import plotly.graph_objects as go
import plotly.io
from plotly.offline import get_plotlyjs

from wattune.errors import WattuneError
from wattune.intervals import Interval
from wattune.run import Prediction
from wattune.view.html import Html, fill, section

FEASIBLE_COLOR: Final = "#0072B2"
INFEASIBLE_COLOR: Final = "#D55E00"
INK: Final = "#1b2430"
LINE: Final = "#dfe4ea"
MONO: Final = 'ui-monospace, "SF Mono", Menlo, "Liberation Mono", monospace'
FONT: Final = 'system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", "Liberation Sans", sans-serif'

POLICY: Final = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"
"""Content security policy of the page: a browser makes no request, whatever the page contains."""

_SHARED: Final = {"ink": INK, "line": LINE, "good": FEASIBLE_COLOR, "font": FONT, "mono": MONO}
"""Properties of the style that figures use too."""

_FILES: Final = resources.files(__package__)
STYLE: Final = (
    f":root {{ {' '.join(f'--{name}: {value};' for name, value in _SHARED.items())} }}\n"
    f"{_FILES.joinpath('page.css').read_text(encoding='utf-8')}"
)
SCRIPT: Final = _FILES.joinpath("page.js").read_text(encoding="utf-8")
"""Script of the page beside plotly."""

IMAGE_SIZE: Final = (1120, 520)
"""Pixels of an image at scale 1; PNG is written at `PNG_SCALE`."""
PNG_SCALE: Final = 2
FORMATS: Final = ("png", "svg", "pdf")

TITLE_PX: Final = 15
"""Height of the name of an axis."""

DASHED: Final = {"dash": "dash", "color": INK, "width": 1.5}

_AXIS: Final = {"gridcolor": LINE, "zeroline": False, "linecolor": "#8a94a3", "ticks": "outside"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """One figure with its title and caption."""

    title: str
    caption: str
    """Description of the figure, and how to read it."""
    figure: go.Figure = field(repr=False)
    stamp: str
    """Words across it, such as `SIMULATED`; empty where its figures are measured."""
    height: int = 440

    @property
    def name(self) -> str:
        """Name of the figure in the page and as a file."""
        return "chart-" + "-".join(self.title.lower().split())

    def _repr_mimebundle_(self, *_: Any, **__: Any) -> dict[str, Any]:
        """The figure as a notebook shows it."""
        bundle: dict[str, Any] = _styled(self)._repr_mimebundle_()
        return bundle

    def html(self) -> Html:
        """Returns the figure as a section of the page."""
        return section(self.title, self.body())

    def body(self) -> Html:
        """Returns the figure with its caption."""
        config = {"displayModeBar": False, "responsive": True}
        drawn = _styled(self).to_html(full_html=False, include_plotlyjs=False, div_id=self.name, config=config)
        return fill(
            '<figure><div role="img" aria-label="{}">{}</div><figcaption>{}</figcaption></figure>',
            f"{self.title}. {self.caption}",
            Html(drawn),
            self.caption,
        )


def blank() -> go.Figure:
    """Returns an empty figure, without a copy of plotly's own template, which the report's style leaves out."""
    return go.Figure(layout={"template": "none", "margin": {"t": 44}})  # the legend stands there


def write_images(charts: Sequence[Chart], folder: Path) -> list[Path]:
    """Writes figures as images in each of `FORMATS`, all with one browser.

    Returns paths of the files. Raises `WattuneError` where the exporter or the browser it draws with is not installed,
    or the folder cannot be written.
    """
    drawn, paths, heights = [], [], []
    for chart in charts:
        figure = _styled(chart)
        figure.update_layout(title={"text": plain(chart.title), "x": 0.01}, margin_t=84)
        for kind in FORMATS:
            drawn.append(figure)
            paths.append(folder / f"{chart.name.removeprefix('chart-')}.{kind}")
            heights.append(max(chart.height, IMAGE_SIZE[1]))
    scales = [PNG_SCALE if path.suffix == ".png" else 1 for path in paths]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if drawn:
            plotly.io.write_images(drawn, paths, width=IMAGE_SIZE[0], height=heights, scale=scales)
    except (ImportError, RuntimeError, ValueError, OSError) as error:
        raise WattuneError(f"cannot write the figures to {folder}: {_need(error)}") from error
    missing = [path.name for path in paths if not path.exists()]
    if missing:
        raise WattuneError(f"the exporter did not write {', '.join(missing)} in {folder}; run it again")
    return paths


def script() -> Html:
    """Returns all of plotly.js as a script, so that charts need no network."""
    return fill("<script>{}</script>", Html(get_plotlyjs()))


def plain(text: str) -> str:
    """Escapes text, so that plotly draws it as it is: plotly interprets some HTML."""
    return html.escape(text, quote=False)


def error_bars(found: Sequence[Interval | Prediction], color: str) -> dict[str, Any]:
    """Returns bars from the low to the high end of each; without length where the scatter is unknown."""
    above, below = [one.high - one.value for one in found], [one.value - one.low for one in found]
    return {"type": "data", "symmetric": False, "array": above, "arrayminus": below, "color": color, "thickness": 1.2}


def _need(error: Exception) -> str:
    """Returns what the exporter lacks, in one line: plotly's own message fills a page."""
    said = f"{type(error).__name__} {error}"
    if "chrome" in said.lower():
        return "no Chrome or Chromium is installed; install one, or run `plotly_get_chrome`"
    if "kaleido" in said.lower():
        return "plotly's exporter is not installed; install wattune[figures], and a Chrome or Chromium"
    return " ".join(str(error).split())[:300]


def _styled(chart: Chart) -> go.Figure:
    """Returns the figure in the report's style; what is not measured has a stamp across it."""
    figure = go.Figure(chart.figure)
    figure.update_layout(
        template="none",
        font={"family": FONT, "size": 13, "color": INK},
        margin={"l": 78, "r": 20, "b": 56},
        height=chart.height,
        legend={"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0},
        hoverlabel={"align": "left", "bgcolor": "#ffffff", "bordercolor": LINE, "font": {"color": INK}},
        paper_bgcolor="#ffffff",
        plot_bgcolor="#ffffff",
    )
    figure.update_xaxes(**_AXIS, title_standoff=12, title_font_size=TITLE_PX)
    figure.update_yaxes(**_AXIS, title_standoff=12, title_font_size=TITLE_PX, automargin=True)
    if chart.stamp:
        look: dict[str, Any] = {"size": 64, "color": "rgba(179,71,0,0.16)"}
        figure.add_annotation(
            text=chart.stamp, xref="paper", yref="paper", x=0.5, y=0.5, textangle=-18, font=look, showarrow=False
        )
    _note_narrow(figure)
    return figure


def _note_narrow(figure: go.Figure) -> None:
    """Notes for the page's script what a narrow page makes smaller or leaves out (`page.js`)."""
    for trace in figure.data:
        if "text" in (getattr(trace, "mode", None) or ""):
            trace.meta = {"mode": trace.mode}
        elif trace.type in ("bar", "waterfall") and isinstance(trace.textposition, str):
            trace.meta = {"textposition": trace.textposition}
    sizes = [note.font.size or figure.layout.font.size for note in figure.layout.annotations]
    figure.layout.meta = {"annotation_sizes": sizes, "left": figure.layout.margin.l, "title_size": TITLE_PX}
