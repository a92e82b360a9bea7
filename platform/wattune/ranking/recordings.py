"""Ranking of recordings: commands whose work is not known, each recorded once.

A recording is assessed as a trial is: its figures as intervals, its bounds at a stated risk. Nothing says that two
commands do the same work, or that a command line does the same as before. So every recording is a row of its own, its
scatter is the prior's, and the ranking says in words what its rows do not share.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any, Final, cast

from wattune.errors import PlanError, SpaceError
from wattune.intervals import Interval
from wattune.metrics import METRICS
from wattune.objective import Constraint, Objective, Question, parse_objective
from wattune.ranking.assessment import RankedTrial, Verdict, assess, finite, shallow
from wattune.ranking.best import ranks, standing, standings
from wattune.ranking.bounds import Holds, Margin
from wattune.ranking.comparison import Recorded, Side
from wattune.ranking.difference import Counted
from wattune.ranking.spreads import Spreads
from wattune.run import QUALITIES, Run, RunStatus
from wattune.units import NS_PER_S

ENERGY: Final = "total_energy_j"
LEAST_ENERGY: Final = Question.of(f"minimize {ENERGY}")
"""The question to recordings without steps where none is asked."""

_OF_STEPS: Final = ("energy_per_token_j", "energy_per_step_j")
"""Metrics that are asked for instead where recordings have them, best first: they hold for any length of a run."""

_OF_ALL_WORK: Final = (ENERGY, "window_s")
"""Metrics that are smaller where a command did less."""


def usual_objective(recorded: Sequence[Recorded]) -> Objective:
    """Returns the objective where none is given: the least energy of a token, of a step, or else of the command.

    Args:
        recorded: The recordings. All must have what is asked for.
    """
    for name in _OF_STEPS:
        if recorded and all(name in one.result.metrics for one in recorded):
            return parse_objective(f"minimize {name}")
    return LEAST_ENERGY.objective


@dataclass(frozen=True, slots=True, kw_only=True)
class RankedRecording:
    """One assessed recording."""

    of: Recorded
    verdict: Verdict
    rank: int | None
    """1 plus the number of feasible recordings that are told to be better; None unless feasible."""
    best_probability: float | None
    objective: Interval | None
    margins: tuple[Margin, ...]
    missing: tuple[str, ...]
    reason: str
    quality: str
    simulated: bool
    spreads: Spreads = field(repr=False, compare=False)

    @property
    def trial_id(self) -> str:
        """Its name, which stands where a trial has its id."""
        return self.of.name

    @property
    def study(self) -> str:
        """Empty: it is of no study."""
        return ""

    @property
    def label(self) -> str:
        """The command."""
        return self.of.text

    @property
    def counted(self) -> tuple[Run, ...]:
        """The one run; none where it failed."""
        return (self.of.result,) if self.of.result.status is RunStatus.COMPLETED else ()

    @property
    def failing(self) -> tuple[Margin, ...]:
        """The margins of the constraints that break."""
        return tuple(margin for margin in self.margins if margin.verdict is Holds.BREAKS)

    def interval(self, metric: str) -> Interval | None:
        """Computes a metric with its interval; None if it was not measured."""
        return self.spreads.interval(self.counted, metric)

    def to_json(self) -> dict[str, Any]:
        """Plain data, ready for `json.dumps`."""
        return {
            "rank": self.rank,
            "best_probability": self.best_probability,
            "recording": self.of.name,
            "folder": self.of.place,
            "command": list(self.of.command),
            "exit_code": self.of.exit_code,
            "machine": dict(self.of.machine),
            "verdict": str(self.verdict),
            "objective": shallow(self.objective) if self.objective else None,
            "margins": [margin.to_json() for margin in self.margins],
            "missing": list(self.missing),
            "reason": self.reason,
            "quality": self.quality,
            "quality_reasons": list(self.of.result.quality_reasons),
            "simulated": self.simulated,
            "metrics": dict(self.of.result.metrics),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordingRanking:
    """All assessed recordings."""

    question: Question
    rows: tuple[RankedRecording, ...]
    """Feasible ones by objective, then undecided, infeasible, unknown and failed ones."""
    scatter: str
    """The run-to-run scatter of the objective and what it rests on."""
    num_filtered: int = 0
    """Recordings that `where` and `least_quality` left out."""

    @property
    def objective(self) -> Objective:
        """The metric that is largest, or smallest, in the best recording."""
        return self.question.objective

    @property
    def constraints(self) -> tuple[Constraint, ...]:
        """The bounds that must hold."""
        return self.question.constraints

    @property
    def feasible(self) -> tuple[RankedRecording, ...]:
        """The recordings that keep every bound, by objective."""
        return tuple(row for row in self.rows if row.verdict is Verdict.FEASIBLE)

    @property
    def undecided(self) -> tuple[RankedRecording, ...]:
        """The recordings with a bound that one run does not decide."""
        return tuple(row for row in self.rows if row.verdict is Verdict.UNDECIDED)

    @property
    def best(self) -> RankedRecording | None:
        """The first feasible recording, None if none is."""
        return next(iter(self.feasible), None)

    @property
    def simulated(self) -> bool:
        """True if any figure was computed and not measured."""
        return any(row.simulated for row in self.rows)

    @property
    def warnings(self) -> tuple[str, ...]:
        """Differences between the rows that an order hides; empty is good."""
        return tuple(differences([row.of for row in self.rows], self.objective.metric))

    def to_json(self) -> dict[str, Any]:
        """Plain data, ready for `json.dumps`."""
        return {
            "objective": str(self.objective),
            "constraints": [str(constraint) for constraint in self.constraints],
            "risk": self.question.risk,
            "scatter": self.scatter,
            "num_filtered": self.num_filtered,
            "warnings": list(self.warnings),
            "simulated": self.simulated,
            "recordings": [row.to_json() for row in self.rows],
        }


def differences(recorded: Sequence[Recorded], metric: str) -> list[str]:
    """Describes what recordings do not share, so that nobody ranks different work without knowing.

    Args:
        recorded: The recordings.
        metric: The metric they are compared by.
    """
    lines = []
    commands = {one.command for one in recorded}
    if len(commands) > 1:
        lines.append(
            f"{len(commands)} different commands: wattune does not know what they do. An order by {metric} is one of "
            "different work, unless you know that they do the same"
        )
    elif len(recorded) > 1:
        lines.append(
            "one command line, recorded several times: what differs between the runs (code, data, environment) is not "
            "known. Each is a row of its own"
        )
    machines = {one.name: ", ".join(f"{name} {value}" for name, value in one.machine.items()) for one in recorded}
    if len(set(machines.values())) > 1:
        listed = "; ".join(f"{name}: {text}" for name, text in machines.items())
        lines.append(f"recorded on different machines: {listed}")
    for one in recorded:
        if one.exit_code is None:
            lines.append(f"{one.name}: the end of its command was not seen")
        elif one.exit_code:
            lines.append(f"{one.name}: its command ended with exit code {one.exit_code}")
    simulated = [one.name for one in recorded if one.simulated]
    if 0 < len(simulated) < len(recorded):
        lines.append(
            f"simulated sensors in {', '.join(simulated)} alone: do not compare power and temperature with them"
        )
    qualities = {one.name: one.result.quality or "not assessed" for one in recorded}
    if len(set(qualities.values())) > 1:
        lines.append("different qualities: " + ", ".join(f"{name} {quality}" for name, quality in qualities.items()))
    return lines


def rank_recordings(
    recorded: Sequence[Recorded],
    question: Question = LEAST_ENERGY,
    *,
    where: Sequence[Constraint] = (),
    least_quality: str = "",
) -> RecordingRanking:
    """Assesses recordings and puts the feasible ones in order.

    A command that failed may not have done its work: it fails where energy or time of the whole command is asked for.

    Args:
        recorded: The recordings.
        question: The metric to maximize or minimize, bounds that must hold, and the accepted risk.
        where: Bounds that a recording must keep to be ranked at all.
        least_quality: `indicative` or `publishable`: recordings of a lower quality are only counted.

    Raises:
        PlanError: A recording is named twice.
        SpaceError: There is no such quality.
    """
    if len({one.place for one in recorded}) < len(recorded):
        raise PlanError("a recording is named twice; name each once")
    if least_quality not in QUALITIES:
        raise SpaceError(f'unknown quality "{least_quality}"; use one of: {", ".join(QUALITIES[2:])}')
    objective = question.objective
    runs = [_run(one, {*question.needed}) for one in recorded]
    spreads = Spreads([(None, one.result) for one in runs])
    kept = [
        one
        for one in runs
        if QUALITIES.index(one.result.quality) >= QUALITIES.index(least_quality)
        and all(bound.holds(one.result.metrics) for bound in where)
    ]
    rows = []
    for one in kept:
        found = assess((one.result,), spreads, question)
        rows.append(RankedRecording(of=one, rank=None, best_probability=None, spreads=spreads, **shallow(found)))
    order = list(Verdict)
    sign = -1.0 if objective.maximize else 1.0
    rows.sort(
        key=lambda row: (
            order.index(row.verdict),
            row.objective is None,
            sign * row.objective.value if row.objective else 0.0,
            row.of.name,
        )
    )
    likely = standings(cast("list[RankedTrial]", rows), question).likely
    first = [row for row in rows if row.verdict is Verdict.FEASIBLE]
    told = ranks(standing(cast("list[RankedTrial]", first), question)) if first else ()
    ranked = [
        replace(row, rank=int(rank), best_probability=likely.get(("", row.trial_id), 0.0))
        for row, rank in zip(first, told, strict=True)
    ]
    return RecordingRanking(
        question=question,
        rows=(*ranked, *rows[len(ranked) :]),
        scatter=spreads.scatter_text(objective.metric),
        num_filtered=len(runs) - len(kept),
    )


def _run(one: Recorded, needed: set[str]) -> Recorded:
    """Returns a recording whose result has failed where its command did and energy or time of all work is needed."""
    result = finite(one.result)
    if one.exit_code != 0 and needed & set(_OF_ALL_WORK):
        end = "its end was not seen" if one.exit_code is None else f"its command ended with exit code {one.exit_code}"
        reason = f"{end}: it may not have done its work"
        result = replace(result, status=RunStatus.CRASHED, reason=reason)
    return replace(one, result=result)


def side_of_recording(one: Recorded) -> Side:
    """Makes one side of a comparison from a recording."""
    result = finite(one.result)
    return Side(
        name=one.name,
        spec=None,
        recorded=one,
        result=result,
        breakdown=None,
        counted=Counted((result,), Spreads([(None, result)])),
        simulated=one.simulated,
        objective=usual_objective([one]).metric,
    )


def recorded_of(
    *,
    name: str,
    place: str,
    facts: Mapping[str, Any],
    machine: Mapping[str, str],
    metrics: Mapping[str, float],
    quality: str,
    quality_reasons: tuple[str, ...],
    tags: Mapping[str, str],
) -> Recorded:
    """Makes a recording of its facts and its figures, ready to rank and compare.

    Args:
        name: Name of the recording.
        place: Its folder.
        facts: Its own manifest.
        machine: Node, devices and driver it was recorded on, in words.
        metrics: Its figures.
        quality: One of `wattune.run.QUALITIES`.
        quality_reasons: Reasons for that.
        tags: Findings that are not numbers.
    """
    try:
        start_wall_ns = round(datetime.fromisoformat(str(facts.get("recorded"))).timestamp() * NS_PER_S)
    except ValueError:  # made elsewhere
        start_wall_ns = 0
    return Recorded(
        name=name,
        place=place,
        command=tuple(map(str, facts.get("command") or ())),
        # Recordings made elsewhere have none; those that a killed recorder left open have none yet.
        exit_code=facts.get("exit_code", 0 if facts.get("closed", True) else None),
        machine=machine,
        simulated=tags.get("simulated") == "true",
        result=Run(
            trial_id=place,
            repeat=0,
            status=RunStatus.COMPLETED,
            metrics={key: value for key, value in metrics.items() if key in METRICS},
            quality=quality,
            quality_reasons=quality_reasons,
            tags={**tags, "nodes": str(facts.get("node") or "")},
            start_wall_ns=start_wall_ns,
            end_wall_ns=start_wall_ns,
        ),
    )
