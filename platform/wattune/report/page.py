"""One HTML page with everything it needs, including plotly.js: it opens offline and shows the same in ten years.

Every figure comes with its method. Simulated figures are marked in a banner, in every table and across every chart.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import yaml

from wattune.ranking.assessment import Verdict
from wattune.ranking.bounds import Margin
from wattune.ranking.comparison import Comparison
from wattune.ranking.evidence import Evidence
from wattune.ranking.frontier import Frontier
from wattune.ranking.order import Ranking
from wattune.report.charts import slot_temperatures, step_parts, waterfall
from wattune.report.coverage import coverage_section
from wattune.report.figure import Chart, script
from wattune.report.frontier import frontier_chart
from wattune.report.markup import POLICY, SCRIPT, STYLE
from wattune.report.pareto import pareto
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
from wattune.report.spaces import spaces_section
from wattune.report.step_throughput import TITLE as STEP_THROUGHPUT
from wattune.report.step_throughput import not_drawn, step_throughput
from wattune.report.traces import power
from wattune.storage.spaces import StoredSpace
from wattune.view.answer import answer_lines, slack_text
from wattune.view.comparison import differing, others, tested
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
    evidence: Mapping[str, Evidence],
    comparison: Comparison | None = None,
    limits: Mapping[str, float] | None = None,
    price: Frontier | None = None,
) -> list[Chart]:
    """Draws every figure that has data, in the report's order.

    Args:
        ranking: Every assessed trial.
        evidence: Evidence of the trials shown in detail, by trial id.
        comparison: The best feasible trial against the best one that breaks a bound.
        limits: Hard limits by metric name.
        price: The best plan at each value of a bound.
    """
    others = ranking.infeasible[:1] or ranking.undecided[:1]
    closely = (*ranking.feasible[:1], *others, *ranking.feasible[1:])
    shown = [row for row in closely if row.trial_id in evidence][:MAX_TRACES]
    drawn = [
        pareto(ranking),
        frontier_chart(price) if price is not None else None,
        predictions(ranking),
        race(ranking),
        waterfall(comparison) if comparison is not None else None,
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
    evidence: Mapping[str, Evidence] | None = None,
    comparison: Comparison | None = None,
    problems: Sequence[str] = (),
    price: Frontier | None = None,
    spaces: Sequence[StoredSpace] = (),
) -> str:
    """Renders the whole report as HTML text.

    Args:
        study_name: The study's name.
        document: The search space with every default.
        ranking: Every assessed trial.
        candidates: Rows of `candidates.parquet`: `status` (kept, rejected, equivalent), `rule`, `reason`.
        evidence: Evidence of the trials shown in detail, by trial id.
        comparison: The best feasible trial against the best one that breaks a bound.
        problems: Messages about evidence that could not be read.
        price: The best plan at each value of a bound.
        spaces: Every space of the study, the first one first.
    """
    evidence = evidence or {}
    charts = draw(ranking, evidence, comparison, document.get("limits"), price)
    body = [
        _banner(ranking.simulated),
        _heading(study_name, ranking),
        _headline(ranking),
        coverage_section(ranking, candidates),
        _kept_bounds(ranking),
        _counts(ranking),
        _warnings((*ranking.warnings, *problems)),
        *(chart.html() for chart in charts[:1]),
        *verdict_tables(ranking),
        *(chart.html() for chart in charts[1:]),
        _not_drawn(ranking, evidence),
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
    return _page(study_name, body, drawn=bool(charts))


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
    return _page(f"{a.label} against {b.label}", body, drawn=chart is not None)


def _page(title: str, body: Sequence[Html], *, drawn: bool) -> str:
    library = script() if drawn else Html()
    return fill(_PAGE, Html(POLICY), title, Html(STYLE), library, join(body), Html(f"<script>{SCRIPT}</script>"))


def _warnings(warnings: Sequence[str]) -> Html:
    if not warnings:
        return Html()
    listed = join(fill("<li>{}.</li>", warning.removesuffix(".")) for warning in warnings)
    return fill('<aside class="warnings"><strong>Before you compare</strong><ul>{}</ul></aside>\n', listed)


def _not_drawn(ranking: Ranking, evidence: Mapping[str, Evidence]) -> Html:
    text = not_drawn(ranking, evidence)
    return section(STEP_THROUGHPUT, fill('<p class="note">{}</p>', text)) if text else Html()


def _banner(simulated: bool) -> Html:
    if not simulated:
        return Html()
    return Html(
        '<div class="banner" role="alert"><strong>SIMULATED TELEMETRY</strong>Power, temperature, clocks and energy on '
        "this page were computed from a model of the device, not measured. They show how the tools work and prove "
        "nothing about hardware.</div>\n"
    )


def _heading(study_name: str, ranking: Ranking) -> Html:
    bounds = [*map(str, ranking.constraints)] or ["no constraints"]
    return fill(
        '<header><p class="eyebrow">wattune study</p><h1>{}</h1>'
        '<ul class="chips"><li class="goal">{}</li>{}</ul></header>\n',
        study_name,
        str(ranking.objective),
        join(fill("<li>{}</li>", bound) for bound in bounds),
    )


def _headline(ranking: Ranking) -> Html:
    best = ranking.best
    if best is None:
        return fill(
            '<section class="headline none"><p class="eyebrow">Best feasible configuration</p>'
            '<p class="label">None: no trial is known to keep every bound.</p>{}<p class="note">{}</p></section>\n',
            _answer(ranking),
            price_text(ranking),
        )
    return fill(
        '<section class="headline"><div><p class="eyebrow">Best feasible configuration</p><p class="label">{}</p>'
        '<p>{}, {}, {}, trial {}</p>{}<p class="note">{}</p></div>'
        '<div><p class="eyebrow">{}</p><p class="figure">{}</p><p>{} {}</p></div></section>\n',
        best.label,
        best.spec.model.name,
        best.spec.cluster.label,
        best.spec.engine,
        best.trial_id,
        _answer(ranking),
        _expected(ranking) + price_text(ranking) + _others(ranking),
        ranking.objective.metric,
        worded(ranking.objective.metric, best.objective),
        repeats_text(best),
        quality_pill(best),
    )


def _expected(ranking: Ranking) -> str:
    """Describes what the best trial is expected to measure again, where others share its rank."""
    if ranking.expected is None or sum(row.rank == 1 for row in ranking.feasible) < 2:
        return ""
    return f"Expected when run again: {worded(ranking.objective.metric, ranking.expected)}. "


def _answer(ranking: Ranking) -> Html:
    """Writes the answer, in the words of the terminal."""
    return join(fill("<p>{}</p>", line) for line in answer_lines(ranking))


def _kept_bounds(ranking: Ranking) -> Html:
    """Draws how much of each bound the best trial uses. Empty without a best trial or a bound."""
    if ranking.best is None or not ranking.best.margins:
        return Html()
    meters = [
        fill(
            "<li><span>{}</span>{}<span>{}, slack {}</span></li>",
            str(margin.constraint),
            _meter(margin),
            worded(margin.metric, margin.got),
            slack_text(margin),
        )
        for margin in ranking.best.margins
    ]
    return fill(
        '<section class="kept"><p class="eyebrow">Bounds of {}</p><ul class="meters">{}</ul></section>\n',
        ranking.best.label,
        join(meters),
    )


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
    return Html(f'<i class="meter" aria-hidden="true"><b style="width:{100 * low / high:.1f}%"></b></i>')


def _counts(ranking: Ranking) -> Html:
    figures = [(str(verdict), len(getattr(ranking, verdict))) for verdict in Verdict]
    item = "<li><strong>{}</strong><span>{}</span><small>trials</small></li>"
    return fill('<ul class="counts">{}</ul>\n', join(fill(item, f"{number:,}", name) for name, number in figures))
