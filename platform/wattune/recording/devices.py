"""Devices that count in a recording, and why: chosen, named by the command's variables, or used by its processes.

On a node that several people use, sensors show everybody's devices. Only the command's are in its figures. Others are
kept apart (`others/` in the recording), and shown apart.
"""

import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Final

import pyarrow as pa

from wattune.analysis.signals.readings import HOST
from wattune.errors import SensorChoiceError
from wattune.telemetry.backend import OTHER_PROCESSES
from wattune.telemetry.devices import VARIABLES, Devices, named, of_devices, visible
from wattune.workers.command.environment import node_environment
from wattune.workers.command.supervisor import descendants

OTHERS: Final = "others"
"""Folder of a recording that has the telemetry of devices that do not count, as a recording has it."""

LONGEST_REST_S: Final = 5.0
"""Between two looks at a command's processes: it takes a look at all of `/proc`."""


class Choice:
    """The devices that count, as far as they are known: before the command runs, while it does, and at the end."""

    def __init__(
        self,
        asked: str | None,
        variables: Mapping[str, str] | None,
        simulated: str | None = None,
        *,
        ran_before: bool = False,
    ) -> None:
        """Takes a person's choice, the variables that the command is started with, and the device to be simulated.

        Without variables the machine is recorded. A command that `ran_before` is older than the sampler.
        """
        self._asked, self._simulated, self._ran_before, self._pid = asked, simulated, ran_before, 0
        self._start_s = self._next_s = 0.0
        self._problems: dict[str, None] = {}
        """Variables that processes set later, and that cannot be kept."""
        self.pids: set[int] = set()
        """The command's processes, those that come later too."""
        self._variables = {} if variables is None else {0: _choosing(variables)}
        """The latest of each process. 0 is the command, with its own once they are read: `env` changes them."""

    @property
    def for_sampler(self) -> dict[str, Any] | None:
        """The choice so far, as `wattune.telemetry.sampler.process.chosen` takes it; None without any."""
        of_machine = self._asked is None and not self._variables
        return None if of_machine else {"asked": self._asked, "variables": self._variables.get(0, {})}

    def begin(self, pid: int) -> None:
        """Names the command's process."""
        self._pid, self._start_s = pid, time.monotonic()
        self.pids.add(pid)

    @property
    def rest_s(self) -> float:
        """Time until the next look; more than any tick where no process is looked at."""
        return max(self._next_s - time.monotonic(), 0.01) if self._pid else LONGEST_REST_S

    def look(self) -> bool:
        """Looks for processes, often at first; does nothing and returns False shortly after the last look."""
        now_s = time.monotonic()
        if not self._pid or now_s < self._next_s:
            return False
        self._next_s = now_s + min(max(now_s - self._start_s, 0.05), LONGEST_REST_S)
        for pid in (self._pid, *descendants(self._pid)):
            self.pids.add(pid)
            if variables := node_environment(pid):
                self._variables[0 if pid == self._pid else pid] = _choosing(variables)
        return True

    def counted(self, manifest: Mapping[str, Any], told: Collection[str] = ()) -> dict[str, Any]:
        """Says which devices of a sampler's manifest count, and why, as a fact of the recording's own.

        `told` are those that ranks told themselves. Raises `SensorChoiceError`: the choice cannot be kept, or before
        the command began a variable of it.
        """
        devices = {name: facts for name, facts in manifest.get("devices", {}).items() if name != HOST}
        if self._simulated is not None:
            devices.setdefault("gpu0", {"name": self._simulated})
        names, why = self._counted(devices, told)
        return {"counted": sorted(names), "why": "; ".join([why, *self._problems])}

    def _counted(self, devices: Devices, told: Collection[str]) -> tuple[Collection[str], str]:
        if self._asked is not None:
            return named(self._asked, devices), f"--devices {self._asked}"
        if not self._variables or not devices:
            return devices, "the whole machine"
        own = {name for name, pids in self.own_processes(devices).items() if pids} | set(told)
        each = self._visible(devices)
        if each:
            why = " and ".join(dict.fromkeys(text for _, text in each)) + " of the command"
            names = {name for found, _ in each for name in found}
            return names | own, f"{why}, and its processes" if own - names else why
        if own:
            return own, "processes of the command were on them"
        strangers = {name for name, facts in devices.items() if any(self._users(facts).values())}
        if strangers:
            return devices.keys() - strangers, "processes of others, and none of the command, were on the rest"
        return devices, "nothing says which devices the command used"

    def _visible(self, devices: Devices) -> list[tuple[list[str], str]]:
        """Returns what each process's variables leave, where they choose."""
        self._problems.clear()
        found = []
        for variables in self._variables.values():
            try:
                found.append(visible(variables, devices))
            except SensorChoiceError as error:
                if not self._pid:  # the command has not begun, and does not
                    raise
                self._problems[str(error)] = None
        return [one for one in found if one is not None]

    def own_processes(self, devices: Devices) -> dict[str, list[int]]:
        """Returns the command's processes that were seen on each device."""
        return {name: sorted(self._users(facts).keys() & self.pids) for name, facts in devices.items()}

    def _users(self, facts: Mapping[str, Any]) -> dict[int, bool]:
        """Returns the processes seen on a device, and whether each is surely nobody of the command.

        In a container the driver tells numbers of processes that nobody there has: one that came during the recording,
        or any where the command ran before, may be the command's.
        """
        seen = {int(pid): bool(here) for pid, here in (facts.get("users") or {}).items()}
        early = {one["pid"] for one in (facts.get("at_start") or {}).get(OTHER_PROCESSES, ())}
        here = {pid: not self._ran_before or seen.get(pid) or Path(f"/proc/{pid}").exists() for pid in early}
        return seen | here


def _choosing(variables: Mapping[str, str]) -> dict[str, str]:
    """Returns those of a program's variables that choose its devices."""
    return {name: variables[name] for name in VARIABLES if name in variables}


_Part = tuple[dict[str, pa.Table], dict[str, Any]]
"""Tables and manifest of some of a node's devices."""


def apart(tables: Mapping[str, pa.Table], manifest: Mapping[str, Any], facts: Mapping[str, Any]) -> tuple[_Part, _Part]:
    """Splits tables and manifest of a sampler by a recording's facts: devices that count with the host, and others."""
    every, counted = set(manifest.get("devices", {})), (facts.get("devices") or {}).get("counted")
    others = every - {HOST, *map(str, counted)} if isinstance(counted, list) else set[str]()
    if not others:
        return (dict(tables), dict(manifest)), ({}, {})
    return of_devices(tables, manifest, every - others), of_devices(tables, manifest, others)
