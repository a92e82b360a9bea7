"""Comparison of two trials or recordings: their differences, and the parts of a step that made one faster or leaner.

If their steps have different numbers of tokens, trials are compared by time and energy of a million tokens. The parts
of each side add up to its whole (`wattune.analysis.metrics.waterfall`), so the changes of the parts add up to the
change. Metrics are tested as differences (`wattune.ranking.difference`).
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Final, TypeAlias

from wattune.analysis.metrics.waterfall import OTHER, UNDIVIDED, Breakdown
from wattune.intervals import Interval
from wattune.masking import masked_arguments, masked_environment
from wattune.metrics import METRICS
from wattune.ranking.common_steps import describe
from wattune.ranking.difference import Counted, Difference, difference, tell_apart
from wattune.run import Recorded, Run
from wattune.search.names import namer
from wattune.storage.space_changes import flattened
from wattune.trial import TrialSpec
from wattune.units import format_change

SPEED: Final = "tokens_per_s"

MEAN_POWER: Final = "node_device_power_mean_w"
"""Metric of the conclusion about a trial and a recording, which have neither work nor energy in common."""

TESTED: Final = ("speed", "energy", "power", "throttle", "thermal")
"""Groups of metrics whose differences are tested and shown."""

MILLION: Final = 1e6

EXPOSED: Final = "exposed_comm"
_BY_GROUP: Final = f"{EXPOSED}:"

CANCELS: Final = 4.0
"""Largest ratio of the parts' changes without signs to the whole change at which shares of it are meaningful: beyond it
a part could be several hundred percent of almost nothing."""

_SOURCES: Final = ("model.source",)
"""Fields of a specification that do not count as a difference."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One of the two: a trial, or a recording."""

    name: str
    """Name with study and trial, such as `moe_h200:0517fb8c0ffe`; of a recording its own."""
    spec: TrialSpec
    result: Run
    breakdown: Breakdown | None
    """Parts of its mean step, None without spans."""
    counted: Counted
    """The runs that its figures are of, with the scatter of their study."""
    simulated: bool
    objective: str = SPEED
    """Metric of its study's objective."""
    plan: str = ""
    """Name of the plan beside the other side's; empty where the plan's own is one."""

    @property
    def label(self) -> str:
        """Short name of the plan, or a recording's command, and the devices."""
        return f"{self.plan or self.spec.label} on {self.spec.cluster.label}"

    @property
    def recorded(self) -> Recorded | None:
        """The recorded command; None for a trial."""
        return self.result.recorded

    @property
    def provenance(self) -> dict[str, Any]:
        """Kind, work and machine, in words that a trial and a recording share."""
        if self.recorded is not None:
            return {"kind": "recording", "work": f"command: {self.recorded.text}", **self.recorded.machine}
        spec = self.spec
        of = f"{spec.workload.mode} at {spec.workload.seq_len} tokens, " if spec.workload.is_known else ""
        work = f"{spec.model.name} {spec.label}, {of}{spec.engine}"
        nodes = self.result.tags.get("nodes")
        return {"kind": "trial", "work": work, "devices": spec.cluster.label, **({"node": nodes} if nodes else {})}

    @property
    def tokens_per_s(self) -> Interval | None:
        """Throughput with the scatter that its study knows."""
        return self.counted.spreads.interval(self.counted.runs, SPEED)

    @property
    def known_as(self) -> str:
        """Its name and quality, such as `moe_h200:0517fb8c0ffe, indicative, SIMULATED telemetry`."""
        simulated = ", SIMULATED telemetry" if self.simulated else ""
        kind = "recording " if self.recorded else ""
        return f"{kind}{self.name}, {self.result.quality or 'not assessed'}{simulated}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Waterfall:
    """Change from a whole of A to that of B, part by part."""

    unit: str
    """`s` or `J`."""
    per: str
    """`step`, or `million tokens` where steps differ in tokens."""
    parts: Mapping[str, tuple[float, float]]
    """Amounts of A and of B by part."""

    @property
    def a(self) -> float:
        """The whole of A: the sum of its parts."""
        return math.fsum(a for a, _ in self.parts.values())

    @property
    def b(self) -> float:
        """The whole of B: the sum of its parts."""
        return math.fsum(b for _, b in self.parts.values())

    @property
    def changes(self) -> dict[str, float]:
        """B minus A of each part."""
        return {name: b - a for name, (a, b) in self.parts.items()}

    @property
    def cancels(self) -> bool:
        """True if the parts' changes cancel out, so that they are not meaningful shares of the whole change."""
        changes = self.changes.values()
        return abs(math.fsum(changes)) * CANCELS < math.fsum(map(abs, changes))

    def share_frac(self, part: str) -> float | None:
        """Returns a part's share of the whole change; shares add up to 1. None without a change, or if parts cancel."""
        whole = math.fsum(self.changes.values())
        return self.changes[part] / whole if whole and not self.cancels else None

    def to_json(self) -> dict[str, Any]:
        """Plain data, ready for `json.dumps`."""
        parts = [
            {"name": name, "a": a, "b": b, "change": b - a, "share_frac": self.share_frac(name)}
            for name, (a, b) in self.parts.items()
        ]
        return {"unit": self.unit, "per": self.per, "a": self.a, "b": self.b, "parts": parts}


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Comparison of trials A and B."""

    a: Side
    b: Side
    differences: Mapping[str, tuple[Any, Any]]
    """Fields of the specifications that differ, by path."""
    time: Waterfall | None
    """None if a side has no spans."""
    energy: Waterfall | None
    """None if a side has no usable power."""
    warnings: tuple[str, ...]
    """Warnings to read before drawing a conclusion."""
    asked: str
    """Metric of the conclusion: that of both studies' objective, else `tokens_per_s`. It is tested alone."""
    tested: tuple[Difference, ...]
    """Tested metrics that both measured, in the schema's order."""

    @property
    def metrics(self) -> dict[str, tuple[float, float]]:
        """Metrics that the first compared run of both measured, in the schema's order."""
        a, b = self.a.result.metrics, self.b.result.metrics
        return {name: (a[name], b[name]) for name in METRICS if name in a and name in b}

    @property
    def error_note(self) -> str:
        """Describes the errors of intervals and verdicts."""
        others = sum(one.metric != self.asked and not one.untested for one in self.tested)
        return (
            f"An interval is the 95 % one of its difference alone. A verdict of told apart is wrong in at most 5 % of "
            f"cases for {self.asked}, and for any of the {others} others together (Holm)"
        )

    @property
    def conclusion(self) -> str:
        """Conclusion in one sentence: the side with more, by how much, and whether the two are told apart."""
        return self.conclude("A", "B")

    def conclude(self, name_a: str, name_b: str) -> str:
        """Returns the conclusion with names of the two."""
        found = next((one for one in self.tested if one.metric == self.asked), None)
        if found is None:
            return f"{self.asked} was not measured on both sides"
        leads = found.a.value >= found.b.value
        name, more, less = (name_a, found.a, found.b) if leads else (name_b, found.b, found.a)
        if found.change_frac is None or not less.value:
            size = f"{format_change(found.metric, abs(found.change))} more {self.asked}"
        else:
            what = "more tokens a second" if self.asked == SPEED else f"more {self.asked}"
            size = f"{100 * (more.value / less.value - 1):.1f} % {what}"
        verb = "trains" if self.asked == SPEED else "has"
        return f"{name} {verb} {size}{_interval_text(found, turned=leads)}: {found.verdict}"

    def to_json(self) -> dict[str, Any]:
        """Plain data, ready for `json.dumps`."""
        return {
            "a": _side(self.a),
            "b": _side(self.b),
            "conclusion": self.conclusion,
            "differences": {path: {"a": values[0], "b": values[1]} for path, values in self.differences.items()},
            "time": self.time and self.time.to_json(),
            "energy": self.energy and self.energy.to_json(),
            "metrics": {name: {"a": a, "b": b} for name, (a, b) in self.metrics.items()},
            "asked": self.asked,
            "tested": [one.to_json() for one in self.tested],
            "error_note": self.error_note,
            "warnings": list(self.warnings),
        }


def _interval_text(found: Difference, *, turned: bool) -> str:
    """Formats the 95 % interval of a difference, `turned` to that of A over B; empty without a test."""
    if found.low is None or found.high is None:
        return ""
    if found.low_frac is not None and found.high_frac is not None:
        low, high = found.low_frac, found.high_frac
        if turned:
            low, high = 1.0 / (1.0 + high) - 1.0, 1.0 / (1.0 + low) - 1.0
        return f" (95 % interval {100 * low:.1f} to {100 * high:.1f} %)"
    low, high = (-found.high, -found.low) if turned else (found.low, found.high)
    return f" (95 % interval {format_change(found.metric, low)} to {format_change(found.metric, high)})"


def _asked(a: Side, b: Side) -> str:
    """Returns the metric of the conclusion: that of both, else one that both have."""
    if a.objective == b.objective:
        return a.objective
    return MEAN_POWER if a.recorded or b.recorded else SPEED


def compare(a: Side, b: Side) -> Comparison:
    """Compares two trials or recordings metric by metric, and trials part by part."""
    time = energy = None
    warnings = _warnings(a, b)
    plan = namer((a.spec.workload, b.spec.workload))
    a, b = replace(a, plan=plan(a.spec)), replace(b, plan=plan(b.spec))
    if a.recorded or b.recorded:
        pass  # a recording has no phases
    elif a.breakdown is None or b.breakdown is None:
        missing = " and ".join(name for name, side in (("A", a), ("B", b)) if side.breakdown is None)
        warnings.append(f"no spans of measured steps in {missing}: there is no waterfall")
    else:
        known = a.spec.tokens_per_step, b.spec.tokens_per_step
        tokens = (known[0] or 1, known[1] or 1) if None not in known else (1, 1)
        parts_a, parts_b, per = _parts_of_equal_work(a.breakdown, b.breakdown, tokens)
        parts_a, parts_b, notes = _equally_divided(parts_a, parts_b)
        warnings += notes
        time, energy = _waterfalls(parts_a, parts_b, per)
        if a.breakdown.step_energy_j is None or b.breakdown.step_energy_j is None:
            energy = None
        if a.breakdown.indicative or b.breakdown.indicative:
            warnings.append("more than 5 % of a step is unexplained or undivided: its parts are indicative")
    asked = _asked(a, b)
    names = [name for name in METRICS if METRICS[name].group in TESTED or name == asked]
    tested = tell_apart(filter(None, (difference(name, a.counted, b.counted) for name in names)), asked)
    return Comparison(
        a=a,
        b=b,
        differences=_differences(a, b),
        time=time,
        energy=energy,
        warnings=tuple(warnings),
        asked=asked,
        tested=tested,
    )


_Parts: TypeAlias = Mapping[str, tuple[float, float]]
"""Seconds and joules by part."""

_NOTHING: Final = (0.0, 0.0)


def _parts_of_equal_work(
    breakdown_a: Breakdown, breakdown_b: Breakdown, tokens_per_step: tuple[int, int]
) -> tuple[_Parts, _Parts, str]:
    """Returns the parts of both sides for the same work, and the name of that work (`Waterfall.per`)."""
    tokens_a, tokens_b = tokens_per_step
    if tokens_a == tokens_b:
        return _parts(breakdown_a, 1.0), _parts(breakdown_b, 1.0), "step"
    return _parts(breakdown_a, MILLION / tokens_a), _parts(breakdown_b, MILLION / tokens_b), "million tokens"


def _parts(breakdown: Breakdown, scale: float) -> _Parts:
    return {name: (scale * time_s, scale * (of_j or 0.0)) for name, (time_s, of_j) in breakdown.parts.items()}


def _equally_divided(a: _Parts, b: _Parts) -> tuple[_Parts, _Parts, list[str]]:
    """Divides both sides as finely as the coarser one, and returns warnings about it.

    Parts of one side against a whole of the other would make every part a change.
    """
    if (UNDIVIDED in a) != (UNDIVIDED in b):
        which = "A" if UNDIVIDED in a else "B"
        warning = (
            f"spans of {which} do not show communication inside forward and backward: steps are compared undivided"
        )
        return _undivided(a), _undivided(b), [warning]
    if _has_groups(a) != _has_groups(b):
        return _without_groups(a), _without_groups(b), []
    return a, b, []


def _undivided(parts: _Parts) -> _Parts:
    """Joins all parts except `other`."""
    inside = [values for name, values in parts.items() if name != OTHER]
    sums = math.fsum(time for time, _ in inside), math.fsum(energy for _, energy in inside)
    return {UNDIVIDED: sums, OTHER: parts.get(OTHER, _NOTHING)}


def _has_groups(parts: _Parts) -> bool:
    return any(name.startswith(_BY_GROUP) for name in parts)


def _without_groups(parts: _Parts) -> _Parts:
    """Joins the communication of all groups into one part."""
    found: dict[str, tuple[float, float]] = {}
    for name, (time, energy) in parts.items():
        whole = EXPOSED if name.startswith(_BY_GROUP) else name
        before = found.get(whole, _NOTHING)
        found[whole] = before[0] + time, before[1] + energy
    return found


def _waterfalls(a: _Parts, b: _Parts, per: str) -> tuple[Waterfall, Waterfall]:
    """Builds the waterfalls of time and energy, `other` last; parts that are zero on both sides are left out."""
    names = [*dict.fromkeys(name for name in (*a, *b) if name != OTHER), OTHER]
    pairs = {name: (a.get(name, _NOTHING), b.get(name, _NOTHING)) for name in names}
    pairs = {name: (of_a, of_b) for name, (of_a, of_b) in pairs.items() if name == OTHER or any((*of_a, *of_b))}
    time, energy = ({name: (of_a[i], of_b[i]) for name, (of_a, of_b) in pairs.items()} for i in (0, 1))
    return Waterfall(unit="s", per=per, parts=time), Waterfall(unit="J", per=per, parts=energy)


def _differences(a: Side, b: Side) -> dict[str, tuple[Any, Any]]:
    if not (a.recorded or b.recorded):
        flat_a, flat_b = flattened(_fields(a.spec)), flattened(_fields(b.spec))
    else:
        unknown = dict.fromkeys(a.provenance | b.provenance, "not known")
        flat_a, flat_b = unknown | a.provenance, unknown | b.provenance
    return {
        path: (flat_a.get(path), flat_b.get(path))
        for path in flat_a | flat_b
        if flat_a.get(path) != flat_b.get(path) and path not in _SOURCES
    }


def _fields(spec: TrialSpec) -> dict[str, Any]:
    """Returns a specification as plain data, with flags and variables by name."""
    data = asdict(spec)
    if spec.program is None:
        del data["program"]
        return data
    program = data.pop("program")
    data |= {
        "command": " ".join(masked_arguments(spec.program.command)),
        "env": masked_environment(dict(program["environment"])),
        "flags": dict(spec.flags),
        "steps": spec.program.steps,
    }
    unknown = [key for key, part in (("model", spec.model), ("workload", spec.workload)) if not part.is_known]
    return {key: value for key, value in data.items() if key not in unknown}


def _warnings(a: Side, b: Side) -> list[str]:
    found = []
    if a.simulated != b.simulated:
        found.append(f"telemetry of {'A is SIMULATED, B' if a.simulated else 'B is SIMULATED, A'} was measured")
    elif a.simulated:
        found.append("telemetry of both is SIMULATED: it proves nothing about hardware")
    if a.recorded or b.recorded:
        return [*found, *_other_work(a, b), *_other_quality(a, b)]
    devices = {side.spec.cluster.simulate_sensors_of for side in (a, b)}
    if a.spec.cluster.device == b.spec.cluster.device and len(devices) > 1 and None not in devices:
        found.append(
            f"both ran on {a.spec.cluster.device}: step times and tokens_per_s are of that machine and do not compare "
            f"{' with '.join(sorted(map(str, devices)))}"
        )
    if a.counted.spreads is not b.counted.spreads:
        found.append("A and B are of different studies: what the machine did in between is not in the intervals")
    found += describe((*a.counted.runs, *b.counted.runs))
    found += _other_quality(a, b)
    if a.spec.model != b.spec.model:
        found.append(
            f"models differ ({a.spec.model.name}, {b.spec.model.name}): a token is not the same work on both sides"
        )
    if a.spec.program is not None and b.spec.program is not None and a.spec.program.command != b.spec.program.command:
        found.append("the commands differ beyond their flags: nobody knows whether both do the same work")
    if a.spec.workload.seq_len != b.spec.workload.seq_len:
        found.append("sequence lengths differ: a token is not the same work on both sides")
    return found


def _other_quality(a: Side, b: Side) -> list[str]:
    if a.result.quality == b.result.quality:
        return []
    return [f"A is {a.result.quality or 'not assessed'}, B is {b.result.quality or 'not assessed'}"]


def _other_work(a: Side, b: Side) -> list[str]:
    """Describes what is not known to be the same of a recording and what it is compared with."""
    if a.recorded is None or b.recorded is None:
        trial, recording = ("B", "A") if a.recorded else ("A", "B")
        begin = f"{trial} is a trial and {recording} a recording: "
        if "step_time_s" in (a if a.recorded else b).result.metrics:
            text = (
                f"{begin}figures of both are of measured steps. wattune does not know what the command trains: speed "
                "and energy of tokens compare only where it is the same model"
            )
            return [text, *_endings(a, b)]
        text = (
            f"{begin}figures of {trial} are of its measured steps, those of {recording} of its whole command with "
            "start and end. wattune does not know what the command does, so speed and energy of work are not compared"
        )
        return [text, *_endings(a, b)]
    found = ["each was recorded once: intervals have the scatter of a prior, not of repeats"]
    if a.recorded.command != b.recorded.command:
        found.append(
            "the commands differ, and wattune does not know what they do: energy and time compare only where both do "
            "the same work"
        )
    elif not a.recorded.command:
        found.append("no command is known: energy and time compare only where the same work ran on both sides")
    else:
        found.append("one command line on both sides: what changed in code, data or environment is not known")
    return [*found, *_endings(a, b)]


def _endings(a: Side, b: Side) -> list[str]:
    """Describes commands that were recorded and did not end well."""
    found = []
    for name, side in (("A", a.recorded), ("B", b.recorded)):
        if side is not None and side.failure:
            end = f"with exit code {side.exit_code}" if side.ended else "with its end not seen"
            found.append(f"the command of {name} ended {end}: it may not have done its work")
    return found


def _side(side: Side) -> dict[str, Any]:
    return {
        "name": side.name,
        "kind": "recording" if side.recorded else "trial",
        "label": side.label,
        "trial_id": None if side.recorded else side.result.trial_id,
        "repeat": side.result.repeat,
        "quality": side.result.quality,
        "simulated": side.simulated,
        "tokens_per_s": side.tokens_per_s and asdict(side.tokens_per_s),
        "breakdown": side.breakdown and side.breakdown.to_json(),
    }
