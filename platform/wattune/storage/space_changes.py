"""Changes of a study's space: those that it may go on with, and those that contradict its results.

A trial's id is a hash of everything that it does, so results of two spaces never share an id. A space may therefore
gain or lose values, axes, models and engines: what was measured stays, what is new runs. Settings of measuring,
objective, bounds and search are no part of a trial. Refused is what would rank unlike things under one question or
give a name a second meaning: no cluster in common, another workload, a model of the same name with other fields,
another command, other variables of its environment, other steps, and any key that this version does not know.
"""

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields
from typing import Any, Final

from wattune.catalog.hardware import UNCOUNTED, ClusterSpec
from wattune.catalog.models import ModelSpec
from wattune.field_types import default_of
from wattune.plans.axes import FOUND, Plan
from wattune.trial import Measure
from wattune.workload import OF_WORK, Workload

FREE: Final = ("study", "measure", "isolation", "objective", "constraints", "limits", "search", "requires")
"""Keys that change no measured result. Each trial says itself how long it was measured and in which workers."""

LISTED: Final = ("engine", "space", "flags", "plans")
"""Keys whose values may come and go: they are a part of every trial's id."""

_ANOTHER_NAME: Final = "or give the study another name"
_ABSENT: Final = "nothing"
_LONGEST: Final = 120
"""Most characters of a value that a message repeats."""

_FOLLOWS: Final = frozenset({"etp", "dtype"})
"""Axes whose neutral value follows from the rest of the plan or the device: a space never spells it out."""


def _contradiction(key: str, stored: str, given: str, remedy: str) -> str:
    """Says which key of a space cannot change since results with the stored value are there, and what to do."""
    return f"{key}: stored {stored}, given {given}; {remedy}"


def contradictions(stored: Mapping[str, Any], given: Mapping[str, Any]) -> list[str]:
    """Lists what keeps a study from going on with another space, a line each; both have every default."""
    old, new = completed_space(stored), completed_space(given)
    found = [
        *_of_clusters(_entries(old.get("cluster")), _entries(new.get("cluster"))),
        *_of_models(_entries(old.get("model")), _entries(new.get("model"))),
        *_of_workload(old.get("workload"), new.get("workload")),
    ]
    known = {*FREE, *LISTED, "cluster", "model", "workload"}
    for key in sorted((old.keys() | new.keys()) - known):
        if old.get(key) != new.get(key):
            said = {name: _text(one[key]) if key in one else _ABSENT for name, one in (("s", old), ("g", new))}
            remedy = f"restore it, {_ANOTHER_NAME}"
            found.append(_contradiction(key, said["s"], said["g"], remedy))
    return found


def changes(stored: Mapping[str, Any], given: Mapping[str, Any]) -> list[str]:
    """Lists every difference between two spaces of one study, a line for each key; both have every default."""
    before, after = flattened(completed_space(stored)), flattened(completed_space(given))
    lines = []
    for path in sorted(before.keys() | after.keys()):
        old, new = before.get(path), after.get(path)
        if old == new or path == "study":
            continue
        if isinstance(old, list) and isinstance(new, list):
            came = [_text(one) for one in new if one not in old]
            went = [_text(one) for one in old if one not in new]
            parts = [f"adds {', '.join(came)}"] if came else []
            parts += [f"drops {', '.join(went)}"] if went else []
            lines.append(f"{path}: {' and '.join(parts) or 'in another order'}")
        else:
            said = [_text(one[path]) if path in one else _ABSENT for one in (before, after)]
            lines.append(f"{path}: {' -> '.join(said)}")
    return lines


def _of_clusters(stored: Sequence[Any], given: Sequence[Any]) -> list[str]:
    """Finds the fields that differ where no cluster is in both spaces."""
    if not stored or any(one in stored for one in given):
        return []
    if not given:
        return [_contradiction("cluster", _text(stored), _ABSENT, f"restore it, {_ANOTHER_NAME}")]
    remedy = f"keep a stored cluster and add this one as another entry, {_ANOTHER_NAME}"
    return _fields("cluster", _closest(given[0], stored), given[0], remedy)


def _of_models(stored: Sequence[Any], given: Sequence[Any]) -> list[str]:
    """Finds the fields that differ of models that kept their name and are none of the stored ones of that name."""
    found = []
    for name in dict.fromkeys(_name(one) for one in stored):
        known = [one for one in stored if _name(one) == name]
        now = [one for one in given if _name(one) == name]
        if now and not any(one in known for one in now):
            remedy = (
                f"a name keeps its meaning: keep the stored model and add this one as another entry, {_ANOTHER_NAME}"
            )
            found += _fields(f"model {name}", _closest(now[0], known), now[0], remedy)
    return found


def _of_workload(stored: Any, given: Any) -> list[str]:
    """Finds the keys of a workload that differ; mode and sizes may gain and lose values while one stays."""
    if not isinstance(stored, Mapping) or not isinstance(given, Mapping):
        return [] if stored == given else _fields("", {"workload": stored}, {"workload": given}, _ANOTHER_NAME[3:])
    sizes = [name for name in OF_WORK if any(one in _entries(stored.get(name)) for one in _entries(given.get(name)))]
    old = {name: value for name, value in stored.items() if name not in sizes}
    new = {name: value for name, value in given.items() if name not in sizes}
    return _fields("workload", old, new, "results of two workloads do not compare: give the study another name")


def _fields(key: str, stored: Any, given: Any, remedy: str) -> list[str]:
    """Lists the fields that differ between two entries."""
    before, after = flattened(stored, key), flattened(given, key)

    def shown(entry: Mapping[str, Any], path: str) -> str:
        return _text(entry[path]) if path in entry else _ABSENT

    return [
        _contradiction(path, shown(before, path), shown(after, path), remedy)
        for path in sorted(before.keys() | after.keys())
        if before.get(path) != after.get(path)
    ]


def _closest(one: Any, others: Sequence[Any]) -> Any:
    """Returns the entry that differs from one in the fewest fields."""
    return min(others, key=lambda other: len(_fields("", other, one, "")))


def _name(entry: Any) -> str:
    return str(entry.get("name")) if isinstance(entry, Mapping) else str(entry)


def _entries(value: Any) -> list[Any]:
    """Returns a list: a single entry may stand without one."""
    return [] if value is None else list(value) if isinstance(value, list | tuple) else [value]


def flattened(value: Any, path: str = "") -> dict[str, Any]:
    """Returns the leaves of nested mappings by their paths, such as `plan.tp`."""
    if isinstance(value, Mapping):
        return {key: leaf for name, item in value.items() for key, leaf in flattened(item, f"{path}.{name}").items()}
    return {path.lstrip("."): list(value) if isinstance(value, tuple) else value}


def _text(value: Any) -> str:
    """Writes a value in short: an entry by its name or device and what tells it from others."""
    if isinstance(value, Mapping):
        fields = ", ".join(f"{name}={item}" for name, item in value.items() if item is not None)
        text = str(value.get("name") or fields)
    elif isinstance(value, list | tuple):
        text = f"[{', '.join(map(_text, value))}]"
    else:
        text = str(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def completed_space(document: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a space with every key that came after it was written.

    An axis, a measurement setting, or a field of workload, model or cluster that the space does not name has its
    neutral value, which is what its study ran with. Figures of a device of its own that count in no id are left out:
    they make no other cluster of it.
    """
    space = dict(document)
    axes = {name: [plain_value(value)] for name, value in _defaults(Plan).items() if name not in _FOLLOWS}
    later = {"measure": _defaults(Measure), "workload": _defaults(Workload), "model": _defaults(ModelSpec)}
    for section, defaults in (later | {"cluster": _defaults(ClusterSpec), "space": axes}).items():
        if (entries := space.get(section)) is not None:
            each = [_completed(one, defaults) for one in _entries(entries)]
            each = [_counted(one) for one in each] if section == "cluster" else each
            space[section] = each if isinstance(entries, list | tuple) else each[0]
    return space


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


def plain_value(value: Any) -> Any:
    """Writes an axis value as a file does: a list for a tuple, names for a layout without entries and for None."""
    return (list(value) or "even") if isinstance(value, tuple) else FOUND if value is None else value
