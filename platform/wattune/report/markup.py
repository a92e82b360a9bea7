"""The style of the report and the script beside its charts.

Colours are Okabe and Ito's (jfly.uni-koeln.de/color, 2008), which colour-blind readers can distinguish.
"""

from importlib import resources
from typing import Final

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
