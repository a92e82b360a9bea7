"""One HTML page with everything it needs, including plotly.js: it opens offline and shows the same in ten years.

Every figure comes with its method. Simulated figures are marked in a banner, in every table and across every chart.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import yaml

from wattune.analysis.detail import Detail
from wattune.ranking.answer import StudyAnswer, answer_of
from wattune.ranking.bounds import Holds, Margin
from wattune.ranking.comparison import Comparison
from wattune.ranking.frontier import Frontier
from wattune.ranking.order import Ranking
from wattune.report.charts import slot_temperatures, step_parts, waterfall
from wattune.report.figure import POLICY, SCRIPT, STYLE, Chart, script
from wattune.report.frontier import frontier_chart
from wattune.report.pareto import BESIDE_PX, pareto
from wattune.report.predictions import predictions
from wattune.report.race import race
from wattune.report.sections import (
    method_section,
    quality_pill,
    rejections_section,
    repeats_text,
    saturation_section,
    times_section,
    verdict_tables,
)
from wattune.report.spaces import coverage_section, spaces_section
from wattune.report.step_throughput import TITLE as STEP_THROUGHPUT
from wattune.report.step_throughput import not_drawn, step_throughput
from wattune.report.traces import power
from wattune.storage.spaces import StoredSpace
from wattune.view.answer import answer_notes, bound_text
from wattune.view.comparison import differing, others, reason_text, tested
from wattune.view.html import Html, fill, join, section, table
from wattune.view.ranking import price_text
from wattune.view.table import worded

_PAGE: Final = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{}"><title>{} – wattune</title><style>{}</style>{}</head>
<body><main>
{}</main>{}</body></html>
"""

MAX_TRACES: Final = 2
"""Most trials whose power is drawn: the best feasible one and the best one that breaks a bound."""


def draw(
    ranking: Ranking,
    evidence: Mapping[str, Detail],
    comparisons: Mapping[str, Comparison] | None = None,
    limits: Mapping[str, float] | None = None,
    price: Frontier | None = None,
) -> list[Chart]:
    """Draws every figure that has data, in the report's order.

    `evidence` is of the trials shown in detail, `comparisons` have the answer's plan as B, by what A is: the `next`,
    the `reference` trial, the `price` of a bound. `limits` are hard ones by metric, `price` the best plan at each value
    of a bound.
    """
    answer = pareto(ranking)
    details = _details(ranking, evidence, comparisons or {}, limits, price)
    return [answer, *details] if answer is not None else details


def _details(
    ranking: Ranking,
    evidence: Mapping[str, Detail],
    comparisons: Mapping[str, Comparison],
    limits: Mapping[str, float] | None,
    price: Frontier | None,
) -> list[Chart]:
    """Draws every figure but the one that stands beside the answer."""
    others = ranking.infeasible[:1] or ranking.undecided[:1]
    closely = (*ranking.feasible[:1], *others, *ranking.feasible[1:])
    shown = [row for row in closely if row.trial_id in evidence][:MAX_TRACES]
    drawn = [
        frontier_chart(price) if price is not None else None,
        predictions(ranking),
        race(ranking),
        next(filter(None, map(waterfall, comparisons.values())), None),
        step_parts(ranking, evidence),
        step_throughput(ranking, evidence),
        power(ranking, shown, evidence, limits or {}),
        slot_temperatures(ranking, evidence),
    ]
    return [chart for chart in drawn if chart is not None]


def render_report(
    study_name: str,
    document: Mapping[str, Any],
    ranking: Ranking,
    candidates: Sequence[Mapping[str, Any]],
    evidence: Mapping[str, Detail] | None = None,
    comparisons: Mapping[str, Comparison] | None = None,
    problems: Sequence[str] = (),
    price: Frontier | None = None,
    spaces: Sequence[StoredSpace] = (),
) -> str:
    """Renders the whole report as HTML text.

    `document` is the space with every default, and `candidates` are the rows of `candidates.parquet`. `evidence` is by
    trial id, of those shown in detail; `problems` say what of it could not be read. `comparisons` have the answer's
    plan as B, by what A is; see `draw`.
    """
    evidence, comparisons = evidence or {}, comparisons or {}
    picture, text = pareto(ranking, BESIDE_PX), not_drawn(ranking, evidence)
    charts = _details(ranking, evidence, comparisons, document.get("limits"), price)
    body = [
        _banner(ranking.simulated),
        _heading(study_name, ranking),
        _headline(ranking, comparisons, picture),
        _warnings((*ranking.warnings, *problems)),
        coverage_section(ranking, candidates),
        *verdict_tables(ranking),
        *(chart.html() for chart in charts),
        section(STEP_THROUGHPUT, fill('<p class="note">{}</p>', text)) if text else Html(),
        saturation_section(ranking, evidence),
        spaces_section(spaces, ranking),
        rejections_section(candidates),
        times_section(ranking),
        method_section(ranking, document),
        section(
            "Search space",
            fill("<pre>{}</pre>", yaml.safe_dump(dict(document), sort_keys=False, default_flow_style=None)),
        ),
    ]
    return page(study_name, body, drawn=bool(picture or charts))


def render_comparison(comparison: Comparison) -> str:
    """Renders two trials side by side as HTML text: differences, waterfall, every metric."""
    chart = waterfall(comparison)
    a, b = comparison.a, comparison.b
    body = [
        _banner(a.simulated or b.simulated),
        fill(
            '<header><p class="eyebrow">wattune compare</p><h1>{} against {}</h1>'
            '<ul class="chips"><li>A: {}</li><li>B: {}</li></ul></header>\n',
            a.label,
            b.label,
            a.known_as,
            b.known_as,
        ),
        section("In a sentence", fill('<p class="label">{}.</p>', comparison.conclusion)),
        _warnings(comparison.warnings),
        *([chart.html()] if chart else []),
        section("What differs", table(differing(comparison), "Fields of the two specifications.")),
        section("Differences", table(tested(comparison), f"{comparison.error_note}.")),
        section("Other metrics", table(others(comparison), "Of the first compared run, not tested.")),
    ]
    return page(f"{a.label} against {b.label}", body, drawn=chart is not None)


def page(title: str, body: Sequence[Html], *, drawn: bool) -> str:
    """Makes a page of sections, with the plotting library if something is drawn."""
    library = script() if drawn else Html()
    return fill(_PAGE, Html(POLICY), title, Html(STYLE), library, join(body), Html(f"<script>{SCRIPT}</script>"))


def _warnings(warnings: Sequence[str]) -> Html:
    if not warnings:
        return Html()
    listed = join(fill("<li>{}.</li>", warning.removesuffix(".")) for warning in warnings)
    return fill('<aside class="warnings"><strong>Before you compare</strong><ul>{}</ul></aside>\n', listed)


def _banner(simulated: bool) -> Html:
    if not simulated:
        return Html()
    return Html(
        '<div class="banner" role="alert"><strong>SIMULATED TELEMETRY</strong>'
        "<span>Power, temperature, clocks and energy on "
        "this page were computed from a model of the device, not measured. They show how the tools work and prove "
        "nothing about hardware.</span></div>\n"
    )


def _heading(study_name: str, ranking: Ranking) -> Html:
    bounds = [*map(str, ranking.constraints)] or ["no constraints"]
    return fill(
        '<header class="study"><div><p class="eyebrow">wattune study</p><h1>{}</h1></div>'
        '<ul class="chips"><li class="goal">{}</li>{}</ul></header>\n',
        study_name,
        str(ranking.objective),
        join(fill("<li>{}</li>", bound) for bound in bounds),
    )


def _headline(ranking: Ranking, comparisons: Mapping[str, Comparison], picture: Chart | None) -> Html:
    """Writes the answer: the plan, its gain and why, what to do next, the picture beside it, and every bound."""
    notes = answer_notes(ranking, found := answer_of(ranking))
    kind = "recording" if ranking.of_recordings else "configuration"
    title = f"Best feasible {kind}" if found.state != "undecided" else f"Most likely the best {kind}, its bounds open"
    to_do = [_code(note.text, found.command) for note in notes if note.tone == "next"]
    said = [*_why(found, ranking, comparisons), *(note.text for note in notes if not note.tone)]
    lost = reason_text(comparisons["price"]) if "price" in comparisons else ""
    more = f"{_expected(ranking)}{price_text(ranking)}{lost and f' Against it: {lost}.'}{_others(ranking)}"
    parts = [
        _plan(found, ranking, notes[0].text),
        fill("<ul>{}</ul>", join(fill("<li>{}</li>", text) for text in said)) if said else Html(),
        fill('<div class="next">{}</div>', join(to_do)) if to_do else Html(),
        fill('<p class="note">{}</p>', more) if more else Html(),
    ]
    return fill(
        '<section class="headline{}"><div class="answer"><p class="eyebrow">{}</p>{}</div>{}{}</section>\n',
        (" pictured" if picture else "") + ("" if ranking.best else " none"),
        title,
        join(parts),
        fill('<div class="picture"><h2>{}</h2>{}</div>', picture.title, picture.body()) if picture else Html(),
        _bounds(found),
    )


def _plan(found: StudyAnswer, ranking: Ranking, answer: str) -> Html:
    """Names the answer's plan with its figure, what both rest on, and how much better it is; else says why none is."""
    row = found.plan
    if row is None:
        return fill('<h2 class="label">{}</h2>', answer)
    about = row.label if row.recorded else f"{row.spec.model.name}, {row.spec.cluster.label}, {row.spec.engine}"
    return fill(
        '<h2 class="label">{}</h2><p class="figure">{} <small>{}</small></p><p class="about">{} {}, {}{}</p>'
        '<p class="lead">{}</p>',
        row.trial_id if row.recorded else row.label,
        worded(ranking.objective.metric, row.objective),
        ranking.objective.metric,
        quality_pill(row),
        repeats_text(row),
        about,
        Html() if row.recorded else f", trial {row.trial_id}",
        answer,
    )


def _why(found: StudyAnswer, ranking: Ranking, comparisons: Mapping[str, Comparison]) -> list[str]:
    """Compares the plan with the next one and with the reference trial, and names the parts of a step that differ."""
    titles, row = {"next": "the next"}, found.reference
    if row is not None and row is found.next_plan:
        titles = {"next": "the next, the reference trial"}
    elif row is not None:
        verdict = "" if row in ranking.feasible else f", {row.verdict}"
        titles["reference"] = f"the reference trial, {ranking.name_of(row)}{verdict}"
    said = []
    for role, one in comparisons.items():
        if title := titles.get(role):
            reason = reason_text(one)
            said.append(f"Against {title}: {one.conclude('that', 'it')}{reason and f'; {reason}'}.")
    return said


def _code(text: str, command: str) -> Html:
    """Writes what to do, its command to copy."""
    if not command or not text.endswith(command):
        return fill("<p>{}</p>", text)
    return fill("<p>{}<code>{}</code></p>", text.removesuffix(command), command)


def _expected(ranking: Ranking) -> str:
    """Describes what the best trial is expected to measure again, where others share its rank."""
    if ranking.expected is None or sum(row.rank == 1 for row in ranking.feasible) < 2:
        return ""
    return f"Expected when run again: {worded(ranking.objective.metric, ranking.expected)}. "


def _bounds(found: StudyAnswer) -> Html:
    """Draws how much of each bound the plan uses, the closest first. Empty without a plan or a bound."""
    margins = sorted(found.plan.margins if found.plan else (), key=lambda margin: margin is not found.closest)
    meters = [
        fill("<li>{}<span>{}</span><p>{}</p></li>", _meter(one), worded(one.metric, one.got), bound_text(one, found))
        for one in margins
    ]
    return fill('<ul class="meters">{}</ul>', join(meters)) if meters else Html()


def _others(ranking: Ranking) -> str:
    """Describes the best trial of every other model or workload, if there are several."""
    metric = ranking.objective.metric
    named = [
        f" Best of {ranking.work_name(row)}: {row.label} with {worded(metric, row.objective)}."
        for row in ranking.best_of_each
        if row is not ranking.best
    ]
    return "".join(named)


def _meter(margin: Margin) -> Html:
    """Draws the used share of a bound; empty if it is not a share, as around 0."""
    low, high = sorted((margin.got, margin.bound))
    if low < 0 or high <= 0:
        return Html("<i></i>")
    look = "" if margin.verdict is Holds.HOLDS else ' class="lost"'
    return Html(f'<i class="meter" aria-hidden="true"><b{look} style="width:{100 * low / high:.1f}%"></b></i>')
