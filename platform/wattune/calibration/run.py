"""Calibration: runs loads of known times beside a sampler, and fits the sensors' properties to the recordings.

Three parts for each device, some two minutes together:

- square waves of several periods, read faster than a study reads, give each signal's period, delay, window and gain;
- copies between host and device without pause give the most that their link carries by the device's own counter, of
  which `pcie_of_peak_frac` is a share;
- a load without pause, beside the sampler of a study that is paused and resumed in turns, gives the cost of sampling.

No Ray is used; loads are processes of `wattune.workers.calibration_load`.
"""

import contextlib
import os
import platform
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import psutil
import pyarrow as pa
import pyarrow.parquet as pq

from wattune.arrays import Floats
from wattune.calibration.fit import CONFIDENCE_FRAC, fit, fit_link, fit_overhead
from wattune.catalog.hardware import device as catalog_device
from wattune.errors import SensorChoiceError, TelemetryError
from wattune.simulation.activity import DeviceActivity, Part, seconds_of
from wattune.simulation.device_model import device_model
from wattune.simulation.sensors import BACKEND as SIMULATED
from wattune.simulation.sensors import simulate_node
from wattune.storage.files import CALIBRATIONS, require_writable, storage_path, write_calibration
from wattune.telemetry.backend import DeviceInfo
from wattune.telemetry.files.segments import read_tables
from wattune.telemetry.registry import load_backend
from wattune.telemetry.sampler.process import SamplerProcess
from wattune.units import NS_PER_S, s_to_ns

NVML: Final = "nvml"

SIMULATED_DEVICE: Final = "h200_sxm"
"""The device whose sensors are simulated: the one its model was fitted to."""

FAST_HZ: Final = 50.0
SLOW_HZ: Final = 20.0
"""Reads a second while waves run, five and two of them for each refresh of an H200's instant and average power; `slow`
reads take some 10 ms each, so they are shared out among devices."""

REST_S: Final = 2.0
"""Idle time `wattune.workers.calibration_load` leaves around each wave."""
WARM_S: Final = 3.0
"""Steady load before the first block: the power limit has set in (it acts within 1 s on H200)."""
SETTLE_S: Final = 0.05
"""Left out of a block's beginning, where the sampler is just being paused or resumed."""
LAST_DRAIN_S: Final = 1.5
"""From the load's end to the sampler's: the ring is drained once a second."""
START_TIMEOUT_S: Final = 180.0
_POLL_S: Final = 0.5

CalibrationListener = Callable[[str, float], None]
"""Called about twice a second with the part that runs, and the share of everything that is done, in [0, 1]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Protocol:
    """Lengths of the parts of a calibration."""

    waves: tuple[tuple[float, int], ...] = ((0.2, 40), (0.5, 16), (1.0, 8), (2.0, 4), (4.0, 3))
    """Period in seconds and number of periods of each wave."""
    copies_s: float = 5.0
    """Length of the copies."""
    num_pairs: int = 16
    """Pairs of blocks, one with and one without sampler."""
    block_s: float = 2.0

    @property
    def waves_s(self) -> float:
        """Returns the length of all waves."""
        return REST_S + sum(period_s * count + REST_S for period_s, count in self.waves)

    @property
    def blocks_s(self) -> float:
        """Returns the length of all blocks."""
        return 2 * self.num_pairs * self.block_s


@dataclass(frozen=True, slots=True)
class _Bench:
    """One device to calibrate, and the means to do so."""

    backend: str
    info: DeviceInfo
    num_devices: int
    node: str
    folder: Path
    protocol: Protocol
    report: CalibrationListener

    @property
    def simulated(self) -> bool:
        return self.backend == SIMULATED

    @property
    def sampled(self) -> list[str]:
        """The backends of its sampler. Simulated sensors are computed afterwards; the host's are real everywhere."""
        return ["host"] if self.simulated else [self.backend, "host"]


def calibrate(
    backend: str,
    *,
    storage: str | None = None,
    protocol: Protocol | None = None,
    listener: CalibrationListener = lambda _what, _done_frac: None,
) -> list[tuple[Path, dict[str, Any]]]:
    """Calibrates every device of a backend, about two minutes each, and keeps what was found for later studies.

    One after another; nothing else should use them meanwhile. Returns for each device the file that was written, and
    its content. Raises `PlanError`: nothing can be written in the storage, `TelemetryError`: there are no such sensors
    or devices here, the load or the sampler failed, or too little was recorded.

    Args:
        backend: `nvml`, or `simulated`: a load on this processor, and the sensors of an H200 computed from it.
        storage: Folder it is kept in, under `calibration`; see `wattune.storage.files.find_storage`.
        protocol: The loads; None is the usual ones.
        listener: Called with what is going on and the share of it all that is done.
    """
    kept_in = storage_path(storage)
    require_writable(kept_in / CALIBRATIONS)  # said now, not after minutes of load
    infos = find_devices(backend)
    documents = []
    for index, info in enumerate(infos):
        report = partial(_report, listener, info.device, index, len(infos))
        with tempfile.TemporaryDirectory(prefix="wattune-calibrate-") as folder:
            bench = _Bench(backend, info, len(infos), platform.node(), Path(folder), protocol or Protocol(), report)
            documents.append(_calibrate(bench))
    return [(write_calibration(kept_in, one), one) for one in documents]


def _report(
    listener: CalibrationListener, device: str, index: int, num_devices: int, what: str, done_frac: float
) -> None:
    listener(f"{device}: {what}", (index + done_frac) / num_devices)


def find_devices(backend: str) -> list[DeviceInfo]:
    """The backend's devices with power sensors and a uuid: calibrations are kept by it.

    Raises `SensorChoiceError` where no such backend can be calibrated. Raises `TelemetryError` where there are no such
    sensors or devices, or no load is known to run on them.
    """
    if backend not in (NVML, SIMULATED):
        raise SensorChoiceError(
            f'backend "{backend}" cannot be calibrated; use --backend {NVML}, or --backend {SIMULATED} on any machine'
        )
    if backend == SIMULATED:
        uuid = f"simulated-{platform.node()}-gpu0"  # what simulated studies on this node call it, too
        return [DeviceInfo(device="gpu0", name=f"simulated {SIMULATED_DEVICE}", uuid=uuid)]
    sensors = load_backend(backend)
    try:
        found = [one for one in sensors.devices() if one.uuid and "fast" in sensors.capabilities(one.device)]
    finally:
        sensors.close()
    if not found:
        raise TelemetryError(
            f"backend {backend} shows no device whose power can be read; see wattune doctor, or try {SIMULATED}"
        )
    return found


def _calibrate(bench: _Bench) -> dict[str, Any]:
    wall_ns = time.time_ns()
    spans, tables, versions = _record_waves(bench)
    seen = fit(tables, bench.info.device, spans, bench.protocol.waves)
    pcie_bytes_per_s = None if bench.simulated else _record_copies(bench)
    overhead, cpu_frac = measure_overhead(
        bench.sampled, bench.info, bench.folder, bench.protocol, simulated=bench.simulated, report=bench.report
    )
    return {
        **bench.info.to_json(),
        "backend": bench.backend,
        "simulated": bench.simulated,
        "wall_ns": wall_ns,
        "versions": versions,
        **seen,
        "link_peaks": {} if pcie_bytes_per_s is None else {"pcie": pcie_bytes_per_s},
        "overhead": {
            **overhead,
            "confidence_frac": CONFIDENCE_FRAC,
            "backends": bench.sampled,
            "sampler_cpu_frac": cpu_frac,
        },
    }


def _record_waves(bench: _Bench) -> tuple[pa.Table, Mapping[str, pa.Table], dict[str, Any]]:
    """Spans and telemetry of all waves, and the versions behind them."""
    rates_hz = {"fast": FAST_HZ, "slow": SLOW_HZ / bench.num_devices} if not bench.simulated else {}
    waves = [str(part) for wave in bench.protocol.waves for part in ("--wave", *wave)]
    spans_path = bench.folder / "waves.parquet"
    with (
        sampling(bench.folder / "waves", bench.node, bench.sampled, rates_hz) as sampler,
        load(bench.info, bench.node, spans_path, waves, sampler.renew, simulated=bench.simulated) as process,
    ):
        for elapsed_s in _until_done(process, sampler):
            bench.report("square waves", min(elapsed_s / bench.protocol.waves_s, 1.0) / 2)
        _check(process, spans_path)
        time.sleep(LAST_DRAIN_S)
        versions: dict[str, Any] = sampler.stop()["versions"]
    spans = pq.read_table(spans_path)
    tables = _simulated(spans, bench) if bench.simulated else read_tables(bench.folder / "waves")[0]
    return spans, tables, versions


def _record_copies(bench: _Bench) -> float | None:
    """Measures the most PCIe carries in its busier direction, bytes a second; None where the device counts none."""
    spans_path = bench.folder / "copies.parquet"
    with (
        sampling(bench.folder / "copies", bench.node, bench.sampled, {}) as sampler,
        load(bench.info, bench.node, spans_path, ["--copies", f"{bench.protocol.copies_s}"], sampler.renew) as process,
    ):
        for _ in _until_done(process, sampler):
            bench.report("copies between host and device", 0.5)
        _check(process, spans_path)
    tables, _ = read_tables(bench.folder / "copies")
    return fit_link(tables, bench.info.device, ("pcie_tx_bytes", "pcie_rx_bytes"), pq.read_table(spans_path))


def _until_done(process: "subprocess.Popen[str]", sampler: SamplerProcess) -> Iterator[float]:
    """Seconds so far, about twice a second while a load runs; the sampler's lease is renewed meanwhile."""
    start_s = time.monotonic()
    while process.poll() is None:
        sampler.renew()
        yield time.monotonic() - start_s
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_POLL_S)


def _simulated(spans: pa.Table, bench: _Bench) -> Mapping[str, pa.Table]:
    start_ns, end_ns = (spans[f"{edge}_mono_ns"].to_numpy() for edge in ("start", "end"))
    part = Part(start_ns=start_ns, end_ns=end_ns, shares=seconds_of("tensor", 1.0))
    activity = DeviceActivity(device=bench.info.device, steps=None, phases=(part,))
    margin_ns = s_to_ns(REST_S + 0.5)
    tables, _ = simulate_node(
        device_model(catalog_device(SIMULATED_DEVICE)),
        bench.node,
        [activity],
        wall_minus_mono_ns=spans["start_wall_ns"][0].as_py() - spans["start_mono_ns"][0].as_py(),
        first_ns=int(start_ns.min()) - margin_ns,
        last_ns=int(end_ns.max()) + margin_ns,
        seed=0,
    )
    return tables


def measure_overhead(
    backends: Sequence[str],
    info: DeviceInfo,
    folder: Path,
    protocol: Protocol,
    *,
    simulated: bool = False,
    report: CalibrationListener = lambda _what, _done_frac: None,
) -> tuple[dict[str, float], float]:
    """Measures the cost of a sampler at its default rates to a steady load and of one processor.

    The sampler is paused by SIGSTOP in every other block, two blocks a pair, their order reversed from pair to pair. A
    paused sampler calls no driver and uses no processor; pausing leaves no start-up in the comparison. Progress goes on
    from one half. Returns the ratio of step times (`fit_overhead`), and the sampler's share of one processor while on.
    Raises `TelemetryError` where the load or the sampler ended early.
    """
    node, spans_path = platform.node(), folder / "steady.parquet"
    seconds = WARM_S + protocol.blocks_s + 1.0
    order = [on for index in range(protocol.num_pairs) for on in ((False, True) if index % 2 == 0 else (True, False))]
    spans_ns = []
    with (
        sampling(folder / "overhead", node, backends, {}) as sampler,
        load(info, node, spans_path, ["--steady", str(seconds)], sampler.renew, simulated=simulated) as process,
        _pausable(sampler) as pausable,
    ):
        time.sleep(WARM_S)
        cpu_s = _cpu_s(pausable)
        first_ns = time.monotonic_ns()
        for index, on in enumerate(order):
            switch = pausable.resume if on else pausable.suspend
            switch()
            start_ns = time.monotonic_ns()
            end_ns = first_ns + s_to_ns((index + 1) * protocol.block_s)
            sampler.renew()
            report("cost of sampling", (1 + index / len(order)) / 2)
            time.sleep(max(0.0, (end_ns - start_ns) / NS_PER_S))
            spans_ns.append((start_ns + s_to_ns(SETTLE_S), end_ns))
        cpu_frac = (_cpu_s(pausable) - cpu_s) / (protocol.blocks_s / 2)
        process.wait(START_TIMEOUT_S)
        _check(process, spans_path)
    step_s = _steps_inside(pq.read_table(spans_path), spans_ns)
    pairs = [
        (second, first) if order[2 * index] else (first, second)
        for index, (first, second) in enumerate(zip(step_s[::2], step_s[1::2], strict=True))
    ]
    return fit_overhead(pairs), cpu_frac


def _steps_inside(spans: pa.Table, spans_ns: Sequence[tuple[int, int]]) -> list[Floats]:
    """The lengths of the steps that lie wholly inside each span."""
    start_ns, end_ns = (spans[f"{edge}_mono_ns"].to_numpy() for edge in ("start", "end"))
    return [
        (end_ns - start_ns)[(start_ns >= first_ns) & (end_ns <= last_ns)] / NS_PER_S for first_ns, last_ns in spans_ns
    ]


@contextlib.contextmanager
def sampling(
    folder: Path, node: str, backends: Sequence[str], rates_hz: Mapping[str, float]
) -> Iterator[SamplerProcess]:
    """A sampler for as long as the body runs."""
    sampler = SamplerProcess.start(folder, node=node, backends=backends, rates_hz=rates_hz)
    try:
        yield sampler
    finally:
        sampler.stop()


@contextlib.contextmanager
def _pausable(sampler: SamplerProcess) -> Iterator[psutil.Process]:
    """The sampler's process, running again in the end: a paused one could not close its files."""
    try:
        process = psutil.Process(sampler.manifest()["sampler"]["pid"])
        try:
            yield process
        finally:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.resume()
    except psutil.NoSuchProcess as error:
        raise TelemetryError(f"the sampler in {sampler.folder} ended while it was measured; see its log") from error


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


@contextlib.contextmanager
def load(
    info: DeviceInfo,
    node: str,
    spans_path: Path,
    options: Sequence[str],
    renew: Callable[[], object],
    *,
    simulated: bool = False,
) -> Iterator["subprocess.Popen[str]"]:
    """A load on a device, warm when the body begins and ended with it.

    Until it is warm `renew` is called twice a second: on a busy machine it loads longer than a sampler's lease lasts.
    The device is found by its uuid, so that CUDA's order and the driver's may differ; `options` are those of `python -m
    wattune.workers.calibration_load`. Raises `TelemetryError` where it ended or hung before it was warm; its last words
    are in the message.
    """
    device = "cpu" if simulated else "cuda:0"
    command = [sys.executable, "-P", "-m", "wattune.workers.calibration_load", str(spans_path), "--node", node]
    command += ["--name", info.device, "--device", device, *options]
    visible = {} if simulated else {"CUDA_VISIBLE_DEVICES": str(info.uuid)}
    with open(_log_path(spans_path), "w+") as log:
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env={**os.environ, **visible},
            start_new_session=True,  # Ctrl-C reaches it through this process, which ends it in order
        )
        try:
            assert process.stdout is not None, "a pipe was asked for"
            end_s, heard = time.monotonic() + START_TIMEOUT_S, list[Any]()
            while not heard and time.monotonic() < end_s:
                renew()
                heard = select.select([process.stdout], [], [], _POLL_S)[0]
            if not heard or process.stdout.readline().strip() != "ready":
                process.kill()
                process.wait()
                raise _failed(process, spans_path)
            yield process
        finally:
            process.terminate()
            process.wait()


def _log_path(spans_path: Path) -> Path:
    return spans_path.with_suffix(".log")


def _check(process: "subprocess.Popen[str]", spans_path: Path) -> None:
    if process.returncode:
        raise _failed(process, spans_path)


def _failed(process: "subprocess.Popen[str]", spans_path: Path) -> TelemetryError:
    words = _log_path(spans_path).read_text(errors="replace").splitlines()[-4:]
    log = "\n".join(f"  {line}" for line in words) or "  it wrote nothing"
    return TelemetryError(f"the load ended with exit code {process.returncode} before it was done:\n{log}")
