"""Measurement quality: one table of bounds, and a verdict that is a pure function of facts."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, TypeAlias

from wattune.analysis.metrics.doubts import AVERAGED, MILDER, OF_POWER, TIME_ZONE
from wattune.analysis.metrics.energy import LEAST_COVERAGE_FRAC
from wattune.analysis.metrics.outlier import BROKEN_FRAC, VARIES_FRAC
from wattune.analysis.metrics.speed import step_times_s
from wattune.analysis.metrics.step_breakdown import HOST_BOUND_FRAC
from wattune.analysis.metrics.thermal import temperature_rise_c_per_min
from wattune.analysis.run_data import Examined
from wattune.analysis.signals.clock_check import clock_step_s
from wattune.analysis.signals.readings import HOST
from wattune.analysis.signals.steady_state import drift_frac
from wattune.fidelity import BURST, FIDELITY, STOPPED_EARLY
from wattune.run import INDICATIVE, INVALID, PUBLISHABLE, QUALITIES
from wattune.schema import COVERED_PERIODS
from wattune.units import ns_to_s

Found: TypeAlias = Mapping[str, float]
"""Metrics of a run by name."""

Fact: TypeAlias = Callable[[Examined, Found], float | None]
"""Finds a fact about a run and its metrics; None where it is unknown or does not apply."""


@dataclass(frozen=True, slots=True)
class Threshold:
    """One bound on one fact. Beyond `publishable` a measurement is indicative, beyond `indicative` invalid."""

    code: str
    fact: Fact
    """The number or truth that is judged."""
    publishable: float
    """The bound up to which the fact lowers nothing."""
    indicative: float | None
    """The bound up to which the verdict is indicative; None if the verdict is never worse than that."""
    at_least: bool = False
    """True if the fact must reach the bounds, false if it must not exceed them."""
    scope: str = "all"
    """`all`, or the only group of metrics that is assessed by it: `thermal` or `step_breakdown`."""

    def verdict(self, value: float | None) -> str:
        """Returns the best verdict this fact allows; an unknown fact allows `publishable`."""
        if value is None or self._within(float(value), self.publishable):
            return PUBLISHABLE
        return INDICATIVE if self.indicative is None or self._within(float(value), self.indicative) else INVALID

    def _within(self, value: float, bound: float) -> bool:
        return value >= bound if self.at_least else value <= bound


def _metric(name: str) -> Fact:
    return lambda _, found: found.get(name)


def _energy_checked(run: Examined, found: Found) -> bool:
    return not run.powers.traces or "energy_integral_error_frac" in found


def _thermal_window_s(run: Examined, found: Found) -> float | None:
    return run.aligned.duration_s if "device_temp_max_c" in found else None


def _num_missing_ranks(run: Examined, _: Found) -> int:
    steps, spec = run.aligned.steps, run.data.spec
    return 0 if steps is None or spec is None else max(spec.cluster.world_size - len(steps.rank), 0)


def _num_missing_devices(run: Examined, _: Found) -> int:
    missing = len(run.aligned.missing)
    return 0 if missing == len(run.aligned.devices) else missing


def _largest_gap_s(run: Examined, _: Found) -> float | None:
    """Returns the longest time without a sample; a mean is of the time before it, so its usual interval is no gap."""
    gaps_s = [
        one.largest_gap_s
        for one in run.powers.traces
        if not one.averaged_s or one.largest_gap_s > COVERED_PERIODS * one.spacing_s
    ]
    return max(gaps_s, default=None)


def _num_stand_ins(run: Examined, _: Found) -> int:
    """Counts power sensors whose finest series covers too little of the window, so that a coarser one is used.

    Where a sampler wrote ring samples, power from elsewhere means that their file is lost.
    """
    tiers = {node: manifest.get("tiers", {}) for node, manifest in run.data.manifests.items()}
    rings = {node for node, each in tiers.items() if each.get("ring", {}).get("rows")}
    return sum(one.stands_in or (not one.from_ring and one.node in rings) for one in run.powers.traces)


def _step_time_drift_frac(run: Examined, _: Found) -> float | None:
    """Returns the difference between the halves of the window by a trend or a jump; 0 where it may be chance."""
    return None if run.aligned.steps is None else drift_frac(step_times_s(run.aligned.steps))


def _rate_frac(run: Examined, _: Found) -> float | None:
    """Returns achieved over requested rate of the worst tier; None if no sampler reports it."""
    rates = [
        tier["achieved_hz"] / tier["requested_hz"]
        for manifest in run.data.manifests.values()
        for name, tier in manifest.get("tiers", {}).items()
        if name != HOST and tier.get("achieved_hz") is not None and tier.get("requested_hz")
    ]
    return min(rates, default=None)


def _clock_step_s(run: Examined, _: Found) -> float | None:
    """Returns the largest jump of any node's wall clock, as samplers told; where none did, as the stamps tell."""
    clocks = [manifest.get("clock", {}) for manifest in run.data.manifests.values()]
    looked = [clock["steps"] for clock in clocks if "steps" in clock]
    return (
        max((ns_to_s(abs(step["step_ns"])) for steps in looked for step in steps), default=0.0)
        if looked
        else clock_step_s(run.data.sources)
    )


def _clock_uncertainty_s(run: Examined, _: Found) -> float | None:
    """Returns the largest clock uncertainty of the summed nodes; None for one node, or if no manifest has it."""
    nodes = {node for node, _ in run.aligned.devices}
    said_ns = [run.data.manifests.get(node, {}).get("clock_offset_uncertainty_ns") for node in nodes]
    return max((ns_to_s(one) for one in said_ns if one is not None), default=None) if len(nodes) > 1 else None


def _num_other_processes(run: Examined, _: Found) -> int | None:
    """Counts foreign processes on the busiest device from beginning to end; None if no backend can list them.

    A process that came or left in between may be a worker of this trial, or of the one before.
    """
    counts = []
    for known in map(run.aligned.known.get, run.aligned.devices):
        found = [
            {process["pid"] for process in facts["other_processes"]}
            for when in ("at_start", "at_end")
            if "other_processes" in (facts := (known or {}).get(when, {}))
        ]
        if found:
            counts.append(len(set.intersection(*found)))
    return max(counts, default=None)


def _doubted(code: str) -> Fact:
    return lambda run, _: code in run.doubts


THRESHOLDS: Final = (
    Threshold("rank_missing", _num_missing_ranks, 0, 0),
    Threshold("device_missing", _num_missing_devices, 0, 0),
    Threshold("outside_window", lambda run, _: run.powers.num_outside, 0, 0),
    *(Threshold(code, _doubted(code), 0, 0) for code in (*OF_POWER, TIME_ZONE)),
    *(Threshold(code, _doubted(code), 0, None) for code in MILDER),
    Threshold("no_device_power", lambda run, _: bool(run.powers.traces), 1, None, at_least=True),
    Threshold("simulated", lambda run, _: run.data.simulated, 0, None),
    Threshold("replayed", lambda run, _: run.data.read_by("replay"), 0, None),
    Threshold("few_steps", lambda run, _: run.num_steps, 20, 2, at_least=True),
    Threshold("low_coverage", _metric("sample_coverage_frac"), 0.98, LEAST_COVERAGE_FRAC, at_least=True),
    Threshold("ring_incomplete", _num_stand_ins, 0, None),
    Threshold(AVERAGED, _doubted(AVERAGED), 0, None),
    Threshold("gap", _largest_gap_s, 0.5, 3.0),
    Threshold("energy_disagrees", _metric("energy_integral_error_frac"), 0.005, 0.05),
    Threshold("energy_unchecked", _energy_checked, 1, None, at_least=True),
    Threshold("slow_sampling", _rate_frac, 0.95, None, at_least=True),
    Threshold("clock_stepped", _clock_step_s, 0.01, None),
    Threshold("clock_uncertain", _clock_uncertainty_s, 0.25, None),
    Threshold("other_gpu_users", _num_other_processes, 0, None),
    Threshold("device_outlier", _metric("device_outlier_frac"), VARIES_FRAC, BROKEN_FRAC),
    Threshold("no_steady_state", lambda run, _: run.num_unsteady_steps is not None, 1, None, at_least=True),
    Threshold("unsteady_steps", _step_time_drift_frac, 0.02, None),
    Threshold("short_for_thermal", _thermal_window_s, 60.0, None, at_least=True, scope="thermal"),
    Threshold("warming", lambda run, _: temperature_rise_c_per_min(run.temperatures), 1.0, None, scope="thermal"),
    Threshold("step_unexplained", _metric("other_frac"), 0.05, None, scope="step_breakdown"),
    Threshold("host_bound", _metric("host_bound_frac"), HOST_BOUND_FRAC, None),
    Threshold("start_up_counts", lambda run, _: run.data.numbers.window_start_mono_ns is not None, 0, None),
    Threshold(BURST, lambda run, _: run.data.tags.get(FIDELITY) == BURST, 0, None),
    Threshold(STOPPED_EARLY, lambda run, _: STOPPED_EARLY in run.data.tags, 0, None),
    Threshold("edited", lambda run, _: len(run.data.files.accepted), 0, None),
    Threshold("files_missing", lambda run, _: len(run.data.files.missing), 0, None),
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


QualityVerdict = tuple[str, tuple[str, ...], dict[str, str]]
"""Quality of the whole; codes of all bounds that were exceeded, those of groups included, in the table's order; and the
quality of each group of metrics that is worse than the whole."""


def quality_of(examined: Examined, metrics: Found) -> QualityVerdict:
    """Returns the verdict on a measurement."""
    return assess_quality({threshold.code: threshold.fact(examined, metrics) for threshold in THRESHOLDS})


def assess_quality(facts: Mapping[str, float | None]) -> QualityVerdict:
    """Returns the worst of what facts allow, by the codes of `THRESHOLDS`; one that is unknown allows everything."""
    found = [(threshold, threshold.verdict(facts.get(threshold.code))) for threshold in THRESHOLDS]
    short = [(threshold, verdict) for threshold, verdict in found if verdict != PUBLISHABLE]
    quality = min((v for t, v in short if t.scope == "all"), key=QUALITIES.index, default=PUBLISHABLE)
    groups = {t.scope: v for t, v in short if t.scope != "all" and QUALITIES.index(v) < QUALITIES.index(quality)}
    return quality, tuple(threshold.code for threshold, _ in short), groups
