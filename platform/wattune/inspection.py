"""Analysis of a trial's or recording's folder, from its files alone."""

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from wattune.analysis.detail import Detail, detail_of
from wattune.analysis.summary import IMPOSSIBLE, Summary, impossible, summarize
from wattune.errors import ImpossibleValueError, PlanError
from wattune.recording.recording import load
from wattune.storage.digests import NO_DIGESTS, FileCheck
from wattune.storage.measured import MeasuredFolder
from wattune.storage.study import TrialFolder


@dataclass(frozen=True, slots=True, kw_only=True)
class Analysis:
    """Summary and detail of a folder."""

    summary: Summary
    detail: Detail | None
    """None without a window, or if the tables do not have the expected schema."""
    unreadable: str = ""
    """Error message if the trial's result, the only file with allocators' memory, cannot be read; else empty."""
    files: FileCheck = NO_DIGESTS
    """Agreement of the folder's files with their digests."""
    accepted: tuple[str, ...] = ()
    """Files that this call accepted as they are."""

    @property
    def notes(self) -> list[str]:
        """Notes to read beside the metrics, a line each."""
        said = {
            "schema_columns": "unexpected columns: {}",
            "outlier": "unlike its peers: {}",
            "steady_from_step": "steps left out before the steady state: {}",
            "saturated": "saturated: {}",
            IMPOSSIBLE: "refused: {}",
        }
        files = self.files
        lost = [f"memory is unknown: {self.unreadable}"] if self.unreadable else []
        lost += [f"files that are missing: {', '.join(files.missing)}"] if files.missing else []
        lost += [f"files edited on purpose: {', '.join(files.accepted)}"] if files.accepted else []
        lost += [] if files.digested else ["files have no digests: damage to them is not seen"]
        facts = {**self.summary.tags, **self.summary.numbers.known}
        doubts = [one for one in self.summary.quality_reasons if one in self.summary.tags and one not in said]
        lost = [f"{one}: {facts[one]}" for one in doubts] + lost
        return [text.format(facts[name]) for name, text in said.items() if name in facts] + lost

    def to_json(self) -> dict[str, Any]:
        """Plain data, ready for `json.dumps`."""
        return {
            "metrics": dict(self.summary.metrics),
            "quality": self.summary.quality,
            "quality_reasons": list(self.summary.quality_reasons),
            "tags": dict(self.summary.tags),
            "numbers": self.summary.numbers.known,
            "unreadable": self.unreadable,
            "files": asdict(self.files),
            "detail": None if self.detail is None else self.detail.to_json(),
        }


def inspect(path: Path, *, accept: bool = False) -> Analysis:
    """Analyses a folder; long recordings are read a device at a time.

    Memory is that of the rank that used most, from the trial's result: allocators' memory is not in any table. `accept`
    takes files that were edited on purpose as they are now; the quality says so from then on. Raises `PlanError`: there
    is no such folder, or it has no measured data, `TelemetryError`: a table or manifest in it cannot be read, or a file
    does not agree with its digest.
    """
    if not path.is_dir():
        raise PlanError(f"{path} is not a folder; give a trial's or a recording's folder")
    accepted = TrialFolder(path).accept() if accept else ()
    files, unreadable = _checked(path)
    found = _inspected(path, files)
    return replace(found, files=files, accepted=accepted, unreadable=unreadable)


def _checked(path: Path) -> tuple[FileCheck, str]:
    """Compares the files with their digests. The result that holds them may be unreadable itself."""
    try:
        TrialFolder(path).result()
    except PlanError as error:
        return NO_DIGESTS, str(error)
    return MeasuredFolder(path).check(), ""


def _inspected(path: Path, files: FileCheck) -> Analysis:
    try:
        data = load(path, checked=True)
        if not data.tables and data.spans is None:
            raise PlanError(f"{path} has neither telemetry nor spans; give a trial's or a recording's folder")
        data = replace(data, files=files)
        summary = summarize(data)
        return Analysis(summary=summary, detail=None if data.examined is None else detail_of(data.examined))
    except ImpossibleValueError as error:
        return Analysis(summary=impossible(error), detail=None)
