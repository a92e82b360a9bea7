"""View of the answer: the lines that come first on a terminal and in a report."""

from collections.abc import Sequence
from typing import Final

from wattune.ranking.answer import StudyAnswer, answer_of
from wattune.ranking.best import NEAR_FRAC
from wattune.ranking.bounds import Margin
from wattune.ranking.order import Ranking
from wattune.units import format_change, format_probability
from wattune.view.table import Note, View, worded


def answer_view(ranking: Ranking) -> View:
    """Lays out the answer: what is known in bold, then what it rests on, what could be wrong, and what to do."""
    return [*answer_notes(ranking), Note("")]


def answer_lines(ranking: Ranking, *, is_running: bool = False) -> list[str]:
    """Returns the sentences of `answer_notes`."""
    return [note.text for note in answer_notes(ranking, is_running=is_running)]


def answer_notes(ranking: Ranking, found: StudyAnswer | None = None, *, is_running: bool = False) -> list[Note]:
    """Returns the answer in sentences, the first of which names the plan. Others have the tone `bound`, `next` or none.

    While the study is running it is that of the plans measured so far, and names nothing to do.
    """
    found = found or answer_of(ranking)
    text = "" if is_running else _left(found)
    left = [Note(text, "next")] if text else []
    if found.plan is None:
        # What is not measured may keep every bound, so nobody loosens one for it yet.
        if found.state == "none" and (left or is_running):
            return [Note(_NONE_YET, "conclusion"), *left]
        return [Note(_WITHOUT[found.state], "conclusion")]
    bound = [] if found.closest is None else [Note(bound_text(found.closest, found), "bound")]
    lines = []
    if found.rivals:
        named = [_rival(one, ranking) for one in found.rivals[:2]]
        more = f", and {len(found.rivals) - 2} more" if len(found.rivals) > 2 else ""
        could = "hardly likely to be better" if found.state == "sure" else "could be better"
        lines.append(f"Undecided, and {could}: {'; '.join(named)}{more}.")
    if found.num_behind:
        plans = "plan with an open bound is" if found.num_behind == 1 else "plans with an open bound are"
        lines.append(f"{found.num_behind} {plans} {ranking.words[1]} in any case.")
    if found.ties and (found.state == "unsure" or found.near_probability):
        lines.append(f"Not told apart from {_listed(found.ties)}.")
    first = Note(_first(found, ranking, is_running=is_running), "conclusion")
    to_do = [] if is_running else [Note(text, "next") for text in _to_do(found)]
    return [first, *left, *bound, *map(Note, lines), *to_do]


def bound_text(margin: Margin, found: StudyAnswer) -> str:
    """Returns a bound of the answer's plan with its distance, and marks the one that is closest."""
    return f"{'Closest bound: ' if margin is found.closest else ''}{margin.constraint}: {slack_text(margin)}."


def slack_text(margin: Margin) -> str:
    """Returns the distance to a bound, its share of the bound, and the probability that the bound holds."""
    share = "" if margin.slack_frac is None else f" ({100 * margin.slack_frac:+.1f} %)"
    slack = f"{'+' if margin.slack > 0 else ''}{format_change(margin.metric, margin.slack)}{share}"
    likely = margin.holds_probability
    kept = "" if likely is None else f", the next run keeps it with probability {format_probability(likely)}"
    other = margin.elsewhere_probability
    if likely is not None and other is not None and (text := format_probability(other)) != format_probability(likely):
        kept += f", on another day or device {text}"
    return f"{slack.replace('-', '−')}{_past(margin)}, {margin.verdict}{kept}"


def place_text(margin: Margin) -> str:
    """Returns the distance of the worst run to the bound, its side, and how many runs passed it if only some did."""
    place = "within" if margin.holds else "past"
    return f"{format_change(margin.metric, abs(margin.slack))} {place}{_past(margin)}"


def _past(margin: Margin) -> str:
    """Says how many runs passed the bound; empty where all of them say the same."""
    return f", {margin.num_past} of {margin.num_runs} runs past it" if 0 < margin.num_past < margin.num_runs else ""


_MOST_NAMED: Final = 3
"""Most plans that a sentence names."""

_NONE_YET = "No plan that was measured keeps every bound."

_WITHOUT = {
    "none": "No plan keeps every bound; loosen a bound or widen the space.",
    "failed": "No answer: every trial failed.",
    "unmeasured": "No answer yet: nothing was measured in full that the question needs.",
}


def _left(found: StudyAnswer) -> str:
    """Says how many plans the answer does not rest on; empty where none is left, or the space is not known."""
    if not found.num_unmeasured:
        return ""
    left = f"{found.num_unmeasured} of {found.num_candidates} plans of the space are not measured"
    if found.better_probability is None:
        return f"{left}: the same `wattune run` goes on, `wattune suggest` says how likely one of them is better."
    likely = format_probability(found.better_probability)
    return f"{left}, one of them is better with probability {likely}: the same `wattune run` goes on."


def _first(found: StudyAnswer, ranking: Ranking, *, is_running: bool) -> str:
    likely = f"P(best) {format_probability(found.best_probability or 0.0)}"
    if found.better_probability is not None:
        likely += f" of all {found.num_candidates} plans"
    if found.near_probability is not None:
        likely += f", P(within {100 * NEAR_FRAC:g} % of the best) {format_probability(found.near_probability)}"
    assert found.plan is not None, "there is a plan to name"
    figure = worded(ranking.objective.metric, found.plan.objective)
    kept = " plan so far" if is_running else " measured plan" if found.num_unmeasured else ""
    kept += " that keeps every bound" if ranking.constraints else ""
    if found.state == "undecided":
        return f"No plan is known to keep every bound. Most likely the best is {found.name}: {figure}, {likely}."
    known = {"sure": f"The best{kept} is", "unsure": f"Not decided. The best known{kept} is"}[found.state]
    # Where faster plans are undecided, a share of draws near 1 would read as if they could not win.
    surely = "" if found.state == "unsure" and not found.repeats else f", {likely}"
    return f"{known} {found.name}: {figure}{_over_next(found, ranking)}{surely}."


def _over_next(found: StudyAnswer, ranking: Ranking) -> str:
    if found.lead_frac is None:
        return ""
    return f", {_share(found.lead_frac, ranking)} than {found.next_name}, the next"


def _share(lead_frac: float, ranking: Ranking) -> str:
    better, worse = ranking.words
    return f"{100 * abs(lead_frac):.1f} % {better if lead_frac >= 0 else worse}"


def _rival(one: tuple[str, float | None, float | None], ranking: Ranking) -> str:
    name, lead_frac, likely = one
    lead = "" if lead_frac is None else f", {_share(lead_frac, ranking)}"
    return f"{name}{lead}, P(holds) {format_probability(likely or 0.0)}"


def _to_do(found: StudyAnswer) -> list[str]:
    if found.repeats:
        time = "" if found.repeats_s is None else f", about {found.repeats_s:.0f} s"
        command = f": {found.command}" if found.command else ""
        count = f"{len(found.repeats)} repeat{'s' if len(found.repeats) > 1 else ''}"
        return [f"Next: {count} of {_listed(found.repeats)}{time}{command}"]
    if found.state == "sure":
        return []
    return ["Repeats are not likely to decide it at this risk; accept another one with --risk, or loosen the bound."]


def _listed(names: Sequence[str]) -> str:
    """Lists names, of many the first ones."""
    shown = [*names[:_MOST_NAMED], *([f"{len(names) - _MOST_NAMED} more"] if len(names) > _MOST_NAMED else [])]
    return ", ".join(shown[:-1]) + (" and " if shown[1:] else "") + shown[-1]
