"""The answer of a ranking: the named plan, how much better, how surely, what could be wrong, what would settle it.

Console, page and `--json` show this one object. It computes no probability of its own: all are the ranking's.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Final, Literal

from wattune.fidelity import role_of
from wattune.ranking.assessment import RankedTrial
from wattune.ranking.best import MAY_BE_BEST, NEAR_FRAC
from wattune.ranking.bounds import Margin
from wattune.ranking.order import Ranking
from wattune.ranking.work import compares
from wattune.run import Run

UNTIL_DECIDED: Final = "--until-decided"
"""Option of `wattune run` that repeats the two most likely plans until the answer is known."""

_RUN: Final = "wattune run SPACE"
"""The command where that of the one study is not known; SPACE is its file."""

BETTER: Final = "wattune.better_probability"
"""Note of a written ranking: how likely a plan not measured is better, and what was asked of which results."""

State = Literal["sure", "unsure", "undecided", "none", "failed", "unmeasured"]
"""State of knowledge: the best plan; one that holds, while another may be better; only plans whose bounds are open;
no plan that keeps every bound; nothing but failures; no measurement that could tell."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyAnswer:
    """Answer of a study to its question, as far as it knows."""

    state: State
    plan: RankedTrial | None = None
    """The best plan that holds every bound; in the state `undecided` the one that most likely is."""
    name: str = ""
    """Its name among the ranked ones."""
    next_plan: RankedTrial | None = None
    """The next plan of the same work that holds too."""
    next_name: str = ""
    """Its name; empty without one."""
    reference: RankedTrial | None = None
    """The study's reference trial of the same work: an ordinary plan. None if it is the plan itself, or was not
    measured."""
    lead_frac: float | None = None
    """Lead of the plan over that one, as a fraction of that one's figure; negative if it is worse."""
    best_probability: float | None = None
    """P(best) of the plan among all plans of the space, where `better_probability` is known; else of those measured."""
    near_probability: float | None = None
    """P(it keeps every bound and none that does leads it by more than `NEAR_FRAC`), where P(best) alone is not sure."""
    better_probability: float | None = None
    """Probability that a plan that was not measured keeps every bound and is better; None where nothing predicts it."""
    ties: tuple[str, ...] = ()
    """Other plans that hold and are not told apart from the best."""
    closest: Margin | None = None
    """The plan's bound that its next run keeps least surely; None without a bound."""
    rivals: tuple[tuple[str, float | None, float | None], ...] = ()
    """Undecided plans that could be better, most likely first: name, lead over the plan as a fraction, P(holds)
    of its least sure bound."""
    repeats: tuple[str, ...] = ()
    """Plans of which one repeat each tells most; empty where the answer is known, or where repeats cannot tell."""
    repeats_s: float | None = None
    """Seconds of a call with these repeats, by their runs so far and the starts of their workers; None where runs say
    no time."""

    num_behind: int = 0
    """Plans with an open bound that are not the best even if they keep it: another one is better in any case."""

    num_candidates: int = 0
    """Plans of the space; 0 where it is not known."""
    num_unmeasured: int = 0
    """Those that were not tried in full: the answer does not rest on them."""

    run_command: str = _RUN
    """The command that goes on with the study."""

    @property
    def command(self) -> str:
        """The command that does the repeats; empty where there are none, and for recordings."""
        recorded = self.plan is not None and self.plan.recorded is not None
        return f"{self.run_command} {UNTIL_DECIDED}" if self.repeats and not recorded else ""

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "state": self.state,
            "trial_id": None if self.plan is None else self.plan.trial_id,
            "plan": self.name,
            "next_plan": self.next_name,
            "lead_frac": self.lead_frac,
            "best_probability": self.best_probability,
            "near_probability": self.near_probability,
            "better_probability": self.better_probability,
            "reference_trial_id": None if self.reference is None else self.reference.trial_id,
            "ties": list(self.ties),
            "closest_bound": None if self.closest is None else self.closest.to_json(),
            "rivals": [{"plan": name, "lead_frac": lead, "holds_probability": p} for name, lead, p in self.rivals],
            "repeats": list(self.repeats),
            "repeats_s": self.repeats_s,
            "command": self.command,
            "num_behind": self.num_behind,
            "num_candidates": self.num_candidates,
            "num_unmeasured": self.num_unmeasured,
        }


def asked_of(ranking: Ranking) -> str:
    """Returns the question of a ranking, and how many results it has and when the last one ended, as a text."""
    ends_ns = [one.end_wall_ns for row in ranking.trials for one in row.repeats]
    return f"{ranking.question} {len(ends_ns)} {max(ends_ns, default=0)}"


def answer_of(ranking: Ranking) -> StudyAnswer:
    """Reads the answer of a ranking. A plan is sure at P(best or near) of 1 less the risk, if none ahead may hold."""
    total = sum(one.num_candidates for one in ranking.space)
    left = max(0, total - sum(one.num_measured + one.num_failed for one in ranking.space))
    able = sorted((*ranking.feasible, *ranking.undecided), key=lambda row: -(row.best_probability or 0.0))
    if not able:
        return StudyAnswer(state=_without_any(ranking), num_candidates=total, num_unmeasured=left)
    plan = ranking.best or able[0]
    likely, until = plan.best_probability or 0.0, 1.0 - ranking.question.risk
    metric = ranking.objective.metric
    alike = [row for row in able if row is not plan and compares(row.spec, plan.spec, metric)]
    follower = next((row for row in ranking.feasible if row in alike), None)
    measured = [row for row in ranking.compared if row is not plan and compares(row.spec, plan.spec, metric)]
    rivals = [
        row
        for row in sorted(alike, key=lambda row: (-(row.best_probability or 0.0), -(_holds(row) or 0.0)))
        if row in ranking.undecided
        and ((ranking.lead_frac(row, plan) or 0.0) > 0.0 or (row.best_probability or 0.0) >= MAY_BE_BEST)
    ]
    # The race ends at the same bars: at P(best or near it), and at the probability that no plan keeps every bound.
    none = 1.0 - sum(row.best_probability or 0.0 for row in (*able, *ranking.behind))
    pair = able[:2] if max(none, ranking.near_probability) < until else []
    near = ranking.near_probability if plan is able[0] and likely < until <= ranking.near_probability else None
    ahead = any((ranking.lead_frac(row, plan) or 0.0) > NEAR_FRAC for row in rivals)
    unsure = ahead or (likely < until and near is None)
    state: State = "undecided" if ranking.best is None else "unsure" if unsure else "sure"
    return StudyAnswer(
        state=state,
        run_command=ranking.run_command or _RUN,
        plan=plan,
        name=_name(plan, ranking),
        next_plan=follower,
        next_name="" if follower is None else _name(follower, ranking),
        reference=max(filter(_num_references, measured), key=_num_references, default=None),
        ties=tuple(_name(row, ranking) for row in ranking.feasible if row.rank == 1 and row is not plan),
        lead_frac=None if follower is None else ranking.lead_frac(plan, follower),
        best_probability=likely * (1.0 - (ranking.better_probability or 0.0)),
        near_probability=None if near is None else near * (1.0 - (ranking.better_probability or 0.0)),
        better_probability=ranking.better_probability,
        closest=_closest(plan.margins),
        rivals=tuple((_name(row, ranking), ranking.lead_frac(row, plan), _holds(row)) for row in rivals),
        repeats=tuple(_name(row, ranking) for row in pair),
        repeats_s=_seconds(pair, ranking.trials),
        num_behind=len(ranking.behind),
        num_candidates=total,
        num_unmeasured=left,
    )


def _without_any(ranking: Ranking) -> State:
    if ranking.infeasible:
        return "none"
    unclear = ranking.unknown or ranking.burst or ranking.interrupted
    return "failed" if ranking.failed and not unclear else "unmeasured"


def _num_references(row: RankedTrial) -> int:
    return sum(role_of(run) == "reference" for run in row.counted)


def _name(row: RankedTrial, ranking: Ranking) -> str:
    return row.trial_id if row.recorded is not None else ranking.name_of(row)


def _closest(margins: Sequence[Margin]) -> Margin | None:
    def surely(one: Margin) -> tuple[float, float]:
        likely, share = one.holds_probability, one.slack_frac
        return 0.0 if likely is None else likely, float("inf") if share is None else share

    return min(margins, key=surely, default=None)


def _holds(row: RankedTrial) -> float | None:
    found = _closest(row.margins)
    return None if found is None else found.holds_probability


def _seconds(rows: Sequence[RankedTrial], every: Sequence[RankedTrial]) -> float | None:
    """Returns the seconds of a call with one repeat of each plan: its runs, and one start of each kind of workers."""
    taken = [[run.took_s - _start_s(run) for run in row.counted] for row in rows]
    if not (taken and all(taken) and all(map(median, taken))):
        return None
    kinds = {(row.spec.cluster, row.spec.engine) for row in rows}
    starts_s: dict[object, float] = {}
    for row in every:
        if (kind := (row.spec.cluster, row.spec.engine)) in kinds:
            starts_s[kind] = max(starts_s.get(kind, 0.0), *map(_start_s, row.repeats))
    return sum(map(median, taken)) + sum(starts_s.values())


def _start_s(run: Run) -> float:
    return run.numbers.group_start_s or 0.0
