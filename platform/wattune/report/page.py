"""One HTML page that carries all it needs, plotly.js included: it opens offline and shows the same in ten years.

A figure does not stand without its method, and simulated figures say so in a banner, in every table and across every
chart.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final

import yaml

from wattune.intervals import Interval
from wattune.ranking.assessment import Margin, RankedTrial, Verdict, is_simulated
from wattune.ranking.comparison import Comparison
from wattune.ranking.evidence import Evidence
from wattune.ranking.order import Ranking
from wattune.report.charts import slot_temperatures, step_parts, trade_off, waterfall
from wattune.report.figure import Chart, script
from wattune.report.markup import POLICY, SCRIPT, STYLE, Html, fill, join, section, table
from wattune.report.traces import power
from wattune.trial import TrialResult, TrialStatus
from wattune.units import NS_PER_S, format_quantity

MAX_ROWS: Final = 50
"""Rows a table shows; the ranking file has all of them."""

_BASES: Final = {
    "repeats": "its repeats",
    "pooled": "repeats and reference trial",
    "reference": "the reference trial",
    "steps": "its steps",
}
"""What an interval rests on; nothing is said where nothing is known."""

_VERSION_TAG: Final = "version."
"""What tags begin with that name software and its version."""

_PAGE: Final = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{}"><title>{} – wattune</title><style>{}</style>{}</head>
<body><main>
{}</main>{}</body></html>
"""

MAX_TRACES: Final = 2
"""Trials whose power is drawn: the best feasible one and the best of those that break a bound."""


def draw(
    ranking: Ranking,
    evidence: Mapping[str, Evidence],
    comparison: Comparison | None = None,
    limits: Mapping[str, float] | None = None,
) -> list[Chart]:
    """Every figure there is something to draw for, in the report's order.

    Args:
        ranking: Every trial, judged.
        evidence: Of the trials that are shown closely, by trial id.
        comparison: The best feasible trial against the best of those that break a bound.
        limits: Hard limits by metric name.
    """
    closely = (*ranking.feasible[:1], *ranking.infeasible[:1], *ranking.feasible[1:])
    shown = [row for row in closely if row.trial_id in evidence][:MAX_TRACES]
    drawn = [
        trade_off(ranking),
        waterfall(comparison) if comparison is not None else None,
        step_parts(ranking, evidence),
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
) -> str:
    """The whole report as HTML text.

    Args:
        study_name: The study's name.
        document: The search space, every default spelled out.
        ranking: Every trial, judged.
        candidates: Rows of `candidates.parquet`: `status` (kept, rejected, equivalent), `rule`, `reason`.
        evidence: Of the trials that are shown closely, by trial id.
        comparison: The best feasible trial against the best of those that break a bound.
        problems: Evidence that could not be read, in words.
    """
    evidence = evidence or {}
    charts = draw(ranking, evidence, comparison, document.get("limits"))
    body = [
        _banner(ranking.simulated),
        _heading(study_name, ranking),
        _headline(ranking),
        _warnings((*ranking.warnings, *problems)),
        _counts(ranking, candidates),
        *(chart.html() for chart in charts[:1]),
        *_tables(ranking),
        *(chart.html() for chart in charts[1:]),
        _saturation(ranking, evidence),
        _rejections(candidates),
        _method(ranking, document),
        section(
            "Search space",
            fill("<pre>{}</pre>", yaml.safe_dump(dict(document), sort_keys=False, default_flow_style=None)),
        ),
    ]
    return _page(study_name, body, drawn=bool(charts))


def render_comparison(comparison: Comparison) -> str:
    """Two trials side by side as HTML text: what differs, the waterfall, every metric."""
    chart = waterfall(comparison)
    a, b = comparison.a, comparison.b
    differing = [
        [path, _value(values[0]), _value(values[1])] for path, values in sorted(comparison.differences.items())
    ]
    rows = [
        [
            name,
            format_quantity(name, of_a),
            format_quantity(name, of_b),
            f"{100 * (of_b / of_a - 1):+.1f} %" if of_a else "–",
        ]
        for name, (of_a, of_b) in comparison.metrics.items()
    ]
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
        section("What differs", table("Fields of the two specifications.", ["field", "A", "B"], differing)),
        section(
            "Every metric",
            table("Of the compared repeats.", ["metric", "A", "B", "B over A"], rows, ["A", "B", "B over A"]),
        ),
    ]
    return _page(f"{a.label} against {b.label}", body, drawn=chart is not None)


def _page(title: str, body: Sequence[Html], *, drawn: bool) -> str:
    library = script() if drawn else Html()
    return fill(_PAGE, Html(POLICY), title, Html(STYLE), library, join(body), Html(f"<script>{SCRIPT}</script>"))


def _value(value: Any) -> str:
    return "–" if value is None else str(value)


def _warnings(warnings: Sequence[str]) -> Html:
    if not warnings:
        return Html()
    listed = join(fill("<li>{}.</li>", warning) for warning in warnings)
    return fill('<aside class="warnings"><strong>Before you compare</strong><ul>{}</ul></aside>\n', listed)


def _saturation(ranking: Ranking, evidence: Mapping[str, Evidence]) -> Html:
    """How near links and units ran to what they can do; `saturated` is said only where it holds."""
    rows = [
        [
            row.label,
            one.what,
            one.within,
            f"{100 * one.achieved_frac:.1f} %",
            f"{100 * one.above_frac:.1f} %",
            f"{100 * one.threshold_frac:.0f} %",
            "saturated" if one.saturated else "no",
            one.peak_source,
        ]
        for row in (*ranking.feasible[:1], *ranking.infeasible[:1])
        for one in (evidence[row.trial_id].saturation if row.trial_id in evidence else ())
    ]
    if not rows:
        return Html()
    columns = ["configuration", "what", "within", "of its peak", "time above", "threshold", "saturated", "peak by"]
    caption = (
        "Mean over the time named under within, as a share of the peak; saturated is said where at least half of that "
        "time is above the threshold."
    )
    stamp = "SIMULATED TELEMETRY. " if ranking.simulated else ""
    return section(
        "How near to saturation", table(stamp + caption, columns, rows, ["of its peak", "time above", "threshold"])
    )


def _range(metric: str, found: Interval | None) -> str:
    """A figure and what it may be off by."""
    return "–" if found is None else found.shown(metric)


def _slack(margin: Margin) -> str:
    share = "" if margin.slack_frac is None else f" ({100 * margin.slack_frac:+.1f} %)"
    slack = f"{'+' if margin.slack > 0 else ''}{format_quantity(margin.metric, margin.slack)}{share}"
    likely = "" if margin.holds_probability is None else f", holds with probability {margin.holds_probability:.2f}"
    return slack.replace("-", "−") + likely


def _middle(row: RankedTrial) -> float:
    """The middle of the objective's interval."""
    assert row.objective is not None, "feasible rows and those asked for have one"
    return row.objective.value


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
            '<p class="label">None: no trial is known to keep every bound.</p><p class="note">{}</p></section>\n',
            _price(ranking),
        )
    meters = [
        fill(
            "<li><span>{}</span>{}<span>{}, slack {}</span></li>",
            margin.constraint,
            _meter(margin),
            format_quantity(margin.metric, margin.got),
            _slack(margin),
        )
        for margin in best.margins
    ]
    ties = sum(row.rank == 1 for row in ranking.feasible) - 1
    shared = f"Shares rank 1 with {ties} more: the measurement does not tell them apart. " if ties else ""
    return fill(
        '<section class="headline"><div><p class="eyebrow">Best feasible configuration</p><p class="label">{}</p>'
        '<p>{}, {}, {}, trial {}</p><p class="note">{}</p></div>'
        '<div><p class="eyebrow">{}</p><p class="figure">{}</p><p>{} {}</p></div>{}</section>\n',
        best.label,
        best.spec.model.name,
        best.spec.cluster.label,
        best.spec.engine,
        best.trial_id,
        shared + _price(ranking) + _others(ranking),
        ranking.objective.metric,
        _range(ranking.objective.metric, best.objective),
        _repeats(best),
        _quality(best),
        fill('<ul class="meters">{}</ul>', join(meters)) if meters else Html(),
    )


def _others(ranking: Ranking) -> str:
    """The best of every other model, where there are several."""
    metric = ranking.objective.metric
    named = [
        f" Best of {row.spec.model.name}: {row.label} with {_range(metric, row.objective)}."
        for row in ranking.best_of_each
        if row is not ranking.best
    ]
    return "".join(named)


def _repeats(row: RankedTrial) -> str:
    left_out = len(row.repeats) - len(row.counted)
    count = "1 repeat" if len(row.counted) == 1 else f"{len(row.counted)} repeats"
    basis = f", interval by {_BASES[row.objective.method]}" if row.objective and row.objective.method in _BASES else ""
    return (f"{count}, {left_out} left out" if left_out else count) + basis


def _price(ranking: Ranking) -> str:
    """What the bounds cost: the first infeasible trial of the same model against the best feasible one."""
    best = ranking.best
    alike = (row for row in ranking.infeasible if best is None or row.spec.model == best.spec.model)
    row = next((row for row in alike if row.objective is not None), None)
    if row is None:
        return ""
    failing = row.failing[0]
    past = f"fails {failing.constraint} by {format_quantity(failing.metric, -failing.slack)}"
    reached = format_quantity(ranking.objective.metric, _middle(row))
    if best is None:
        return f"The best of those that break a bound, {row.label}, reaches {reached} and {past}."
    own = _middle(best)
    gain = (_middle(row) - own) * (1 if ranking.objective.maximize else -1)
    if gain <= 0 or not own:
        return "No trial that breaks a bound does better."
    return f"{row.label} is {100 * gain / abs(own):.1f} % better, with {reached}, but {past}."


def _meter(margin: Margin) -> Html:
    """How much of what is allowed is used; nothing where that is no share, as around 0."""
    low, high = sorted((margin.got, margin.bound))
    if low < 0 or high <= 0:
        return Html("<i></i>")
    return Html(f'<i class="meter" aria-hidden="true"><b style="width:{100 * low / high:.1f}%"></b></i>')


def _quality(row: RankedTrial) -> Html:
    named = row.quality or "not judged"
    reasons = sorted({reason for result in row.counted for reason in result.quality_reasons})
    pill = fill('<span class="pill {}" title="{}">{}</span>', named, ", ".join(reasons), named)
    return join([pill, Html('<span class="pill simulated">simulated</span>')]) if row.simulated else pill


def _counts(ranking: Ranking, candidates: Sequence[Mapping[str, Any]]) -> Html:
    statuses = Counter(row["status"] for row in candidates)
    figures = [(str(verdict), len(getattr(ranking, verdict)), "trials") for verdict in Verdict]
    figures += [
        (status, statuses[status], "combinations") for status in ("kept", "rejected", "equivalent") if candidates
    ]
    item = "<li><strong>{}</strong><span>{}</span><small>{}</small></li>"
    return fill('<ul class="counts">{}</ul>\n', join(fill(item, f"{n:,}", name, of) for name, n, of in figures))


def _tables(ranking: Ranking) -> list[Html]:
    """One table for each verdict there are trials of."""
    metric, bounds = ranking.objective.metric, [*map(str, ranking.constraints)]
    varying = ranking.varying
    columns = ["configuration", *varying, metric, *bounds, "quality"]
    numeric = ["rank", metric, *bounds]

    def cells(row: RankedTrial) -> list[str]:
        margins = {margin.constraint: _margin(margin) for margin in row.margins}
        return [
            fill("<strong>{}</strong><small>{}</small>", row.label, row.trial_id),
            *(row.setting[name] for name in varying),
            fill("{}<small>{}</small>", _range(metric, row.objective), _repeats(row)),
            *(margins.get(bound, "–") for bound in bounds),
            _quality(row),
        ]

    def part(
        rows: Sequence[RankedTrial], reading: str, columns: Sequence[str], line: Callable[[RankedTrial], list[str]]
    ) -> Html:
        if not rows:
            return Html()
        more = f" The first {MAX_ROWS} of {len(rows):,}; ranking.parquet has all." if len(rows) > MAX_ROWS else ""
        stamp = "SIMULATED TELEMETRY. " if ranking.simulated else ""
        return section(
            str(rows[0].verdict).capitalize(),
            table(
                f"{stamp}{reading}{more}",
                columns,
                [line(row) for row in rows[:MAX_ROWS]],
                numeric,
                ids=[f"trial-{row.trial_id}" for row in rows[:MAX_ROWS]],
            ),
        )

    return [
        part(
            ranking.feasible,
            "A rank is 1 plus the number of trials whose 95 % interval lies wholly above. Under each bound the repeat "
            "that comes closest to it, and its distance to the bound.",
            ["rank", *columns],
            lambda row: [str(row.rank), *cells(row)],
        ),
        part(ranking.infeasible, "Best first; ✕ marks the bounds that fail.", columns, cells),
        part(
            ranking.unknown,
            "A metric that was not measured neither keeps nor breaks a bound.",
            ["configuration", metric, "not measured"],
            lambda row: [row.label, _range(metric, row.objective), ", ".join(row.missing)],
        ),
        part(
            ranking.interrupted,
            "Run again by the same command: the study ended while they ran.",
            ["configuration", "how it ended"],
            lambda row: [row.label, row.reason],
        ),
        _failures(ranking),
    ]


def _margin(margin: Margin) -> Html:
    value = format_quantity(margin.metric, margin.got)
    shown = value if margin.holds else fill('<span class="fails">✕ {}</span>', value)
    return fill("{}<small>{}</small>", shown, _slack(margin))


def _failures(ranking: Ranking) -> Html:
    groups: dict[TrialStatus, list[tuple[RankedTrial, TrialResult]]] = {}
    for row in ranking.failed:
        result = next(result for result in row.repeats if result.status is not TrialStatus.COMPLETED)
        groups.setdefault(result.status, []).append((row, result))
    rows = [
        [status.replace("_", " "), str(len(group)), group[0][0].label, group[0][1].reason or "no reason given"]
        for status, group in sorted(groups.items(), key=lambda item: -len(item[1]))
    ]
    columns = ["how it ended", "trials", "for example", "its reason"]
    return (
        section("Failed", table("A trial with one failed repeat has failed.", columns, rows, ["trials"]))
        if rows
        else Html()
    )


def _rejections(candidates: Sequence[Mapping[str, Any]]) -> Html:
    rejected = [row for row in candidates if row["status"] == "rejected"]
    num_equivalent = sum(row["status"] == "equivalent" for row in candidates)
    examples = {row["rule"]: row["reason"] for row in reversed(rejected)}
    counts = Counter(row["rule"] for row in rejected).most_common()
    parts = []
    if rejected:
        rows = [[rule, f"{count:,}", examples[rule]] for rule, count in counts]
        parts.append(
            table("Combinations that cannot run.", ["rule", "combinations", "for example"], rows, ["combinations"])
        )
    if num_equivalent:
        parts.append(
            fill(
                '<p class="note">{} more do the same work as one that is kept: not run twice.</p>',
                f"{num_equivalent:,}",
            )
        )
    return section("Rejected and equivalent", *parts) if parts else Html()


def _method(ranking: Ranking, document: Mapping[str, Any]) -> Html:
    counted = [result for row in ranking.trials for result in row.counted]
    measured = [row for row in ranking.trials if row.counted]
    methods = Counter(row.objective.method for row in measured if row.objective)
    known = ", ".join(f"{_BASES[name]} ({count})" for name, count in methods.items() if name in _BASES)
    widths = [row.objective.half_width_frac for row in measured if row.objective and row.objective.method != "none"]
    spread = f"to ±{100 * max(widths):.2g} % or better, by {known}" if widths else "not known"
    if "none" in methods and widths:
        spread += f"; of {methods['none']} trials scatter is not known"
    reasons = Counter(reason for result in counted for reason in result.quality_reasons).most_common()
    facts = {
        "Window": "from the earliest start to the latest end of the measured steps over all ranks",
        "Steps": ", ".join(f"{name} {value}" for name, value in (document.get("measure") or {}).items()),
        "Repeats": f"{len(counted)} of {len(measured)} trials" if counted else "",
        "Scatter": spread if counted else "",
        "Sensor": _sensor(counted),
        "Quality": ranking.note.removeprefix("quality: "),
        "Peaks": "highest moving mean over the window in the metric's name, devices of a node summed on one time axis",
        "Held back by": ", ".join(f"{reason} ({count})" for reason, count in reasons),
        "Measured": _period(counted),
        "Software": _versions(counted),
    }
    items = (fill("<dt>{}</dt><dd>{}</dd>", name, text) for name, text in facts.items() if text)
    return section("Method and quality", fill("<dl>{}</dl>", join(items)))


def _sensor(counted: Sequence[TrialResult]) -> str:
    """What telemetry says of itself, in the worst repeat."""
    parts = ["simulated"] if any(map(is_simulated, counted)) else []
    for name, label, worst in (
        ("sensor_period_s", "period up to", max),
        ("sample_coverage_frac", "coverage at least", min),
        ("energy_integral_error_frac", "power integral and energy counter agree within", max),
        ("telemetry_overhead_frac", "own overhead up to", max),
    ):
        values = [abs(result.metrics[name]) for result in counted if name in result.metrics]
        parts += [f"{label} {format_quantity(name, worst(values))}"] if values else []
    return ", ".join(parts)


def _period(counted: Sequence[TrialResult]) -> str:
    times_ns = [ns for result in counted for ns in (result.start_wall_ns, result.end_wall_ns) if ns]
    ends = [min(times_ns), max(times_ns)] if times_ns else []
    return " to ".join(datetime.fromtimestamp(ns / NS_PER_S, UTC).strftime("%Y-%m-%d %H:%M UTC") for ns in ends)


def _versions(counted: Sequence[TrialResult]) -> str:
    found: dict[str, set[str]] = {}
    for result in counted:
        for tag, text in result.tags.items():
            if tag.startswith(_VERSION_TAG) or tag == "git_commit":
                found.setdefault(tag.removeprefix(_VERSION_TAG), set()).add(text)
    return ", ".join(f"{name} {' / '.join(sorted(texts))}" for name, texts in sorted(found.items()))
