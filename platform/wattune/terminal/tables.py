"""Tables for a terminal. Nothing here computes a figure."""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Final, Literal

from rich import box
from rich.console import Console, Group, RenderableType
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from wattune.catalog.hardware import DEVICES
from wattune.catalog.models import MODELS, NOT_REPRESENTED
from wattune.doctor import Finding
from wattune.intervals import Interval
from wattune.schema import METRICS
from wattune.search.prune import Candidate, Candidates
from wattune.units import format_quantity

SIMULATED_NOTE: Final = (
    "Power, clocks and temperatures are SIMULATED: they show how wattune decides, not what hardware does."
)

_WHOLE: Final = ("rank", "trial", "count")
"""Columns whose cells are never wrapped."""

_FOLLOWS: Final = "have, and what follows"

_LEAST_PROSE: Final = 36
"""Least columns for a text of several words; below that the table becomes a listing."""

_INDENT: Final = 4
_BETWEEN: Final = "   "
"""Between two figures of one line of a listing."""


def make_table(title: str, *columns: str, right: Iterable[str] = ()) -> Table:
    """Makes a table that wraps its text if the terminal is too narrow, so that copied text is never cut."""
    table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left", title_style="bold", pad_edge=False)
    for column in columns:
        justify: Literal["left", "right"] = "right" if column in right else "left"
        table.add_column(column, justify=justify, overflow="fold", no_wrap=column in _WHOLE)
    return table


def fitted(
    console: Console,
    table: Table,
    *,
    lead: Sequence[str] = (),
    prose: Collection[str] = (),
    own: Collection[str] = (),
) -> RenderableType:
    """Returns a table where it fits the terminal, else the same cells as a listing: a few lines for each row.

    No figure is ever broken over two lines, and no column is squeezed to some letters.

    Args:
        console: The output, whose width counts.
        table: A table of texts.
        lead: Columns of a row's first line in a listing; the first column unless given.
        prose: Columns of several words, which may be wrapped.
        own: Columns that have a line of their own in a listing.
    """
    if fits(console, table, prose):
        return table
    headings = [str(column.header) for column in table.columns]
    rows = zip(*([_text(cell) for cell in column._cells] for column in table.columns), strict=True)
    lines = [Text(str(table.title), style="bold")] if table.title else []
    for row in rows:
        cells = dict(zip(headings, row, strict=True))
        first = [cells[name] for name in lead or headings[:1]]
        items = [
            (name in own or name in prose, Text.assemble((_heading(name, own), "dim"), cell))
            for name, cell in cells.items()
            if name not in (lead or headings[:1]) and cell.plain not in ("", "-")
        ]
        lines += _wrapped(console, Text("  ").join(first), 0)
        for packed in _packed(items, console.width - _INDENT):
            lines += _wrapped(console, packed, _INDENT)
    return Group(*lines)


def fits(console: Console, table: Table, prose: Collection[str] = ()) -> bool:
    """Tells whether a table fits a terminal with every cell whole, but for texts of several words."""
    texts = [column for column in table.columns if column.header in prose]
    for column in texts:
        column.max_width = _LEAST_PROSE
    wide = console.options.update(max_width=100_000)
    width = Measurement.get(console, wide, table).maximum
    for column in texts:
        column.max_width = None
    return width <= console.width


def print_table(
    console: Console,
    table: Table,
    *,
    lead: Sequence[str] = (),
    prose: Collection[str] = (),
    own: Collection[str] = (),
) -> None:
    """Prints a table, or its listing on a narrow terminal; see `fitted`."""
    console.print(fitted(console, table, lead=lead, prose=prose, own=own), highlight=False)


def _heading(name: str, own: Collection[str]) -> str:
    """Returns the heading of a figure in a listing."""
    return f"{name}: " if name in own else f"{name} " if name else ""


def _text(cell: Any) -> Text:
    return cell if isinstance(cell, Text) else Text(str(cell))


def _packed(items: Iterable[tuple[bool, Text]], width: int) -> list[Text]:
    """Puts as many items on a line as fit; some have a line of their own."""
    lines: list[Text] = []
    is_open = False
    for alone, item in items:
        if is_open and not alone and lines[-1].cell_len + len(_BETWEEN) + item.cell_len <= width:
            lines[-1].append(_BETWEEN).append_text(item)
        else:
            lines.append(item.copy())
        is_open = not alone
    return lines


def _wrapped(console: Console, line: Text, indent: int) -> list[Text]:
    """Wraps a line between words, its rest two columns further in."""
    room = max(console.width - indent - 2, 8)
    parts = [line] if line.cell_len <= console.width - indent else list(line.wrap(console, room, overflow="fold"))
    spaces = [" " * indent, *[" " * (indent + 2)] * (len(parts) - 1)]
    return [Text(space).append_text(part) for space, part in zip(spaces, parts, strict=True)]


def shown(metric: str, value: float | Interval) -> str:
    """Formats a metric with its unit, and an interval as its middle with its half width."""
    return value.shown(metric) if isinstance(value, Interval) else format_quantity(metric, value)


def print_candidates(console: Console, candidates: Candidates, *, most: int = 20) -> None:
    """Prints the candidates that would be tried, and why the others would not."""
    sizes = [name for name in ("seq_len", "global_batch_size") if any(name in one.config for one in candidates.kept)]
    kept = make_table(f"{len(candidates.kept)} kept", "trial", "model", "cluster", "engine", *sizes, "plan")
    for one in candidates.kept[:most]:
        spec = one.spec
        cells = [str(one.config[name]) for name in sizes]
        kept.add_row(spec.trial_id, spec.model.name, spec.cluster.label, spec.engine, *cells, spec.label)
    print_table(console, kept, lead=("trial", "plan"))
    if len(candidates.kept) > most:
        console.print(f"... and {len(candidates.kept) - most} more; --json lists all\n")
    print_notes(console, candidates.kept)
    if candidates.rejected:
        print_rejections(console, [{"rule": one.rule, "reason": one.reason} for one in candidates.rejected])
    if candidates.equivalent:
        reasons = Counter(one.reason for one in candidates.equivalent)
        equivalent = make_table(
            f"{len(candidates.equivalent)} equivalent to a kept one", "count", "why", right=["count"]
        )
        for reason, count in reasons.most_common(most):
            equivalent.add_row(str(count), reason)
        print_table(console, equivalent, prose=("why",))


def print_notes(console: Console, kept: Iterable[Candidate]) -> None:
    """Prints each note of kept candidates once, with the number of those it is about."""
    for note, count in Counter(note for one in kept for note in one.notes).items():
        console.print(f"{note} (trials: {count})", highlight=False)


def print_rejections(console: Console, rejected: Sequence[Mapping[str, Any]]) -> None:
    """Prints rejected combinations by rule, with one reason each."""
    counts = Counter(str(one["rule"]) for one in rejected)
    examples = {str(one["rule"]): str(one["reason"]) for one in reversed(rejected)}
    table = make_table(f"{len(rejected)} rejected by rule", "count", "rule", "for example", right=["count"])
    for rule, count in counts.most_common():
        table.add_row(str(count), rule, examples[rule])
    print_table(console, table, lead=("count", "rule"), prose=("for example",))


def print_metrics(console: Console, title: str, metrics: Mapping[str, float], verdict: str) -> None:
    """Prints every metric of a trial or recording, in the schema's order."""
    table = make_table(title, "group", "metric", "value", right=["value"])
    group = ""
    for name, metric in METRICS.items():
        if name in metrics:
            table.add_row("" if metric.group == group else metric.group, name, shown(name, metrics[name]))
            group = metric.group
    print_table(console, table, lead=("metric",))
    console.print(verdict, highlight=False)


def print_catalog(console: Console, names: Collection[str] | None = None) -> None:
    """Prints devices and models with their sources: all, or those of some names; and models that are left out."""
    chosen = {*DEVICES, *MODELS} if names is None else names
    devices = make_table(
        "Devices", "name", "bf16 peak", "fp8 peak", "memory", "bandwidth", "power limit", "clock", "source"
    )
    for device in (one for one in DEVICES.values() if one.name in chosen):
        cells = (
            ("peak_bf16_flop_per_s", device.peak_bf16_flop_per_s),
            ("peak_fp8_flop_per_s", device.peak_fp8_flop_per_s),
            ("memory_bytes", device.memory_bytes),
            ("memory_bandwidth_bytes_per_s", device.memory_bandwidth_bytes_per_s),
            ("power_limit_w", device.power_limit_w),
            ("sm_clock_max_mhz", device.sm_clock_max_mhz),
        )
        texts = ["unknown" if value is None else format_quantity(name, value) for name, value in cells]
        devices.add_row(device.name, *texts, device.source)
    if devices.row_count:
        print_table(console, devices, prose=("source",))
    columns = ("name", "parameters", "active", "layers", "hidden", "ffn", "heads", "KV", "vocabulary", "experts")
    models = make_table("Models", *columns, "source", right=columns[1:])
    for model in (one for one in MODELS.values() if one.name in chosen):
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
    if models.row_count:
        print_table(console, models, prose=("source",))
    left_out = [name for name in NOT_REPRESENTED if names is None or name in chosen]
    for name in left_out:
        console.print(f"left out: {name}: {NOT_REPRESENTED[name]}", highlight=False)


def print_metric_list(console: Console, rows: Sequence[Mapping[str, Any]]) -> None:
    """Prints metrics by group: unit, better direction, meaning, tables."""
    for group in dict.fromkeys(row["group"] for row in rows):
        table = make_table(group, "metric", "unit", "better", "is", "from")
        for row in (row for row in rows if row["group"] == group):
            table.add_row(row["name"], row["unit"], row["better"], row["meaning"], " ".join(row["tables"]))
        print_table(console, table, prose=("is",))


def print_findings(console: Console, findings: Sequence[Finding]) -> None:
    """Prints what a machine has or lacks, and the consequences."""
    table = make_table("", "", "what", _FOLLOWS)
    for finding in findings:
        mark = Text("yes", style="green") if finding.ok else Text("no", style="yellow")
        follows = f"\n{finding.follows}" if finding.follows else ""
        table.add_row(mark, finding.topic, Text.assemble(finding.have, (follows, "dim")))
    print_table(console, table, lead=("", "what"), prose=(_FOLLOWS,))


def print_calibration(console: Console, found: Mapping[str, Any]) -> None:
    """Prints a calibration: a device's power sensors, errors by window, cost of sampling, peaks of links."""
    title = f"{found['device']} {found['name']}" + (f", driver {found['driver']}" if "driver" in found else "")
    signals = make_table(f"{title}: sensors", "signal", "period", "delay", "window", "energy told", "fit R²")
    for name, fit in found["signals"].items():
        times = (format_quantity("time_s", fit[key]) for key in ("sensor_period_s", "delay_s", "window_s"))
        signals.add_row(name, *times, _percent(fit["gain_frac"]), f"{fit['explained_frac']:.3f}")
    print_table(console, signals)
    windows = list(dict.fromkeys(window for wave in found["waves"] for window in wave["peaks_w"]))
    waves = make_table("Highest power of a square wave, by window", "period", *windows, "energy off by")
    for wave in found["waves"]:
        peaks = (_peak_cell(wave, name) for name in windows)
        waves.add_row(format_quantity("period_s", wave["period_s"]), *peaks, _percent(wave["energy_error_frac"]))
    print_table(console, waves)
    cost = found["overhead"]
    console.print(
        f"sampling: step time x {cost['ratio']:.4f} ({cost['low']:.4f} to {cost['high']:.4f} with "
        f"{cost['confidence_frac']:.0%} confidence), {_percent(cost['sampler_cpu_frac'])} of one processor",
        highlight=False,
    )
    for link, bytes_per_s in found.get("link_peaks", {}).items():
        shown = format_quantity("link_bytes_per_s", bytes_per_s)
        console.print(f"{link}: {shown} one way of copies that go both, by the device's own counter", highlight=False)
    if found["simulated"]:
        console.print(SIMULATED_NOTE, style="bold yellow")


def _peak_cell(wave: Mapping[str, Any], window: str) -> str:
    """Returns the highest power by one window, and its distance below the highest sample."""
    if window not in wave["peaks_w"]:
        return "-"
    short_frac = wave["under_report_frac"][window]
    return format_quantity("peak_w", wave["peaks_w"][window]) + (f" ({-short_frac:+.0%})" if short_frac else "")


def _percent(value_frac: float | None) -> str:
    return "-" if value_frac is None else f"{value_frac:.2%}"
