"""Sections of the report beside its charts: tables by verdict, saturation, rejections and method.

Every section is empty markup if it has nothing to show.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from typing import Any, Final

from wattune.intervals import Interval
from wattune.ranking.assessment import NOT_ITS_OWN, RankedTrial, is_simulated
from wattune.ranking.bounds import Holds, Margin
from wattune.ranking.evidence import Evidence
from wattune.ranking.order import Ranking
from wattune.report.markup import Html, fill, join, section, table
from wattune.trial import TrialResult, TrialStatus
from wattune.units import NS_PER_S, format_change, format_probability, format_quantity

MAX_ROWS: Final = 50
"""Most rows in a table; the ranking file has all of them."""

MAX_BOUNDS: Final = 5
"""Most bounds whose names and values fit side by side on a window of 1,400 pixels."""

_BASES: Final = {
    "repeats": "its repeats and all others",
    "pooled": "the repeats of other trials",
    "prior": "the prior: nothing was repeated",
}
"""Basis of an interval by its method."""

_SHORT_BASES: Final = {"repeats": "", "pooled": ", pooled", "prior": ", by the prior"}
"""The same in a table, whose caption says what the words mean."""

_BASIS_NOTES: Final = {
    "pooled": " Pooled: the interval is from the repeats of other trials.",
    "prior": " By the prior: the interval is assumed, since nothing was repeated.",
}

_VERSION_TAG: Final = "version."
"""Prefix of tags that name software and its version."""

_STAMP: Final = "SIMULATED TELEMETRY. "


def range_text(metric: str, found: Interval | None) -> str:
    """Returns a figure with its uncertainty."""
    return "–" if found is None else found.shown(metric)


def slack_text(margin: Margin) -> str:
    """Returns the distance to a bound, its share of the bound, and the probability that the bound holds."""
    share = "" if margin.slack_frac is None else f" ({100 * margin.slack_frac:+.1f} %)"
    slack = f"{'+' if margin.slack > 0 else ''}{format_change(margin.metric, margin.slack)}{share}"
    likely = margin.holds_probability
    kept = "" if likely is None else f", the next run keeps it with probability {format_probability(likely)}"
    return f"{slack.replace('-', '−')}, {margin.verdict}{kept}"


def repeats_text(row: RankedTrial) -> str:
    """Returns the number of repeats of a trial, and the basis of its interval."""
    return _count_text(row) + (f", interval by {_BASES[row.objective.method]}" if row.objective else "")


def _count_text(row: RankedTrial) -> str:
    left_out = len(row.repeats) - len(row.counted)
    count = "1 repeat" if len(row.counted) == 1 else f"{len(row.counted)} repeats"
    return f"{count}, {left_out} left out" if left_out else count


def quality_pill(row: RankedTrial) -> Html:
    """Returns the quality of a trial with its reasons in a tooltip, and a mark on simulated ones."""
    named = row.quality or "not assessed"
    reasons = sorted({reason for result in row.counted for reason in result.quality_reasons})
    pill = fill('<span class="pill {}" title="{}">{}</span>', named, ", ".join(reasons), named)
    return join([pill, Html('<span class="pill simulated">simulated</span>')]) if row.simulated else pill


def verdict_tables(ranking: Ranking) -> list[Html]:
    """Makes a table for each verdict that has trials."""
    metric, bounds = ranking.objective.metric, [*map(str, ranking.constraints)]
    varying = ranking.varying
    columns = ["configuration", *varying, metric, *bounds, "quality"]
    numeric = ["P(best)", "rank", metric, *bounds]
    # More bounds than fit side by side have numbers at the head of their columns, and marks alone.
    short = {bound: str(number) for number, bound in enumerate(bounds, start=1)} if len(bounds) > MAX_BOUNDS else {}
    legend = "".join(f" {number}: {bound}." for bound, number in short.items())
    measured = partial(_trial_cells, metric, bounds, varying)

    def part(
        rows: Sequence[RankedTrial], reading: str, columns: Sequence[str], cells: Callable[[RankedTrial], list[str]]
    ) -> Html:
        if not rows:
            return Html()
        more = f" The first {MAX_ROWS} of {len(rows):,}; ranking.parquet has all." if len(rows) > MAX_ROWS else ""
        caption = f"{_STAMP if ranking.simulated else ''}{reading}{more}"
        shown = rows[:MAX_ROWS]
        ids = [f"trial-{row.trial_id}" for row in shown]
        if "quality" in columns:  # rows of measured trials
            caption += legend
            methods = {row.objective.method for row in shown if row.objective}
            caption += "".join(note for method, note in _BASIS_NOTES.items() if method in methods)
        body = table(caption, columns, map(cells, shown), numeric, ids=ids, short=short)
        return section(str(rows[0].verdict).capitalize(), body)

    return [
        part(
            ranking.feasible,
            "P(best) is the probability to be the best feasible trial. A rank is 1 plus the number of trials that are "
            "told to be better, at 95 % over all comparisons. Under each bound the repeat that comes closest to it; "
            "point at it for its distance to the bound.",
            ["P(best)", "rank", *columns],
            lambda row: [format_probability(row.best_probability or 0.0), str(row.rank), *measured(row)],
        ),
        part(
            ranking.undecided,
            f"Best first; the runs do not decide the bounds with ? at a risk of {ranking.risk:g}. More repeats may.",
            columns,
            measured,
        ),
        part(
            ranking.infeasible,
            "Best first; ✕ marks the bounds that fail; point at one for the distance.",
            columns,
            measured,
        ),
        part(
            ranking.unknown,
            "A metric that was not measured neither keeps nor breaks a bound.",
            ["configuration", metric, "not measured"],
            lambda row: [row.label, range_text(metric, row.objective), ", ".join(row.missing)],
        ),
        part(
            ranking.burst,
            "Only a few steps of each were measured. None was promoted to a full measurement, so none is ranked.",
            ["configuration", "what the burst measured"],
            lambda row: [row.label, row.reason],
        ),
        part(
            ranking.interrupted,
            "Run again by the same command: the study ended while they ran.",
            ["configuration", "how it ended"],
            lambda row: [row.label, row.reason],
        ),
        _failures(ranking),
    ]


def _trial_cells(metric: str, bounds: Sequence[str], varying: Sequence[str], row: RankedTrial) -> list[str]:
    """Returns the cells of a measured trial: configuration, setting, objective, margins, quality."""
    margins = {margin.constraint: _margin(margin, brief=len(bounds) > MAX_BOUNDS) for margin in row.margins}
    return [
        fill("<strong>{}</strong><small>{}</small>", row.spec.label, row.trial_id),  # sizes have columns
        *(row.setting[name] for name in varying),
        fill("<span>{}</span><small>{}</small>", range_text(metric, row.objective), _brief_repeats(row)),
        *(margins.get(bound, "–") for bound in bounds),
        quality_pill(row),
    ]


def _brief_repeats(row: RankedTrial) -> str:
    return _count_text(row) + (_SHORT_BASES[row.objective.method] if row.objective else "")


def _margin(margin: Margin, *, brief: bool) -> Html:
    value = format_quantity(margin.metric, margin.got)
    marks = {Holds.HOLDS: "✓", Holds.UNDECIDED: "?", Holds.BREAKS: "✕"}
    kind = "verdict fails" if margin.verdict is Holds.BREAKS else "verdict"
    details = slack_text(margin)
    return fill(
        '<span class="{}" title="{}">{} {}</span><small class="detail">{}</small>',
        kind,
        f"{margin.constraint}: {value}, {details}",
        marks[margin.verdict],
        "" if brief else value,
        f"{value}, {details}" if brief else details,
    )


def _failures(ranking: Ranking) -> Html:
    groups: dict[TrialStatus, list[tuple[RankedTrial, TrialResult]]] = {}
    for row in ranking.failed:
        ended = [result for result in row.repeats if result.status is not TrialStatus.COMPLETED]
        result = next((one for one in ended if one.status not in NOT_ITS_OWN), ended[0])
        groups.setdefault(result.status, []).append((row, result))
    if not groups:
        return Html()
    rows = [
        [status.replace("_", " "), str(len(group)), group[0][0].label, group[0][1].reason or "no reason given"]
        for status, group in sorted(groups.items(), key=lambda item: -len(item[1]))
    ]
    columns = ["how it ended", "trials", "for example", "its reason"]
    return section("Failed", table("A trial with one failed repeat has failed.", columns, rows, ["trials"]))


def saturation_section(ranking: Ranking, evidence: Mapping[str, Evidence]) -> Html:
    """Lists the load of links and units relative to their peaks; `saturated` appears only where it holds."""
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
        "Mean over the time named under within, as a share of the peak. Saturated means that at least half of that "
        "time is above the threshold."
    )
    stamp = _STAMP if ranking.simulated else ""
    return section(
        "How near to saturation", table(stamp + caption, columns, rows, ["of its peak", "time above", "threshold"])
    )


def rejections_section(candidates: Sequence[Mapping[str, Any]]) -> Html:
    """Lists rejected combinations by rule, and counts the equivalent ones."""
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


def method_section(ranking: Ranking, document: Mapping[str, Any]) -> Html:
    """Describes the method behind the figures: window, repeats, sensor, quality, software."""
    counted = [result for row in ranking.trials for result in row.counted]
    measured = [row for row in ranking.trials if row.counted]
    methods = Counter(row.objective.method for row in measured if row.objective)
    known = ", ".join(f"{_BASES[name]} ({count})" for name, count in methods.items())
    widths = [row.objective.half_width_frac for row in measured if row.objective]
    spread = f"to ±{100 * max(widths):.2g} % or better, by {known}" if widths else "not known"
    spread = "; ".join([spread, *ranking.scatter])
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
    """Describes the sensor by the telemetry of the worst repeat."""
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
