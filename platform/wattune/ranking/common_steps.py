"""Comparison of trials over the same steps of the same stream of data.

A trial's window begins after its own warm-up and ends after the seconds that were asked for, so windows hold other
steps. That does not matter where every step does the same work. It matters in two cases:

- The router chooses the experts (`learned`, or none is named): then a step's work depends on the step.
- Step time has a trend: then a mean depends on the window.

Speed and energy of such trials are computed again over the steps that all compared trials measured. Bounds keep the
whole window: a peak over fewer steps would be lower. A trial that shares too few steps with the others is marked
(`STEPS_DIFFER`), and its quality is `indicative` at most.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Final, TypeAlias

from wattune.analysis.figures import figures_over, is_of_steps
from wattune.analysis.run_data import RunData
from wattune.analysis.signals.steady_state import LEAST_STEPS
from wattune.errors import WattuneError
from wattune.fidelity import is_burst
from wattune.ranking.spreads import Results
from wattune.run import INDICATIVE, INVALID, Run, RunStatus
from wattune.storage.study import StudyFolder
from wattune.trial import TrialSpec

STEPS_DIFFER: Final = "steps_differ"
"""Quality reason of a trial that is not compared over the same steps as the others."""

COMPARED: Final = "steps_compared"
"""Tag of a result whose speed and energy are of fewer steps than it measured."""

_TRENDS: Final = ("unsteady_steps", "no_steady_state")
"""Quality reasons of a trend in step time."""

Range: TypeAlias = tuple[int, int]
"""First and last step, as indices of the stream of data."""

Again: TypeAlias = Callable[[TrialSpec, Run, Range], Mapping[str, float]]
"""Computes metrics of a result over some of its steps; empty where it cannot."""


def of_folder(study: StudyFolder, results: Results) -> Results:
    """Returns a study's results with speed and energy over common steps of the folder's spans, where windows matter."""

    def again(spec: TrialSpec, result: Run, steps: Range) -> Mapping[str, float]:
        try:
            data = replace(RunData.of(study.trial(result.trial_id, result.repeat).path), spec=spec)
            return figures_over(data.of_trial(result.tags, result.numbers, told=result.metrics), *steps)
        except WattuneError:  # without its files a trial is marked; `wattune analyze` says what they lack
            return {}

    return over_common_steps(results, again)


def over_common_steps(results: Results, again: Again | None = None) -> Results:
    """Returns results with speed and energy over the steps that all compared trials measured, where windows matter.

    `again` computes metrics over some steps; without it there are only results, and trials are marked.
    """
    ranges = {
        id(result): steps
        for _, result in results
        if result.status is RunStatus.COMPLETED and not is_burst(result) and (steps := result.numbers.steps) is not None
    }
    bound = [result for spec, result in results if id(result) in ranges and window_matters(spec, result)]
    if not bound or len(ranges) < 2:
        return results
    common, outside = _common(ranges)
    bound_ids = {id(result) for result in bound}
    changed = []
    for spec, result in results:
        whole = ranges.get(id(result))
        if id(result) not in bound_ids or whole == common:
            changed.append((spec, result))
            continue
        found = {} if again is None or common is None or id(result) in outside else again(spec, result, common)
        if found and common is not None:
            changed.append((spec, _over(result, found, common)))
            continue
        quality = INVALID if result.quality == INVALID else INDICATIVE
        changed.append(
            (spec, replace(result, quality=quality, quality_reasons=(*result.quality_reasons, STEPS_DIFFER)))
        )
    return changed


def window_matters(spec: TrialSpec, result: Run) -> bool:
    """Returns true if a trial's figures depend on the steps it measured."""
    routing = spec.workload.routing
    learned = spec.model.is_moe and (routing is None or routing.by == "learned")
    return learned or not set(_TRENDS).isdisjoint(result.quality_reasons)


def describe(results: Iterable[Run]) -> list[str]:
    """Describes the results that are over common steps, and those that are not compared over the same steps."""
    listed = list(results)
    counts = Counter(one.tags[COMPARED] for one in listed if COMPARED in one.tags)
    why = "their routing or a trend makes the window matter"
    lines = [
        f"speed and energy of {count} runs are over steps {steps} of the data, which all compared runs measured: {why}."
        " Bounds are over the whole window"
        for steps, count in sorted(counts.items())
    ]
    differ = sum(STEPS_DIFFER in one.quality_reasons for one in listed)
    if differ:
        lines.append(
            f"{differ} runs are not compared over the same steps as the others ({STEPS_DIFFER}), and {why}; raise "
            "measure.min_steps"
        )
    return lines


def _common(ranges: Mapping[int, Range]) -> tuple[Range | None, set[int]]:
    """Finds the steps that results share, and the results that are left out so that these are enough.

    As long as they are too few, the result goes out without which more are shared.
    """
    left, outside = dict(ranges), set[int]()
    while len(left) > 1:
        first, last = max(one[0] for one in left.values()), min(one[1] for one in left.values())
        if last - first + 1 >= LEAST_STEPS:
            return (first, last), outside
        ends = (max(left, key=lambda key: left[key][0]), min(left, key=lambda key: left[key][1]))
        others = {key: [own for other, own in left.items() if other != key] for key in ends}
        worst = max(ends, key=lambda key: min(one[1] for one in others[key]) - max(one[0] for one in others[key]))
        outside.add(worst)
        del left[worst]
    return None, set(ranges)


def _over(result: Run, found: Mapping[str, float], steps: Range) -> Run:
    """Returns a result with the speed and energy of some steps."""
    kept = {name: value for name, value in result.metrics.items() if not is_of_steps(name)}
    tags = {**result.tags, COMPARED: f"{steps[0]}-{steps[1]}"}
    return replace(result, metrics={**kept, **found}, tags=tags)
