"""Sections of the report beside its charts: tables by verdict, saturation, rejections and method.

Every section is empty markup if it has nothing to show.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, Final

from wattune.analysis.detail import Detail
from wattune.ranking.assessment import NOT_ITS_OWN, RankedTrial, is_simulated
from wattune.ranking.order import Ranking
from wattune.run import Run, RunStatus
from wattune.search.prune import LeftOut
from wattune.units import NS_PER_S
from wattune.view.html import Html, fill, join, section, table
from wattune.view.plans import rejections
from wattune.view.ranking import STANDING, bound_columns, setting_columns
from wattune.view.table import COUNT, PERCENT, Cell, Column, Note, Table, worded
from wattune.view.times import times_view

MAX_ROWS: Final = 50
"""Most rows in a table; the ranking file has all of them."""

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
    return join([pill, *(fill('<span class="pill simulated">{}</span>', mark) for mark in row.marks)])


def _stamped(ranking: Ranking) -> str:
    return f"{ranking.stamp} TELEMETRY. " if ranking.stamp else ""


def verdict_tables(ranking: Ranking) -> list[Html]:
    """Makes a table for each verdict that has trials."""
    metric = ranking.objective.metric
    measured = [
        # Sizes have columns.
        Column("configuration", lambda row: Cell(row.spec.label, small=row.trial_id), place="lead"),
        *setting_columns(ranking),
        Column(metric, lambda row: Cell(row.objective, small=_brief_repeats(row)), metric),
        *bound_columns(ranking.constraints),
        Column("quality", quality_pill),
    ]
    configuration = Column("configuration", lambda row: row.label)

    def part(rows: Sequence[RankedTrial], columns: Sequence[Column], reading: str) -> Html:
        if not rows:
            return Html()
        more = f" The first {MAX_ROWS} of {len(rows):,}; ranking.parquet has all." if len(rows) > MAX_ROWS else ""
        methods = {row.objective.method for row in rows[:MAX_ROWS] if row.objective} if measured[-1] in columns else ()
        notes = "".join(note for method, note in _BASIS_NOTES.items() if method in methods)
        caption = f"{_stamped(ranking)}{reading}{more}{notes}"
        shown = table(Table("", columns, rows[:MAX_ROWS]), caption, name=lambda row: f"trial-{row.trial_id}")
        return section(str(rows[0].verdict).capitalize(), shown)

    return [
        part(
            ranking.feasible,
            [*STANDING, *measured],
            "P(best) is the probability to be the best that keeps every bound; undecided trials have a share of it. A "
            "rank is 1 plus the number of trials that are told to be better, at 95 % over all comparisons. Under each "
            "bound the repeat that comes closest to it; point at it for its distance to the bound.",
        ),
        part(
            ranking.undecided,
            measured,
            f"Best first; the runs do not decide the bounds with ? at a risk of {ranking.question.risk:g}. More "
            "repeats may.",
        ),
        part(
            ranking.behind,
            measured,
            "Best first; bounds with ? are open, and another plan is better whether they hold or not: no repeat of "
            "these changes the answer.",
        ),
        part(ranking.infeasible, measured, "Best first; ✕ marks the bounds that fail; point at one for the distance."),
        part(
            ranking.unknown,
            [
                configuration,
                Column(metric, lambda row: row.objective, metric),
                Column("not measured", lambda row: ", ".join(row.missing)),
            ],
            "A metric that was not measured neither keeps nor breaks a bound.",
        ),
        part(
            ranking.burst,
            [configuration, Column("what the burst measured", lambda row: row.reason)],
            "Only a few steps of each were measured. None was promoted to a full measurement, so none is ranked.",
        ),
        part(
            ranking.interrupted,
            [configuration, Column("how it ended", lambda row: row.reason)],
            "Run again by the same command: the study ended while they ran.",
        ),
        _failures(ranking),
    ]


def _brief_repeats(row: RankedTrial) -> str:
    return _count_text(row) + (_SHORT_BASES[row.objective.method] if row.objective else "")


def _failures(ranking: Ranking) -> Html:
    groups: dict[RunStatus, list[tuple[RankedTrial, Run]]] = {}
    for row in ranking.failed:
        ended = [result for result in row.repeats if result.status is not RunStatus.COMPLETED]
        result = next((one for one in ended if one.status not in NOT_ITS_OWN), ended[0])
        groups.setdefault(result.status, []).append((row, result))
    if not groups:
        return Html()
    columns = [
        Column("how it ended", lambda one: one[0].replace("_", " ")),
        Column("trials", lambda one: len(one[1]), COUNT),
        Column("for example", lambda one: one[1][0][0].label),
        Column("its reason", lambda one: one[1][0][1].reason or "no reason given"),
    ]
    rows = sorted(groups.items(), key=lambda item: -len(item[1]))
    return section("Failed", table(Table("", columns, rows), "A trial with one failed repeat has failed."))


def saturation_section(ranking: Ranking, evidence: Mapping[str, Detail]) -> Html:
    """Lists the load of links and units relative to their peaks; `saturated` appears only where it holds."""
    rows = [
        (row, one)
        for row in (*ranking.feasible[:1], *ranking.infeasible[:1])
        for one in (evidence[row.trial_id].saturation if row.trial_id in evidence else ())
    ]
    if not rows:
        return Html()
    columns = [
        Column("configuration", lambda pair: pair[0].label),
        Column("what", lambda pair: pair[1].what),
        Column("within", lambda pair: pair[1].within),
        Column("of its peak", lambda pair: pair[1].achieved_frac, PERCENT),
        Column("time above", lambda pair: pair[1].above_frac, PERCENT),
        Column("threshold", lambda pair: f"{100 * pair[1].threshold_frac:.0f} %", PERCENT),
        Column("saturated", lambda pair: "saturated" if pair[1].saturated else "no"),
        Column("peak by", lambda pair: pair[1].peak_source),
    ]
    caption = (
        f"{_stamped(ranking)}Mean over the time named under within, as a share of the peak. "
        "Saturated means that at least half of that time is above the threshold."
    )
    return section("How near to saturation", table(Table("", columns, rows), caption))


def rejections_section(candidates: Sequence[Mapping[str, Any]]) -> Html:
    """Lists rejected combinations by rule, and counts the equivalent ones."""
    rejected = [
        LeftOut(config={}, rule=row["rule"], reason=row["reason"]) for row in candidates if row["status"] == "rejected"
    ]
    num_equivalent = sum(row["status"] == "equivalent" for row in candidates)
    parts = [table(rejections(rejected), "Combinations that cannot run.")] if rejected else []
    if num_equivalent:
        text = '<p class="note">{} more do the same work as one that is kept: not run twice.</p>'
        parts.append(fill(text, f"{num_equivalent:,}"))
    return section("Rejected and equivalent", *parts) if parts else Html()


def times_section(ranking: Ranking) -> Html:
    """Lists the seconds of each run by part, and their sum."""
    found = times_view(ranking)
    tables, notes = [one for one in found if isinstance(one, Table)], [one for one in found if isinstance(one, Note)]
    if not tables:
        return Html()
    rows = [*tables[0].rows[-MAX_ROWS:], tables[0].total]
    more = [f"the last {MAX_ROWS} of {len(tables[0].rows):,} runs"] if len(tables[0].rows) > MAX_ROWS else []
    caption = ". ".join(text[0].upper() + text[1:] for text in [*more, *(note.text for note in notes)])
    return section("Where the time went", table(replace(tables[0], title="", rows=rows), f"{caption}."))


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
        "Sensor": "; ".join(text for text in (_sensor(counted), ranking.true_text) if text),
        "Quality": ranking.note.removeprefix("quality: "),
        "Peaks": "highest moving mean over the window in the metric's name, devices of a node summed on one time axis",
        "Held back by": ", ".join(f"{reason} ({count})" for reason, count in reasons),
        "Measured": _period(counted),
        "Software": _versions(counted),
    }
    items = (fill("<dt>{}</dt><dd>{}</dd>", name, text) for name, text in facts.items() if text)
    return section("Method and quality", fill("<dl>{}</dl>", join(items)))


def _sensor(counted: Sequence[Run]) -> str:
    """Describes the sensor by the telemetry of the worst repeat."""
    parts = ["simulated"] if any(map(is_simulated, counted)) else []
    for name, label, worst in (
        ("sensor_period_s", "period up to", max),
        ("sample_coverage_frac", "coverage at least", min),
        ("energy_integral_error_frac", "power integral and energy counter agree within", max),
        ("telemetry_overhead_frac", "own overhead up to", max),
    ):
        values = [abs(result.metrics[name]) for result in counted if name in result.metrics]
        parts += [f"{label} {worded(name, worst(values))}"] if values else []
    return ", ".join(parts)


def _period(counted: Sequence[Run]) -> str:
    times_ns = [ns for result in counted for ns in (result.start_wall_ns, result.end_wall_ns) if ns]
    ends = [min(times_ns), max(times_ns)] if times_ns else []
    return " to ".join(datetime.fromtimestamp(ns / NS_PER_S, UTC).strftime("%Y-%m-%d %H:%M UTC") for ns in ends)


def _versions(counted: Sequence[Run]) -> str:
    found: dict[str, set[str]] = {}
    for result in counted:
        for tag, text in result.tags.items():
            if tag.startswith(_VERSION_TAG) or tag == "git_commit":
                found.setdefault(tag.removeprefix(_VERSION_TAG), set()).add(text)
    return ", ".join(f"{name} {' / '.join(sorted(texts))}" for name, texts in sorted(found.items()))
