"""The protocol of a sensor backend. A backend reads sensors; it does not pace reads or judge readings."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final, Protocol, runtime_checkable

import pyarrow as pa

from wattune.arrays import Ints

Row = Mapping[str, int | float | str | None]
"""Values by the columns of the tier's table in `wattune.schema.TELEMETRY`, without node, device and times.

A column the device does not have is left out; a read that failed is None, and `<column>_error` then holds the vendor's
code for it as text.
"""

ERROR_SUFFIX: Final = "_error"

AVAILABLE: Final = "available"
"""Value of a column in `Backend.capabilities` that can be read. Others are `unavailable: ` and the reason."""


def read_columns(
    readers: Mapping[str, Callable[[], int | float | str | None]],
    failures: tuple[type[Exception], ...],
    code: Callable[[Exception], str] = str,
) -> Row:
    """Reads one row: a column whose reader raises one of `failures` is None, with the failure's code beside it."""
    row: dict[str, int | float | str | None] = {}
    for column, read in readers.items():
        try:
            row[column] = read()
        except failures as failed:
            row[column] = None
            row[f"{column}{ERROR_SUFFIX}"] = code(failed)
    return row


def taken_ns(tier: str, rows: pa.Table) -> Ints:
    """Times of the values on the monotonic clock; a ring sample was taken before its row was read."""
    mono_ns: Ints = rows["mono_ns"].to_numpy()
    if tier != "ring":
        return mono_ns
    age_ns: Ints = rows["wall_ns"].to_numpy() - rows["sensor_ns"].to_numpy()
    return mono_ns - age_ns


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceInfo:
    """Facts known of a device before it is read; None where it has no such thing or cannot be asked."""

    device: str
    """The name telemetry rows and spans carry, unique on its node, such as `gpu0` or `host`."""
    name: str
    """The product's name, as its driver gives it."""
    uuid: str | None = None
    """The device's own identity, the same in every container and after every restart."""
    slot: int | None = None
    """Position in the chassis: devices in order of bus address."""
    driver: str | None = None
    power_limit_w: float | None = None
    """The enforced limit at the start."""
    sm_clock_max_mhz: float | None = None
    power_domain: str | None = None
    """Devices that share one power reading share this name."""
    power_from_energy_counter: bool | None = None
    """True where the power series is the energy counter's own rise: the two cannot check each other."""
    nic_link_bytes_per_s: float | None = None
    """Of a host: what its network ports that are up carry together in one direction, by their links' rated speed."""

    def to_json(self) -> dict[str, str | int | float]:
        """Plain data for the manifest; what is unknown is not in it."""
        return {key: value for key, value in asdict(self).items() if value is not None}


class Backend(Protocol):
    """The sensors of one kind on this node, read by one thread.

    A sensor that fails is data (see `Row`), so `read` raises nothing for it. Vendor units end here: rows are in the
    units their columns name. Calls that block belong in no `read`.
    """

    @property
    def simulated(self) -> bool:
        """True where its values are computed and not measured."""
        ...

    def devices(self) -> Sequence[DeviceInfo]:
        """The devices it reads; the same for its whole life."""
        ...

    def capabilities(self, device: str) -> Mapping[str, Mapping[str, str]]:
        """Returns the tiers of a device of `devices`, and for every column whether it can be read.

        Tier to column to `AVAILABLE` or `unavailable: ` with the reason, such as `unavailable: permission`.
        """
        ...

    def read(self, device: str, tier: str) -> Sequence[Row]:
        """Reads one tier of the device's `capabilities` now.

        Returns one row; for `ring` one for every sample the driver recorded since the last read, perhaps none.
        """
        ...

    def close(self) -> None:
        """Gives the sensors back; may be called twice."""
        ...


OTHER_PROCESSES: Final = "other_processes"
"""Key in `FactsProvider.facts` of the processes on a device that are not the sampler."""


@runtime_checkable
class FactsProvider(Protocol):
    """A backend that also knows facts no column holds. A backend need not be one.

    It is asked when a recording begins and when it ends, so these calls may block. Where a recording looks who uses its
    devices, one device is asked at every batch of rows too.
    """

    def facts(self, device: str) -> Mapping[str, Any]:
        """Returns facts of this moment as plain data for the manifest; as in `read`, a failing sensor raises nothing.

        `OTHER_PROCESSES`, left out where it is not known, is a list with one mapping for every other process on the
        device: `pid`, and `memory_used_bytes` where known.
        """
        ...
