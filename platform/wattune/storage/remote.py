"""Studies at a URL: finished trials as whole objects, in any store that fsspec can reach.

Studies run in a local folder. Finished trials are copied to `<url>/<study>`, in the layout of the study folder, and
fetched from there where the local folder lacks them. A trial is in the store when its `run.json` is, which is sent
last. Another measurement of the same trial never writes over anything in the store.

A store that does not answer costs one bounded wait and a `TrackingError`. For the next minute every call fails at once.
"""

import functools
import threading
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, TypeVar
from urllib.parse import parse_qsl, urlsplit

from wattune.access import SLOWEST_BYTES_PER_S, Access
from wattune.errors import PlanError, SpaceError, TrackingError, closest
from wattune.masking import without_secrets
from wattune.run import Run
from wattune.storage.files import is_file_of, is_hidden, is_inside, make_folder, write_whole
from wattune.storage.measured import RECORDINGS, RUN
from wattune.storage.spaces import CANDIDATES, NEXT_CANDIDATES, STUDY, finish, space_of
from wattune.storage.study import StudyFolder, TrialFolder
from wattune.storage.trial_files import read_result

_ATTEMPTS: Final = "attempts"
_SMALL: Final = ("spec.json", RUN)
"""Files of a trial that a ranking needs."""

_FILES_AT_ONCE: Final = 64
_AT_ONCE: Final = 4
"""Trials that are sent at the same time, and files of each: a file may hold 50 MB of the head's memory."""

_SENDING: Final = ".sending"
"""Holds the `run.json` of the trial whose files are being sent: an upload that was cut short goes on after them."""

_T = TypeVar("_T")


class RemoteStorage:
    """One URL that studies are copied to and fetched from."""

    def __init__(self, url: str, *, clock: Callable[[], float] = time.monotonic) -> None:
        """Names a store by any URL of fsspec's, such as `s3://bucket/studies`; it is reached by the first call.

        Keys and endpoints come from the store's own variables and files, or from fsspec's configuration. Raises
        `PlanError`: the kind of store is unknown, or its library is not installed.
        """
        import fsspec
        from fsspec.utils import get_protocol

        self.url = url.rstrip("/") if not url.endswith("://") else url
        self._protocol = get_protocol(url)
        try:
            self.at_once: int = _AT_ONCE if fsspec.get_filesystem_class(self._protocol).async_impl else 1
            """Trials that may be sent at the same time: other stores' libraries do one thing after another."""
        except ImportError as error:
            raise PlanError(f'storage "{self.shown}" cannot be used: {error}; install that library') from error
        except ValueError:
            known = closest(self._protocol, fsspec.available_protocols())
            raise PlanError(f'storage "{self.shown}" is of an unknown kind of store; {known}') from None
        self._access = Access(self.url, "make the store answer", clock, _secrets_of(self.url))
        self._fs: Any = None
        self._root = ""
        self._study_lock = threading.Lock()

    @property
    def shown(self) -> str:
        """The URL for messages and logs: without a password or token."""
        return without_secrets(self.url)

    def studies(self) -> list[str]:
        """Lists the names of the studies. Raises `TrackingError`: the store cannot be reached or refuses."""

        def find(fs: Any) -> list[str]:
            return [path.removeprefix(self._root).split("/")[0] for path in fs.glob(f"{self._root}*/{STUDY}")]

        return sorted(self._do("list studies", find))

    def send_trial(self, study: str, folder: TrialFolder) -> bool:
        """Sends a finished trial, and returns whether it was sent now.

        One that is there is not sent again, and one that will run again is not sent. An upload that was cut short goes
        on with the files that are not there. A trial costs one listing, of its own folder. Raises `TrackingError`: the
        store cannot be reached or refuses, or holds another measurement of this trial, `TelemetryError`: a file of it
        does not agree with its digest.
        """
        result = folder.result()
        if result is None or not result.status.is_final:
            return False
        checked = folder.check()  # damage stays here
        whole = (folder.path / RUN).read_bytes()
        place = f"{study}/trials/{folder.path.name}"
        files = [path for path in _files(folder.path) if path != folder.path / RUN]
        ahead = set(checked.missing)
        # A trial that was tried again has what it was before among its attempts.
        earlier = [path.read_bytes() for path in folder.path.glob(f"{_ATTEMPTS}/*/{RUN}")]

        def send(fs: Any) -> bool:
            top = f"{self._root}{place}"
            there = self._list(fs, place, hidden=True)
            sent = _read(fs, f"{top}/{RUN}") if RUN in there else None
            if sent == whole:
                return False
            if sent is not None and _result(sent) is not None and sent not in earlier:
                raise TrackingError(
                    f"{self.shown}/{place} holds another measurement of this trial, made elsewhere; it is not written "
                    "over: give one of the two studies another name, or remove the trial there"
                )
            remotes = {path: path.relative_to(folder.path).as_posix() for path in files}
            if _SENDING in there and sent is None and _read(fs, f"{top}/{_SENDING}") == whole:
                remotes = {path: name for path, name in remotes.items() if there.get(name) != path.stat().st_size}
            else:  # what is there is of another attempt, but for what its nodes have sent
                for name in there.keys() - ahead if ahead else ():
                    fs.rm_file(f"{top}/{name}")
                if there and not ahead:
                    fs.rm(top, recursive=True)
                fs.pipe_file(f"{top}/{_SENDING}", whole)
            _put(fs, {path: f"{top}/{name}" for path, name in remotes.items()})
            _put(fs, {folder.path / RUN: f"{top}/{RUN}"})
            fs.rm_file(f"{top}/{_SENDING}")
            return True

        num_bytes = sum(path.stat().st_size for path in files)
        return self._do(f"send trial {folder.path.name} of study {study}", send, num_bytes)

    def send_ahead(self, place: str, files: Mapping[str, bytes]) -> None:
        """Sends files of a trial from where they are made, before it has a result: `send_trial` keeps those it names.

        Raises `TrackingError`: the store cannot be reached or refuses, is of one machine, or holds the trial's result.
        """
        if self._protocol in ("file", "local", "memory"):
            raise TrackingError(f"{self.shown} is another place on each machine")

        def send(fs: Any) -> None:
            if _read(fs, f"{self._root}{place}/{RUN}") is not None:
                raise TrackingError(f"{self.shown}/{place} holds a result of this trial")
            for name, content in files.items():
                fs.pipe_file(f"{self._root}{place}/{name}", content)

        self._do(f"send telemetry of {place}", send, sum(map(len, files.values())))

    def send_study(self, study: StudyFolder) -> None:
        """Sends the files of the study as a whole, again whenever they change.

        Raises `TrackingError`: the store cannot be reached or refuses, `SpaceError`: it holds a study of this name that
        contradicts this one, or that has grown beyond it.
        """
        if not study.exists:  # its first space is not there yet
            return
        files = {path: f"{study.name}/{path.name}" for path in _files(study.path, deep=False)}
        last = study.path / STUDY

        def send(fs: Any) -> None:
            with self._study_lock:  # what is sent later is of later
                self._compare(fs, study)
                self._send(fs, files, last)

        self._do(f"send study {study.name}", send, sum(path.stat().st_size for path in files))

    def fetch_study(self, name: str, storage: Path, *, whole: bool = False, may_lack: bool = False) -> StudyFolder:
        """Fetches the files of a study that the local folder lacks, and its spaces if it has grown elsewhere.

        A trial that is in the store and not finished here comes from there. Its unfinished files here are removed. One
        that failed here and was tried again elsewhere is set aside, and the later attempt comes from there. `whole`
        fetches spans and telemetry too, not only the files that a ranking needs; `may_lack` takes a study that is
        neither there nor here as one that begins. Raises `PlanError`: the study is neither there nor here,
        `SpaceError`: the study here contradicts the one there, `TrackingError`: the store cannot be reached or refuses.
        """
        study = StudyFolder(storage / name)
        content = self._do(f"read study {name}", lambda fs: _read(fs, f"{self._root}{name}/{STUDY}"))
        if content is None:
            if may_lack or study.exists:
                return study
            known = ", ".join(self.studies()) or "none"
            raise PlanError(f'no study "{name}" in {self.shown}, which holds: {known}; give another name or URL')
        newer = not study.exists or self._is_newer(study, content)
        found = self._do(f"list study {name}", lambda fs: self._list(fs, name))
        if newer:
            make_folder(study.path)
            apart = (STUDY, CANDIDATES, NEXT_CANDIDATES)
            self._bring(
                name, study.path, {each: size for each, size in found.items() if "/" not in each and each not in apart}
            )
            table = self._do(f"read study {name}", lambda fs: _read(fs, f"{self._root}{name}/{CANDIDATES}"))
            if table is not None:
                write_whole(study.path / NEXT_CANDIDATES, table)
            write_whole(study.path / STUDY, content)  # from here on the store's space holds, before that the local one
            finish(study.path)
        given_way = self._give_way(study, found)
        self._bring(name, study.path, _missing(study, found, given_way, whole=whole))
        return study

    def _give_way(self, study: StudyFolder, sizes: Mapping[str, int]) -> set[str]:
        """Sets trials aside that were tried again elsewhere, by sizes of the store's files; returns their names.

        The store has their result here among its attempts.
        """
        earlier: dict[str, Path] = {}
        for name in sizes:
            top, trial, *inside = name.split("/", 3) if name.count("/") > 2 else ("", "")
            ours = study.path / "trials" / trial / RUN
            is_attempt = top == "trials" and inside[0] == _ATTEMPTS and name.endswith(f"/{RUN}")
            if is_attempt and f"trials/{trial}/{RUN}" in sizes and ours.is_file():
                earlier |= {name: ours} if ours.stat().st_size == sizes[name] else {}
        if not earlier:
            return set()
        prefix = f"{self._root}{study.name}".rstrip("/")
        fetch = functools.partial(_read_all, paths=[f"{prefix}/{name}" for name in earlier])
        contents = self._do(f"fetch {study.name}", fetch, sum(sizes[name] for name in earlier))
        pairs = zip(earlier.values(), contents, strict=True)
        found = {ours.parent for ours, content in pairs if ours.read_bytes() == content}
        for folder in found:
            TrialFolder(folder).set_aside()
        return {folder.name for folder in found}

    def fetch_folder(self, inside: str, folder: Path, sizes: Mapping[str, int] | None = None) -> None:
        """Fetches the files of a trial or recording that are not here; `inside` is empty where the URL is its own.

        Where `sizes` of files are given, these alone.

        Raises `PlanError`: the store has no such folder, `TrackingError`: the store cannot be reached or refuses.
        """
        found = sizes or self._do(f"list {inside or self.shown}", lambda fs: self._list(fs, inside))
        if not found:
            place = f"{self.shown}/{inside}".rstrip("/")
            raise PlanError(f"there is no folder {place}; give a trial's or a recording's")
        self._bring(inside, folder, {name: size for name, size in found.items() if not (folder / name).exists()})

    def send_recording(self, folder: Path) -> None:
        """Sends a recording, its `run.json` last. Raises `TrackingError`: the store cannot be reached or refuses."""
        top = f"{RECORDINGS}/{folder.name}"
        files = {path: f"{top}/{path.relative_to(folder).as_posix()}" for path in _files(folder)}
        num_bytes = sum(path.stat().st_size for path in files)
        self._do(f"send recording {folder.name}", lambda fs: self._send(fs, files, folder / RUN), num_bytes)

    def _send(self, fs: Any, files: Mapping[Path, str], last: Path) -> None:
        """Sends files to their places below the URL, one of them after all others."""
        for late in (False, True):
            _put(fs, {path: f"{self._root}{name}" for path, name in files.items() if (path == last) is late})

    def _is_newer(self, study: StudyFolder, content: bytes) -> bool:
        """Returns whether the store's study, of which `content` is the `study.yaml`, has grown beyond the local one.

        Raises `SpaceError` where one contradicts the other, or both have grown, each in its own way. Raises `PlanError`
        where the store's file cannot be read.
        """
        there = space_of(content, f"{self.shown}/{study.name}/{STUDY}")
        here = study.space()
        differ = study.require_space(there.document, self.shown)
        if differ and there.number == here.number:
            listed = "\n".join(f"  {line}" for line in differ)
            raise SpaceError(
                f"study {study.path} has become another one than in {self.shown}, both are at space {here.number}:\n"
                f"{listed}\ngive one of the two another name"
            )
        return there.number > here.number

    def _compare(self, fs: Any, study: StudyFolder) -> None:
        """Makes sure that the study may be sent: the store's is the same, or one that it has grown from."""
        content = _read(fs, f"{self._root}{study.name}/{STUDY}")
        if content is not None and self._is_newer(study, content):
            raise SpaceError(
                f"study {study.name} has grown in {self.shown} meanwhile; run it again: that fetches the newer space"
            )

    def _list(self, fs: Any, inside: str, *, hidden: bool = False) -> dict[str, int]:
        """Lists the sizes of the files below a folder, by their place in it."""
        fs.invalidate_cache()
        top = f"{self._root}{inside}".rstrip("/") + "/"
        found: dict[str, dict[str, Any]] = fs.find(top.rstrip("/") or "/", detail=True)
        named = {path[path.index(top) + len(top) :] if top in path else path: facts for path, facts in found.items()}
        own = [name for name in named if is_inside(name) and (hidden or not is_hidden(name))]
        return {name: int(named[name].get("size") or 0) for name in own}

    def _bring(self, inside: str, folder: Path, sizes: Mapping[str, int]) -> None:
        """Downloads files, results last, a trial's own at the very end. So one that is cut short is fetched again."""
        wanted = sorted(sizes, key=lambda name: (name.endswith(RUN), -name.count("/")))
        prefix = f"{self._root}{inside}".rstrip("/")
        for start in range(0, len(wanted), _FILES_AT_ONCE):
            names = wanted[start : start + _FILES_AT_ONCE]
            paths = [f"{prefix}/{name}" for name in names]
            fetch = functools.partial(_read_all, paths=paths)
            contents = self._do(f"fetch {inside or self.shown}", fetch, sum(sizes[name] for name in names))
            for name, content in zip(names, contents, strict=True):
                write_whole(folder / name, content)

    def _do(self, action: str, operation: Callable[[Any], _T], num_bytes: int = 0) -> _T:
        """Runs an operation on fsspec's file system, as `Access.do` does."""
        moving_s = num_bytes / SLOWEST_BYTES_PER_S
        return self._access.do(action, lambda: operation(self._open()), moving_s=moving_s)

    def _open(self) -> Any:
        if self._fs is None:
            from fsspec.core import url_to_fs

            fs, root = url_to_fs(self.url, **_options(self._protocol))
            self._root = f"{root.rstrip('/')}/" if root else ""
            self._fs = fs
        return self._fs


def _secrets_of(url: str) -> dict[str, str]:
    """Returns what may be secret of a URL and of fsspec's configuration, by names of variables."""
    from fsspec.config import conf

    parts = urlsplit(url.rpartition("::")[2])
    given = [("password", parts.password or ""), *parse_qsl(parts.query)]
    given += [
        (name, value) for options in conf.values() if isinstance(options, dict) for name, value in options.items()
    ]
    return {f"{number}_{name}".upper(): value for number, (name, value) in enumerate(given) if isinstance(value, str)}


def _options(protocol: str) -> dict[str, Any]:
    """Returns options for fsspec's file systems. The user's own configuration of fsspec goes before them."""
    from fsspec.config import conf

    if protocol in ("file", "local"):
        return {"auto_mkdir": True}
    if protocol in ("s3", "s3a") and "config_kwargs" not in conf.get("s3", {}):
        # botocore waits a minute for a connection and tries five times.
        return {
            "config_kwargs": {
                "connect_timeout": 10,
                "read_timeout": 30,
                "retries": {"max_attempts": 2},
                "max_pool_connections": 2 * _AT_ONCE**2,
            }
        }
    return {}


def _files(folder: Path, *, deep: bool = True) -> list[Path]:
    found = folder.rglob("*") if deep else folder.glob("*")
    return sorted(
        path for path in found if is_file_of(folder, path) and not is_hidden(path.relative_to(folder).as_posix())
    )


def _missing(
    study: StudyFolder, names: Mapping[str, int], given_way: Collection[str], *, whole: bool
) -> dict[str, int]:
    """Lists files in the store that the local study lacks, with their sizes; `given_way` was set aside just now."""
    inside: dict[str, list[str]] = {}
    for name in names:
        if name.startswith("trials/"):
            inside.setdefault(name.split("/")[1], []).append(name)
    wanted = []
    for trial in sorted(trial for trial, own in inside.items() if f"trials/{trial}/{RUN}" in own):
        folder = TrialFolder(study.path / "trials" / trial)
        with suppress(PlanError):  # an unreadable result stays as it is: readers of the study name it
            known = folder.result()
            if trial not in given_way and (known is None or not known.status.is_final):
                folder.clear()
        wanted += [name for name in inside[trial] if whole or name.split("/", 2)[2] in _SMALL]
    wanted += [name for name in names if "/" not in name and name != STUDY]
    return {name: names[name] for name in wanted if not (study.path / name).exists()}


def _read(fs: Any, path: str) -> bytes | None:
    """Reads a small file; None where there is none."""
    fs.invalidate_cache()
    try:
        return bytes(fs.cat_file(path))
    except FileNotFoundError:
        return None


def _read_all(fs: Any, paths: list[str]) -> list[bytes]:
    found = fs.cat(paths)
    # fsspec returns a single file without its name.
    return [found[path] for path in paths] if isinstance(found, dict) else [found]


def _result(content: bytes) -> Run | None:
    try:
        return read_result(content)
    except PlanError:
        return None


def _put(fs: Any, remotes: Mapping[Path, str]) -> None:
    """Sends files, each whole or not at all: object stores do so by themselves, and take several at a time."""
    from fsspec.implementations.local import LocalFileSystem

    if isinstance(fs, LocalFileSystem):
        for local, remote in remotes.items():
            folder, _, name = remote.rpartition("/")
            partial = f"{folder}/.{name}.partial"
            fs.put_file(str(local), partial)
            Path(partial).replace(remote)
    elif remotes:
        at_once = {"batch_size": _AT_ONCE} if fs.async_impl else {}
        fs.put([str(local) for local in remotes], list(remotes.values()), **at_once)
