"""The host backend: CPU, memory, network, RAPL power, temperature and pressure, from procfs and sysfs alone.

Everything is machine-wide, also inside a container: the kernel shows one `/proc/stat` to all. Sources: Linux
Documentation/filesystems/proc.rst, ABI/stable/sysfs-class-infiniband, power/powercap/powercap.rst,
hwmon/sysfs-interface.rst, accounting/psi.rst.
"""

import errno
import re
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Final, TypeVar

from wattune.errors import TelemetryError
from wattune.telemetry.backend import AVAILABLE, DeviceInfo, Row, read_columns
from wattune.units import kib_to_bytes, mc_to_c, ns_to_s, uj_to_j, us_to_s

HOST: Final = "host"
"""The one device's name and its tier's."""

_IDLE_FIELDS: Final = (3, 4)
"""Positions of idle and iowait in a `cpu` line (proc.rst 1.7): the processor does nothing in either."""
_TIME_FIELDS: Final = 8
"""Fields that add up to all time; guest and guest_nice after them are counted in user and nice already."""
_INFINIBAND_TYPE: Final = "32"
"""ARPHRD_INFINIBAND of if_arp.h, as `/sys/class/net/*/type` gives it."""
_INFINIBAND_WORD_BYTES: Final = 4
"""`port_xmit_data` and `port_rcv_data` count double words (ABI/stable/sysfs-class-infiniband)."""
_CPU_SENSORS: Final = {"coretemp": "Package ", "k10temp": "Tdie|Tccd"}
"""Labels of temperatures worth reading, by the processor's hwmon chip: to read every core costs an interrupt on each
(hwmon/coretemp.rst), and `Tctl` is on a scale of its own (hwmon/k10temp.rst)."""
_STALLED: Final = re.compile(r"^some .*\btotal=(\d+)$", re.MULTILINE)
_MACHINE_NAMESPACE: Final = uuid.UUID("6f2c2a0e-8a43-4c0d-9d0f-5b7f6f3f7f10")
"""Makes a public identity of the machine-id, which machine-id(5) asks to keep confidential."""
_UNREAD: Final = (OSError, ValueError, KeyError, IndexError)
"""Raised where a file cannot be read, or holds something else than the kernel's documents say."""


def _code(error: Exception) -> str:
    """Returns the code a failed read leaves in its row: the kernel's name of the error, or `unparsable`."""
    number = error.errno if isinstance(error, OSError) else None
    return errno.errorcode.get(number, str(number)) if number is not None else "unparsable"


def _read_int(path: Path) -> int:
    return int(path.read_text())


_Told = TypeVar("_Told")


def _since(read: Callable[[], _Told], change: Callable[[_Told, _Told], float | None]) -> Callable[[], float | None]:
    """Returns a reader of what counters did since they were read before, at first since now; None after a failure."""
    last: _Told | None = read()

    def reader() -> float | None:
        nonlocal last
        before, last = last, None
        last = read()
        return None if before is None else change(before, last)

    return reader


def _rapl(sysfs: Path, kind: str, clock_ns: Callable[[], int]) -> Callable[[], float | None]:
    """Returns the reader of the power of the RAPL zones of a kind, `package` or `dram`, one a socket or die.

    The `intel-rapl-mmio` zones are left out: they are the same packages through another door. Raises
    `PermissionError`: only root may read them (since CVE-2020-8694).
    """
    name = rf"{kind}(-\d+(-die-\d+)?)?"
    counters = [  # each with the microjoules after which it wraps to 0
        (folder / "energy_uj", _read_int(folder / "max_energy_range_uj"))
        for folder in sorted((sysfs / "class/powercap").glob("intel-rapl:*"))
        if re.fullmatch(name, (folder / "name").read_text().strip())
    ]
    if not counters:
        raise TelemetryError(f"no RAPL {kind} zone")

    def power_w(before: tuple[int, list[int]], now: tuple[int, list[int]]) -> float | None:
        """Returns watts over all zones; None where a counter stood still, which is a missing reading and not 0 W."""
        rises_uj = [
            ends_uj - begins_uj + (range_uj if ends_uj < begins_uj else 0)
            for (_, range_uj), begins_uj, ends_uj in zip(counters, before[1], now[1], strict=True)
        ]
        return uj_to_j(sum(rises_uj)) / ns_to_s(now[0] - before[0]) if all(rises_uj) and now[0] > before[0] else None

    return _since(lambda: (clock_ns(), [_read_int(counter) for counter, _ in counters]), power_w)


def _jiffies(path: Path) -> tuple[int, int]:
    """Reads idle time and all time of all processors, in ticks of the kernel."""
    with open(path) as file:
        fields = [int(field) for field in file.readline().split()[1 : 1 + _TIME_FIELDS]]
    return sum(fields[position] for position in _IDLE_FIELDS), sum(fields)


def _busy_frac(before: tuple[int, int], now: tuple[int, int]) -> float | None:
    """Returns the share of all processors' time that was not idle; None where less than one tick passed."""
    idle, total = now[0] - before[0], now[1] - before[1]
    # iowait may run backwards (proc.rst), so the quotient may leave [0, 1] by a tick.
    return None if total <= 0 else min(1.0, max(0.0, 1 - idle / total))


def _stalled(path: Path, clock_ns: Callable[[], int]) -> tuple[int, int]:
    """Reads the time, and the microseconds in which some task waited for a resource (psi.rst)."""
    found = _STALLED.search(path.read_text())
    if found is None:
        raise ValueError(f"{path} has no total")
    return clock_ns(), int(found[1])


def _stalled_frac(before: tuple[int, int], now: tuple[int, int]) -> float | None:
    """Returns the share of time in which some task waited."""
    # The kernel weighs its processors' clocks into one (kernel/sched/psi.c), which need not agree with ours.
    waited_s, passed_ns = us_to_s(max(0, now[1] - before[1])), now[0] - before[0]
    return None if passed_ns <= 0 else min(1.0, waited_s / ns_to_s(passed_ns))


def _memory_used_bytes(path: Path) -> int:
    """Returns memory that is not available to a new program; page cache that can be dropped does not count as used."""
    fields = dict(line.split(":", 1) for line in path.read_text().splitlines())
    total_kib, available_kib = (int(fields[name].split()[0]) for name in ("MemTotal", "MemAvailable"))
    return kib_to_bytes(total_kib - available_kib)


def _port_counters(sysfs: Path, direction: str) -> list[tuple[Path, int]]:
    """Files that count bytes through the machine's own ports, each with the bytes of one count.

    Bridges, tunnels and bonds are left out, since their traffic is counted again below them, and so are IPoIB
    interfaces, which miss RDMA, where the InfiniBand port's own counter has all of it.
    """
    netdev, infiniband = {"tx": ("tx_bytes", "port_xmit_data"), "rx": ("rx_bytes", "port_rcv_data")}[direction]
    counters = [
        (folder / "statistics" / netdev, 1)
        for folder in sorted((sysfs / "class/net").glob("*"))
        if (folder / "device").exists() and (folder / "type").read_text().strip() != _INFINIBAND_TYPE
    ]
    counters += [
        (path, _INFINIBAND_WORD_BYTES)
        for path in sorted((sysfs / "class/infiniband").glob(f"*/ports/*/counters/{infiniband}"))
    ]
    return counters


def _ports_bytes_per_s(sysfs: Path) -> float | None:
    """Adds up the agreed link speeds of the ports of `_port_counters` that are up, in one direction.

    A port that is both network interface and RDMA port (RoCE) is one link and counts once.

    None where no port is up, or one does not say its speed, as virtual ones do not.
    """
    links: dict[tuple[Path, int], float] = {}
    for counter, _ in _port_counters(sysfs, "tx"):
        port = counter.parent.parent
        try:
            if "infiniband" in counter.parts:
                # "4: ACTIVE", and "400 Gb/sec (4X NDR)" (ABI/stable/sysfs-class-infiniband).
                link = (port.parent.parent / "device").resolve(), int(port.name)
                is_up = (port / "state").read_text().split(":")[-1].strip() == "ACTIVE"
                bits_per_s = float((port / "rate").read_text().split()[0]) * 1e9 if is_up else 0.0
            else:
                # Megabits a second, -1 where unknown; ports of one adapter from 0 on (ABI/testing/sysfs-class-net).
                number = port / "dev_port"
                link = (port / "device").resolve(), (_read_int(number) if number.exists() else 0) + 1
                is_up = (port / "operstate").read_text().strip() == "up"
                bits_per_s = _read_int(port / "speed") * 1e6 if is_up else 0.0
        except (OSError, ValueError, IndexError):
            return None
        if bits_per_s < 0:
            return None
        links[link] = max(links.get(link, 0.0), bits_per_s / 8)
    return sum(links.values()) or None


def _nic(sysfs: Path, direction: str) -> Callable[[], int]:
    """Returns the reader of the bytes of all ports in a direction."""
    counters = _port_counters(sysfs, direction)
    if not counters:
        raise TelemetryError("no physical network port")
    return lambda: sum(_read_int(path) * scale for path, scale in counters)


def _temperature(sysfs: Path) -> Callable[[], float]:
    """Returns the reader of the highest of the processors' temperatures."""
    thermometers: list[Path] = []
    for chip in sorted((sysfs / "class/hwmon").glob("hwmon*")):
        pattern = _CPU_SENSORS.get((chip / "name").read_text().strip())
        if pattern is None:
            continue
        every = sorted(chip.glob("temp*_input"))
        labels = {path: path.with_name(path.name.replace("_input", "_label")) for path in every}
        chosen = [path for path in every if labels[path].exists() and re.match(pattern, labels[path].read_text())]
        thermometers += chosen or every
    if not thermometers:
        raise TelemetryError(f"no hwmon chip named {' or '.join(_CPU_SENSORS)}")
    return lambda: mc_to_c(max(map(_read_int, thermometers)))


class HostBackend:
    """This machine as one device, `host`. Fractions and powers are means since the previous read."""

    simulated: Final = False

    def __init__(
        self,
        procfs: Path = Path("/proc"),
        sysfs: Path = Path("/sys"),
        machine_id: Path = Path("/etc/machine-id"),
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        """Finds what there is to read, and reads the counters once, as the start of the first difference."""
        self._procfs, self._sysfs, self._machine_id = procfs, sysfs, machine_id
        self._readers: dict[str, Callable[[], float | int | None]] = {}
        self._capabilities: dict[str, str] = {}
        self._offer("cpu_busy_frac", lambda: _since(partial(_jiffies, procfs / "stat"), _busy_frac))
        for kind in ("package", "dram"):
            self._offer(f"{kind}_power_w", partial(_rapl, sysfs, kind, clock_ns))
        self._offer("memory_used_bytes", lambda: partial(_memory_used_bytes, procfs / "meminfo"))
        for direction in ("tx", "rx"):
            self._offer(f"nic_{direction}_bytes", partial(_nic, sysfs, direction))
        self._offer("cpu_temp_max_c", partial(_temperature, sysfs))
        for resource in ("cpu", "memory", "io"):
            told = partial(_stalled, procfs / "pressure" / resource, clock_ns)
            self._offer(f"psi_{resource}_some_frac", partial(_since, told, _stalled_frac))
        self._capabilities["node_power_w"] = "unavailable: told by a chassis or a PDU, whose logs wattune import reads"

    def _offer(self, column: str, open_reader: Callable[[], Callable[[], float | int | None]]) -> None:
        """Keeps a column's reader, which is asked once, or why there is none."""
        try:
            reader = open_reader()
            reader()
            self._readers[column], self._capabilities[column] = reader, AVAILABLE
        except TelemetryError as absent:
            self._capabilities[column] = f"unavailable: {absent}"
        except PermissionError:
            self._capabilities[column] = "unavailable: permission"
        except _UNREAD as error:
            self._capabilities[column] = f"unavailable: {_code(error)}"

    def devices(self) -> Sequence[DeviceInfo]:
        """The one device."""
        model = re.search(r"^model name\s*:\s*(.+)$", self._text(self._procfs / "cpuinfo") or "", re.MULTILINE)
        machine_id = self._text(self._machine_id)
        try:
            link_bytes_per_s = _ports_bytes_per_s(self._sysfs)
        except OSError:
            link_bytes_per_s = None  # the counters' own capability says why
        return [
            DeviceInfo(
                device=HOST,
                name=model[1] if model else "unknown processor",
                uuid=str(uuid.uuid5(_MACHINE_NAMESPACE, machine_id)) if machine_id else None,
                driver=self._text(self._procfs / "sys/kernel/osrelease"),
                power_domain=HOST,
                nic_link_bytes_per_s=link_bytes_per_s,
            )
        ]

    @staticmethod
    def _text(path: Path) -> str | None:
        try:
            return path.read_text().strip() or None
        except OSError:
            return None

    def capabilities(self, device: str) -> Mapping[str, Mapping[str, str]]:
        """The tier `host` and its columns."""
        assert device == HOST, device
        return {HOST: self._capabilities}

    def read(self, device: str, tier: str) -> Sequence[Row]:
        """One row; a file that cannot be read is None with the kernel's error name beside it."""
        assert (device, tier) == (HOST, HOST), (device, tier)
        return [read_columns(self._readers, _UNREAD, _code)]

    def close(self) -> None:
        """Nothing stays open between reads."""
