"""Sweeps of collectives and kernels: starts one rank for each device of this node, follows them, keeps the table.

torchrun starts and ends the ranks (`wattune.workers.link_load`). Rank 0 writes each result at once; whatever ends the
ranks, the table holds what was measured until then.
"""

import contextlib
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import pyarrow as pa

from wattune.calibration.run import NVML, CalibrationListener
from wattune.cost.sweep import ROWS, TABLE, read_rows
from wattune.errors import SensorChoiceError, TelemetryError
from wattune.fitting.store import LINKS
from wattune.storage.files import make_folder, require_writable, storage_path, write_table
from wattune.telemetry.registry import load_backend

CPU: Final = "cpu"

CPU_RANKS: Final = 2
"""Ranks of a sweep on processors."""

GRACE_S: Final = 8.0
"""From the end of the time to the end of the ranks: a case in hand, and closing of communicators."""
END_S: Final = 10.0
"""Longest that torchrun takes to end its ranks when it is told to."""

_INTERRUPTED: Final = "it was interrupted"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """Result of a sweep."""

    path: Path
    table: pa.Table
    """Rows of `wattune.cost.sweep.COLUMNS`."""
    ended: str
    """The reason it ended before all cases were measured; empty where all were."""
    interrupted: bool = False
    """True where Ctrl-C ended it."""


def calibrate_links(
    backend: str,
    *,
    storage: str | None = None,
    out: str | None = None,
    minutes: float = 5.0,
    options: Sequence[str] = (),
    listener: CalibrationListener = lambda _what, _used_frac: None,
) -> Sweep:
    """Measures collectives and kernels on all devices of this node, and keeps the table for `fit`.

    Ctrl-C, or anything else that ends it, keeps what was measured. Raises `PlanError`: nothing can be written there,
    `SensorChoiceError`: the backend has no collectives, `TelemetryError`: there are no devices, or nothing was
    measured; the ranks' last words are in the message.

    Args:
        backend: `nvml` for GPUs, or `cpu` for processors and gloo.
        storage: The place that `fit` looks in; the table goes to its folder `links`.
        out: Another folder for the table, in which it is replaced.
        minutes: Longest time, with the start of the ranks: one for each device, or `CPU_RANKS`.
        options: Further ones of `wattune.workers.link_load`.
        listener: Called with the case that runs and the share of the time that is used, in [0, 1].
    """
    folder = Path(out) if out else storage_path(storage) / LINKS / datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
    require_writable(folder)
    if backend not in (NVML, CPU):
        raise SensorChoiceError(f'links of backend "{backend}" cannot be measured; use --backend {NVML} or {CPU}')
    start_s = time.monotonic()
    seconds = minutes * 60
    count = CPU_RANKS if backend == CPU else _num_devices()
    make_folder(folder)
    with tempfile.TemporaryDirectory(prefix="wattune-links-") as place:
        own = Path(place)
        log_path = own / "log"
        deadline_s = start_s + seconds
        command = _command(own, backend, count, deadline_s, options)
        with log_path.open("w") as log:
            process = subprocess.Popen(
                command,
                stdout=subprocess.PIPE,
                stderr=log,
                env=_environment(),
                start_new_session=True,  # Ctrl-C reaches the ranks through this process, which ends them in order
            )
            last = ""
            try:
                last = _follow(process, start_s, seconds, listener)
                ended = ""
            except KeyboardInterrupt:
                ended = _INTERRUPTED
            finally:
                with contextlib.suppress(KeyboardInterrupt):
                    _end(process)
        if not ended and "; " in last:
            ended = last.split("; ", 1)[1]
        if not ended and not last.startswith("done"):
            ended = f"the ranks ended with exit code {process.returncode}, at: {last}"
        found = read_rows((own / ROWS).read_text() if (own / ROWS).exists() else "")
        if not found.num_rows:
            words = log_path.read_text(errors="replace").splitlines()[-6:]
            text = "\n".join(f"  {line}" for line in words) or "  they wrote nothing"
            raise TelemetryError(f"nothing was measured: {ended or 'no case fits'}; the ranks said last:\n{text}")
        write_table(folder / TABLE, found)
        if process.returncode:
            shutil.copy(log_path, folder / "links.log")
    return Sweep(path=folder / TABLE, table=found, ended=ended, interrupted=ended == _INTERRUPTED)


def _num_devices() -> int:
    sensors = load_backend(NVML)
    try:
        count = len(sensors.devices())
    finally:
        sensors.close()
    if not count:
        raise TelemetryError(f"backend {NVML} shows no device; see wattune doctor, or try --backend {CPU}")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return count if visible is None else len([one for one in visible.split(",") if one])


def _command(folder: Path, backend: str, count: int, deadline_s: float, options: Sequence[str]) -> list[str]:
    torchrun = [sys.executable, "-P", "-m", "torch.distributed.run", "--standalone", "--nnodes", "1"]
    torchrun += ["--local-addr", "127.0.0.1"]  # the host's own name may not resolve
    torchrun += ["--nproc-per-node", str(count), "--max-restarts", "0", "-m", "wattune.workers.link_load"]
    device = "cpu" if backend == CPU else "cuda"
    return [*torchrun, str(folder), "--device", device, "--until-mono-s", str(deadline_s), *options]


def _environment() -> dict[str, str]:
    """Returns the environment of the ranks: one node needs no network, and no rank takes all processors."""
    own = {"GLOO_SOCKET_IFNAME": "lo"} if Path("/sys/class/net/lo").exists() else {}
    return {**own, "OMP_NUM_THREADS": "1", "PYTHONSAFEPATH": "1", **os.environ}


def _follow(process: "subprocess.Popen[bytes]", start_s: float, seconds: float, listener: CalibrationListener) -> str:
    """Passes progress on until the ranks end or their time and the grace are over. Returns their last line."""
    assert process.stdout is not None, "a pipe was asked for"
    last, rest = "starting", b""
    while (used_s := time.monotonic() - start_s) < seconds + GRACE_S:
        listener(last, min(used_s / seconds, 1.0))
        ready, _, _ = select.select([process.stdout], [], [], 0.5)
        if not ready:
            continue
        if not (chunk := os.read(process.stdout.fileno(), 65536)):
            process.wait(END_S)
            return last
        *lines, rest = (rest + chunk).split(b"\n")
        last = lines[-1].decode(errors="replace") if lines else last
    return f"{last}; the ranks did not end in time"


def _end(process: "subprocess.Popen[bytes]") -> None:
    """Ends torchrun and its ranks: asks, and kills what does not go."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(END_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # the group is our own, also where torchrun died before its ranks
    process.wait()
    if process.stdout is not None:
        process.stdout.close()
