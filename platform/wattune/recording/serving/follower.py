"""A running recording, followed through its sampler's files: last readings, peaks, and clock lost since its start.

No sensor is read here. Peaks come from the same functions as the live view's and the recording's own figures. A window
that a sensor cannot resolve gives no peak.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from wattune.analysis.metrics.throttle import Throttle
from wattune.analysis.run_data import RunData
from wattune.analysis.signals.readings import HOST
from wattune.analysis.summary import metrics_by_device, summarize
from wattune.clock import ClockAnchor
from wattune.recording.recording import look
from wattune.schema import DeviceKey
from wattune.storage.files import with_calibrations
from wattune.storage.measured import RecordingFolder
from wattune.telemetry.sampler.process import SamplerProcess
from wattune.units import s_to_ns

LOOK_BACK_S: Final = 70.0
"""Time before a look that recent peaks are of. A server that scrapes every 60 s misses none, also where it is late: the
sensors lag by 2 s, and peaks are up to `ASSESS_EVERY_S` and a second old when they are scraped."""
LEAST_PIECE_S: Final = 1.0
"""Shortest time whose lost clock is added up, and time before it that is assessed with it: whether a device was at its
power cap takes 0.2 s of power before a reading."""
ASSESS_EVERY_S: Final = 5.0
"""Shortest time between two assessments, which take most of the CPU time of a look. Last readings are always new."""
FOLLOWED_TIERS: Final = ("fast", "counter", "slow", HOST)
"""Tiers with a latest reading. The ring is a history: its samples count in the peaks."""

_DEVICE_PEAKS: Final = {window: f"device_power_peak_{window}_w" for window in ("20ms", "100ms", "1s")}
_NODE_PEAKS: Final = {window: f"node_device_power_peak_{window}_w" for window in ("100ms", "1s")}


@dataclass(slots=True, kw_only=True)
class Peaks:
    """Highest means of a power over windows, by the window's length."""

    since_start_w: dict[str, float] = field(default_factory=dict)
    recent_w: dict[str, float] = field(default_factory=dict)
    """Of the last `LOOK_BACK_S`."""

    def observe(self, metrics: Mapping[str, float], names: Mapping[str, str]) -> None:
        """Takes the peaks of the last `LOOK_BACK_S`; a window that has no peak now keeps the one since the start."""
        self.recent_w = {window: metrics[name] for window, name in names.items() if name in metrics}
        for window, peak_w in self.recent_w.items():
            self.since_start_w[window] = max(peak_w, self.since_start_w.get(window, peak_w))


@dataclass(slots=True, kw_only=True)
class ClockLost:
    """Clock that one device lost to throttling since the start, as `wattune.analysis.metrics.throttle` defines it."""

    assessed_s: float = 0.0
    """Time that was assessed: with clock, reasons and power."""
    throttled_s: float = 0.0
    """Time of it in which a cause was active and the clock below 0.98 of its maximum."""
    lost_s: float = 0.0
    """Integral of 1 minus clock over maximum during `throttled_s`."""
    lost_by_cause_s: dict[str, float] = field(default_factory=dict)
    """The same for each cause. Causes overlap."""

    @classmethod
    def of(cls, found: Throttle | None, duration_s: float) -> "ClockLost | None":
        """Makes seconds of shares of a duration; None where a cause is unknown."""
        if found is None or found.any_frac is None or found.loss_frac is None:
            return None
        return cls(
            assessed_s=duration_s,
            throttled_s=found.any_frac * duration_s,
            lost_s=found.loss_frac * duration_s,
            lost_by_cause_s={cause: lost * duration_s for cause, lost in found.loss_by_cause_frac.items()},
        )

    def add(self, whole: "ClockLost", known: "ClockLost") -> None:
        """Adds what a stretch of time holds beyond its beginning, which was added before. No figure ever falls."""
        self.assessed_s += whole.assessed_s - known.assessed_s
        self.throttled_s += max(whole.throttled_s - known.throttled_s, 0.0)
        self.lost_s += max(whole.lost_s - known.lost_s, 0.0)
        for cause, lost_s in whole.lost_by_cause_s.items():
            more_s = max(lost_s - known.lost_by_cause_s.get(cause, 0.0), 0.0)
            self.lost_by_cause_s[cause] = self.lost_by_cause_s.get(cause, 0.0) + more_s


Latest = Mapping[str, float]
"""The last row of one device in one tier, by column; what could not be read is not in it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceView:
    """Everything known of one device. It is not changed once it is in a snapshot."""

    facts: Mapping[str, Any]
    """The manifest's."""
    latest: Mapping[str, Latest]
    """By tier."""
    peaks: Peaks
    clock_lost: ClockLost


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """A recording at one moment."""

    taken_mono_ns: int
    recording: str
    """The recording's name."""
    start_wall_ns: int
    """Start of its window on the node's wall clock."""
    node: str
    sampler_alive: bool
    manifest: Mapping[str, Any]
    devices: Mapping[str, DeviceView]
    """By name; empty once the sampler has ended: an old reading must not look like a new one."""
    host: Latest | None
    peaks: Peaks
    """Of the sum of the node's devices."""
    cpu_s: float
    """CPU time that following has cost before this moment."""
    others: Sequence[str] = ()
    """Devices that do not count."""


class Follower:
    """Follows one recording. For one thread."""

    def __init__(self, sampler_folder: Path, start_mono_ns: int) -> None:
        """Has read nothing yet of what a recording's sampler writes, from the start of the recording's window."""
        self._folder, self._start_ns = sampler_folder, start_mono_ns
        self._sampler = SamplerProcess(sampler_folder)
        self._recording = RecordingFolder(sampler_folder.parents[1])
        self._assessed_until_ns = start_mono_ns
        self._device_peaks: dict[str, Peaks] = {}
        self._lost: dict[str, ClockLost] = {}
        self._node_peaks = Peaks()
        self._others: Sequence[str] = ()
        self._start_wall_ns = ClockAnchor.now().to_wall_ns(start_mono_ns)
        self._cpu_s = 0.0

    def look(self) -> Snapshot:
        """Reads what is new.

        It has to be called more often than every `LOOK_BACK_S`. Of a longer time only the end is looked at, for peaks
        and for lost clock. Raises `TelemetryError` where a file cannot be read.
        """
        begun_cpu_s = time.thread_time()
        try:
            return self._look()
        finally:
            self._cpu_s += time.thread_time() - begun_cpu_s

    def _look(self) -> Snapshot:
        now_ns = time.monotonic_ns()
        since_ns = max(self._start_ns, now_ns - s_to_ns(LOOK_BACK_S))
        if not self._sampler.alive():
            return self._snapshot(now_ns, {}, alive=False)
        measured = look(self._folder, since_ns)
        node = next(iter(measured.manifests))
        manifest = with_calibrations(self._recording.storage, measured.manifests[node])
        measured = replace(measured, manifests={node: manifest})
        others = measured.facts.get("others", ())
        if others != self._others:  # the sum had devices that do not count, or lacked some that do
            self._others, self._node_peaks = others, Peaks()
        if measured.window is not None:
            self._assess(measured, since_ns)
        return self._snapshot(now_ns, manifest, alive=True, measured=measured)

    def _assess(self, measured: RunData, since_ns: int) -> None:
        """Takes peaks of all that was read, and the lost clock of what is new, where enough is."""
        assert measured.window is not None
        shift_ns = measured.window[0] - since_ns  # from the monotonic clock to the window's
        begin_ns, end_ns = max(self._assessed_until_ns, since_ns), measured.window[1] - shift_ns
        first = self._assessed_until_ns == self._start_ns
        if end_ns - begin_ns < s_to_ns(LEAST_PIECE_S if first else ASSESS_EVERY_S):
            return
        for (_, name), metrics in metrics_by_device(measured).items():
            self._device_peaks.setdefault(name, Peaks()).observe(metrics, _DEVICE_PEAKS)
        self._node_peaks.observe(summarize(measured).metrics, _NODE_PEAKS)
        from_ns = max(since_ns, begin_ns - s_to_ns(LEAST_PIECE_S))
        whole = _clock_lost(measured, (from_ns + shift_ns, end_ns + shift_ns))
        known = _clock_lost(measured, (from_ns + shift_ns, begin_ns + shift_ns))
        for name, lost in whole.items():
            before = known.get(name) if from_ns < begin_ns else ClockLost()
            if before is not None:
                self._lost.setdefault(name, ClockLost()).add(lost, before)
        self._assessed_until_ns = end_ns

    def _snapshot(
        self, now_ns: int, manifest: Mapping[str, Any], *, alive: bool, measured: RunData | None = None
    ) -> Snapshot:
        devices: dict[str, DeviceView] = {}
        host = None
        for name, facts in manifest.get("devices", {}).items() if measured is not None else ():
            latest = _latest(measured, (manifest["node"], name)) if measured is not None else {}
            if name == HOST:
                host = latest.get(HOST)
                continue
            peaks, lost = self._device_peaks.get(name, Peaks()), self._lost.get(name, ClockLost())
            devices[name] = DeviceView(
                facts=facts,
                latest=latest,
                peaks=Peaks(since_start_w=dict(peaks.since_start_w), recent_w=dict(peaks.recent_w)),
                clock_lost=replace(lost, lost_by_cause_s=dict(lost.lost_by_cause_s)),
            )
        return Snapshot(
            taken_mono_ns=now_ns,
            recording=self._recording.path.name,
            start_wall_ns=self._start_wall_ns,
            node=self._folder.name,
            sampler_alive=alive,
            manifest=manifest,
            devices=devices,
            host=host,
            peaks=replace(self._node_peaks, since_start_w=dict(self._node_peaks.since_start_w)) if alive else Peaks(),
            cpu_s=self._cpu_s,
            others=self._others,
        )


def _clock_lost(measured: RunData, window_ns: tuple[int, int]) -> dict[str, ClockLost]:
    """Computes the clock that devices lost in a window, by name; one of which that is not known is not in it."""
    examined = replace(measured, window=window_ns).examined
    if examined is None:
        return {}
    each = {device: examined.only(device).throttles.get(device) for device in measured.devices}
    lost = {name: ClockLost.of(found, examined.aligned.duration_s) for (_, name), found in each.items()}
    return {name: known for name, known in lost.items() if known is not None}


def _latest(measured: RunData, device: DeviceKey) -> dict[str, Latest]:
    """Returns a device's last row of every tier that has one."""
    own = {tier: measured.rows(tier, device) for tier in FOLLOWED_TIERS}
    last = {tier: rows.slice(rows.num_rows - 1).to_pylist()[0] for tier, rows in own.items() if rows is not None}
    return {
        tier: {name: one for name, one in row.items() if isinstance(one, int | float)} for tier, row in last.items()
    }
