"""MLflow's client for a store that is one sqlite file: it reads and writes the runs' files beside the store.

MLflow's own client refuses locations without a machine's path where no server is between (3.17.2).
"""

import shutil
from pathlib import Path
from typing import Any

from mlflow import MlflowClient
from mlflow.entities import FileInfo

from wattune.errors import TrackingError
from wattune.storage.files import is_inside
from wattune.tracking.locations import ARTIFACTS, path_inside


class BesideClient(MlflowClient):  # type: ignore[misc]  # mlflow has no types
    """A client of an sqlite store that keeps artifacts beside the store's file."""

    def __init__(self, uri: str, database: Path) -> None:
        """Names a store, `sqlite:///<file>`, and its file."""
        super().__init__(tracking_uri=uri)
        self.database = database
        self._folders: dict[str, Path | None] = {}

    def log_artifact(self, run_id: str, local_path: str, artifact_path: str | None = None) -> None:
        """Copies a file to a run's artifacts."""
        folder = self._folder(run_id)
        if folder is None:
            super().log_artifact(run_id, local_path, artifact_path)
            return
        target = _below(folder, artifact_path or "")
        target.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(local_path, target / Path(local_path).name)

    def list_artifacts(self, run_id: str, path: str | None = None) -> list[Any]:
        """Lists what lies in a folder of a run's artifacts, by name."""
        folder = self._folder(run_id)
        if folder is None:
            return list(super().list_artifacts(run_id, path))
        place = _below(folder, path or "")
        if not place.is_dir():
            return []
        return [
            FileInfo(one.relative_to(folder).as_posix(), one.is_dir(), None if one.is_dir() else one.stat().st_size)
            for one in sorted(place.iterdir())
        ]

    def download_artifacts(self, run_id: str, path: str, dst_path: str | None = None) -> str:
        """Returns the path of an artifact, of a copy where a folder for it is named."""
        folder = self._folder(run_id)
        if folder is None:
            return str(super().download_artifacts(run_id, path, dst_path))
        found = _below(folder, path)
        if not found.exists():
            raise TrackingError(f"{found} is missing; copy {ARTIFACTS} together with {self.database.name}")
        if dst_path is None:
            return str(found)
        target = _below(Path(dst_path), path)
        target.parent.mkdir(parents=True, exist_ok=True)
        if found.is_dir():
            shutil.copytree(found, target, dirs_exist_ok=True)
        else:
            shutil.copyfile(found, target)
        return str(target)

    def _folder(self, run_id: str) -> Path | None:
        """Returns the folder of a run's artifacts; None where they lie in another place than beside the store."""
        if run_id not in self._folders:
            inside = path_inside(str(self.get_run(run_id).info.artifact_uri))
            self._folders[run_id] = None if inside is None else self.database.parent / ARTIFACTS / inside
        return self._folders[run_id]


def _below(folder: Path, path: str) -> Path:
    """Returns a path in a folder. Raises `TrackingError` where it leads out of it."""
    if not is_inside(path):
        raise TrackingError(f"artifact path {path!r} leads out of its run; a store is damaged, or not to be trusted")
    return folder / path
