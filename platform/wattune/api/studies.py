"""A study that was run, read back: its trials, their metrics and their telemetry as Arrow tables."""

import warnings
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc

from wattune.errors import PlanError, TelemetryError, closest
from wattune.ranking.assessment import finite
from wattune.run import Run, RunStatus
from wattune.storage.files import FOLDER_NAME, find_storage, named_path, storage_path
from wattune.storage.measured import MANIFEST, RECORDINGS
from wattune.storage.remote import RemoteStorage
from wattune.storage.study import StudyFolder, TrialFolder, check_study_name
from wattune.storage.trial_tables import left_out
from wattune.trial import TrialSpec
from wattune.view.files import repeats_table

if TYPE_CHECKING:
    import pyarrow.dataset as ds


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One finished repeat of one trial."""

    spec: TrialSpec
    """The configuration that ran."""
    result: Run
    """Its status, metrics and quality."""
    path: Path
    """Its folder."""


@dataclass(frozen=True, slots=True)
class Study:
    """A study's results. Reading them starts nothing and changes nothing."""

    folder: StudyFolder

    @property
    def name(self) -> str:
        """The study's name."""
        return self.folder.name

    @property
    def path(self) -> Path:
        """The study's folder."""
        return self.folder.path

    @property
    def space(self) -> dict[str, Any]:
        """The search space that holds, every default filled in; `wattune.plan` takes it.

        Raises:
            PlanError: The file cannot be read.
        """
        return self.folder.document()

    def trials(self) -> list[Trial]:
        """Returns every finished repeat that can be read, failed ones included.

        Raises:
            PlanError: There are finished trials, and not one of them can be read.
        """
        return [
            Trial(spec=spec, result=result, path=self.folder.trial(result.trial_id, result.repeat).path)
            for spec, result in self.folder.results()
        ]

    def metrics(self) -> pa.Table:
        """Returns one row for each finished repeat: status, quality, plan, and a column for every metric.

        A metric that was not measured is null. The unit of a metric is in its field's metadata. The table's metadata
        names the repeats that cannot be read, a line each (`wattune.unreadable`).

        Raises:
            PlanError: There are finished trials, and not one of them can be read.
        """
        results, unreadable = self.folder.finished()
        runs = [(spec, finite(result)) for spec, result in results]
        return repeats_table(runs, study=self.name, unreadable="\n".join(unreadable.values()))

    def dataset(self, tier: str) -> "ds.Dataset":
        """Opens one telemetry table of all trials without reading it, for queries on more than fits in memory.

        A trial whose files are damaged is left out, it alone. A warning names it, and so does the metadata of the
        dataset's schema (`wattune.unreadable`, a line each).

        Args:
            tier: A key of `wattune.schema.TELEMETRY`, or `spans`.

        Raises:
            TelemetryError: There is no such table, no trial has it, or not one trial's table can be read.
        """
        dataset = self.folder.dataset(tier)
        _warn(left_out(dataset.schema), tier)
        return dataset

    def telemetry(self, tier: str, *, trial_id: str | None = None, columns: Sequence[str] | None = None) -> pa.Table:
        """Reads one telemetry table of all trials, or of one. A damaged trial is left out as in `dataset`.

        Args:
            tier: A key of `wattune.schema.TELEMETRY`, or `spans`.
            trial_id: Only this trial: its id, or the first digits of it.
            columns: Only these columns.

        Returns:
            The rows of every trial and node, with two columns in front: `trial`, the name of the trial's folder, and
            `simulated`, true where the values were computed instead of measured.

        Raises:
            TelemetryError: There is no such table or column, no trial has it, or not one asked trial's can be read.
        """
        dataset = self.folder.dataset(tier)
        for name in columns or ():
            if name not in dataset.schema.names:
                raise TelemetryError(f'"{name}" is not a column of {tier}; {closest(name, dataset.schema.names)}')
        chosen = None if trial_id is None else pc.starts_with(pc.field("trial"), trial_id)
        wanted = None if columns is None else list(columns)
        try:
            table = dataset.to_table(columns=wanted, filter=chosen)
        except (pa.ArrowException, OSError) as error:
            raise TelemetryError(f"{self.path}: a {tier} table cannot be read: {error}") from error
        damaged = [reason for reason in left_out(dataset.schema) if reason.startswith(trial_id or "")]
        if damaged and not table.num_rows:
            raise TelemetryError(f"a {tier} table cannot be read: {damaged[0]}")
        _warn(damaged, tier)
        return table.replace_schema_metadata(dataset.schema.metadata)


def _warn(damaged: Sequence[str], tier: str) -> None:
    """Warns of the trials that a dataset leaves out, from the line that called the study."""
    if damaged:
        more = f"; and {len(damaged) - 1} more" if damaged[1:] else ""
        warnings.warn(f"{tier} tables without {len(damaged)} damaged trial(s): {damaged[0]}{more}", stacklevel=3)


def load_study(name_or_path: str | Path, *, storage: str | None = None, whole: bool = False) -> Study:
    """Finds a study by its name in the storage, by its folder, or by its URL.

    Args:
        name_or_path: Its name, its folder, or its URL: then the storage is the place the URL lies in.
        storage: The place studies are kept in; see `wattune.storage.files.find_storage`. From a URL the local folder
            gets what it lacks, unless the study is being run from there at this moment.
        whole: Fetch spans and telemetry from a URL too, not only results.

    Raises:
        PlanError: There is no study there.
        SpaceError: The local folder holds another study of this name.
        TrackingError: The storage's URL cannot be reached.
    """
    return Study(find_study(str(name_or_path), storage=storage, whole=whole))


def find_recording(name: str | Path, *, storage: str | None = None) -> Path | None:
    """Finds a recording's folder by its name in the storage, or by its path; None where it is none.

    A study of the same name comes first.
    """
    text = str(name)
    if "://" in text:
        return None
    place = storage_path(storage)
    if FOLDER_NAME.fullmatch(text) and (place / text / "study.yaml").is_file():
        return None
    folders = [named_path(text), *([place / RECORDINGS / text] if FOLDER_NAME.fullmatch(text) else [])]
    return next((one for one in folders if (one / MANIFEST).is_file() and not (one / "spec.json").is_file()), None)


def find_measured(name: str | Path, *, storage: str | None = None) -> Path:
    """Finds what can be analysed: a folder, a recording by its name, or a trial as `STUDY:TRIAL_ID`.

    Raises `PlanError`: there is nothing of that name, or several trials begin with it.

    Args:
        name: What is looked for. The first digits of a trial's id are enough, and `-N` after it names its repeat N;
            else it is the first one that completed.
        storage: The place studies and recordings are kept in.
    """
    text, folder = str(name), named_path(name)
    if folder.is_dir():
        return folder
    found = find_recording(text, storage=storage)
    if found is not None:
        return found
    study, colon, wanted = text.rpartition(":")
    if not colon or not study or not wanted:
        raise PlanError(
            f"{text} is neither a folder nor a recording in {storage_path(storage)}; give a trial's or a "
            "recording's folder, a recording's name, or STUDY:TRIAL_ID"
        )
    return _trial_folder(find_study(study, storage=storage, whole=True), wanted)


def _trial_folder(study: StudyFolder, wanted: str) -> Path:
    trials: dict[tuple[str, int], TrialFolder] = {}
    for trial in study.trials():
        with suppress(PlanError):  # some other folder that somebody put there
            trials[trial.key()] = trial
    trial_id, number = study.named_trial(wanted, (own for own, _ in trials))
    repeats = {str(repeat): trials[own, repeat] for own, repeat in sorted(trials) if own == trial_id}
    if number and number not in repeats:
        raise PlanError(f"trial {trial_id} of study {study.path} has no repeat {number}; it has {', '.join(repeats)}")
    if number:
        return repeats[number].path
    return next((trial for trial in repeats.values() if _completed(trial)), next(iter(repeats.values()))).path


def _completed(trial: TrialFolder) -> bool:
    with suppress(PlanError):
        result = trial.result()
        return result is not None and result.status is RunStatus.COMPLETED
    return False


def find_study(name: str, *, storage: str | None, whole: bool = False) -> StudyFolder:
    """Finds a study's folder, and fetches what it lacks where the storage is a URL; see `load_study`."""
    if "://" in name:
        url, _, name = name.rstrip("/").rpartition("/")
        folder = storage_path(storage)
    else:
        folder, url = find_storage(storage)
    if not url or (named_path(name) / "study.yaml").is_file():
        return StudyFolder.open(name, folder)
    remote = RemoteStorage(url)
    local = StudyFolder(folder / check_study_name(name))
    if not local.path.is_dir():
        return remote.fetch_study(name, folder, whole=whole)
    with local.if_idle() as idle:
        return remote.fetch_study(name, folder, whole=whole) if idle else local
