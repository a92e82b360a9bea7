"""Progress of the measurement of a running command, from its steps alone: warming up, measuring, or done.

The rules are those of the built-in engines' loop (`wattune.workers.loop`): warm-up until the latest steps are
stable, then at least `measure.min_steps` and `measure.min_seconds`. Only the end differs. The loop stops stepping; a
command is told to stop, and its steps after that do not count.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from wattune.steps.files import Step
from wattune.steps.steady import most_warmup, warmup
from wattune.trial import Measure
from wattune.units import ns_to_s
from wattune.workers.early_stop import LEAST_STEPS, loses

LEAST_MEASURED: Final = 2
"""Fewest measured steps of a command that ended by itself: `few_steps` of `wattune.analysis.quality`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """State of a measurement."""

    part: str
    """`build` before the first step, then `warmup` and `measure`."""
    done: int
    """Steps of the part so far."""
    total: int
    """Steps that the part is expected to have."""
    first_index: int = 0
    """Index of the first measured step: steps of warm-up before it."""
    end_index: int = 0
    """Index after the last step that was seen."""
    steady: bool = False
    """True where step time was stable when measuring began."""
    finished: bool = False
    """True once enough was measured."""
    stopped_early: str = ""
    """The proof that the trial loses, where that is why it is finished."""

    @property
    def num_measured(self) -> int:
        """Measured steps."""
        return max(self.end_index - self.first_index, 0) if self.part == "measure" else 0


class Measuring:
    """Follows the steps of one rank."""

    def __init__(self, measure: Measure, stop_above_s: float | None = None) -> None:
        """Waits for the first step; above a mean step time of `stop_above_s` the trial loses."""
        self._measure, self._stop_above_s = measure, stop_above_s
        self._next_proof = max(measure.min_steps, LEAST_STEPS)

    def look(self, steps: Sequence[Step], *, ended: bool = False) -> Look:
        """Judges the steps of one rank so far, from the program's first step.

        Where it has `ended`, no more will come: the first round alone is then warm-up, where it goes on longer.
        """
        if not steps:
            return Look(part="build", done=0, total=1)
        times_s = [ns_to_s(step.duration_ns) for step in steps]
        first, steady = warmup(times_s, self._measure.warmup_steps)
        if ended and (first is None or first + LEAST_MEASURED > len(steps)):
            first, steady = self._measure.warmup_steps, False
        if first is None or first >= len(steps):
            end, most = steps[-1].index + 1, most_warmup(self._measure.warmup_steps)
            return Look(part="warmup", done=len(steps), total=most, first_index=end, end_index=end)
        measured = steps[first:]
        span_s = ns_to_s(measured[-1].end_mono_ns - measured[0].start_mono_ns)
        missing = self._measure.missing_steps(len(measured), span_s, max(statistics.median(times_s[first:]), 1e-9))
        proof = self._proof(measured) if missing else ""
        return Look(
            part="measure",
            done=len(measured),
            total=len(measured) + missing,
            first_index=measured[0].index,
            end_index=measured[-1].index + 1,
            steady=steady,
            finished=not missing or bool(proof),
            stopped_early=proof and f"{len(measured)} of {len(measured) + missing} steps: {proof}",
        )

    def _proof(self, measured: Sequence[Step]) -> str:
        """Returns the proof that the trial loses; looked for whenever the number of steps has doubled."""
        if self._stop_above_s is None or len(measured) < self._next_proof:
            return ""
        self._next_proof = 2 * len(measured)
        return loses([ns_to_s(step.start_mono_ns) for step in measured], self._stop_above_s) or ""
