"""Results of experiments for people: the picture of one, the table of all, the page of a folder."""

import math
from collections.abc import Mapping
from html import escape
from typing import Any, Final

from wattune.units import unit_of
from wattune.view.table import Column, Table, View

_WIDTH, _LEFT, _ROW, _TOP = 900, 300, 54, 96
_STAMPS: Final = {"simulated": "SIMULATED SENSORS", "estimated": "ESTIMATED, NOT MEASURED", "measured": "measured"}
_VERSIONS: Final = ("wattune", "torch", "driver")


def effect_text(claim: Mapping[str, Any]) -> str:
    """Writes an effect with its 95 % interval and verdict: a change in percent, of a temperature in kelvin."""
    effect, low, high = (_shown(claim, key) for key in ("effect", "low", "high"))
    unit = "K" if unit_of(claim["metric"]) == "degC" else "%"
    within = "untested" if high is None else f"{-100.0 if low is None else low:+.1f} to {high:+.1f}"
    size = "not measured" if effect is None else f"{effect:+.1f} {unit} ({within})"
    would = f"; {claim['would_tell']} repeats would tell" if claim["would_tell"] else ""
    return f"{claim['metric']} {size}: {claim['verdict']}{would}"


def effects_picture(result: Mapping[str, Any]) -> str:
    """Draws the claims of a result as SVG: effect and interval, the estimate made before, the verdict in words.

    Shapes and words say everything, so that it is read without colour.
    """
    claims = result["claims"]
    values = [_shown(claim, key) for claim in claims for key in ("effect", "low", "high", "predicted")]
    most = max([1.0, *(abs(value) for value in values if value is not None)])
    height, middle = _TOP + _ROW * len(claims) + 44, (_LEFT + _WIDTH - 190) / 2
    scale = (_WIDTH - 210 - _LEFT) / 2 / most
    arms, stamp = " against ".join(reversed(result["arms"])), _STAMPS[result["evidence"]]
    legend = "Bar: 95 % interval. Diamond: the estimate made before. Axis: change in %, of temperatures in K"
    size = f'width="{_WIDTH}" height="{height}" viewBox="0 0 {_WIDTH} {height}"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" font-family="sans-serif" fill="#111">',
        f'<title>{escape(result["question"])}</title><rect width="{_WIDTH}" height="{height}" fill="#fff"/>',
        _text(16, 26, result["question"], size=15),
        _text(16, 48, f"{arms}; {_ran_on(result)}"),
        _text(16, 68, f"{result['paper']}. {legend}", size=11),
        f'<path d="M{middle:.1f} {_TOP - 12}V{height - 34}" stroke="#111" stroke-dasharray="4 3"/>',
        *(_text(middle + value * scale, height - 16, f"{value:+.3g}", anchor="middle") for value in (-most, 0, most)),
    ]
    for place, claim in enumerate(claims):
        y = _TOP + _ROW * place + 16
        x = {key: middle + value * scale for key in claim if (value := _shown(claim, key)) is not None}
        parts += [_text(16, y, claim["metric"]), _text(16, y + 17, f"expected {claim['expected']}", size=11)]
        parts += [_text(_LEFT, y + 24, effect_text(claim).partition(" ")[2], size=11)]
        if "low" in x:
            ends = "".join(f"M{x[end]:.1f} {y - 6}v12" for end in ("low", "high"))
            parts.append(f'<path d="M{x["low"]:.1f} {y}H{x["high"]:.1f}{ends}" stroke="#111" stroke-width="2"/>')
        if "predicted" in x:
            parts.append(f'<path d="M{x["predicted"]:.1f} {y - 8}l7 8-7 8-7-8z" fill="none" stroke="#111"/>')
        if "effect" in x:
            parts.append(f'<circle cx="{x["effect"]:.1f}" cy="{y}" r="5"/>')
        mark = {"agrees": "✓", "contests": "✗"}.get(claim["verdict"], "?")
        parts.append(_text(_WIDTH - 170, y + 4, f"{mark} {claim['verdict']}"))
    if result["evidence"] != "measured":
        parts.append(_text(middle, height - 36, stamp, size=22, anchor="middle"))
    return "\n".join([*parts, "</svg>"]) + "\n"


def repeat_text(first: Mapping[str, Any], again: Mapping[str, Any]) -> str:
    """Says whether a repeat has the verdict of the first run, and where a claim's is another, what may be why."""
    ways = []
    for was, now in zip(first["claims"], again["claims"], strict=False):
        if was["verdict"] != now["verdict"]:
            ends = [one[key] for one in (was, now) for key in ("low", "high")]
            apart = None not in ends and max(ends[0], ends[2]) > min(ends[1], ends[3])
            how = "the intervals lie apart" if apart else "the intervals overlap, so more repeats may tell"
            how = "one of them did not measure it" if None in (was["effect"], now["effect"]) else how
            ways.append(f"{now['metric']} {now['verdict']}, before {was['verdict']}: {how}")
    old, new = ({"hardware": one["hardware"], **one["versions"]} for one in (first, again))
    pairs = [(key, new.get(key), old.get(key)) for key in ("hardware", *_VERSIONS)]
    others = [f"{key} {now}, before {was}" for key, now, was in pairs if now != was]
    ways.append(f"other are {'; '.join(others)}" if others else "hardware and versions are the same")
    same = f"reproduces {first['verdict']}; " if first["verdict"] == again["verdict"] else ""
    return f"{same}{'; '.join(ways)} ({first['date']})"


def experiments_view(questions: Mapping[str, str], results: Mapping[str, Mapping[str, Any]]) -> View:
    """Lays out every experiment: what it asks, on what it ran, and what came out."""
    told = {name: (_ran_on(one), "; ".join(map(effect_text, one["claims"]))) for name, one in results.items()}
    columns = [
        Column("experiment", lambda name: name, place="lead"),
        Column("question", lambda name: questions.get(name, "repeated"), place="prose"),
        Column("ran on", lambda name: told.get(name, ("-", ""))[0], place="prose"),
        Column("answer", lambda name: told.get(name, ("", "not run"))[1], place="prose"),
    ]
    ran = f"{len(questions.keys() & results.keys())} of {len(questions)} experiments ran"
    return [Table(ran, columns, sorted({*questions, *results}))]


def results_page(results: Mapping[str, Mapping[str, Any]]) -> str:
    """Writes the Markdown table of results, by the experiments' names: what was asked, on what, and what came out."""
    rows: list[list[str]] = [["experiment", "question", "whose", "ran on", "answer", "verdict"], ["---"] * 6]
    for name, result in results.items():
        own, verdict = name.partition("@")[0], f"**{result['verdict']}**"
        linked = f"[{name}]({own}.py), [figure](results/{name}.svg)<br>`wattune experiments run {own}`"
        if own != name and own in results:
            verdict += f"; {repeat_text(results[own], result)}"
        answer = "<br>".join(map(effect_text, result["claims"]))
        rows.append([linked, result["question"], result["paper"], _ran_on(result), answer, verdict])
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def _ran_on(result: Mapping[str, Any]) -> str:
    versions = [f"{key} {result['versions'][key]}" for key in _VERSIONS if key in result["versions"]]
    facts = [result[key] for key in ("hardware", "evidence", "date", "quality")]
    return ", ".join(filter(None, [*facts, *versions]))


def _shown(claim: Mapping[str, Any], key: str) -> float | None:
    """Returns an effect as it is shown: percent of a log ratio, kelvin of a temperature; None where there is none."""
    value = claim[key]
    if key not in ("effect", "low", "high", "predicted") or value is None:
        return None
    return float(value) if unit_of(claim["metric"]) == "degC" else 100.0 * math.expm1(value)


def _text(x: float, y: float, text: str, *, size: int = 13, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y}" font-size="{size}" text-anchor="{anchor}">{escape(text)}</text>'
