"""Views of a space before it runs: what is kept and what is not, with estimates, and what those were fitted to."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from wattune.cost.estimate import LIMITS
from wattune.fitting.store import StoredFit
from wattune.search.forecast import Estimate, Forecast
from wattune.search.prune import Candidate, Candidates, LeftOut
from wattune.trial import TrialSpec
from wattune.view.table import COUNT, FIGURE, PERCENT, Column, Note, Table, View, columns_of, halved, reading, worded

SHOWN: Final = {
    "step": "step_time_s",
    "tokens/s": "tokens_per_s",
    "memory": "memory_peak_bytes",
    "node peak 1 s": "node_device_power_peak_1s_w",
    "warmest": "device_temp_max_c",
    "clock lost": "clock_deficit_frac",
}
"""Figures of a candidate that are shown, by heading; the last one where a space sets limits, clocks or profiles."""

READING: Final = reading(
    "± is half of the 95 % interval; tokens/s has the step's; (%) is the probability to break the bound"
)


def candidates_view(candidates: Candidates, *, most: int = 20) -> View:
    """Lays out the candidates that would be tried, and why the others would not."""
    kept = candidates.kept
    sizes = [name for name in ("seq_len", "global_batch_size") if any(name in one.config for one in kept)]
    columns = [
        Column("trial", lambda one: one.spec.trial_id, place="lead"),
        Column("model", lambda one: one.spec.model.name),
        Column("cluster", lambda one: one.spec.cluster.label),
        Column("engine", lambda one: one.spec.engine),
        *columns_of({name: name for name in sizes}, lambda one, name: str(one.config[name]), ""),
        Column("plan", lambda one: one.spec.label, place="lead"),
    ]
    parts: list[Table | Note] = [Table(f"{len(kept)} kept", columns, kept[:most])]
    if len(kept) > most:
        parts.append(Note(f"... and {len(kept) - most} more; --json lists all\n"))
    parts += [*notes_of(kept), rejections(candidates.rejected)]
    reasons = Counter(one.reason for one in candidates.equivalent)
    counted = [Column("count", lambda one: one[1], COUNT), Column("why", lambda one: one[0], place="prose")]
    title = f"{len(candidates.equivalent)} equivalent to a kept one"
    return [*parts, Table(title, counted, reasons.most_common(most))]


def notes_of(kept: Iterable[Candidate]) -> list[Note]:
    """Returns each note of kept candidates once, with the number of those it is about."""
    return [Note(f"{note} (trials: {n})") for note, n in Counter(note for one in kept for note in one.notes).items()]


def rejections(rejected: Sequence[LeftOut]) -> Table:
    """Lays out rejected combinations by rule, the most frequent first, with the first reason of each."""
    counts = Counter(one.rule for one in rejected)
    examples = {one.rule: one.reason for one in reversed(rejected)}
    columns = [
        Column("count", lambda one: one[1], COUNT, place="lead"),
        Column("rule", lambda one: one[0], place="lead"),
        Column("for example", lambda one: examples[one[0]], place="prose"),
    ]
    return Table(f"{len(rejected)} rejected by rule", columns, counts.most_common())


def forecast_view(forecast: Forecast, *, top: int = 10) -> View:
    """Lays out the most promising candidates with their estimates, and what cannot fit."""
    kept = forecast.kept
    shown = [one.spec.read_as for one in kept]
    several = len({(spec.model, spec.cluster, spec.engine) for spec in shown}) > 1
    plan = forecast.namer()

    def name(spec: TrialSpec) -> str:
        return (f"{spec.model.name}, {spec.cluster.label}, {spec.engine}: " if several else "") + plan(spec)

    def figure(position: int, metric: str) -> str:
        column = forecast.estimates.columns[metric]
        value, low, high = (float(one[position]) for one in (column.value, column.low, column.high))
        return f"{value:,.0f}" if metric == "tokens_per_s" else halved(metric, value, low, high)

    def broken(position: int) -> str:
        return ", ".join(f"{bound} ({risk:.0%})" for bound, risk in forecast.breaks(position).items())

    listed, sets = range(len(kept))[:top], any(spec.plan.settings for spec in shown)
    columns = [
        Column("trial", lambda position: kept[position].trial_id, place="lead"),
        Column("plan", lambda position: name(shown[position]), place="lead"),
        *columns_of({key: SHOWN[key] for key in list(SHOWN)[: None if sets else -1]}, figure, FIGURE),
        Column("limited by", lambda position: LIMITS[forecast.estimates.limited_by[position]]),
        *([Column("breaks", broken, place="prose")] if any(map(broken, listed)) else []),
    ]
    parts: list[Table | Note] = [
        Note(f"{len(kept)} may fit; best first by estimate: {forecast.objective}\n"),
        Table("", columns, listed),
    ]
    if len(kept) > top:
        parts.append(Note(f"... and {len(kept) - top} more; --top N lists more, --out FILE writes all"))
    parts += [Note(""), READING, *(Note(f"estimated for {source.text}", is_long=True) for source in forecast.sources)]
    if forecast.unestimated:
        parts.append(Note(f"without an estimate: {', '.join(forecast.unestimated)}"))
    if any(one.spec.stands_for for one in kept):
        parts.append(
            Note("SCALED DOWN: figures are the large plans'; what runs is small (`wattune plan` without --estimate)")
        )
    parts += notes_of(kept)
    if forecast.rejected:
        first = forecast.rejected[0]
        parts.append(Note(f"\n{len(forecast.rejected)} rejected by rule {first.rule}, for example: {first.reason}"))
    return parts


def estimate_view(found: Estimate) -> View:
    """Lays out one plan's figures with intervals, the parts of its step and memory, and what rejects it."""
    spec = found.spec
    sizes = f"seq_len {spec.workload.seq_len}, global_batch_size {spec.workload.global_batch_size}"
    title = f"{spec.model.name}, {spec.cluster.label}, {found.engine}: {spec.label}, {sizes}"
    figures = [
        Column("", lambda one: one[0]),
        Column("estimated", lambda one: worded(one[0], one[1]["value"]), FIGURE),
        Column(
            "95 % interval", lambda one: f"{worded(one[0], one[1]['low'])} to {worded(one[0], one[1]['high'])}", FIGURE
        ),
    ]
    view: list[Table | Note] = [Note(title, is_long=True)]
    view += [Table("", figures, list(found.figures.items()))] if found.figures else []
    for name, quantity, parts in (
        ("Parts of a step", "step_time_s", found.step_parts_s),
        ("Memory of the fullest rank", "memory_peak_bytes", found.memory_parts_bytes),
    ):
        columns = [
            Column("", lambda one: one[0]),
            Column("estimated", lambda one: one[1], quantity),
            Column("share", lambda one: one[2], PERCENT),
        ]
        view += [Table(name, columns, _shares(parts))] if parts else []
    if found.figures:
        view += [Note(f"limited by {found.limited_by}"), Note(f"estimated for {found.source}", is_long=True)]
    return [*view, *([Note(f"rejected by rule {found.rule}: {found.reason}", "warning")] if found.rule else [])]


def _shares(parts: Mapping[str, float]) -> list[tuple[str, float, float]]:
    """Returns parts with their size and share, largest first."""
    total = sum(parts.values())
    return sorted(((name, size, size / total) for name, size in parts.items()), key=lambda one: -one[1])


def fit_view(fit: StoredFit) -> View:
    """Lays out what coefficients were fitted to, their error on held-out trials, and what would sharpen them."""
    title = f"{fit.device}: {fit.num_trials} trials of {fit.num_configurations} configurations"
    title += f", {fit.links}" if fit.links else ""
    columns = [
        Column("metric", lambda one: one[0]),
        Column("median error", lambda one: None if one[1].median_frac is None else f"{one[1].median_frac:.1%}", FIGURE),
        Column("95 % within", lambda one: f"{one[1].p95_frac:.1%}", FIGURE),
    ]
    return [
        Table(title, columns, list(fit.hold_out.items())),
        Note("errors are on configurations that the fit did not see"),
        *(Note(f"would sharpen it: {wish}") for wish in fit.sharpen),
    ]
