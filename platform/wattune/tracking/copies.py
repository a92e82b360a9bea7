"""Record of what a tracker's store has of a study, and receipts of that where no store can be asked."""

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeAlias

from wattune.access import Access
from wattune.objective import parse_constraint, parse_objective
from wattune.run import Run
from wattune.storage.files import write_whole
from wattune.tracking.run import NOT_FINAL, NS_PER_MS, Curves, quality_tags
from wattune.trial import TrialSpec

Delivered: TypeAlias = "dict[tuple[str, int], Sent]"
"""The repeats that a store has, by trial and repeat."""

_VERDICTS = ("feasible", "undecided", "behind", "infeasible", "unknown", "burst", "interrupted", "failed")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """One repeat of a trial as a store has it."""

    attempt: int
    end_ms: int
    """End of its measurement, in milliseconds of the wall clock."""
    quality: tuple[str, str]
    """Quality and its reasons, as tags."""
    final: bool = True
    """False of a trial that runs again."""

    @classmethod
    def of(cls, result: Run) -> "Sent":
        """Describes a result that is sent now."""
        return cls(
            attempt=result.numbers.attempt or 1,
            end_ms=result.end_wall_ns // NS_PER_MS,
            quality=_quality_of(quality_tags(result)),
            final=result.status.is_final,
        )

    @classmethod
    def of_run(cls, run: Any) -> "Sent":
        """Describes what a run of MLflow's holds; a failed trial may run again by `run --retry`."""
        tags = run.data.tags
        attempt = tags.get("attempt", "1")
        return cls(
            attempt=int(attempt) if attempt.isdecimal() else 1,
            end_ms=run.info.end_time or 0,
            quality=_quality_of(tags),
            final=tags.get("status") not in NOT_FINAL,
        )

    def holds(self, result: Run) -> bool:
        """Returns whether it is a result, or a later one: else the store lacks the result.

        A trial whose folder was moved out of its study is measured anew, and its attempts begin at 1 again. One that
        runs again gives way to what came of it.
        """
        new = Sent.of(result)
        if new.attempt > self.attempt or new.end_ms > self.end_ms or new.final > self.final:
            return False
        same = (new.attempt, new.end_ms) == (self.attempt, self.end_ms)
        return not same or self.quality == new.quality


def _quality_of(tags: Mapping[str, str]) -> tuple[str, str]:
    """Returns quality and its reasons from a run's tags."""
    return tags.get("quality", ""), tags.get("quality_reasons", "")


class WithReceipts(ABC):
    """A tracker of a store that keeps what it is given and is never asked: a file beside it says what it has."""

    def __init__(self, study_name: str, access: Access, receipts: Path) -> None:
        """Names a study, the way to the store, and the file of receipts; nothing is written yet."""
        self.study_name = study_name
        self._access, self._receipts = access, receipts

    def log_trial(
        self, spec: TrialSpec, result: Run, folder: Path, series: Curves | None = None, picture: str = ""
    ) -> bool:
        """Sends one repeat of a trial, unless there is a receipt for it; the rest is as `Tracker` does it.

        Raises `TrackingError` where the store cannot be reached or refuses.
        """
        del folder, picture  # files stay in the study folder
        name = f"{result.trial_id}-{result.repeat}"

        def send() -> bool:
            known = self._read()
            sent = known.get((result.trial_id, result.repeat))
            if sent is not None and sent.holds(result):
                return False
            self.send_trial(name, spec, result, series or {})
            known[result.trial_id, result.repeat] = Sent.of(result)
            rows = [[*key, asdict(one)] for key, one in known.items()]
            write_whole(self._receipts, json.dumps(rows).encode())
            return True

        return self._access.do(f"send trial {name} of study {self.study_name}", send)

    def log_study(
        self,
        document: Mapping[str, Any],
        ranking: Mapping[str, Any],
        report_path: Path | None,
        results: Sequence[tuple[TrialSpec, Run]] = (),
    ) -> None:
        """Sends facts of the whole study. Raises `TrackingError` where the store cannot be reached or refuses."""
        del report_path, results
        facts = goals_of(document) | facts_of(ranking)
        self._access.do(f"send study {self.study_name}", lambda: self.send_study(facts, document, ranking))

    def delivered(self) -> Delivered:
        """Returns what there are receipts for and is final.

        Raises `TrackingError` where the receipts cannot be read.
        """
        known = self._access.do(f"list trials of study {self.study_name}", self._read)
        return {key: sent for key, sent in known.items() if sent.final}

    def _read(self) -> Delivered:
        if not self._receipts.exists():
            return {}
        rows = json.loads(self._receipts.read_text())
        return {(one, repeat): Sent(**{**sent, "quality": tuple(sent["quality"])}) for one, repeat, sent in rows}

    @abstractmethod
    def send_trial(self, name: str, spec: TrialSpec, result: Run, series: Curves) -> None:
        """Puts a trial into the store, in the place of what it had of it."""

    @abstractmethod
    def send_study(self, facts: Mapping[str, str], document: Mapping[str, Any], ranking: Mapping[str, Any]) -> None:
        """Puts the study's goal, ranking and answer into the store."""


def goals_of(document: Mapping[str, Any]) -> dict[str, str]:
    """Returns a study's objective and constraints, as they are read."""
    bounds = [str(parse_constraint(text)) for text in document.get("constraints", ())]
    return {"objective": str(parse_objective(document["objective"])), "constraints": ", ".join(bounds) or "none"}


def facts_of(ranking: Mapping[str, Any]) -> dict[str, str]:
    """Returns what a ranking says in short: how many plans have each verdict, and the best one."""
    return {
        **{f"num_{verdict}": str(len(ranking[verdict])) for verdict in _VERDICTS},
        "note": ranking["note"],
        "simulated": str(ranking["simulated"]).lower(),
        "best": " ".join(f"{row['label']} ({row['trial_id']})" for row in ranking["feasible"][:1]) or "none",
    }
