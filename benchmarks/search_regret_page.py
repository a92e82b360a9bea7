"""The results page of `search_regret.py`: its rows, its tables of Markdown, and a drawing of each table's curves."""

import csv
import html
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from harness import Rows

BEGIN: Final = "<!-- tables: written by benchmarks/search_regret.py --markdown -->"
END: Final = "<!-- end of tables -->"
COLUMNS: Final = {
    "strategy": "strategy",
    "trials to 2 % (10 %, 90 %)": "",
    "found": "found_frac",
    "GPU-s": "gpu_time_median_s",
    "run": "num_trials_run",
    "stopped": "stopped_frac",
    "regret at its end": "end_regret_median_frac",
    "feasible": "feasible_frac",
    "hypervolume": "hypervolume_frac",
    "pairs right": "pairwise_frac",
    "inside 95 %": "inside_frac",
}
"""Title of a column of the page, and the column of the rows."""
DRAWN: Final = {
    "random": "#8a94a3",
    "tpe": "#E69F00",
    "gp": "#56B4E9",
    "model_guided": "#007A53",
    "model_guided, warm start": "#CC79A7",
    "model_guided, no prior": "#0072B2",
}
"""Strategies that are drawn, with their colours (Okabe and Ito)."""
_WIDTH, _HEIGHT, _LEFT, _TOP, _BOTTOM, _LEAST = 720, 340, 64, 54, 44, 1e-3


def merge_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    """Writes rows into a CSV file in place of earlier ones of the same table and strategy. Returns all rows."""
    before: list[dict[str, str]] = []
    if path.exists():
        with path.open(newline="") as lines:
            before = list(csv.DictReader(lines))
    made = {(str(row["table"]), str(row["strategy"])): {k: str(v) for k, v in row.items()} for row in rows}
    after = {(row["table"], row["strategy"]): row for row in before} | made
    tables = list(dict.fromkeys(table for table, _ in after))
    ordered = [row for table in tables for (own, _), row in after.items() if own == table]
    names = list(dict.fromkeys(name for row in [*made.values(), *ordered] for name in row))
    with path.open("w", newline="") as out:
        writer = csv.DictWriter(out, names, restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows(ordered)
    return ordered


def write_tables(page: Path, rows: Sequence[Mapping[str, str]], drawings: str) -> None:
    """Writes the page's tables anew, between their two marks.

    Args:
        page: The page. It holds `BEGIN` and `END`.
        rows: All rows, of all tables.
        drawings: Folder of the drawings, relative to the page; a table without one has no link.
    """
    head, mark, rest = page.read_text().partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not mark or not end:
        raise SystemExit(f"{page}: has no place for tables; add the lines {BEGIN} and {END}")
    parts = []
    for name in dict.fromkeys(row["table"] for row in rows):
        own = [row for row in rows if row["table"] == name]
        parts += ["", _heading(name, own, page.parent / drawings / f"{name}.svg", drawings), ""]
        parts += [f"| {' | '.join(COLUMNS)} |", f"|{'---|' * len(COLUMNS)}"]
        parts += [f"| {' | '.join(_cell(row, title) for title in COLUMNS)} |" for row in own]
    page.write_text("\n".join([f"{head}{mark}", *parts, "", f"{end}{tail}"]))


def _heading(name: str, rows: Sequence[Mapping[str, str]], drawing: Path, drawings: str) -> str:
    seeds = sorted({int(row["num_seeds"]) for row in rows})
    by = f"{seeds[-1]} seeds" if len(seeds) == 1 else f"{seeds[0]} to {seeds[-1]} seeds"
    known = next((row["estimate_pairs_frac"] for row in rows if row.get("estimate_pairs_frac")), "")
    estimate = f", the estimate orders {float(known):.0%} of pairs rightly" if known else ""
    link = f" ([drawing]({drawings}/{name}.svg))" if drawing.exists() else ""
    return f"**{name}**, {rows[0]['num_candidates']} candidates, {by}{estimate}{link}:"


def _cell(row: Mapping[str, str], title: str) -> str:
    if title.startswith("trials"):
        low, median, high = (
            row[f"num_trials_{end}"] or f">{row['num_trials_most']}" for end in ("p10", "median", "p90")
        )
        return f"{median} ({low}, {high})"
    name = COLUMNS[title]
    text = row.get(name, "")
    if text and name in ("found_frac", "stopped_frac", "feasible_frac", "pairwise_frac", "inside_frac"):
        return f"{float(text):.0%}"
    if name == "end_regret_median_frac":
        return f"{float(text):.3f}" if text else "none feasible"
    return text


def print_rows(title: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Prints a table of Markdown."""
    shown = Rows(
        "strategy", *(name for name in rows[0] if name not in ("table", "strategy", "num_candidates", "num_seeds"))
    )
    for row in rows:
        shown.add(*(row[name] for name in shown.columns))
    print(f"\n{title}\n\n{shown.markdown()}", flush=True)


def draw_regret(path: Path, title: str, curves: Mapping[str, np.ndarray], within: float) -> None:
    """Draws the regret of each strategy against trials as SVG: the median, and a band from the 10th to 90th percentile.

    Args:
        path: The file.
        title: What stands above it.
        curves: [seeds, trials] for each strategy.
        within: Regret that counts as found, drawn as a line.
    """
    shown = {name: one for name, one in curves.items() if name in DRAWN}
    longest = max((one.shape[1] for one in shown.values()), default=1)
    bands = {name: np.quantile(np.clip(one, _LEAST, 1.0), (0.1, 0.5, 0.9), axis=0) for name, one in shown.items()}

    def x(step: float) -> float:
        return _LEFT + (step - 1) / max(longest - 1, 1) * (_WIDTH - _LEFT - 20)

    def y(regret: float) -> float:
        return _TOP + np.log10(regret) / np.log10(_LEAST) * (_HEIGHT - _TOP - _BOTTOM)

    def points(values: np.ndarray) -> list[str]:
        return [f"{x(step):.1f},{y(value):.1f}" for step, value in enumerate(values, start=1)]

    font = 'font-family="sans-serif" font-size="12"'
    parts = [
        '<svg xmlns="http://www.w3.org/2000/svg"',
        f' width="{_WIDTH}" height="{_HEIGHT}" viewBox="0 0 {_WIDTH} {_HEIGHT}">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="#ffffff"/>',
        f'<text x="{_LEFT}" y="18" {font} font-weight="bold">{html.escape(title)}</text>',
    ]
    for regret in (1.0, 0.1, 0.01, 0.001):
        label = f"{100 * regret:g} %"
        parts.append(f'<path d="M{_LEFT} {y(regret):.1f}H{_WIDTH - 20}" stroke="#dfe3e8"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y(regret) + 4:.1f}" {font} text-anchor="end">{label}</text>')
    parts.append(f'<path d="M{_LEFT} {y(within):.1f}H{_WIDTH - 20}" stroke="#1f2933" stroke-dasharray="3 3"/>')
    steps = sorted({1, *(round(longest * share / 4) for share in (1, 2, 3, 4))} - {0})
    parts += [f'<text x="{x(step):.1f}" y="{_HEIGHT - 24}" {font} text-anchor="middle">{step}</text>' for step in steps]
    parts.append(f'<text x="{_WIDTH / 2:.0f}" y="{_HEIGHT - 6}" {font} text-anchor="middle">trials</text>')
    place = _LEFT
    for name, (low, median, high) in bands.items():
        color = DRAWN[name]
        outline = " ".join([*points(high), *reversed(points(low))])
        parts.append(f'<polygon points="{outline}" fill="{color}" fill-opacity="0.1"/>')
        parts.append(f'<polyline points="{" ".join(points(median))}" fill="none" stroke="{color}" stroke-width="2"/>')
        parts.append(f'<rect x="{place}" y="30" width="12" height="4" fill="{color}"/>')
        parts.append(f'<text x="{place + 16}" y="37" {font}>{html.escape(name)}</text>')
        place += 28 + 7 * len(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join([*parts, "</svg>", ""]))
