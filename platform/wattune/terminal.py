"""What people see in a terminal: tables, and the progress of a study. Nothing here computes a figure."""

import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, Literal, Protocol

from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from wattune.catalog.hardware import DEVICES
from wattune.catalog.models import MODELS
from wattune.doctor import Finding
from wattune.ranking import Interval, Margin, RankedTrial, Ranking
from wattune.schema import METRICS
from wattune.search.prune import Candidates
from wattune.trial import TrialResult, TrialSpec, TrialStatus
from wattune.units import format_quantity

_STYLES: Final = {"feasible": "green", "infeasible": "yellow", "unknown": "magenta", "failed": "red"}

SIMULATED_NOTE: Final = (
    "Power, clocks and temperatures are SIMULATED: they show how wattune decides, not what hardware does."
)


class Event(Protocol):
    """What progress needs of a trial's event."""

    @property
    def kind(self) -> str:
        """`skipped`, `started` or `finished`."""

    @property
    def spec(self) -> TrialSpec:
        """The trial."""

    @property
    def repeat(self) -> int:
        """Which repeat of it."""

    @property
    def result(self) -> TrialResult | None:
        """What came of it, once it ended."""


def _table(title: str, *columns: str, right: Iterable[str] = ()) -> Table:
    """A table whose text folds in its last column only; the others are as wide as their content."""
    table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left", title_style="bold", pad_edge=False)
    for column in columns:
        justify: Literal["left", "right"] = "right" if column in right else "left"
        table.add_column(column, justify=justify, overflow="fold", no_wrap=column != columns[-1])
    return table


def shown(metric: str, value: float | Interval) -> str:
    """A metric as people read it; an interval as both its ends."""
    if isinstance(value, Interval):
        low, high = format_quantity(metric, value.low), format_quantity(metric, value.high)
        return low if low == high else f"{low} to {high}"
    return format_quantity(metric, value)


def print_candidates(console: Console, candidates: Candidates, *, most: int = 20) -> None:
    """What would be tried, and why the rest would not."""
    kept = _table(f"{len(candidates.kept)} kept", "trial", "model", "cluster", "engine", "plan")
    for one in candidates.kept[:most]:
        spec = one.spec
        kept.add_row(spec.trial_id, spec.model.name, spec.cluster.label, spec.engine, spec.label)
    console.print(kept)
    if len(candidates.kept) > most:
        console.print(f"... and {len(candidates.kept) - most} more; --json lists all\n")
    if candidates.rejected:
        print_rejections(console, [{"rule": one.rule, "reason": one.reason} for one in candidates.rejected])
    if candidates.folded:
        reasons = Counter(one.reason for one in candidates.folded)
        folded = _table(f"{len(candidates.folded)} folded into an equal one", "count", "why", right=["count"])
        for reason, count in reasons.most_common(most):
            folded.add_row(str(count), reason)
        console.print(folded)


def print_rejections(console: Console, rejected: Sequence[Mapping[str, Any]]) -> None:
    """Rejected combinations counted by rule, with one reason each."""
    counts = Counter(str(one["rule"]) for one in rejected)
    examples = {str(one["rule"]): str(one["reason"]) for one in reversed(rejected)}
    table = _table(f"{len(rejected)} rejected by rule", "count", "rule", "for example", right=["count"])
    for rule, count in counts.most_common():
        table.add_row(str(count), rule, examples[rule])
    console.print(table)


def print_ranking(console: Console, ranking: Ranking, *, top: int | None = None) -> None:
    """Feasible trials in order with their distance to each bound, then the others with what they lack."""
    metric = ranking.objective.metric
    bounds = [str(constraint) for constraint in ranking.constraints]
    columns = ["rank", "trial", "model", "plan", metric, *(f"bound {n}" for n in range(1, len(bounds) + 1)), "quality"]
    table = _table(f"{ranking.objective}", *columns, right=["rank", metric])
    for row in (*ranking.feasible[:top], *ranking.infeasible[:top]):
        margins = {margin.constraint: margin for margin in row.margins}
        table.add_row(
            str(row.rank) if row.rank else "-",
            row.trial_id,
            row.spec.model.name,
            Text(row.label, style=_STYLES[str(row.verdict)]),
            shown(metric, row.objective) if row.objective else "-",
            *(_margin_cell(margins.get(bound)) for bound in bounds),
            row.quality + (" (simulated)" if row.simulated else ""),
        )
    console.print(table)
    for number, bound in enumerate(bounds, start=1):
        console.print(f"bound {number}: {bound}", highlight=False)
    hidden = 0 if top is None else max(0, len(ranking.feasible) - top) + max(0, len(ranking.infeasible) - top)
    if hidden:
        console.print(f"... and {hidden} more; raise --top to see them")
    for title, rows in (("unknown", ranking.unknown), ("failed", ranking.failed)):
        if rows:
            others = _table(f"{len(rows)} {title}", "trial", "model", "plan", "why")
            for row in rows[:top]:
                plan = Text(row.label, style=_STYLES[title])
                others.add_row(row.trial_id, row.spec.model.name, plan, row.reason)
            console.print(others)
    console.print(ranking.note, highlight=False, style="dim")
    if ranking.simulated:
        console.print(SIMULATED_NOTE, style="bold yellow")


def _margin_cell(margin: Margin | None) -> Text:
    if margin is None:
        return Text("not measured", style="magenta")
    got, distance = shown(margin.metric, margin.got), shown(margin.metric, abs(margin.slack))
    if margin.holds:
        return Text(f"{got} ({distance} within)", style="green")
    return Text(f"{got} ({distance} past)", style="bold red")


def print_front(console: Console, rows: Sequence[RankedTrial], metrics: Sequence[str]) -> None:
    """The trials that no other beats in both metrics."""
    table = _table(f"Pareto front of {' and '.join(metrics)}", "trial", "plan", *metrics, right=metrics)
    for row in rows:
        cells = [shown(metric, interval) if (interval := row.interval(metric)) else "-" for metric in metrics]
        table.add_row(row.trial_id, row.label, *cells)
    console.print(table)


def print_metrics(console: Console, title: str, metrics: Mapping[str, float], verdict: str) -> None:
    """Every metric of a trial or recording, in the schema's order."""
    table = _table(title, "group", "metric", "value", right=["value"])
    group = ""
    for name, metric in METRICS.items():
        if name in metrics:
            table.add_row("" if metric.group == group else metric.group, name, shown(name, metrics[name]))
            group = metric.group
    console.print(table)
    console.print(verdict)


def print_catalog(console: Console) -> None:
    """Devices and models with their sources."""
    devices = _table("Devices", "name", "bf16 peak", "memory", "bandwidth", "power limit", "clock", "source")
    for device in DEVICES.values():
        cells = (
            ("peak_bf16_flop_per_s", device.peak_bf16_flop_per_s),
            ("memory_bytes", device.memory_bytes),
            ("memory_bandwidth_bytes_per_s", device.memory_bandwidth_bytes_per_s),
            ("power_limit_w", device.power_limit_w),
            ("sm_clock_max_mhz", device.sm_clock_max_mhz),
        )
        texts = ["unknown" if value is None else format_quantity(name, value) for name, value in cells]
        devices.add_row(device.name, *texts, device.source)
    console.print(devices)
    columns = ("name", "parameters", "active", "layers", "hidden", "ffn", "heads", "KV", "vocabulary", "experts")
    models = _table("Models", *columns, "source", right=columns[1:])
    for model in MODELS.values():
        experts = f"{model.num_experts_per_token} of {model.num_experts}" if model.is_moe else "-"
        shape = (model.num_layers, model.hidden_size, model.ffn_hidden_size, model.num_heads, model.num_kv_heads)
        models.add_row(
            model.name,
            f"{model.num_parameters / 1e9:.1f} B",
            f"{model.num_active_parameters / 1e9:.1f} B",
            *map(str, shape),
            f"{model.vocab_size:,}",
            experts,
            model.source,
        )
    console.print(models)


def print_findings(console: Console, findings: Sequence[Finding]) -> None:
    """What a machine has, lacks, and what follows."""
    table = _table("", "", "what", "have, and what follows")
    for finding in findings:
        mark = Text("yes", style="green") if finding.ok else Text("no", style="yellow")
        follows = f"\n{finding.follows}" if finding.follows else ""
        table.add_row(mark, finding.topic, Text.assemble(finding.have, (follows, "dim")))
    console.print(table)


def print_calibration(console: Console, found: Mapping[str, Any]) -> None:
    """What a device's power sensors can tell, what each window hides, and what sampling costs."""
    title = f"{found['device']} {found['name']}" + (f", driver {found['driver']}" if "driver" in found else "")
    signals = _table(f"{title}: sensors", "signal", "period", "delay", "window", "energy told", "fit R²")
    for name, fit in found["signals"].items():
        times = (format_quantity("time_s", fit[key]) for key in ("sensor_period_s", "delay_s", "window_s"))
        signals.add_row(name, *times, _percent(fit["gain_frac"]), f"{fit['explained_frac']:.3f}")
    console.print(signals)
    windows = list(dict.fromkeys(window for wave in found["waves"] for window in wave["peaks_w"]))
    waves = _table("Highest power of a square wave, by window", "period", *windows, "energy off by")
    for wave in found["waves"]:
        peaks = (_peak_cell(wave, name) for name in windows)
        waves.add_row(format_quantity("period_s", wave["period_s"]), *peaks, _percent(wave["energy_error_frac"]))
    console.print(waves)
    cost = found["overhead"]
    console.print(
        f"sampling: step time x {cost['ratio']:.4f} ({cost['low']:.4f} to {cost['high']:.4f} with "
        f"{cost['confidence_frac']:.0%} confidence), {_percent(cost['sampler_cpu_frac'])} of one processor",
        highlight=False,
    )
    if found["simulated"]:
        console.print(SIMULATED_NOTE, style="bold yellow")


def _peak_cell(wave: Mapping[str, Any], window: str) -> str:
    """The highest power by one window, and how far it is below the highest sample."""
    if window not in wave["peaks_w"]:
        return "-"
    short_frac = wave["under_report_frac"][window]
    return format_quantity("peak_w", wave["peaks_w"][window]) + (f" ({-short_frac:+.0%})" if short_frac else "")


def _percent(value_frac: float | None) -> str:
    return "-" if value_frac is None else f"{value_frac:.2%}"


class StudyProgress:
    """One live line for a study and one printed line for each trial that ended; plain lines off a terminal."""

    def __init__(self, console: Console, objective_metric: str, num_trials: int) -> None:
        """Shows nothing before `__enter__`.

        Args:
            console: Where to.
            objective_metric: The metric shown for each trial.
            num_trials: Trials, with all their repeats.
        """
        self._console = console
        self._metric = objective_metric
        self._total = num_trials
        self._done = 0
        self._started_s = 0.0
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24),
            TextColumn("{task.completed:.0f}/{task.total:.0f}"),
            TimeElapsedColumn(),
            TextColumn("elapsed,"),
            TimeRemainingColumn(),
            TextColumn("left"),
            console=console,
            disable=not console.is_terminal,
            transient=True,
        )
        self._task = self._progress.add_task("starting Ray", total=num_trials)

    def __enter__(self) -> "StudyProgress":
        """Begins to show."""
        self._started_s = time.monotonic()
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Takes the live line away."""
        self._progress.stop()

    def __call__(self, event: Event) -> None:
        """Shows one event; the listener of `wattune.api.run_study`."""
        if event.kind == "started":
            self._progress.update(self._task, description=_described(event))
            return
        self._done += 1
        self._progress.update(self._task, completed=self._done, description="next trial")
        self._console.print(self._line(event), highlight=False)

    def _line(self, event: Event) -> Text:
        assert event.result is not None, "only a started trial has no result"
        result, elapsed_s = event.result, time.monotonic() - self._started_s
        line = Text(f"[{self._done}/{self._total}] {elapsed_s:5.0f} s  ", style="dim")
        line.append(f"{_described(event):<44} ", style="default")
        if event.kind == "skipped":
            line.append("done before  ")
        if result.status is not TrialStatus.COMPLETED:
            return line.append(f"{result.status}: {result.reason}", style="red")
        value = result.metrics.get(self._metric)
        line.append(f"{self._metric} {'not measured' if value is None else shown(self._metric, value)}", style="cyan")
        power_w = result.metrics.get("node_device_power_peak_1s_w")
        return line if power_w is None else line.append(f"  1 s node peak {shown('peak_w', power_w)}", style="dim")


def _described(event: Event) -> str:
    repeat = f" #{event.repeat}" if event.repeat else ""
    return f"{event.spec.model.name} {event.spec.label}{repeat}"
