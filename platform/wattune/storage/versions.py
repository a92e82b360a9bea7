"""Reads what earlier versions of wattune wrote: renames their keys and adds what could not be said then.

A study folder carries its version in `study.yaml`, a recording in its `manifest.json`. Version 0 wrote no number. It
said `anchor` for the reference trial, `marks.parquet` for `spans.parquet`, and `folded` for equivalent combinations.
Versions 0 and 1 wrote no digests (`wattune.storage.digests`). Version 2 wrote none of `study.yaml` and
`candidates.parquet`, kept one space, and gave the long run of a finalist the repeat after the ordinary ones.
Nothing that an earlier version wrote is changed on the disk, except `study.yaml` when the study runs again.
"""

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields
from typing import Any, Final

from wattune.catalog.hardware import UNCOUNTED, ClusterSpec
from wattune.catalog.models import ModelSpec
from wattune.errors import PlanError
from wattune.field_types import default_of
from wattune.plans.axes import Plan
from wattune.trial import Measure, Workload

VERSION: Final = 3
"""Version of the folders this code writes."""

DIGESTS_SINCE: Final = 2
"""First version whose trials and recordings have digests. Damage to older ones is not seen, and readers say so."""

RENAMED_KEYS: Final = {"measure.anchor_every": "measure.reference_every", "search.anchor": "search.reference"}
"""Keys of a search space by their names in version 0."""

RENAMED_FILES: Final = {"spans": "marks"}
"""Tables of a trial or recording, and their names in version 0."""

ADDED: Final[dict[str, Any]] = {"search.finalists": None, "search.ladder": None, "search.early_stop": False}
"""Later keys of a space by dotted path, such as `search.patience`, with the value that studies before them ran with.

Add a line with every key that comes after version 0, except for axes and fields of `Measure`, `Workload`, `ModelSpec`
and `ClusterSpec`: their defaults are read from the class. Without the line, a study begun before the key is refused as
another space. A golden test of version 0 names a key that is missing here.
"""

_RENAMED_STATUS: Final = {"folded": "equivalent"}
_FOLLOWS: Final = frozenset({"etp", "dtype"})
"""Axes whose neutral value follows from the rest of the plan or the device: a space never spells it out."""


def check_version(version: Any, where: str) -> None:
    """Makes sure that this code can read a folder of that version.

    Args:
        version: What the folder says; None is version 0.
        where: The file that says it.

    Raises:
        PlanError: A later version wrote it, or it is no version.
    """
    if version is None or (isinstance(version, int) and not isinstance(version, bool) and 0 <= version <= VERSION):
        return
    raise PlanError(
        f"{where}: got version {str(version)[:40]}, allowed: up to {VERSION}; read it with the wattune that wrote it, "
        "or install a newer one"
    )


def upgraded_space(document: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a study's space with today's names of its keys.

    Args:
        document: The content of a `study.yaml` of this or an earlier version, without its version.
    """
    space = dict(document)
    for old, new in RENAMED_KEYS.items():
        (section, old_key), new_key = old.split("."), new.split(".")[1]
        if isinstance(space.get(section), Mapping) and old_key in space[section]:
            # In its old place, so that a file written anew reads like the one before.
            space[section] = {new_key if key == old_key else key: value for key, value in space[section].items()}
    return space


def completed_space(document: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a space with every key that came after it was written.

    An axis, a measurement setting, or a field of workload, model or cluster that the space does not name has its
    neutral value, which is what its study ran with. Other keys have their value of `ADDED`. Figures of a device of its
    own that count in no id are left out: they make no other cluster of it.
    """
    space = dict(document)
    for section, kind in (("measure", Measure), ("workload", Workload), ("model", ModelSpec), ("cluster", ClusterSpec)):
        entries = space.get(section)
        if isinstance(entries, Mapping):
            space[section] = _completed(entries, _defaults(kind))
        elif isinstance(entries, list):
            space[section] = [_completed(each, _defaults(kind)) for each in entries]
    if isinstance(clusters := space.get("cluster"), Mapping):
        space["cluster"] = _counted(clusters)
    elif isinstance(clusters, list):
        space["cluster"] = [_counted(each) for each in clusters]
    axes = {name: [_plain(value)] for name, value in _defaults(Plan).items() if name not in _FOLLOWS}
    if isinstance(space.get("space"), Mapping):
        space["space"] = _completed(space["space"], axes)
    for path, value in ADDED.items():
        space = _added(space, path.split("."), value)
    return space


def upgraded_candidate(row: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a row of `candidates.parquet` in today's words."""
    status = row.get("status")
    return {**row, "status": _RENAMED_STATUS.get(status, status)} if isinstance(status, str) else dict(row)


def _defaults(kind: type[Any]) -> dict[str, Any]:
    """Returns the defaults of a dataclass by field. Sources are not settings."""
    defaults = {each.name: default_of(each) for each in fields(kind) if each.name != "source"}
    return {name: default for name, default in defaults.items() if default is not MISSING}


def _completed(entry: Any, defaults: Mapping[str, Any]) -> Any:
    """Adds to a mapping the keys that it lacks. Other values stay as they are, for a later check."""
    return {**entry, **{k: v for k, v in defaults.items() if k not in entry}} if isinstance(entry, Mapping) else entry


def _counted(cluster: Any) -> Any:
    """Returns a cluster whose own device has the fields that count in an id. All figures of `like` are among them."""
    if not isinstance(cluster, Mapping):
        return cluster
    return {
        key: {name: own for name, own in value.items() if name not in UNCOUNTED and name != "like"}
        if isinstance(value, Mapping)
        else value
        for key, value in cluster.items()
    }


def _added(entry: Any, path: Sequence[str], value: Any) -> Any:
    """Adds a key at a path unless it is there, in every entry of a list. A section that is missing stays missing."""
    if isinstance(entry, list):
        return [_added(each, path, value) for each in entry]
    first, *rest = path
    if not isinstance(entry, Mapping) or (rest and first not in entry):
        return entry
    if rest:
        return {**entry, first: _added(entry[first], rest, value)}
    return _completed(entry, {first: value})


def _plain(value: Any) -> Any:
    """Writes an axis value as a file does."""
    return (list(value) or "even") if isinstance(value, tuple) else value
