"""Evidence of single trials beyond their metrics, for reports and comparisons, read from a trial's folder."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Final

import pyarrow.compute as pc

from wattune.analysis.detail import Detail, detail_of
from wattune.analysis.run_data import RunData
from wattune.analysis.summary import node_power_series
from wattune.errors import PlanError, TelemetryError, WattuneError
from wattune.objective import parse_objective
from wattune.ranking.assessment import RankedTrial, completed, finite, is_simulated
from wattune.ranking.common_steps import of_folder
from wattune.ranking.comparison import SPEED, Side
from wattune.ranking.difference import Counted
from wattune.ranking.recordings import usual_metric
from wattune.ranking.spreads import Spreads
from wattune.run import Recorded, Run
from wattune.storage.study import StudyFolder, TrialFolder
from wattune.trial import TrialSpec, recorded_spec

MOST_STEPS: Final = 2000
"""Most steps of a timeline."""


def gather(folder: TrialFolder) -> Detail | None:
    """Reads the detail of one repeat with its power, None if its folder has no window of measured steps.

    Its steps are at most `MOST_STEPS`, numbered in the stream of data, warm-up included. Raises `TelemetryError`: a
    table in it cannot be read or is of another schema, or a file does not agree with its digest.
    """
    folder.check()
    data = RunData.of(folder.path)
    if data.problems:
        raise TelemetryError(f"{folder.path}: {'; '.join(data.problems.values())}")
    examined = data.examined
    if examined is None:
        return None
    found = detail_of(examined)
    steps = found.steps.slice(0, MOST_STEPS)
    steps = steps.set_column(0, "step", pc.subtract(steps["step"], data.first_step))
    return replace(found, steps=steps, power_w=node_power_series(examined.aligned))


def gather_all(study: StudyFolder, rows: Iterable[RankedTrial]) -> tuple[dict[str, Detail], list[str]]:
    """Reads the evidence of trials' first completed repeats, by trial id, and says which cannot be read."""
    found: dict[str, Detail] = {}
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


def side_of_row(study: StudyFolder, row: RankedTrial, evidence: Detail | None) -> Side:
    """Makes one side of a comparison from a ranked trial, by its first completed repeat."""
    return _side(study, row.spec, Counted(row.counted, row.spreads), row.counted[0], evidence)


def _side(study: StudyFolder, spec: TrialSpec, counted: Counted, result: Run, evidence: Detail | None) -> Side:
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
        """Reads one side of a comparison: a trial by its id, or the first digits, and with `-N` its repeat N.

        Raises `PlanError`: there is no such trial or more than one, it did not complete, or its files cannot be read,
        `TelemetryError`: its telemetry cannot be read.
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

    Raises `PlanError`: the text is neither.
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
