"""Sensors of a recording: the backends of this machine, and sensors simulated from the host's activity."""

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from wattune.catalog.hardware import device
from wattune.simulation.activity import DeviceActivity, Part, seconds_of
from wattune.simulation.device_model import CELL_S, device_model
from wattune.simulation.sensors import BACKEND as SIMULATED
from wattune.simulation.sensors import simulate_node
from wattune.telemetry.probe import probe
from wattune.telemetry.registry import BACKENDS, split_backend
from wattune.units import s_to_ns

HOST: Final = "host"
"""The backend, tier and device of the machine itself."""

SIMULATED_DEVICE: Final = "h200_sxm"
"""Device of the catalog that `simulated` means where it names none."""


def default_backends() -> list[str]:
    """The host, and every backend whose devices are on this machine."""
    return [HOST, *(name for name, is_there, *_ in probe() if is_there and name in BACKENDS)]


def split_simulated(backends: Sequence[str]) -> tuple[list[str], str | None]:
    """Splits backends into those a sampler reads, and the device to simulate where `simulated[:DEVICE]` is asked for.

    Raises `SensorChoiceError` where a backend does not exist or cannot be used as written, or the device cannot be
    simulated. Raises `PlanError` where the catalog has no such device.
    """
    sampled: list[str] = []
    simulated = None
    for text in backends:
        name, _, argument = text.partition(":")
        if name == SIMULATED:
            simulated = argument or SIMULATED_DEVICE
            device_model(device(simulated))
        else:
            split_backend(text)
            sampled.append(text)
    if simulated is not None and HOST not in sampled:
        sampled.append(HOST)
    return sampled, simulated


def simulate_from_host(name: str, node: str, host: pa.Table) -> tuple[dict[str, pa.Table], dict[str, Any]]:
    """Sensors of one device of the catalog, as busy with matrix products as the machine's processors were.

    A reading of the host is the mean since the one before. In every cell of the model the device works for that share
    of it: half-busy processors give half the work at every moment, and no square wave.

    Returns tables and manifest as `wattune.simulation.sensors.simulate_node` does; nothing where the processors'
    activity was read less than twice.
    """
    host = host.filter(pc.is_valid(host["cpu_busy_frac"]))
    if host.num_rows < 2:
        return {}, {}
    read_ns, busy_frac = host["mono_ns"].to_numpy(), host["cpu_busy_frac"].to_numpy().astype(np.float64)
    first_ns, last_ns = int(read_ns[0]), int(read_ns[-1])
    start_ns = np.arange(first_ns, last_ns, s_to_ns(CELL_S), dtype=np.int64)
    reading = np.searchsorted(read_ns, start_ns, side="right")
    work = Part(
        start_ns=start_ns,
        end_ns=start_ns + (busy_frac[reading] * s_to_ns(CELL_S)).astype(np.int64),
        shares=seconds_of("tensor", 1.0),
    )
    activity = DeviceActivity(device="gpu0", steps=None, phases=(work,))
    return simulate_node(
        device_model(device(name)),
        node,
        [activity],
        wall_minus_mono_ns=host["wall_ns"][0].as_py() - first_ns,
        first_ns=first_ns,
        last_ns=last_ns,
        seed=0,
    )
