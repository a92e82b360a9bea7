"""A trial's specification and result as files: read, and compared with what they say of themselves."""

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from wattune.deadline import read_bounded
from wattune.errors import PlanError
from wattune.run import INDICATIVE, QUALITIES, Run
from wattune.storage.digests import ACCEPTED, FILES, NO_FILES, DigestError, agrees, check_files, digests_of, object_of
from wattune.storage.documents import MOST_BYTES
from wattune.storage.files import RESTORE, write_digested
from wattune.storage.format import FormatError
from wattune.storage.measured import RUN
from wattune.trial import TrialSpec

NO_TRIAL: Final = (OSError, ValueError, KeyError, TypeError, AttributeError, ArithmeticError, PlanError)
"""Errors from reading a trial's files that are damaged, or written by hand or another version."""

EDITED: Final = "edited"
"""Reason of the quality of a result whose files were edited on purpose."""


def read_result_file(path: Path) -> Run:
    """Reads a `run.json`. Raises `PlanError`: it cannot be read, is no result, or does not agree with its digest."""
    try:
        content = read_bounded(path, MOST_BYTES)
    except (OSError, ValueError) as error:
        raise no_trial(path.parent, error) from error
    return read_result(content, path.parent)


def read_result(content: bytes, folder: Path | str = "") -> Run:
    """Reads the content of a `run.json` of a folder, which the error names.

    Raises `PlanError`: it is no result, or does not agree with its digest.
    """
    try:
        return Run.from_json(without_files(object_of(content, any_depth=True)))
    except NO_TRIAL as error:
        raise no_trial(folder, error) from error


def without_files(data: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the object of a `run.json` without what it says of the files beside it."""
    return {name: value for name, value in data.items() if name not in (FILES, ACCEPTED)}


def spec_of(content: bytes) -> TrialSpec:
    """Reads a specification, and makes sure that its id is that of its content; raises one of `NO_TRIAL` else."""
    return specified(object_of(content, bare=True, any_depth=True))


def specified(data: Mapping[str, Any]) -> TrialSpec:
    """Makes a specification of the object of a `spec.json`; see `spec_of`."""
    spec = TrialSpec.from_json(data)
    trial_id = spec.trial_id
    if data.get("trial_id") != trial_id:
        raise ValueError(f"trial_id of spec.json: got {str(data.get('trial_id'))[:60]}, its content is {trial_id}")
    if spec.plan.dp(spec.cluster.world_size) < 1:
        raise ValueError(
            f"plan: {spec.plan.label[:60]} needs more than the {spec.cluster.world_size} rank(s) there are"
        )
    return spec


def key_of(name: str) -> tuple[str, int]:
    """Returns the trial's id and the repeat that a folder's name says.

    Raises `ValueError`: the name is of another form.
    """
    trial_id, _, repeat = name.rpartition("-")
    if not (trial_id and repeat.isdecimal() and repeat.isascii() and len(repeat) < 10):
        raise ValueError("no folder of a trial")
    return trial_id, int(repeat)


def require_own(name: str, spec: TrialSpec, result: Run, own_id: str = "") -> None:
    """Makes sure that folder, specification and result are of one trial; `own_id` is the specification's, if known.

    Raises `ValueError`: they are not.
    """
    said = {"folder": key_of(name), "run.json": (result.trial_id, result.repeat)}
    own_id = own_id or spec.trial_id
    for where, (trial_id, repeat) in said.items():
        if trial_id != own_id or repeat != result.repeat:
            raise ValueError(f"{where} is of {trial_id}-{repeat}, spec.json of {own_id}")


def no_trial(folder: Path | str, error: Exception) -> PlanError:
    """Makes the error of a trial that cannot be read, from that of reading a file of it."""
    if isinstance(error, PermissionError):
        return PlanError(f"{folder} cannot be read: {error.strerror}; give a study you may read")
    if isinstance(error, FormatError):
        return PlanError(f"{folder}: {error}")
    if isinstance(error, DigestError):
        return PlanError(f"{folder}: {RUN}: {error}; {RESTORE}, or move the folder out of the study")
    text = error if isinstance(error, OSError) else f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"
    return PlanError(
        f"{folder}: no trial of this version of wattune ({text}); move the folder out of the study, and the same "
        "`wattune run` measures it anew"
    )


def with_digests(folder: Path, result: Run, known: Mapping[str, str] = NO_FILES) -> dict[str, Any]:
    """Returns the object of a `run.json`, with the digests of all files beside it; see `digests_of`."""
    return {**result.to_json(), FILES: digests_of(folder, RUN, known)}


def accept(folder: Path) -> tuple[str, ...]:
    """Takes files that were edited on purpose as they are now: writes their digests, and says so in the quality.

    The result's figures stay what they are. It is never better than `indicative` again. Returns the files that were
    edited; none where all agree. Raises `PlanError`: there is no result, or what it or the specification holds is none.
    """
    path = folder / RUN
    try:
        content = path.read_bytes()
        data = object_of(content, accept=True)
        result = Run.from_json(without_files(data))
        if result.recorded is None:
            require_own(folder.name, spec_of((folder / "spec.json").read_bytes()), result)
        files = data.get(FILES)
        found = check_files(folder, files if isinstance(files, dict) else {}, data.get(ACCEPTED))
    except NO_TRIAL as error:
        raise no_trial(folder, error) from error
    edited = (*(() if agrees(content) else (RUN,)), *found.changed, *found.missing)
    if not edited:
        return ()
    result = replace(
        result,
        metrics={name: value for name, value in result.metrics.items() if math.isfinite(value)},
        quality=min(result.quality, INDICATIVE, key=QUALITIES.index),
        quality_reasons=tuple(dict.fromkeys((*result.quality_reasons, EDITED))),
    )
    accepted = sorted({*found.accepted, *edited})
    write_digested(path, {**with_digests(folder, result), ACCEPTED: accepted}, private=result.recorded is not None)
    return edited
