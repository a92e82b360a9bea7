"""The picture of one trial: node power over time, above the time of each step. An SVG without any library.

MLflow shows it under a run's artifacts. It is drawn for each trial while a study runs, so it costs milliseconds.
"""

from collections.abc import Mapping, Sequence
from html import escape
from typing import Final

import numpy as np

from wattune.arrays import AnyFloats, envelope

PICTURE: Final = "picture.svg"
"""Name of the picture among a run's artifacts."""

WIDTH: Final = 720
HEIGHT: Final = 360
_LEFT, _RIGHT = 70, 16
_POWER: Final = (64, 200)
"""Top and bottom of the panel with node power, pixels from the top; the next one has the steps."""
_STEPS: Final = (238, 318)

_MOST_PARTS: Final = (WIDTH - _LEFT - _RIGHT) // 2
"""Parts of a long trace. The least and the greatest sample of each are drawn, so that peaks stay."""

_COLORS: Final = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00")
"""Okabe and Ito's, which colour-blind readers can distinguish; a node beyond the sixth has the first again."""
_INK: Final = "#1b2430"
_LINE: Final = "#dfe4ea"


def trial_picture(
    title: str,
    subtitle: str,
    power_w: Mapping[str, tuple[AnyFloats, AnyFloats]],
    steps: tuple[AnyFloats, AnyFloats],
    *,
    simulated: bool,
) -> str:
    """Draws a trial as SVG: its name, and a line of figures below; empty without anything to draw.

    Power has seconds from the first measured step, and watts, by node; steps have the seconds at which they begin, and
    their times. `simulated` writes so across the power.
    """
    powers = {node: series for node, series in power_w.items() if len(series[0])}
    start_s, time_s = steps
    if not powers and not len(start_s):
        return ""
    ends = [float(times[-1]) for times, _ in powers.values()]
    ends += [float(start_s[-1] + time_s[-1])] if len(start_s) else []
    begins = [float(times[0]) for times, _ in powers.values()] + ([float(start_s[0])] if len(start_s) else [])
    span = (min(begins), max(ends))
    size = f'width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" font-family="sans-serif" fill="{_INK}">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
        _text(_LEFT, 24, title, size=15, weight=650),
        _text(_LEFT, 44, subtitle, fill="#566172"),
    ]
    colors = [_COLORS[number % len(_COLORS)] for number in range(len(powers))]
    if powers:
        lines = [(node, color, *series) for color, (node, series) in zip(colors, powers.items(), strict=True)]
        parts += _panel(_POWER, "node power [W]", lines, span)
    if powers and simulated:
        stamp = _text((_LEFT + WIDTH) / 2, 150, "SIMULATED", size=44, fill="#b34700", anchor="middle", opacity=0.25)
        parts.append(stamp)
    if len(start_s):
        seconds = np.column_stack([start_s, np.asarray(start_s) + time_s]).ravel()  # each step is as wide as it is long
        parts += _panel(_STEPS, "step [ms]", [("steps", _INK, seconds, np.repeat(1e3 * np.asarray(time_s), 2))], span)
    for tick in _ticks(*span):
        parts.append(_text(_across(tick, span), _STEPS[1] + 16, f"{tick:g}", anchor="middle"))
    parts.append(
        _text((_LEFT + WIDTH - _RIGHT) / 2, HEIGHT - 8, "time from the first measured step [s]", anchor="middle")
    )
    return "\n".join([*parts, "</svg>"]) + "\n"


def _panel(
    panel: tuple[int, int],
    title: str,
    lines: Sequence[tuple[str, str, AnyFloats, AnyFloats]],
    span: tuple[float, float],
) -> list[str]:
    """Draws a panel's grid, the numbers beside it, its title, and its lines: name, colour, seconds and values."""
    values = _range([heights for *_, heights in lines])
    parts = [_text(_LEFT, panel[0] - 6, title)]
    for tick in _ticks(*values, most=4):
        y = _up(tick, values, panel)
        parts.append(f'<path d="M{_LEFT} {y:.1f}H{WIDTH - _RIGHT}" stroke="{_LINE}"/>')
        parts.append(_text(_LEFT - 6, y + 4, f"{tick:g}", anchor="end"))
    for name, color, seconds, heights in lines:
        drawn = (each.tolist() for each in envelope(np.asarray(seconds), np.asarray(heights), _MOST_PARTS))
        points = " ".join(f"{_across(a, span):.1f},{_up(b, values, panel):.1f}" for a, b in zip(*drawn, strict=True))
        look = f'fill="none" stroke="{color}" stroke-width="1.2"'
        parts.append(f'<polyline points="{points}" {look}><title>{escape(name)}</title></polyline>')
    return parts


def _range(series: Sequence[AnyFloats]) -> tuple[float, float]:
    """Returns the range of an axis that shows every value with room around it. It need not begin at 0."""
    low, high = min(float(np.min(one)) for one in series), max(float(np.max(one)) for one in series)
    room = 0.08 * (high - low) or 0.05 * abs(high) or 1.0
    return low - room, high + room


def _ticks(low: float, high: float, most: int = 8) -> list[float]:
    """Returns round numbers in a range: 1, 2 or 5 times a power of ten apart."""
    raw = (high - low) / most or 1.0
    power = 10.0 ** np.floor(np.log10(raw))
    step = next(step for step in (power, 2 * power, 5 * power, 10 * power) if step >= raw)
    first, last = int(np.ceil(low / step)), int(np.floor(high / step))
    return [round(number * step, 10) for number in range(first, last + 1)]


def _across(second: float, span: tuple[float, float]) -> float:
    return _LEFT + (WIDTH - _LEFT - _RIGHT) * (second - span[0]) / ((span[1] - span[0]) or 1.0)


def _up(value: float, values: tuple[float, float], panel: tuple[int, int]) -> float:
    return panel[1] - (panel[1] - panel[0]) * (value - values[0]) / (values[1] - values[0])


def _text(
    x: float,
    y: float,
    text: str,
    *,
    size: int = 12,
    weight: int = 400,
    fill: str = _INK,
    anchor: str = "start",
    opacity: float = 1.0,
) -> str:
    look = f'font-size="{size}" font-weight="{weight}" fill="{fill}" text-anchor="{anchor}"'
    look += f' opacity="{opacity:g}"' if opacity < 1 else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" {look}>{escape(text)}</text>'
