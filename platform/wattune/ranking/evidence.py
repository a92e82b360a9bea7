"""Evidence of single trials beyond their metrics, for reports and comparisons, read from a trial's folder."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from wattune.analysis.detail import detail_of
from wattune.analysis.examine import examine
from wattune.analysis.metrics.saturation import Saturation
from wattune.analysis.metrics.waterfall import Breakdown
from wattune.analysis.signals.schema_check import schema_problems
from wattune.analysis.summary import node_power_series
from wattune.errors import PlanError, TelemetryError, WattuneError
from wattune.ranking.assessment import RankedTrial, completed, finite, is_simulated
from wattune.ranking.comparison import Comparison, Side, compare
from wattune.ranking.spreads import Spreads
from wattune.storage.study import StudyFolder, TrialFolder
from wattune.trial import TrialResult

MOST_STEPS: Final = 2000
"""Most steps of a timeline."""

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """One repeat of one trial, on the time axis of its window: seconds from the start of the measured steps."""

    trial_id: str
    repeat: int
    power_w: Mapping[str, tuple[Floats, Floats]]
    """By node: seconds, and the sum of its devices in watts, in means of 100 ms."""
    steps: tuple[Floats, Floats]
    """Start and length of every measured step in seconds; empty without spans."""
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


def gather(folder: TrialFolder, result: TrialResult) -> Evidence | None:
    """Reads the evidence of one repeat, None if its folder has no window of measured steps.

    Raises:
        TelemetryError: A table in it cannot be read or is of another schema, or a file does not agree with its digest.
    """
    folder.check()
    spans, tables, manifests = folder.spans(), folder.stored(), folder.manifests()
    problems = schema_problems(tables, spans)
    if problems:
        raise TelemetryError(f"{folder.path}: {'; '.join(problems.values())}")
    examined = examine(folder.spec(), spans, tables, manifests, kernels=folder.kernels())
    if examined is None:
        return None
    found = detail_of(examined)
    start_s = found.steps["start_s"].to_numpy()[:MOST_STEPS]
    time_s = found.steps["time_s"].to_numpy()[:MOST_STEPS]
    return Evidence(
        trial_id=result.trial_id,
        repeat=result.repeat,
        power_w=node_power_series(examined.aligned),
        steps=(start_s, time_s),
        excursions=found.excursions,
        slots=found.slots,
        breakdown=found.breakdown,
        saturation=tuple(found.saturation),
    )


def gather_all(study: StudyFolder, rows: Iterable[RankedTrial]) -> tuple[dict[str, Evidence], list[str]]:
    """Reads the evidence of the first completed repeat of some trials.

    Returns:
        Evidence by trial id, without trials that have none; and messages about unreadable trials.
    """
    found: dict[str, Evidence] = {}
    problems = []
    for row in rows:
        if not row.counted:
            continue
        try:
            evidence = gather(study.trial(row.trial_id, row.counted[0].repeat), row.counted[0])
        except WattuneError as error:
            problems.append(f"files of trial {row.trial_id} cannot be read, so it is not drawn: {error}")
            continue
        if evidence is not None:
            found[row.trial_id] = evidence
    return found, problems


def side_of_row(study: StudyFolder, row: RankedTrial, evidence: Evidence | None) -> Side:
    """Makes one side of a comparison from a ranked trial, by its first completed repeat."""
    result = row.counted[0]
    return Side(
        name=f"{study.name}:{result.trial_id}-{result.repeat}",
        spec=row.spec,
        result=result,
        breakdown=None if evidence is None else evidence.breakdown,
        tokens_per_s=row.interval("tokens_per_s"),
        simulated=is_simulated(result),
    )


def side_of(study: StudyFolder, wanted: str) -> Side:
    """Reads one side of a comparison.

    Args:
        study: Study of the trial.
        wanted: The trial's id, or its first digits, and with `-N` its repeat N.

    Raises:
        PlanError: There is no such trial or more than one, it did not complete, or its files cannot be read.
        TelemetryError: Its telemetry cannot be read.
    """
    trial, _, number = wanted.partition("-")
    finished = study.finished()
    pairs = [(spec, finite(result)) for spec, result in finished.results]
    unreadable = {one.name: one.reason for one in finished.unreadable}
    ids = {result.trial_id for _, result in pairs} | {name.rpartition("-")[0] for name in unreadable}
    begun = sorted(one for one in ids if one.startswith(trial)) if trial else []
    if len(begun) != 1:
        what = "more than one" if begun else "no"
        have = f"these begin so: {', '.join(begun)}" if begun else f"it holds {', '.join(sorted(ids)[:8]) or 'none'}"
        raise PlanError(f'{what} trial "{trial}" in study {study.path}; {have}; give an id that `wattune rank` shows')
    own = [(spec, result) for spec, result in pairs if result.trial_id == begun[0]]
    repeats = completed(result for _, result in own)
    chosen = [result for result in repeats if not number or str(result.repeat) == number]
    if not chosen:
        for name in [f"{begun[0]}-{number}"] if number else sorted(unreadable):
            if name in unreadable and name.rpartition("-")[0] == begun[0]:
                raise PlanError(unreadable[name])
        ended = ", ".join(f"repeat {result.repeat} {result.status}" for _, result in own)
        raise PlanError(f"trial {wanted} of study {study.path} has no completed repeat to compare: {ended}")
    result = min(chosen, key=lambda one: one.repeat)
    evidence = gather(study.trial(result.trial_id, result.repeat), result)
    return Side(
        name=f"{study.name}:{result.trial_id}-{result.repeat}",
        spec=own[0][0],
        result=result,
        breakdown=None if evidence is None else evidence.breakdown,
        tokens_per_s=Spreads(pairs).interval([result] if number else repeats, "tokens_per_s"),
        simulated=is_simulated(result),
    )


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
            f'"{text}" does not name a trial; give STUDY:TRIAL_ID, such as moe_h200:0517fb8c0ffe, or its folder'
        )
    return study, trial


def compare_trials(a: str, b: str, load: Callable[[str], StudyFolder]) -> Comparison:
    """Compares two trials.

    Args:
        a: One trial: `STUDY:TRIAL_ID`, or the path of its folder.
        b: The other, of the same study or of another one.
        load: Opens a study by name or path.

    Raises:
        PlanError: There is no such study or trial.
        TelemetryError: A trial's telemetry cannot be read.
    """
    sides = []
    for text in (a, b):
        name, trial = split_reference(text)
        sides.append(side_of(load(name), trial))
    return compare(*sides)
