"""Measurement quality: one table of bounds, and a verdict that is a pure function of facts."""

from dataclasses import dataclass
from typing import Final

from wattune.analysis.metrics.energy import LEAST_COVERAGE_FRAC
from wattune.analysis.metrics.outlier import BROKEN_FRAC, VARIES_FRAC
from wattune.analysis.metrics.step_breakdown import HOST_BOUND_FRAC
from wattune.fidelity import BURST, STOPPED_EARLY

PUBLISHABLE: Final = "publishable"
INDICATIVE: Final = "indicative"
INVALID: Final = "invalid"

VERDICTS: Final = (INVALID, INDICATIVE, PUBLISHABLE)
"""From worst to best."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Facts about a measurement; None where a fact is unknown or does not apply."""

    num_steps: int | None = None
    """Measured steps; None for a recording without spans."""
    num_missing_ranks: int = 0
    """Ranks of the plan without spans of the measured steps."""
    num_missing_devices: int = 0
    """Devices without any telemetry while others have some."""
    num_outside_sensors: int = 0
    """Power sensors with readings, none of them inside the window."""
    has_power: bool = True
    """True if the power of any device was read."""
    simulated: bool = False
    replayed: bool = False
    """True if readings come from an earlier recording: correct, but not a new measurement."""
    num_stand_ins: int = 0
    """Power sensors whose finest series covers too little of the window, so that a coarser one is used."""
    coverage_frac: float | None = None
    largest_gap_s: float | None = None
    energy_error_frac: float | None = None
    energy_checked: bool = True
    """True if the integral of power could be compared with energy counters."""
    rate_frac: float | None = None
    """Achieved over requested sampling rate of the slowest tier."""
    clock_step_s: float | None = None
    """Largest jump of a node's wall clock during the recording. The driver stamps its power history with that clock."""
    clock_uncertainty_s: float | None = None
    """Uncertainty of the worst node's clock offset; None on one node."""
    num_other_processes: int | None = None
    """Foreign processes on the busiest device that were there from beginning to end."""
    outlier_frac: float | None = None
    """Largest deviation of a device from its peers."""
    steady: bool = True
    """True if steps reached a steady state, or if there are no steps."""
    step_time_drift_frac: float | None = None
    """Difference between the halves of the window by a trend or a jump; 0 where it may be chance."""
    temperature_rise_c_per_min: float | None = None
    thermal_window_s: float | None = None
    """Length of the window; None if no temperatures were read."""
    unexplained_frac: float | None = None
    """`other_frac` of the decomposition."""
    host_bound_frac: float | None = None
    """Share of a step in which devices wait for their host; None without a profiled pass."""
    start_up_counts: bool = False
    """True if the window is the run of a trial's command, its start-up included, as it has no steps."""
    burst: bool = False
    """True for the few steps of a burst."""
    stopped_early: bool = False
    """True if measuring ended once the steps proved that the trial loses."""
    num_edited_files: int = 0
    """Files that were edited on purpose, and accepted."""
    num_missing_files: int = 0
    """Files that were there when the trial ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Threshold:
    """One bound on one fact. Beyond `publishable` a measurement is indicative, beyond `indicative` invalid."""

    code: str
    fact: str
    """The field of `Facts`."""
    publishable: float
    """The bound up to which the fact lowers nothing."""
    indicative: float | None
    """The bound up to which the verdict is indicative; None if the verdict is never worse than that."""
    at_least: bool = False
    """True if the fact must reach the bounds, false if it must not exceed them."""
    scope: str = "all"
    """`all`, or the only group of metrics that is assessed by it: `thermal` or `step_breakdown`."""

    def verdict(self, facts: Facts) -> str:
        """Returns the best verdict this fact allows; an unknown fact allows `publishable`."""
        value = getattr(facts, self.fact)
        if value is None or self._within(float(value), self.publishable):
            return PUBLISHABLE
        return INDICATIVE if self.indicative is None or self._within(float(value), self.indicative) else INVALID

    def _within(self, value: float, bound: float) -> bool:
        return value >= bound if self.at_least else value <= bound


THRESHOLDS: Final = (
    Threshold(code="rank_missing", fact="num_missing_ranks", publishable=0, indicative=0),
    Threshold(code="device_missing", fact="num_missing_devices", publishable=0, indicative=0),
    Threshold(code="outside_window", fact="num_outside_sensors", publishable=0, indicative=0),
    Threshold(code="no_device_power", fact="has_power", publishable=1, indicative=None, at_least=True),
    Threshold(code="simulated", fact="simulated", publishable=0, indicative=None),
    Threshold(code="replayed", fact="replayed", publishable=0, indicative=None),
    Threshold(code="few_steps", fact="num_steps", publishable=20, indicative=2, at_least=True),
    Threshold(
        code="low_coverage", fact="coverage_frac", publishable=0.98, indicative=LEAST_COVERAGE_FRAC, at_least=True
    ),
    Threshold(code="ring_incomplete", fact="num_stand_ins", publishable=0, indicative=None),
    Threshold(code="gap", fact="largest_gap_s", publishable=0.5, indicative=3.0),
    Threshold(code="energy_disagrees", fact="energy_error_frac", publishable=0.005, indicative=0.05),
    Threshold(code="energy_unchecked", fact="energy_checked", publishable=1, indicative=None, at_least=True),
    Threshold(code="slow_sampling", fact="rate_frac", publishable=0.95, indicative=None, at_least=True),
    Threshold(code="clock_stepped", fact="clock_step_s", publishable=0.01, indicative=None),
    Threshold(code="clock_uncertain", fact="clock_uncertainty_s", publishable=0.25, indicative=None),
    Threshold(code="other_gpu_users", fact="num_other_processes", publishable=0, indicative=None),
    Threshold(code="device_outlier", fact="outlier_frac", publishable=VARIES_FRAC, indicative=BROKEN_FRAC),
    Threshold(code="no_steady_state", fact="steady", publishable=1, indicative=None, at_least=True),
    Threshold(code="unsteady_steps", fact="step_time_drift_frac", publishable=0.02, indicative=None),
    Threshold(
        code="short_for_thermal",
        fact="thermal_window_s",
        publishable=60.0,
        indicative=None,
        at_least=True,
        scope="thermal",
    ),
    Threshold(code="warming", fact="temperature_rise_c_per_min", publishable=1.0, indicative=None, scope="thermal"),
    Threshold(
        code="step_unexplained", fact="unexplained_frac", publishable=0.05, indicative=None, scope="step_breakdown"
    ),
    Threshold(code="host_bound", fact="host_bound_frac", publishable=HOST_BOUND_FRAC, indicative=None),
    Threshold(code="start_up_counts", fact="start_up_counts", publishable=0, indicative=None),
    Threshold(code=BURST, fact="burst", publishable=0, indicative=None),
    Threshold(code=STOPPED_EARLY, fact="stopped_early", publishable=0, indicative=None),
    Threshold(code="edited", fact="num_edited_files", publishable=0, indicative=None),
    Threshold(code="files_missing", fact="num_missing_files", publishable=0, indicative=None),
)
"""Every bound, and its source.

- Energy 0.5 % and 5 %, and 0.05 unexplained: from the design.
- Gaps: 3 s is the widest gap that srt-slurm's publish gate accepts; 0.5 s is half of a 1 s peak.
- Coverage: the ring of a switching H200 gives up to 5.5 % fewer samples than its rate. No interval is longer than
  46 ms, so the window still counts as covered.
- Outliers: the largest difference seen between sound devices, and far beyond it (`wattune.analysis.metrics.outlier`).
- Clock steps: half a sample of the 20 ms ring.
- Clocks of several nodes: a quarter of the 1 s over which their power is added up.
- Steps: 20 is the default of a study.
- Waits for the host: `wattune.analysis.metrics.step_breakdown.HOST_BOUND_FRAC`.
- Drift of step time 2 %: ours. It moves the mean by 1 %.
- Temperatures are whole degrees, so a change below 1 degree a minute cannot be seen in less than a minute.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class QualityVerdict:
    """Quality of a measurement, with its reasons."""

    quality: str
    """Of the whole."""
    reasons: tuple[str, ...]
    """Codes of all bounds that were exceeded, those of groups included, in the table's order."""
    groups: dict[str, str]
    """Groups of metrics with a worse verdict than the whole."""


def assess_quality(facts: Facts) -> QualityVerdict:
    """Returns the verdict on a measurement: the worst of what its facts allow."""
    found = [(threshold, threshold.verdict(facts)) for threshold in THRESHOLDS]
    short = [(threshold, verdict) for threshold, verdict in found if verdict != PUBLISHABLE]
    quality = min((v for t, v in short if t.scope == "all"), key=VERDICTS.index, default=PUBLISHABLE)
    groups = {t.scope: v for t, v in short if t.scope != "all" and VERDICTS.index(v) < VERDICTS.index(quality)}
    return QualityVerdict(quality=quality, reasons=tuple(threshold.code for threshold, _ in short), groups=groups)
