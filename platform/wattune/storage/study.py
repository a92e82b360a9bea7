"""The study folder. This module and `wattune.storage.measured` alone read and write its layout.

```
<storage>/<study>/study.yaml space.<n>.yaml candidates.parquet    see `wattune.storage.spaces`
<storage>/<study>/ranking.parquet report.html
  trials/.results .fits .plan .estimates .features    for the next reader (`wattune.storage.known_results`)
  trials/<trial_id>-<repeat>/spec.json run.json spans.parquet [kernels.parquet]
  trials/<trial_id>-<repeat>/telemetry/<node>/<tier>.parquet telemetry/<node>/manifest.json
  trials/<trial_id>-<repeat>/ranks.json stacks/rank<k>.txt    places of ranks; stacks of ranks that hung
  trials/<trial_id>-<repeat>/attempts/<n>/run.json ...     files of interrupted attempts
<storage>/recordings/<name>/manifest.json run.json telemetry/<node>/... [spans.parquet]
<storage>/calibration/<device_uuid>.json
```

A finished trial is a `run.json` that was renamed into place. Whatever is killed, a folder has a whole result or
none. So a study resumes from its folder.
"""

import os
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa

from wattune.deadline import read_bounded
from wattune.errors import PlanError, SpaceError, TelemetryError
from wattune.masking import without_secrets
from wattune.run import Run
from wattune.storage import spaces
from wattune.storage.digests import NO_FILES, object_of
from wattune.storage.documents import MOST_BYTES
from wattune.storage.files import (
    CALIBRATIONS,
    FOLDER_NAME,
    make_folder,
    named_path,
    write_digested,
    write_json,
    write_table,
    write_whole,
)
from wattune.storage.known_results import KnownResults
from wattune.storage.lock import if_idle, run_lock
from wattune.storage.measured import RECORDINGS, RUN, MeasuredFolder
from wattune.storage.parquet import read_table
from wattune.storage.space_changes import changes, contradictions
from wattune.storage.spaces import StoredSpace
from wattune.storage.trial_files import (
    NO_TRIAL,
    accept,
    key_of,
    no_trial,
    read_result_file,
    require_own,
    spec_of,
    specified,
    with_digests,
    without_files,
)
from wattune.storage.trial_tables import open_tables
from wattune.trial import TrialSpec

if TYPE_CHECKING:
    import pyarrow.dataset as ds

_ATTEMPTS: Final = "attempts"
_TAKEN: Final = (RECORDINGS, CALIBRATIONS)
"""Names in the storage that a study cannot have."""

_LONGEST_SHOWN: Final = 200
"""Most characters of an input that a message repeats."""


def check_study_name(name: str) -> str:
    """Returns a name that is one folder inside the storage.

    Raises `SpaceError`: it is empty, too long, has separators, or is taken by the layout.
    """
    if not FOLDER_NAME.fullmatch(name) or name in _TAKEN:
        raise SpaceError(
            f'study name "{name}" cannot be a folder of the storage; use up to 100 letters, digits, ".", "_" and "-", '
            f"the first a letter or digit, and none of {', '.join(_TAKEN)}"
        )
    return name


class TrialFolder(MeasuredFolder):
    """One repeat of one trial."""

    def write_spec(self, spec: TrialSpec) -> None:
        """Writes the specification of the trial, before it runs."""
        write_json(self.path / "spec.json", spec.to_json())

    def spec(self) -> TrialSpec:
        """Reads the specification of the trial.

        Raises `PlanError`: the folder does not hold a readable specification.
        """
        try:
            return spec_of(read_bounded(self.path / "spec.json", MOST_BYTES))
        except NO_TRIAL as error:
            raise no_trial(self.path, error) from error

    def read(self) -> tuple[TrialSpec, Run | None]:
        """Reads specification and result, None while there is none, and makes sure that they belong to this folder.

        Raises `PlanError`: they cannot be read, or are of another trial.
        """
        spec, result = self.spec(), self.result()
        trial_id, repeat = self.key()
        try:
            if result is not None:
                require_own(self.path.name, spec, result)
            elif trial_id != spec.trial_id:
                raise ValueError(f"folder is of {trial_id}-{repeat}, spec.json of {spec.trial_id}")
        except ValueError as error:
            raise no_trial(self.path, error) from error
        return spec, result

    def write_ranks(self, places: Sequence[Mapping[str, Any]]) -> None:
        """Writes the place of each rank: node, device and its identity, slot, process."""
        write_json(self.path / "ranks.json", {"ranks": list(places)})

    def write_stacks(self, stacks: Mapping[int, str]) -> None:
        """Writes the stacks of ranks that hung."""
        for rank, text in stacks.items():
            write_whole(self.path / "stacks" / f"rank{rank}.txt", text.encode())

    def write_output(self, node: int, text: str) -> None:
        """Writes what a command wrote on a node, by the node's number, without secrets."""
        write_whole(self.path / "output" / f"node{node}.txt", without_secrets(text).encode())

    def write_result(self, result: Run, digests: Mapping[str, str] = NO_FILES) -> None:
        """Writes the result, and the digests of all files, in one rename. From then on the trial is done.

        Files whose digests are known are not read (`wattune.storage.digests.digests_of`).
        """
        write_digested(self.path / RUN, with_digests(self.path, result, digests), private=result.recorded is not None)

    def result(self) -> Run | None:
        """Reads the result; None while there is none. Raises `PlanError`: the file is not a result of this version."""
        path = self.path / RUN
        return read_result_file(path) if path.exists() else None

    def keep_result(self, result: Run, digests: Mapping[str, str] = NO_FILES) -> Run:
        """Writes the result unless there is one, also one that another process writes now. Returns what is there."""
        path, content = self.path / RUN, with_digests(self.path, result, digests)
        return result if write_digested(path, content, over=False) else read_result_file(path)

    def accept(self) -> tuple[str, ...]:
        """Takes files that were edited on purpose as they are now; see `wattune.storage.trial_files.accept`."""
        return accept(self.path)

    def write_error(self, text: str) -> None:
        """Writes an error of wattune itself that came while the trial ran."""
        write_whole(self.path / "error.txt", text.encode())

    def set_aside(self) -> None:
        """Moves the files of an attempt that does not count to `attempts/<n>`. The next attempt begins empty."""
        numbers = [int(path.name) for path in (self.path / _ATTEMPTS).glob("[0-9]*") if path.name.isdecimal()]
        target = self.path / _ATTEMPTS / str(max(numbers, default=0) + 1)
        target.mkdir(parents=True, exist_ok=True)
        stays = {_ATTEMPTS, "spec.json", "run.json"}
        for entry in [*(path for path in self.path.iterdir() if path.name not in stays), self.path / "run.json"]:
            if entry.exists():
                entry.rename(target / entry.name)  # the result comes last: with it the attempt is whole

    def attempts(self) -> list[Run]:
        """Reads the results of the attempts that were set aside, in order; those that can be read."""
        paths = [path for path in (self.path / _ATTEMPTS).glob("*/run.json") if path.parent.name.isdecimal()]
        found = []
        for path in sorted(paths, key=lambda path: int(path.parent.name)):
            with suppress(PlanError):  # of a trial that is done or tried again, it only counts
                found.append(read_result_file(path))
        return found

    def key(self) -> tuple[str, int]:
        """Returns the trial's id and the repeat, from the folder's name.

        Raises `PlanError`: the name is of another form.
        """
        try:
            return key_of(self.path.name)
        except ValueError:
            raise PlanError(f"{self.path}: no folder of a trial; move it out of the study") from None

    def begun_wall_ns(self) -> int:
        """Returns the time at which the latest attempt wrote its specification, on the file system's clock."""
        return (self.path / "spec.json").stat().st_mtime_ns

    def clear(self) -> None:
        """Removes the files of an attempt, before another one takes its place."""
        shutil.rmtree(self.path, ignore_errors=True)


Unreadable = Mapping[str, str]
"""The cause and the remedy, in a line, of each repeat that ended and whose files cannot be read, by the name of its
folder. Or of `candidates.parquet`, which is the study's own. Readers that leave them out must say so."""


class StudyFolder:
    """One study's folder."""

    def __init__(self, path: Path) -> None:
        """Names a folder. Nothing is read or made. Use `create` or `open`."""
        self.path = path

    @classmethod
    def create(cls, storage: Path, name: str, document: Mapping[str, Any]) -> "StudyFolder":
        """Returns the folder of a study, a new one or the one that is there, with a space that holds from now on.

        The `document` is the space with every default. Raises `SpaceError`: the name is unusable, or the space
        contradicts the results of the study, `PlanError`: the storage cannot be written to, or the study in it cannot
        be read.
        """
        study = cls(make_folder(storage / check_study_name(name)))
        study.require_space(document)
        study.commit(document)
        return study

    @classmethod
    def open(cls, name_or_path: str, storage: Path) -> "StudyFolder":
        """Opens an existing study, by its name in the storage or by its folder.

        Raises `PlanError`: the study does not exist, or the folder cannot be read. The message names existing studies.
        """
        try:
            for path in (storage / name_or_path, named_path(name_or_path)):
                if (path / "study.yaml").is_file():
                    return cls(path.absolute())
        except OSError as error:  # no right to look there, or a name that is too long
            raise PlanError(
                f'no study "{name_or_path[:_LONGEST_SHOWN]}" can be looked for in {storage}: {error.strerror}; '
                "give a name, or a study folder you may read"
            ) from error
        known = sorted(path.parent.name for path in storage.glob("*/study.yaml"))
        have = f"it holds: {', '.join(known)}" if known else "it holds none"
        raise PlanError(f'no study "{name_or_path}" in {storage}, {have}; give a name, a study folder, or --storage')

    @property
    def name(self) -> str:
        """The study's name."""
        return self.path.name

    @property
    def exists(self) -> bool:
        """True where a study was begun here."""
        return (self.path / spaces.STUDY).exists()

    def document(self) -> dict[str, Any]:
        """Reads the search space that holds.

        Raises `PlanError`: the file cannot be read, does not agree with its digest, is not a mapping, or is of another
        format.
        """
        return self.space().document

    def space(self) -> StoredSpace:
        """Reads the search space that holds, with its number; raises what `document` raises."""
        return spaces.read_space(self.path / spaces.STUDY)

    def spaces(self) -> list[StoredSpace]:
        """Reads every search space of the study, the one it was begun with first; raises what `document` raises."""
        return spaces.all_spaces(self.path)

    def require_space(self, document: Mapping[str, Any], where: str = "") -> list[str]:
        """Makes sure that the study may go on with a search space that has every default.

        `where` names the place of a space that is not the user's. Returns the differences to the space that holds, a
        line each; none where there is no study yet. Raises `SpaceError`: the space contradicts results of the study;
        each contradiction is named.
        """
        if not self.exists:
            return []
        stored = self.document()
        found = contradictions(stored, document)
        if found:
            listed = "\n".join(f"  {one}" for one in found)
            other = f"the space in {where}" if where else "this space"
            raise SpaceError(f"study {self.path} cannot go on with {other}:\n{listed}")
        return changes(stored, document)

    def number_of(self, document: Mapping[str, Any]) -> int:
        """Returns the number that a search space gets, or has where it is the one that holds."""
        if not self.exists:
            return 1
        stored = self.space()
        return stored.number + bool(changes(stored.document, document))

    def commit(self, document: Mapping[str, Any], rows: Sequence[Mapping[str, Any]] | None = None) -> StoredSpace:
        """Makes a search space the one that holds; see `wattune.storage.spaces.commit`. `require_space` comes first."""
        make_folder(self.path)
        return spaces.commit(self.path, document, rows)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Locks the study for one runner. The lock ends with its process, however that ends.

        The folder is made where there is none. It goes again where no study was begun in it. Raises `PlanError`:
        another process is running this study, or its storage cannot be written to.
        """
        with run_lock(self.path, self.path / spaces.STUDY):
            yield

    def if_idle(self) -> AbstractContextManager[bool]:
        """Locks the study unless another process runs it. Yields whether it is locked now.

        Raises `PlanError`: its file system has no locks.
        """
        return if_idle(self.path)

    def trial(self, trial_id: str, repeat: int) -> TrialFolder:
        """Returns the folder of one repeat of one trial. It may not exist yet."""
        return TrialFolder(self.path / "trials" / f"{trial_id}-{repeat}")

    def named_trial(self, wanted: str, ids: Iterable[str]) -> tuple[str, str]:
        """Returns the one id that a text begins, and the repeat that it names after `-`; empty where it names none.

        Raises `PlanError`: no id begins so, or several do.
        """
        begin, _, number = wanted.partition("-")
        known = sorted({*ids})
        begun = [one for one in known if one.startswith(begin)] if begin else []
        if len(begun) == 1:
            return begun[0], number
        what, have = ("more than one", "these begin so") if begun else ("no", "it holds")
        listed = ", ".join(begun or known[:8]) or "none"
        raise PlanError(
            f'{what} trial "{begin}" in study {self.path}; {have}: {listed}; give an id that `wattune rank` shows'
        )

    def trials(self) -> list[TrialFolder]:
        """Lists every trial that was begun, finished or not."""
        found = _folders(self.path / "trials")
        return [TrialFolder(Path(path)) for path in found if os.path.exists(f"{path}/spec.json")]  # noqa: PTH110  # fast

    def begun(self) -> Callable[[str], bool]:
        """Returns what tells of a trial's id whether a repeat of it was begun before this call."""
        folders = defaultdict[str, list[str]](list)
        for path in _folders(self.path / "trials"):
            folders[path.rpartition("/")[2].rpartition("-")[0]].append(path)
        return lambda trial_id: any(os.path.exists(f"{path}/spec.json") for path in folders[trial_id])  # noqa: PTH110

    def results(self) -> list[tuple[TrialSpec, Run]]:
        """Reads every finished trial, with its specification. `finished` names those that cannot be read."""
        return self.finished()[0]

    def finished(self) -> tuple[list[tuple[TrialSpec, Run]], dict[str, str]]:
        """Reads every finished trial, with its specification, and why others cannot be read (`Unreadable`).

        One that cannot be read does not affect the others. Raises `PlanError`: there are finished trials, and none of
        them can be read.
        """
        # Ten thousand trials are ranked while a user waits: every file is opened once, and paths are plain text.
        results: list[tuple[TrialSpec, Run]] = []
        problems: dict[str, PlanError] = {}
        known = KnownResults(self.path)
        for folder in _folders(self.path / "trials"):
            name, files = folder.rpartition("/")[2], known.files_of(folder)
            if (pair := known.get(name, files)) is not None:
                results.append(pair)
                continue
            try:
                written = read_bounded(f"{folder}/run.json", MOST_BYTES)
            except FileNotFoundError:
                continue
            except (OSError, ValueError) as error:
                problems[folder] = no_trial(folder, error)
                continue
            try:
                planned = object_of(read_bounded(f"{folder}/spec.json", MOST_BYTES), bare=True, any_depth=True)
                ended = without_files(object_of(written, any_depth=True))
                spec, result = specified(planned), Run.from_json(ended)
                require_own(name, spec, result, planned["trial_id"])
                results.append((spec, result))
                known.add(name, files, planned, ended)
            except NO_TRIAL as error:
                problems[folder] = no_trial(folder, error)
        known.write()
        if problems and not results:
            raise next(iter(problems.values()))
        return results, {Path(where).name: str(why) for where, why in problems.items()}

    def dataset(self, tier: str) -> "ds.Dataset":
        """Opens one table of all trials that can be read; see `wattune.storage.trial_tables.open_tables`."""
        return open_tables(self.path, tier)

    def candidates(self) -> list[dict[str, Any]]:
        """Reads every combination of the space that holds, and the trials of the spaces before it.

        Each row has the number of the space that its trial came with (`space`). A trial that is in earlier spaces only
        is `removed`. Empty before any was written. Raises `PlanError`: the file is not a Parquet table, or does not
        agree with its digest.
        """
        return spaces.candidates(self.path)

    def write_ranking(self, table: pa.Table) -> None:
        """Writes the current ranking."""
        write_table(self.path / "ranking.parquet", table)

    def ranking_note(self, name: str) -> str:
        """Returns a note in the metadata of the current ranking; empty without one that can be read."""
        with suppress(TelemetryError):
            metadata = read_table(self.path / "ranking.parquet", columns=["trial_id"]).schema.metadata
            return str(metadata.get(name.encode(), b""), errors="replace")
        return ""

    @property
    def report_path(self) -> Path:
        """Path of the study's report."""
        return self.path / "report.html"

    def write_report(self, html: str) -> Path:
        """Writes the report. Returns its path."""
        write_whole(self.report_path, html.encode())
        return self.report_path


def _folders(path: Path) -> list[str]:
    """Lists the folders in a folder, by name; none where it does not exist.

    Links are left out: they lead elsewhere. Raises `PlanError` where it cannot be listed.
    """
    try:
        with os.scandir(path) as entries:
            return sorted(entry.path for entry in entries if entry.is_dir(follow_symlinks=False))
    except FileNotFoundError:
        return []
    except OSError as error:
        raise PlanError(f"{path} cannot be listed: {error.strerror}; give a study you may read") from error
