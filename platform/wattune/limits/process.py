"""The process that sets devices, from both ends: the owner's `SettingsProcess`, and `hold`, which it starts.

It is `python -m wattune.limits.process`, detached as a sampler is, and owns its devices for its whole life. The owner
writes what it wants (`want.json`), the process what came of it (`have.json`).
"""

import json
import pkgutil
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Self, cast

from wattune.errors import PlanError, TelemetryError
from wattune.limits.setter import Setter, Settings
from wattune.storage.files import write_json
from wattune.telemetry.sampler.lease import LEASE, LEASE_S, DetachedProcess, Lease, run_detached, wait_for_signal

VENDORS: Final = {
    "nvml": "wattune.telemetry.nvml.settings:NvmlSettings",
    "amd_smi": "wattune.telemetry.amd_smi.settings:AmdSmiSettings",
}
"""Backend to `module:Class`; loaded in this process alone, as a vendor's library is."""

_WANT: Final = "want.json"
_HAVE: Final = "have.json"
_LOOK_S: Final = 0.05
_SET_S: Final = 30.0
"""Longest that drivers may take to set all devices of a node."""


class SettingsProcess(DetachedProcess):
    """The process that owns a node's devices for a study, known by its folder."""

    what, ready_file = "setter", _HAVE

    @classmethod
    def start(cls, folder: Path, *, lease_s: float = LEASE_S, **asked: Any) -> Self:
        """Starts it and waits until it owns the node's devices, which can have all values and let it set them.

        `asked` are `backend`, a key of `VENDORS`; `num_devices`, those that trials use; `values` by axis. Raises
        `PlanError`: one of them cannot be set, or another process sets it. Nothing is changed then.
        """
        setter = cls(folder)
        folder.mkdir(parents=True, exist_ok=True)
        for name in (_WANT, _HAVE):
            (folder / name).unlink(missing_ok=True)
        setter._spawn("wattune.limits.process", {**asked, "lease_s": lease_s})
        try:
            setter.wait_until_ready()
        except TelemetryError as error:
            said = str(error).rpartition("error: ")[2].partition("\n")[0] if setter.refused else str(error)
            raise PlanError(" ".join(said.split())) from None
        return setter

    def set(self, values: Mapping[str, Any]) -> None:
        """Has its devices set, and axes restored that are not named.

        Raises `TelemetryError`: it is gone or too slow, or a device refuses.
        """
        number, deadline_s = time.monotonic_ns(), time.monotonic() + _SET_S
        write_json(self.folder / _WANT, {"number": number, "values": dict(values)})
        while (have := json.loads((self.folder / _HAVE).read_text()))["number"] != number:
            if not self.alive() or time.monotonic() > deadline_s:
                raise TelemetryError(f"the setter in {self.folder} set nothing:\n{self.last_words()}")
            self.renew()
            time.sleep(_LOOK_S)
        if have["problem"]:
            raise TelemetryError(have["problem"])


def hold(folder: Path, *, backend: str, num_devices: int, values: Mapping[str, Sequence[Any]], lease_s: float) -> None:
    """Owns a node's devices, and sets what the owner wants, until a stop signal or the lease's end; restores them then.

    Without devices it pays the debts of dead setters alone.
    """
    lease, settings = Lease(folder / LEASE, lease_s), cast(Settings, pkgutil.resolve_name(VENDORS[backend])())
    if num_devices not in (0, settings.num_devices):
        text = f"trials use {num_devices} of the node's {settings.num_devices} devices, and all would be set"
        raise PlanError(f"{text}; use all devices of a node")
    setter, number = Setter(settings, settings.owners if num_devices else ()), 0
    try:
        setter.check(values)
        write_json(folder / _HAVE, {"number": number})
        while num_devices and not lease.expired() and wait_for_signal(_LOOK_S) is None:
            want: Any = json.loads((folder / _WANT).read_text()) if (folder / _WANT).exists() else {"number": number}
            if want["number"] != number:
                number, problem = int(want["number"]), ""
                try:
                    setter.set(want["values"])
                except PlanError as error:
                    problem = str(error)
                write_json(folder / _HAVE, {"number": number, "problem": problem})
    finally:
        setter.close()


if __name__ == "__main__":
    sys.exit(run_detached(hold))
