"""Evidence of single trials beyond their metrics, for reports and comparisons, read from a trial's folder."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from wattune.analysis.detail import detail_of
from wattune.analysis.metrics.saturation import Saturation
from wattune.analysis.metrics.waterfall import Breakdown
from wattune.analysis.run_data import RunData
from wattune.analysis.summary import node_power_series
from wattune.arrays import Floats
from wattune.errors import PlanError, TelemetryError, WattuneError
from wattune.objective import parse_objective
from wattune.ranking.assessment import RankedTrial, completed, finite, is_simulated
from wattune.ranking.common_steps import of_folder
from wattune.ranking.comparison import SPEED, Comparison, Side, compare
from wattune.ranking.difference import Counted
from wattune.ranking.recordings import usual_metric
from wattune.ranking.spreads import Spreads
from wattune.run import Recorded, Run
from wattune.storage.study import StudyFolder, TrialFolder
from wattune.trial import TrialSpec, recorded_spec

MOST_STEPS: Final = 2000
"""Most steps of a timeline."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """One repeat of one trial, on the time axis of its window: seconds from the start of the measured steps."""

    power_w: Mapping[str, tuple[Floats, Floats]]
    """By node: seconds, and the sum of its devices in watts, in means of 100 ms."""
    steps: tuple[Floats, Floats]
    """Start and length of every measured step in seconds; empty without spans."""
    step_index: NDArray[np.int64]
    """Index of each step in the stream of data, warm-up included."""
    excursions: pa.Table
    """As in `wattune.analysis.detail.Detail`."""
    slots: pa.Table
    """As in `wattune.analysis.detail.Detail`."""
    breakdown: Breakdown | None
    saturation: tuple[Saturation, ...]

    @property
    def highest_node(self) -> str | None:
        """The node with the highest power, None without recorded power."""
        peaks = {node: float(watts.max()) for node, (_, watts) in self.power_w.items() if watts.size}
        return max(peaks, key=lambda node: peaks[node], default=None)


def gather(folder: TrialFolder) -> Evidence | None:
    """Reads the evidence of one repeat, None if its folder has no window of measured steps.

    Raises:
        TelemetryError: A table in it cannot be read or is of another schema, or a file does not agree with its digest.
    """
    folder.check()
    data = RunData.of(folder.path)
    if data.problems:
        raise TelemetryError(f"{folder.path}: {'; '.join(data.problems.values())}")
    examined = data.examined
    if examined is None:
        return None
    found = detail_of(examined)
    start_s = found.steps["start_s"].to_numpy()[:MOST_STEPS]
    time_s = found.steps["time_s"].to_numpy()[:MOST_STEPS]
    return Evidence(
        power_w=node_power_series(examined.aligned),
        steps=(start_s, time_s),
        step_index=found.steps["step"].to_numpy()[:MOST_STEPS] - data.first_step,
        excursions=found.excursions,
        slots=found.slots,
        breakdown=found.breakdown,
        saturation=tuple(found.saturation),
    )


def gather_all(study: StudyFolder, rows: Iterable[RankedTrial]) -> tuple[dict[str, Evidence], list[str]]:
    """Reads the evidence of trials' first completed repeats, by trial id, and says which cannot be read."""
    found: dict[str, Evidence] = {}
    problems = []
    for row in rows:
        if not row.counted:
            continue
        try:
            evidence = gather(study.trial(row.trial_id, row.counted[0].repeat))
        except WattuneError as error:
            problems.append(f"files of trial {row.trial_id} cannot be read, so it is not drawn: {error}")
            continue
        if evidence is not None:
            found[row.trial_id] = evidence
    return found, problems


def side_of_row(study: StudyFolder, row: RankedTrial, evidence: Evidence | None) -> Side:
    """Makes one side of a comparison from a ranked trial, by its first completed repeat."""
    return _side(study, row.spec, Counted(row.counted, row.spreads), row.counted[0], evidence)


def _side(study: StudyFolder, spec: TrialSpec, counted: Counted, result: Run, evidence: Evidence | None) -> Side:
    return Side(
        name=f"{study.name}:{result.trial_id}-{result.repeat}",
        spec=spec,
        result=result,
        breakdown=None if evidence is None else evidence.breakdown,
        counted=counted,
        simulated=is_simulated(result),
        objective=_objective(study),
    )


class Compared:
    """A study whose trials are compared: its results are read once, and all its sides share their scatter."""

    def __init__(self, study: StudyFolder) -> None:
        """Reads the study's results."""
        self._study = study
        results, self._unreadable = study.finished()
        self._pairs = [(spec, finite(result)) for spec, result in of_folder(study, results)]
        self._spreads = Spreads(self._pairs)

    def side(self, wanted: str) -> Side:
        """Reads one side of a comparison.

        Args:
            wanted: The trial's id, or its first digits, and with `-N` its repeat N.

        Raises:
            PlanError: There is no such trial or more than one, it did not complete, or its files cannot be read.
            TelemetryError: Its telemetry cannot be read.
        """
        spec, repeats = self._found(wanted)
        result = min(repeats, key=lambda one: one.repeat)
        evidence = gather(self._study.trial(result.trial_id, result.repeat))
        return _side(self._study, spec, Counted(repeats, self._spreads), result, evidence)

    def _found(self, wanted: str) -> tuple[TrialSpec, Sequence[Run]]:
        """Finds the specification of a trial and its completed repeats, or the one that is named."""
        ids = {result.trial_id for _, result in self._pairs} | {name.rpartition("-")[0] for name in self._unreadable}
        trial_id, number = self._study.named_trial(wanted, ids)
        own = [(spec, result) for spec, result in self._pairs if result.trial_id == trial_id]
        chosen = [one for one in completed(result for _, result in own) if not number or str(one.repeat) == number]
        if chosen:
            return own[0][0], chosen
        for name in [f"{trial_id}-{number}"] if number else sorted(self._unreadable):
            if name in self._unreadable and name.rpartition("-")[0] == trial_id:
                raise PlanError(self._unreadable[name])
        ended = ", ".join(f"repeat {result.repeat} {result.status}" for _, result in own)
        raise PlanError(f"trial {wanted} of study {self._study.path} has no completed repeat to compare: {ended}")


def _objective(study: StudyFolder) -> str:
    """Returns the metric of a study's objective; throughput if it has none."""
    text = study.document().get("objective")
    return SPEED if text is None else parse_objective(text).metric


def split_reference(text: str) -> tuple[str, str]:
    """Splits the name of a trial into study and trial: `STUDY:TRIAL_ID`, or the path of its folder.

    Raises:
        PlanError: The text is neither.
    """
    path = text.rstrip("/")
    if "/trials/" in path:
        study, _, trial = path.rpartition("/trials/")
        return study, trial
    study, colon, trial = text.rpartition(":")
    if not colon or not study or not trial:
        raise PlanError(
            f'"{text}" names neither a trial nor a recording; give STUDY:TRIAL_ID, such as moe_h200:0517fb8c0ffe, a '
            "recording's name, or the folder of one"
        )
    return study, trial


def compare_trials(
    a: str,
    b: str,
    load: Callable[[str], StudyFolder],
    recorded: Callable[[str], Run | None] = lambda _: None,
) -> Comparison:
    """Compares two trials, two recordings, or one of each.

    Args:
        a: One trial: `STUDY:TRIAL_ID`, or the path of its folder; or a recording.
        b: The other, of the same study or of another one.
        load: Opens a study by name or path.
        recorded: Reads a recording by name or path; None where it is none.

    Raises:
        PlanError: There is no such study or trial.
        TelemetryError: A trial's telemetry cannot be read.
    """
    studies: dict[Path, Compared] = {}
    sides = []
    for text in (a, b):
        recording = recorded(text)
        if recording is not None:
            sides.append(recorded_side(recording))
            continue
        name, trial = split_reference(text)
        study = load(name)
        sides.append(studies.setdefault(study.path.resolve(), Compared(study)).side(trial))
    return compare(*sides)


def recorded_side(recording: Run) -> Side:
    """Makes one side of a comparison from a recording."""
    run = finite(recording)
    spec = recorded_spec(run.recorded or Recorded())
    return Side(
        name=run.trial_id,
        spec=spec,
        result=run,
        breakdown=None,
        counted=Counted((run,), Spreads([(spec, run)])),
        simulated=is_simulated(run),
        objective=usual_metric([run]),
    )
