"""Views of a recording: live while it runs, and its figures afterwards. Nothing is measured here."""

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

import numpy as np
import pyarrow as pa
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from wattune.analysis.run_data import RunData
from wattune.analysis.signals.readings import HOST
from wattune.analysis.summary import metrics_by_device, summarize
from wattune.masking import without_secrets
from wattune.ranking.assessment import is_simulated
from wattune.recording.recorder import LOG
from wattune.recording.recording import look
from wattune.run import INDICATIVE, INVALID, PUBLISHABLE, Recorded, Run
from wattune.schema import THROTTLE_REASON_BITS, DeviceKey
from wattune.units import ns_to_s, s_to_ns
from wattune.view.console import fitted, show
from wattune.view.table import FIGURE, Column, Table, columns_of, worded

LOOK_BACK_S: Final = 60.0
"""Seconds of the recording that the live view assesses; the final verdict is on all of it."""
LINE_EVERY_S: Final = 10.0
"""Seconds between two lines on an output that is not a terminal."""
IDLE_SHARE: Final = 9
"""Idle time after an update, in multiples of its duration: the view never uses more than a tenth of a CPU."""
RATE_OVER_S: Final = 2.0
"""Seconds over which a link's rate is averaged."""
LOG_LINES: Final = 6
LOG_TAIL_BYTES: Final = 4096

_QUALITY_STYLES: Final = {PUBLISHABLE: "green", INDICATIVE: "yellow", INVALID: "red"}
_HOST_GAUGES: Final = {
    "CPU busy": "cpu_busy_frac",
    "package power": "package_power_w",
    "DRAM power": "dram_power_w",
    "memory": "memory_used_bytes",
}


def print_recording(console: Console, run: Run) -> None:
    """Prints the figures of a recording: a line for each device, the whole, and the quality."""
    recording = run.recorded or Recorded()
    columns = {
        "mean": "device_power_mean_w",
        "peak 20 ms": "device_power_peak_20ms_w",
        "100 ms": "device_power_peak_100ms_w",
        "1 s": "device_power_peak_1s_w",
        "limit": "device_power_limit_w",
        "hottest": "device_temp_max_c",
        "throttled": "throttle_frac",
        "clock lost": "throttle_loss_frac",
        "NVLink": "nvlink_bytes_per_s",
    }
    if recording.devices or recording.others:

        def energy_j(one: tuple[str, Mapping[str, float]]) -> float | None:
            mean_w = one[1].get("device_power_mean_w")
            return None if mean_w is None or recording.window_s is None else mean_w * recording.window_s

        figures = columns_of(columns, lambda one, name: one[1].get(name))
        head = (Column("device", lambda one: one[0]), Column("energy", energy_j, "energy_j"))
        for title, devices in (("", recording.devices), ("not counted", recording.others)):
            if devices:
                show(console, Table(title, [*head, *figures], list(devices.items())))
        _say(console, f"devices: {_devices(recording)}")
    command_s, window_s = recording.command_s or recording.window_s, recording.window_s
    is_part = command_s is not None and window_s is not None and window_s < 0.999 * command_s
    whole = {
        "command" if is_part else "time": worded("window_s", command_s),
        "exit code": _exit(recording),
        **({"window": worded("window_s", window_s)} if is_part else {}),
        "energy": worded("energy_j", recording.energy_j),
        "1 s node peak": worded("peak_w", run.metrics.get("node_device_power_peak_1s_w")),
        "chassis mean": worded("power_w", run.metrics.get("node_power_mean_w")),
        **_host_cells(recording.host),
    }
    console.print(Text("   ".join(_told(whole))))
    _print_steps(console, run.metrics, recording)
    console.print(_quality(run.quality, run.quality_reasons, "quality"))
    if is_simulated(run):
        console.print("Power, clocks and temperatures are SIMULATED from processor activity.", style="bold yellow")
    _say(console, f"all figures: wattune analyze {recording.place}")


def print_line_of(console: Console, run: Run) -> None:
    """Prints a recording as one line: its folder, time, energy and peak; problems that it had follow."""
    recording = run.recorded or Recorded()
    reasons = f" ({', '.join(run.quality_reasons)})" if run.quality_reasons else ""
    cells = {
        "": worded("window_s", recording.command_s or recording.window_s),
        "energy": worded("energy_j", recording.energy_j),
        "of": recording.window_why if recording.window_why.startswith("steps") else "-",
        "1 s node peak": worded("peak_w", run.metrics.get("node_device_power_peak_1s_w")),
        "step": worded("step_time_s", run.metrics.get("step_time_s")),
        "exit code": _exit(recording) if recording.exit_code != 0 else "-",
        "quality": run.quality + reasons,
        "devices": _devices(recording) or "-",
        "SIMULATED": "sensors" if is_simulated(run) else "-",
    }
    _say(console, f"{recording.place}: {', '.join(_told(cells))}")
    _print_problems(console, recording)


def _say(console: Console, text: str, style: str | None = None) -> None:
    """Prints a line whole, however long."""
    console.print(text, markup=False, highlight=False, soft_wrap=True, style=style)


def _told(cells: Mapping[str, str]) -> list[str]:
    """Returns cells behind their titles, without those that have nothing to tell."""
    return [f"{title} {cell}".strip() for title, cell in cells.items() if cell != "-"]


def _exit(recording: Recorded) -> str:
    return "unknown" if recording.exit_code is None else str(recording.exit_code)


def _devices(recording: Recorded) -> str:
    """Says which devices count and why; empty without any."""
    names, others = (", ".join(one.partition("/")[2] for one in each) for each in (recording.devices, recording.others))
    apart = f"; not counted: {others}" if others else ""
    return f"{names or 'none'} ({recording.devices_why or 'all'}){apart}" if names or others else ""


_STEP_CELLS: Final = {
    "step": "step_time_s",
    "tokens": "tokens_per_s",
    "energy a step": "energy_per_step_j",
    "energy a token": "energy_per_token_j",
    "peak memory": "memory_peak_bytes",
}


def _print_steps(console: Console, metrics: Mapping[str, float], recording: Recorded) -> None:
    """Prints what the figures are of, and those of a step."""
    if recording.window_why and recording.window_why != "the whole command":
        took = worded("window_s", recording.window_s)
        console.print(f"figures of {took}: {recording.window_why}", markup=False, highlight=False)
    if "step_time_s" in metrics:
        shown = "   ".join(_told({title: worded(name, metrics.get(name)) for title, name in _STEP_CELLS.items()}))
        confidence = recording.steps.get("confidence", "high")
        sure = "" if confidence == "high" else f", {confidence} confidence"
        console.print(Text(f"{shown}   steps from {recording.steps.get('source', 'unknown')}{sure}"))
    _print_problems(console, recording)


def _print_problems(console: Console, recording: Recorded) -> None:
    for rank, text in (recording.steps.get("errors") or {}).items():
        _say(console, f"rank {rank} ended by {text}")
    for text in recording.steps.get("problems") or ():
        _say(console, f"note: {text}", "yellow")


def _host_cells(host: Mapping[str, float]) -> dict[str, str]:
    return {title: worded(name, host.get(name)) for title, name in _HOST_GAUGES.items()}


def _quality(quality: str, reasons: tuple[str, ...], title: str) -> Text:
    why = f" ({', '.join(reasons)})" if reasons else ""
    return Text.assemble(f"{title} ", (quality, _QUALITY_STYLES[quality]), why)


class LiveView:
    """A table of the sampler's latest readings, one row per device; without a terminal, a line for each at intervals.

    It reads the sampler's files and touches no sensor. Call it as `wattune.recording.recorder.Watcher`.
    """

    def __init__(self, console: Console, clock_s: Callable[[], float] = time.monotonic) -> None:
        """Shows nothing before it is entered.

        On a terminal the command must write elsewhere, best to its recording's `LOG`, whose last lines are shown below
        the table.
        """
        self._console, self._clock_s = console, clock_s
        self._live = Live(console=console, auto_refresh=False, transient=True) if console.is_terminal else None
        self._next_s = 0.0
        self._peaks_w: dict[DeviceKey, float] = {}

    def __enter__(self) -> "LiveView":
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def __call__(self, sampler_folder: Path, start_mono_ns: int) -> None:
        """Updates the view, unless the last update was a moment ago."""
        begun_s = self._clock_s()
        if begun_s < self._next_s:
            return
        now_ns = time.monotonic_ns()
        measured = look(sampler_folder, max(start_mono_ns, now_ns - s_to_ns(LOOK_BACK_S)))
        if measured.tables:
            self._show(measured, ns_to_s(now_ns - start_mono_ns), sampler_folder.parents[1] / LOG)
        took_s = self._clock_s() - begun_s
        self._next_s = begun_s + (IDLE_SHARE * took_s if self._live is not None else LINE_EVERY_S)

    def _show(self, measured: RunData, elapsed_s: float, log: Path) -> None:
        known = metrics_by_device(measured)
        rows = {device: self._row(measured, device, known.get(device, {})) for device in measured.devices}
        host = _host_cells(_last_host(measured)) | {"not counted:": ", ".join(measured.facts.get("others") or "-")}
        quality = Text("quality not known yet")
        if measured.window_s is not None:
            summary = summarize(measured)
            title = f"quality of the last {measured.window_s:.0f} s"
            quality = _quality(summary.quality, summary.quality_reasons, title)
        whole = Text("   ".join([f"{elapsed_s:.0f} s", *_told(host)]))
        if self._live is None:
            self._console.print(whole.append("   ").append(quality), soft_wrap=True)
            for device, cells in rows.items():
                line = "   ".join(f"{title} {cell}" for title, cell in cells.items())
                _say(self._console, f"  {'/'.join(device)}   {line}")
            return
        parts: list[RenderableType] = [whole, quality]
        if rows:
            names = {name: name for name in next(iter(rows.values()))}
            readings = columns_of(names, lambda one, name: one[1][name], FIGURE)
            table = Table("", [Column("device", lambda one: "/".join(one[0])), *readings], list(rows.items()))
            parts.insert(0, fitted(self._console, table))
        parts.append(Text("\n".join(_last_lines(log)), style="dim", no_wrap=True, overflow="ellipsis"))
        self._live.update(Group(*parts), refresh=True)

    def _row(self, measured: RunData, device: DeviceKey, metrics: Mapping[str, float]) -> dict[str, str]:
        last = _last(measured.rows("fast", device))
        peak_w = metrics.get("device_power_peak_100ms_w")
        if peak_w is not None:
            self._peaks_w[device] = max(peak_w, self._peaks_w.get(device, 0.0))
        max_mhz = measured.manifests[device[0]]["devices"][device[1]].get("sm_clock_max_mhz")
        return {
            "power": worded("power_w", _number(last, "power_instant_w")),
            "peak 100 ms": worded("power_w", peak_w),
            "since start": worded("power_w", self._peaks_w.get(device)),
            "temperature": worded("temp_c", _number(last, "gpu_temp_c")),
            "SM clock": worded("clock_mhz", _number(last, "sm_clock_mhz")),
            "throttled by": throttle_causes(_number(last, "event_reasons"), _number(last, "sm_clock_mhz"), max_mhz),
            "NVLink": worded("rate_bytes_per_s", _link_rate_bytes_per_s(measured.rows("counter", device))),
        }


def throttle_causes(reasons: float | None, clock_mhz: float | None, clock_max_mhz: float | None) -> str:
    """Returns the causes of a low clock in one reading.

    Returns the active ones of the bits of `event_reasons` if the clock is below 0.98 of the maximum, `no` if it is not
    or there is no cause, `-` if a reading is missing. `throttle_frac` also asks for power near the cap.
    """
    if reasons is None or clock_mhz is None or clock_max_mhz is None:
        return "-"
    active = [cause for cause, bits in THROTTLE_REASON_BITS.items() if int(reasons) & bits]
    lost_frac = 1 - clock_mhz / clock_max_mhz
    return f"{'+'.join(active)} -{100 * lost_frac:.0f} %" if active and lost_frac > 0.02 else "no"


def _last(table: pa.Table | None) -> dict[str, object]:
    """Returns the latest row of one device's table; empty without one."""
    rows: list[dict[str, object]] = [] if table is None else table.slice(max(table.num_rows - 1, 0)).to_pylist()
    return rows[0] if rows else {}


def _number(row: Mapping[str, object], name: str) -> float | None:
    value = row.get(name)
    return float(value) if isinstance(value, int | float) else None


def _last_host(measured: RunData) -> dict[str, float]:
    row = _last(measured.rows(HOST, (next(iter(measured.manifests)), HOST)))
    return {name: value for name in _HOST_GAUGES.values() if (value := _number(row, name)) is not None}


def _link_rate_bytes_per_s(counter: pa.Table | None) -> float | None:
    """Returns the recent rate of one device over all its links, both directions; None without counters."""
    if counter is None or not counter.num_rows:
        return None
    read_ns = counter["mono_ns"].to_numpy()
    first = int(np.searchsorted(read_ns, read_ns[-1] - s_to_ns(RATE_OVER_S)))
    before, now = counter.slice(first, 1).to_pylist()[0], _last(counter)
    pairs = [(_number(before, name), _number(now, name)) for name in ("nvlink_tx_bytes", "nvlink_rx_bytes")]
    rises = [late - early for early, late in pairs if early is not None and late is not None and late >= early]
    elapsed_s = ns_to_s(int(read_ns[-1] - read_ns[first]))
    return sum(rises) / elapsed_s if len(rises) == len(pairs) and elapsed_s > 0 else None


def _last_lines(log: Path) -> list[str]:
    """Returns the last lines of a file that is being written; each version of a progress bar counts as a line."""
    try:
        with open(log, "rb") as file:
            file.seek(max(log.stat().st_size - LOG_TAIL_BYTES, 0))
            text = file.read().decode(errors="replace")
    except FileNotFoundError:
        return []
    return [without_secrets(line) for line in text.splitlines() if line.strip()][-LOG_LINES:]
