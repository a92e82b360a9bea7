"""Settings of devices: who may set them, what they were, and how they come back.

A record a device, in a folder that all users share, says what was found, and is on the disk before anything is set. The
lock beside it belongs to one process, and the kernel drops it with that process. A record without a holder is a debt:
the next setter of anybody pays it before it takes a device of its own.
"""

import json
import os
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, Protocol

from wattune.errors import PlanError
from wattune.private_folder import own_folder
from wattune.storage.files import make_lasting
from wattune.telemetry.sampler.lease import FileLock

FOLDER_VARIABLE: Final = "WATTUNE_LIMITS"
"""Another folder for locks and records: for containers, which share one by a mount, and for tests."""

_FOLDER: Final = "/tmp/wattune-limits"  # noqa: S108 - checked where it is opened
_BOOT: Final = Path("/proc/sys/kernel/random/boot_id")


class Settings(Protocol):
    """Settings of one vendor's devices on this node. Raw values are plain data; calls raise `PlanError`."""

    owners: Sequence[str]
    """Uuids of its devices; those that share a limit have one."""
    num_devices: int

    def allowed(self, owner: str, axis: str) -> Collection[Any]:
        """Returns the values of an axis that a device can have: a range, a list of clocks, or names."""

    def setting(self, owner: str, axis: str) -> Any:
        """Returns the raw value of an axis as it is."""

    def raw(self, owner: str, axis: str, value: Any) -> Any:
        """Returns the raw value of one that is allowed."""

    def write(self, owner: str, axis: str, raw: Any) -> None:
        """Sets a raw value, also one that was found."""


class Setter:
    """The one owner of devices, which sets what it is asked for and restores what it found."""

    def __init__(self, settings: Settings, owners: Collection[str]) -> None:
        """Takes devices, all or none, and pays what dead owners owe them; without devices, what is owed to any.

        Raises `PlanError`, `NotPrivateError`: another process has one, or record or folder is of a third user.
        """
        self._settings = settings
        self._locks: dict[str, FileLock] = {}
        self._found: dict[str, dict[str, Any]] = {}
        self._now: dict[tuple[str, str], Any] = {}
        self._allowed: dict[tuple[str, str], Collection[Any]] = {}
        self._folder = own_folder(Path(os.environ.get(FOLDER_VARIABLE) or _FOLDER), shared=True)
        for owner in settings.owners if not owners else ():
            with suppress(PlanError):  # somebody else's, or of another user
                if self._record(owner):
                    self._take(owner)
                    self._let_go(owner)
        try:
            for owner in owners:
                self._take(owner)
        except PlanError:
            self.close()
            raise

    def _take(self, owner: str) -> None:
        """Locks a device, and restores what a dead owner left."""
        before = self._record(owner)
        lock = FileLock.take(self._folder / f"{owner}.lock", of_all_users=True)
        if lock is None:
            holder = "process {pid} of user {uid}".format_map(before) if before else "another process"
            raise PlanError(f"device {owner} is set by {holder}; end that study first")
        self._locks[owner], self._found[owner] = lock, {}
        record = self._record(owner)  # as its last holder left it
        if record and record["boot"] == _BOOT.read_text():  # a boot restores by itself
            self._found[owner] = record["found"]
            self._log(owner, "restores what a dead owner left", dead=record["pid"])
            self._restore(owner)
            self._found[owner] = {}
        self._path(owner).unlink(missing_ok=True)

    def _path(self, owner: str) -> Path:
        return self._folder / f"{owner}.json"

    def _record(self, owner: str) -> dict[str, Any]:
        """Reads what an owner found; empty without one. One of a third user is not believed: root would set it."""
        try:
            fd = os.open(self._path(owner), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except FileNotFoundError:
            return {}
        with open(fd) as file:
            if (uid := os.fstat(fd).st_uid) not in (0, os.getuid()):
                text = f"device {owner} has a record of user {uid}, {self._path(owner)}"
                raise PlanError(f"{text}; run wattune as that user, or remove it as root")
            record: dict[str, Any] = json.load(file)
        return record

    def check(self, values: Mapping[str, Collection[Any]]) -> None:
        """Makes sure that devices can have values of axes and that this user may set them, by writing what is there."""
        self._find(values)
        for owner in self._found:
            self._restore(owner)

    def set(self, values: Mapping[str, Any]) -> None:
        """Sets axes of its devices and restores the others. Where one raises `PlanError`, all are as found then."""
        self._find({axis: [value] for axis, value in values.items()})
        try:
            for owner, found in self._found.items():
                for axis in found:
                    wanted = self._settings.raw(owner, axis, values[axis]) if axis in values else found[axis]
                    if self._now.get((owner, axis), self) != wanted:
                        self._write(owner, axis, wanted)
        except PlanError:
            for owner in self._found:
                self._restore(owner)
            raise

    def _find(self, values: Mapping[str, Collection[Any]]) -> None:
        """Puts on the disk what settings were found, if the devices can have all values; comes before one is set."""
        for axis, several in values.items():
            for owner in self._found:
                if (owner, axis) not in self._allowed:  # as found: a lock narrows a range
                    self._allowed[owner, axis] = self._settings.allowed(owner, axis)
                if wrong := [value for value in several if value not in self._allowed[owner, axis]]:
                    use = _words(self._allowed[owner, axis], wrong[0])
                    raise PlanError(f"{axis}={wrong[0]} is none that device {owner} takes; use {use}")
        for owner, found in self._found.items():
            if missing := {axis: self._settings.setting(owner, axis) for axis in values if axis not in found}:
                record = {"boot": _BOOT.read_text(), "pid": os.getpid(), "uid": os.getuid()}
                new = self._folder / f".{owner}"
                new.unlink(missing_ok=True)
                with open(new, "x") as file:  # never into a file or link of another user
                    json.dump({**record, "found": {**found, **missing}}, file)
                    file.flush()
                    os.fsync(file.fileno())
                new.rename(self._path(owner))
                make_lasting(self._folder)
                found |= missing

    def _restore(self, owner: str) -> None:
        for axis, raw in self._found[owner].items():
            self._write(owner, axis, raw)

    def _write(self, owner: str, axis: str, raw: Any) -> None:
        self._log(owner, "sets", axis=axis, to=raw, found=self._found[owner][axis])
        self._now.pop((owner, axis), None)  # unknown until it is set
        self._settings.write(owner, axis, raw)
        self._now[owner, axis] = raw

    def _log(self, owner: str, what: str, **more: Any) -> None:
        """Says who changed what, in a file of this user's in the shared folder."""
        who = {"at": time.strftime("%FT%T%z"), "uid": os.getuid(), "pid": os.getpid(), "device": owner}
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        with suppress(OSError), open(os.open(self._folder / f"changes-{os.getuid()}.log", flags, 0o644), "a") as file:
            file.write(f"{json.dumps({**who, 'what': what, **more})}\n")  # a full disk keeps nothing from its limit

    def _let_go(self, owner: str) -> None:
        """Restores a device and lets it go; one that refuses stays recorded, unless it is as it was found."""
        with suppress(PlanError, OSError):  # the next device must have its turn
            try:
                self._restore(owner)
            except PlanError as error:
                self._log(owner, f"cannot restore: {error}")
                if any(self._settings.setting(owner, axis) != raw for axis, raw in self._found[owner].items()):
                    raise
            self._path(owner).unlink(missing_ok=True)
        del self._found[owner]
        self._locks.pop(owner).release()

    def close(self) -> None:
        """Restores its devices and lets them go. May be called twice."""
        for owner in list(self._locks):
            self._let_go(owner)


def _words(allowed: Collection[Any], wrong: Any) -> str:
    """Says which values there are: a range, names, or of many numbers the nearest two."""
    if isinstance(allowed, range):
        return f"{allowed.start} to {allowed.stop - 1}"
    near = allowed if isinstance(wrong, str) else sorted(sorted(allowed, key=lambda one: abs(one - wrong))[:2])
    return " or ".join(map(str, near)) or "found alone"
