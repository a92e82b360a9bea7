"""One ranking of one or several studies, from their folders or from MLflow."""

import gc
import shlex
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypedDict, Unpack

import pyarrow as pa

from wattune.arrays import one_thread
from wattune.errors import PlanError, SpaceError
from wattune.fidelity import is_burst
from wattune.objective import RISK, Question
from wattune.ranking.answer import BETTER, asked_of
from wattune.ranking.assessment import NOT_ITS_OWN
from wattune.ranking.common_steps import of_folder, over_common_steps
from wattune.ranking.conditions import flag_fields, parse_where
from wattune.ranking.order import Ranking, SpaceShare, rank
from wattune.ranking.recordings import judged, usual_metric
from wattune.ranking.spreads import Results
from wattune.run import Run, RunStatus
from wattune.scale_down.reading import as_large
from wattune.storage.files import storage_path
from wattune.storage.spaces import CANDIDATES, candidates_table
from wattune.storage.study import StudyFolder, Unreadable
from wattune.tracking.reader import read_study
from wattune.trial import recorded_spec


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A study's results, with its objective and constraints."""

    name: str
    results: Results
    objective: str | None
    """None if the study does not have one."""
    constraints: tuple[str, ...]
    place: str
    """The folder or store it was read from, for messages."""
    unreadable: Unreadable = field(default_factory=dict)
    """Trials that ended but cannot be read, and so are not among the results."""
    candidates: frozenset[str] | None = None
    """Ids of the trials of its space; None where they are not known."""
    better: str = ""
    """Note `BETTER` of its last ranking."""

    @classmethod
    def of_folder(cls, study: StudyFolder) -> "Source":
        """Reads a study's folder."""
        document, (results, unreadable) = study.document(), study.finished()
        objective, constraints = document.get("objective"), document.get("constraints", [])
        texts = isinstance(constraints, list) and all(isinstance(one, str) for one in constraints)
        if not isinstance(objective, str | None) or not texts:
            raise PlanError(f"{study.path / 'study.yaml'}: objective and constraints are not texts; restore it")
        candidates = None
        try:
            candidates = _candidates(study)
        except PlanError as error:  # the trials say nothing less: how much of the space they are is unknown
            unreadable[CANDIDATES] = str(error)
        return cls(
            name=study.name,
            results=as_large(of_folder(study, results)),
            unreadable=unreadable,
            candidates=candidates,
            better=study.ranking_note(BETTER),
            objective=objective,
            constraints=tuple(constraints),
            place=str(study.path),
        )

    @classmethod
    def of_recordings(cls, runs: Sequence[Run]) -> "Source":
        """Makes one of recordings, which usually ask for the least energy. Raises `PlanError`: one is named twice."""
        known = [(one.recorded, one) for one in runs if one.recorded is not None]
        if len({(of.place, one.trial_id) for of, one in known}) < len(runs):
            raise PlanError("a recording is named twice; name each once")
        times = Counter(one.trial_id for one in runs)
        named = [
            (recorded_spec(of), one if times[one.trial_id] == 1 else replace(one, trial_id=of.place))
            for of, one in known
        ]
        objective = f"minimize {usual_metric(runs)}"
        return cls(name="recordings", results=named, objective=objective, constraints=(), place="recordings")

    @classmethod
    def of_store(cls, uri: str, name: str) -> "Source":
        """Reads a study from an MLflow store. Raises `TrackingError`: it cannot be reached or has no such study."""
        results, unreadable, goals = read_study(uri, name)
        return cls(
            name=name,
            results=as_large(over_common_steps(results)),
            unreadable=unreadable,
            objective=goals["objective"],
            constraints=tuple(goals["constraints"]),
            place=f"{uri}, study {name}",
        )


class Asked(TypedDict, total=False):
    """The objective and constraints of a ranking, where they are not those of the studies."""

    objective: str | None
    """Instead of the studies' own, such as `minimize energy_per_token_j`; several need it where theirs differ."""
    constraints: Sequence[str] | None
    """Instead of the studies' own."""
    where: Sequence[str]
    """Only trials that hold all of these are ranked: bounds on metrics, such as `mfu_frac > 0.3`, and conditions on the
    configuration (`wattune.ranking.conditions.FIELDS`), such as `tp <= 2` or `engine == torch`."""
    least_quality: str
    """`indicative` or `publishable`: trials of a lower quality are left out."""
    risk: float
    """Accepted probability of a wrong verdict on a bound; 0.05 unless given."""


@contextmanager
def collector_paused() -> Iterator[None]:
    """Pauses the garbage collector, which would scan everything repeatedly while many objects are made, and threads.

    Reading and ranking ten thousand trials makes no cycles, and takes a quarter less time without it.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        with one_thread():
            yield
    finally:
        if was_on:
            gc.enable()


def rank_sources(sources: Sequence[Source], **asked: Unpack[Asked]) -> Ranking:
    """Ranks the trials of one or several studies together.

    Raises `PlanError`: a study is named twice, or has no objective and none is given, `SpaceError`: an objective or
    constraint cannot be used as written, or the studies' own differ.
    """
    names = [source.name for source in sources]
    if len(set(names)) < len(names):
        raise PlanError(f"studies {', '.join(names)}: two have the same name; name each study once")
    objective, constraints = asked.get("objective"), asked.get("constraints")
    if objective is None:
        unsaid = [source.place for source in sources if source.objective is None]
        if unsaid:
            verb = "has" if len(unsaid) == 1 else "have"
            raise PlanError(f"{' and '.join(unsaid)} {verb} no objective; pass --objective")
        objective = _agreed("objective", [(source.name, str(source.objective)) for source in sources])
    if constraints is None:
        bounds = [(source.name, "; ".join(source.constraints) or "none") for source in sources]
        _agreed("constraint", bounds)
        constraints = sources[0].constraints
    flags = flag_fields(spec for source in sources for spec, _ in source.results)
    question = Question.of(objective, *constraints, risk=asked.get("risk", RISK))
    ranking = rank(
        {one.name: [(spec, judged(run, question.needed)) for spec, run in one.results] for one in sources},
        question,
        where=[parse_where(text, flags) for text in asked.get("where", ())],
        least_quality=asked.get("least_quality", ""),
    )
    spaces = [source for source in sources if source.candidates is not None]
    (likely, _, asked_then), better = sources[0].better.partition(" "), None
    if len(sources) == 1 and asked_then == asked_of(ranking):
        with suppress(ValueError):  # `None`: nothing predicted it
            better = float(likely)
    return replace(
        ranking,
        unreadable={
            f"{source.name}:{name}" if len(sources) > 1 else name: reason
            for source in sources
            for name, reason in source.unreadable.items()
        },
        space=tuple(map(_share, spaces)),
        better_probability=better,
        run_command=_run_command(Path(spaces[0].place)) if len(spaces) == len(sources) == 1 else "",
    )


def _candidates(study: StudyFolder) -> frozenset[str] | None:
    """Reads the ids of the trials of a study's space; None before they were written.

    A million combinations may be rejected, so two columns are read and no rows are made; Arrow's own filter would load
    pandas. Raises `PlanError` where the file is not such a table, or does not agree with its digest.
    """
    table = candidates_table(study.path, "status", "trial_id")
    if table is None:
        return None
    try:
        pairs = zip(table["status"].to_pylist(), table["trial_id"].to_pylist(), strict=True)
        return frozenset(trial_id for status, trial_id in pairs if status == "kept")
    except (KeyError, pa.ArrowException) as error:
        path = study.path / CANDIDATES
        raise PlanError(f"{path}: {error}; `wattune run` of the space writes it anew") from error


def _run_command(folder: Path) -> str:
    """Returns the command that goes on with the study of a folder."""
    elsewhere = folder.absolute().parent != storage_path()
    storage = f" --storage {shlex.quote(str(folder.parent))}" if elsewhere else ""
    return f"wattune run {shlex.quote(str(folder / 'study.yaml'))}{storage}"


def _share(source: Source) -> SpaceShare:
    """Counts the trials of a source's space that were measured."""
    known = source.candidates or frozenset()
    completed = [result for _, result in source.results if result.status is RunStatus.COMPLETED]
    others = (result for _, result in source.results if result.status is not RunStatus.COMPLETED)
    ended = [result for result in others if result.status.is_final]
    broken = {result.trial_id for result in ended if result.status not in NOT_ITS_OWN}
    measured = known & {result.trial_id for result in completed if not is_burst(result)} - broken
    failed = known & {result.trial_id for result in ended} - measured
    return SpaceShare(
        study=source.name,
        num_candidates=len(known),
        num_measured=len(measured),
        num_failed=len(failed),
        num_burst=len(known & {result.trial_id for result in completed} - measured - failed),
    )


def _agreed(what: str, said: Sequence[tuple[str, str]]) -> str:
    """Returns the text that all studies agree on. Raises `SpaceError` where they differ."""
    if len({text for _, text in said}) > 1:
        listed = "\n".join(f"  {name}: {text}" for name, text in said)
        raise SpaceError(f"the studies' {what}s differ:\n{listed}\npass one for all with --{what}")
    return said[0][1]
