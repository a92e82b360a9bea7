"""Results of a study as one file, `trials/.results`: ten thousand trials are read at once, and not from two files each.

It is a copy that a reader leaves for the next one; the trials' own files remain the truth. A row counts while both
files of its trial are those it was read from: of the same size, times and inode, which neither a copy elsewhere nor an
edit keeps. The file has its digest in front. Torn, damaged or of another format it is as if it were not there, so it
is written without care for a crash. It is packed lines of JSON: the format with the texts that trials share, then
`[folder, files, specification without its plan, plan, names of metrics, metrics, result without them]` for each trial,
the three in the middle as numbers of such texts.
"""

import hashlib
import io
import json
import os
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import cache, reduce
from pathlib import Path
from typing import Any, Final
from zipfile import BadZipFile

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pydantic_core import from_json

from wattune.plans.axes import Plan
from wattune.run import Run
from wattune.storage.digests import SETTLED_NS
from wattune.storage.format import FORMAT
from wattune.storage.trial_files import NO_TRIAL
from wattune.trial import TrialSpec, plan_of

RESULTS: Final = "trials/.results"
"""Not in the study's own folder, whose time says which study is newest."""

FITS: Final = "trials/.fits"
PLAN: Final = "trials/.plan"
ESTIMATES: Final = "trials/.estimates"
FEATURES: Final = "trials/.features"

_LAYOUT: Final = 2
"""Of its lines; one of another layout is as if it were not there."""

LEAST_KEPT: Final = 1000
"""Trials of a space from which on a study keeps what follows from them."""

LEAST_NEW: Final = 250
"""Trials that are not in the file, and a twentieth of all at least, from which on it is written."""

Tree = Mapping[str, Any]
"""Arrays by name, or further trees."""


@cache
def _code() -> bytes:
    files = (path for path in sorted(Path(__file__).parents[1].rglob("*.*")) if path.suffix != ".pyc")
    return b"".join([np.__version__.encode(), *(path.read_bytes() for path in files if path.is_file())])


def read_known(path: Path, *follows_from: object) -> dict[str, NDArray[Any]]:
    """Reads arrays that were kept; none unless the file is whole, and follows from the same texts and the same code."""
    with suppress(OSError, ValueError, LookupError, EOFError, MemoryError, BadZipFile):
        if (content := path.read_bytes())[:32] == _digest(follows_from, content[32:]):
            return dict(np.load(io.BytesIO(content[32:]), allow_pickle=False))
    return {}


def write_known(path: Path, arrays: Mapping[str, NDArray[Any]], *follows_from: object) -> None:
    """Keeps arrays for the next reader. Where they cannot be written, it computes them anew."""
    np.savez(sink := io.BytesIO(), **arrays)  # type: ignore[arg-type]  # its own parameters have other names
    _leave(path, _digest(follows_from, sink.getvalue()) + sink.getvalue(), 0o666)


def kept(path: Path, num_trials: int, make: Callable[[], Tree], *follows_from: object) -> dict[str, Any]:
    """Returns a tree of arrays that was kept, else one that is made now, and kept where it is of many trials."""
    found = dict[str, Any]()
    for place, array in (read_known(path, *follows_from) if num_trials >= LEAST_KEPT else {}).items():
        *branch, name = place.split("/")
        reduce(lambda at, one: at.setdefault(one, {}), branch, found)[name] = array
    if not found and (found := dict(make())) and num_trials >= LEAST_KEPT:
        write_known(path, dict(_leaves(found)), *follows_from)
    return found


def _leaves(tree: Tree, at: str = "") -> Iterator[tuple[str, NDArray[Any]]]:
    for name, one in tree.items():
        yield from _leaves(one, f"{at}{name}/") if isinstance(one, Mapping) else ((f"{at}{name}", np.asarray(one)),)


def _digest(follows_from: tuple[object, ...], content: bytes) -> bytes:
    return hashlib.sha256(b"".join([_code(), repr(follows_from).encode(), content])).digest()


class KnownResults:
    """Results of a study's trials that were read before."""

    def __init__(self, study: Path) -> None:
        """Reads the file of a study's folder, if it is there and whole."""
        self._path = study / RESULTS
        self._numbers: dict[str, int] = {}
        self._texts: list[str] = []
        self._read_texts: dict[int, Any] = {}
        self._rows: dict[str, tuple[str, list[Any], bytes]] = {}
        self._specs: dict[int, TrialSpec] = {}
        self._plans: dict[int, Plan] = {}
        self._kept: list[bytes] = []
        self._num_new, self._mode = 0, 0o666
        self._begun_ns = time.time_ns()
        with suppress(OSError, ValueError, LookupError, TypeError, pa.ArrowException, MemoryError):
            self._read(self._path.read_bytes())

    def _read(self, content: bytes) -> None:
        if hashlib.sha256(packed := content[32:]).digest() != content[:32]:
            return
        first, *lines = pa.input_stream(pa.py_buffer(packed), compression="zstd").read().split(b"\n")
        form, layout, self._texts = from_json(first)
        if (form, layout) == (FORMAT, _LAYOUT):
            self._numbers = {text: number for number, text in enumerate(self._texts)}
            self._rows = {(row := from_json(line))[0]: (row[1], row[2:], line) for line in lines}

    def files_of(self, folder: str) -> str:
        """Returns what tells a trial's files from any others; empty where they may change without being told apart."""
        try:
            both = [os.stat(f"{folder}/{name}") for name in ("spec.json", "run.json")]  # noqa: PTH116  # twice as fast
        except OSError:
            return ""
        for one in both:
            self._mode &= one.st_mode
            if not stat.S_ISREG(one.st_mode) or self._begun_ns - one.st_ctime_ns < SETTLED_NS:
                return ""
        return " ".join(f"{one.st_size} {one.st_mtime_ns} {one.st_ctime_ns} {one.st_ino}" for one in both)

    def get(self, name: str, files: str) -> tuple[TrialSpec, Run] | None:
        """Returns specification and result of a trial by its folder's name, None unless they are of these files."""
        known, own, line = self._rows.get(name, ("", [], b""))
        if not files or known != files:
            return None
        of_spec, of_plan, of_names, values, result = own
        try:
            spec, plan = self._specs.get(of_spec), self._plans.get(of_plan)
            if plan is None:
                plan = self._plans[of_plan] = plan_of(self._shared(of_plan))
            if spec is None:
                whole = {**self._shared(of_spec), "plan": self._shared(of_plan)}
                spec = self._specs[of_spec] = TrialSpec.from_json(whole)
            metrics = dict(zip(self._shared(of_names), values, strict=True))
            spec = replace(spec, plan=plan).known_as(name.partition("-")[0])
            found = spec, Run.from_json({**result, "metrics": metrics}, is_sound=True)
        except NO_TRIAL:
            return None
        self._kept.append(line)
        return found

    def _shared(self, number: int) -> Any:
        known = self._read_texts
        return known[number] if number in known else known.setdefault(number, from_json(self._texts[number]))

    def add(self, name: str, files: str, spec: Mapping[str, Any], result: Mapping[str, Any]) -> None:
        """Keeps the content of a trial's files that were read and found whole."""
        if files:
            own = {key: value for key, value in spec.items() if key not in ("plan", "trial_id")}
            shared = (json.dumps(one) for one in (own, spec["plan"], [*result["metrics"]]))
            numbers = [self._numbers.setdefault(text, len(self._numbers)) for text in shared]
            others = {key: value for key, value in result.items() if key != "metrics"}
            self._kept.append(json.dumps([name, files, *numbers, [*result["metrics"].values()], others]).encode())
            self._num_new += 1

    def write(self) -> None:
        """Writes the file where enough is new. Where it cannot be written, the next reader reads the trials."""
        if self._num_new < max(LEAST_NEW, 0.05 * len(self._kept)):
            return
        plain = b"\n".join([json.dumps([FORMAT, _LAYOUT, [*self._numbers]]).encode(), *self._kept])
        with pa.CompressedOutputStream(sink := pa.BufferOutputStream(), "zstd") as stream:
            stream.write(plain)
        content = sink.getvalue().to_pybytes()
        _leave(self._path, hashlib.sha256(content).digest() + content, self._mode & 0o666)


def _leave(path: Path, content: bytes, mode: int) -> None:
    """Writes a file if it can be written. The next writer takes the place of what a dead one left."""
    partial = path.with_name(f"{path.name}.new")
    with suppress(OSError):
        try:
            with open(partial, "wb", opener=lambda path, flags: os.open(path, flags, mode)) as file:
                file.write(content)
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)
