"""Holds the NVML backend against the device it reads: run on a machine with an NVIDIA GPU and torch.

    python benchmarks/nvml_check.py [--out FOLDER] [--golden FOLDER]

One pass takes about two minutes on an otherwise idle GPU. The script prints the rows of
benchmarks/results/nvml_check.md, and writes them as JSON with `--out`. It checks

- every column;
- the cost of calls, idle and under load;
- the ring over 60 s of a 0.5 s square wave, sample by sample, against an independent drain in another process that asks
  for what is later than the last sample seen;
- the ring's integral against the energy counter;
- PCIe counters, their wraps and GPM's unit against copies of known size;
- throttle counters against violation status.

`--golden` also records the two traces of tests/golden/h200x1.
"""

import argparse
import contextlib
import json
import multiprocessing
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow.parquet as pq
import pynvml
import torch

from wattune.schema import TELEMETRY
from wattune.storage.measured import MeasuredFolder
from wattune.telemetry.files.segments import read_tables
from wattune.telemetry.nvml import fields
from wattune.telemetry.nvml.backend import NvmlBackend
from wattune.telemetry.sampler.process import SamplerProcess
from wattune.units import NS_PER_S

DEVICE: Final = "gpu0"
TIERS: Final = ("ring", "fast", "counter", "slow")
WAVE_S: Final = 0.5
CONTINUITY_S: Final = 60.0
OTHER_DRAIN_S: Final = 0.7
"""Period of the independent drain: another one than ours, so that both see the ring at different places."""
CLOSEST_NS: Final = 5e6
"""Samples are at least 7 ms apart; the stamps of one sample in two drains are within 0.2 ms."""
COPY_BYTES: Final = 2**30
COPY_S: Final = 3.0

KEPT: Final = ("rows", "achieved_hz", "missed_ticks", "longest_gap_s", "errors")
"""Keys that are shown of each tier in a recording's manifest."""


@contextlib.contextmanager
def load(folder: Path, *arguments: str, seconds: float) -> Iterator[Path]:
    """Runs `wattune.workers.calibration_load` beside the body, warm when the body begins; gives its spans' path."""
    spans = folder / f"spans-{time.monotonic_ns()}.parquet"
    command = [
        sys.executable,
        "-m",
        "wattune.workers.calibration_load",
        str(spans),
        "--node",
        "node0",
        "--name",
        DEVICE,
    ]
    process = subprocess.Popen([*command, "--device", "cuda:0", *arguments], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline().strip() == "ready", "the load did not start"
    try:
        yield spans
        assert process.wait(timeout=seconds + 30) == 0, "the load failed"
    finally:
        process.kill()
        process.wait()


def wave(seconds: float) -> list[str]:
    """Arguments of a square wave of `WAVE_S`."""
    return ["--wave", str(WAVE_S), str(round(seconds / WAVE_S))]


def other_drain(seconds: float, found: "multiprocessing.Queue[list[tuple[int, int]]]") -> None:
    """Drains the ring in a process of its own, by time stamp, and puts what it saw."""
    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByIndex(0)
    seen: list[tuple[int, int]] = []
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s:
        with contextlib.suppress(pynvml.NVMLError_NotFound):
            last_us = seen[-1][0] if seen else 0
            _, samples = pynvml.nvmlDeviceGetSamples(handle, pynvml.NVML_TOTAL_POWER_SAMPLES, last_us)
            seen += [(sample.timeStamp, sample.sampleValue.uiVal) for sample in samples]
        time.sleep(OTHER_DRAIN_S)
    found.put(seen)


def quantiles_ms(call: Callable[[], Any], count: int, pause_s: float = 0.0) -> dict[str, float]:
    """Times a call: median and maximum of `count`, with a pause before each. The first is not counted."""
    call()
    taken_ms = []
    for _ in range(count):
        time.sleep(pause_s)
        start_ns = time.perf_counter_ns()
        call()
        taken_ms.append((time.perf_counter_ns() - start_ns) / 1e6)
    return {"median_ms": float(np.median(taken_ms)), "max_ms": max(taken_ms), "count": count}


def latencies(backend: NvmlBackend, count: int) -> dict[str, Any]:
    """Times every tier and every call behind it."""
    handle = pynvml.nvmlDeviceGetHandleByIndex(0)
    kind = pynvml.NVML_TOTAL_POWER_SAMPLES
    newest_us = pynvml.nvmlDeviceGetSamples(handle, kind, 0)[1][-1].timeStamp

    def field(number: int, scope: int = 0) -> Callable[[], Any]:
        return lambda: pynvml.nvmlDeviceGetFieldValues(handle, [(number, scope)])

    calls: dict[str, Callable[[], Any]] = {
        "GetSamples, whole ring": lambda: pynvml.nvmlDeviceGetSamples(handle, kind, 0),
        "GetSamples, last 20 samples": lambda: pynvml.nvmlDeviceGetSamples(handle, kind, newest_us - 400_000),
        "ClockInfo SM": lambda: pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM),
        "CurrentClocksEventReasons": lambda: pynvml.nvmlDeviceGetCurrentClocksEventReasons(handle),
        "Temperature": lambda: pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU),
        "MarginTemperature": lambda: pynvml.nvmlDeviceGetMarginTemperature(handle),
        "EnforcedPowerLimit": lambda: pynvml.nvmlDeviceGetEnforcedPowerLimit(handle),
        "MemoryInfo v2": lambda: pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2),
    }
    for number in (fields.POWER_INSTANT, fields.POWER_AVERAGE, fields.MEMORY_TEMP, fields.TOTAL_ENERGY, 74, 75):
        calls[f"field {number}"] = field(number)
    for number in (fields.PCIE_TX, fields.PCIE_RX, *fields.NEW_THROTTLE_FIELDS):
        calls[f"field {number}"] = field(number)
    for number in (fields.NVLINK_TX, fields.NVLINK_RX):
        calls[f"field {number}, all links"] = field(number, fields.ALL_LINKS)
        calls[f"field {number}, link 0"] = field(number)
    found: dict[str, Any] = {}
    for name, call in calls.items():
        try:
            found[name] = quantiles_ms(call, count)
        except pynvml.NVMLError as error:
            found[name] = str(error)
    for tier in TIERS:
        # GPM needs 100 ms between samples: read in a row, it would not take any.
        pause_s = 0.11 if tier == "counter" else 0.0
        found[f"read {tier}"] = quantiles_ms(partial(backend.read, DEVICE, tier), count, pause_s)
    return found


def columns(backend: NvmlBackend) -> dict[str, Any]:
    """One row of every tier, and what is not offered."""
    found: dict[str, Any] = {}
    capabilities = backend.capabilities(DEVICE)
    for tier in TIERS:
        time.sleep(0.2)
        row = dict(backend.read(DEVICE, tier)[-1])
        offered = set(TELEMETRY[tier].names) - {"node", "device", "mono_ns", "wall_ns"}
        found[tier] = {name: row.get(name, capabilities[tier][name]) for name in sorted(offered)}
    return found


def energy_ratio(samples: np.ndarray, counter: Sequence[tuple[int, float]]) -> dict[str, float]:
    """The ring's integral over the energy counter, from many readings of it.

    The counter moves every 100 ms, so that two readings alone are 90 J uncertain at 900 W: a straight line through all
    of them is not.

    Args:
        samples: Wall time in nanoseconds and watts, shape (samples, 2).
        counter: Wall time in nanoseconds and joules of every reading.
    """
    origin_ns = samples[0, 0]
    times_s, watts = (samples[:, 0] - origin_ns) / NS_PER_S, samples[:, 1]
    whole_j = np.concatenate([[0.0], np.cumsum(np.diff(times_s) * (watts[1:] + watts[:-1]) / 2)])
    read_s = np.array([(time_ns - origin_ns) / NS_PER_S for time_ns, _ in counter])
    inside = (read_s > times_s[0]) & (read_s < times_s[-1])
    counted_j = np.array([energy_j for _, energy_j in counter])[inside]
    slope, _ = np.polyfit(counted_j - counted_j[0], np.interp(read_s[inside], times_s, whole_j), 1)
    return {"counter_j": float(counted_j[-1] - counted_j[0]), "integral_error_frac": float(slope - 1)}


def continuity(backend: NvmlBackend, folder: Path) -> dict[str, Any]:
    """The ring over a square wave, drained once a second, beside an independent drain and the energy counter."""
    context = multiprocessing.get_context("spawn")
    queue: multiprocessing.Queue[list[tuple[int, int]]] = context.Queue()
    other = context.Process(target=other_drain, args=(CONTINUITY_S, queue))
    ours: list[tuple[int, float]] = []
    counter: list[tuple[int, float]] = []
    with load(folder, *wave(CONTINUITY_S + 2), seconds=CONTINUITY_S):
        other.start()
        end_s = time.monotonic() + CONTINUITY_S
        while time.monotonic() < end_s:
            ours += [(int(row["sensor_ns"] or 0), float(row["power_w"] or 0)) for row in backend.read(DEVICE, "ring")]
            before_ns = time.time_ns()
            row = backend.read(DEVICE, "slow")[0]
            counter.append(((before_ns + time.time_ns()) // 2, float(row["energy_j"] or 0)))
            time.sleep(1.0)
        theirs = queue.get(timeout=30)
        other.join()
    samples, others = np.array(ours), np.array([(time_us * 1000, power_mw / 1000) for time_us, power_mw in theirs])
    # A drain by time stamp gets its last sample once more whenever the driver has moved its stamps meanwhile.
    again = np.concatenate([[False], (np.diff(others[:, 0]) < CLOSEST_NS) & (np.diff(others[:, 1]) == 0)])
    steps_ms = np.diff(samples[:, 0]) / 1e6
    energy = {f"{seconds} s": energy_ratio(samples, counter[2 : 3 + seconds]) for seconds in (10, 20, 50)}
    return {
        "facts": backend.facts(DEVICE)["ring"],
        "samples": len(ours),
        "closer_than_5ms": int((steps_ms * 1e6 < CLOSEST_NS).sum()),
        "independent_samples": len(theirs),
        "independent_repeated": int(again.sum()),
        **agreement(samples, others[~again]),
        "step_ms": {f"p{p}": float(np.percentile(steps_ms, p)) for p in (0, 1, 50, 99, 100)},
        "energy": energy,
    }


def agreement(ours: np.ndarray, others: np.ndarray) -> dict[str, Any]:
    """Compares two lists of samples (nanoseconds, watts) where both have any. Stamps may differ by `CLOSEST_NS`."""
    first, last = max(ours[0, 0], others[0, 0]) - CLOSEST_NS, min(ours[-1, 0], others[-1, 0]) + CLOSEST_NS
    ours, others = (one[(one[:, 0] >= first) & (one[:, 0] <= last)] for one in (ours, others))

    def missing(these: np.ndarray, those: np.ndarray) -> int:
        right = np.clip(np.searchsorted(those[:, 0], these[:, 0]), 1, len(those) - 1)
        nearest = np.where(these[:, 0] - those[right - 1, 0] < those[right, 0] - these[:, 0], right - 1, right)
        found = (abs(those[nearest, 0] - these[:, 0]) < CLOSEST_NS) & (those[nearest, 1] == these[:, 1])
        return int((~found).sum())

    return {
        "common_s": (last - first) / NS_PER_S,
        "common_samples": len(ours),
        "common_independent_samples": len(others),
        "missing_in_ours": missing(others, ours),
        "missing_in_independent": missing(ours, others),
        "peak_20ms_w": float(ours[:, 1].max()),
        "independent_peak_20ms_w": float(others[:, 1].max()),
    }


def ring_age(seconds: float = 3.0) -> dict[str, float]:
    """Measures the age of a sample right after it appears, with the ring read 100 times a second."""
    handle = pynvml.nvmlDeviceGetHandleByIndex(0)
    last_us, ages_ms, sizes = 0, [], []
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s:
        _, samples = pynvml.nvmlDeviceGetSamples(handle, pynvml.NVML_TOTAL_POWER_SAMPLES, 0)
        if last_us and samples[-1].timeStamp != last_us:
            ages_ms.append(time.time_ns() / 1e6 - samples[-1].timeStamp / 1e3)
            sizes.append(sum(sample.timeStamp > last_us for sample in samples))
        last_us = samples[-1].timeStamp
        time.sleep(0.01)
    return {
        "updates": len(ages_ms),
        "new_per_update": float(np.median(sizes)),
        "median_ms": float(np.median(ages_ms)),
        "max_ms": max(ages_ms),
    }


def copies(backend: NvmlBackend) -> dict[str, Any]:
    """Traffic of copies of known size, as the unwrapped counters, the raw registers and GPM have it."""
    host = torch.empty(COPY_BYTES, dtype=torch.uint8, pin_memory=True)
    device = torch.empty(COPY_BYTES, dtype=torch.uint8, device="cuda")
    handle = pynvml.nvmlDeviceGetHandleByIndex(0)
    found = {}
    for name, target, source in (("host_to_device", device, host), ("device_to_host", host, device)):
        torch.cuda.synchronize()
        time.sleep(0.3)
        first, raw = dict(backend.read(DEVICE, "counter")[0]), raw_pcie(handle)
        gpm_samples = [pynvml.nvmlGpmSampleGet(handle, pynvml.nvmlGpmSampleAlloc())]
        start_s = time.monotonic()
        copied, tick = 0, 0
        while (elapsed_s := time.monotonic() - start_s) < COPY_S:
            target.copy_(source, non_blocking=True)
            torch.cuda.synchronize()
            copied += COPY_BYTES
            if elapsed_s > tick * 0.2:
                tick += 1
                backend.read(DEVICE, "counter")
        elapsed_s = time.monotonic() - start_s
        gpm_samples.append(pynvml.nvmlGpmSampleGet(handle, pynvml.nvmlGpmSampleAlloc()))
        time.sleep(0.2)
        last, raw_last = dict(backend.read(DEVICE, "counter")[0]), raw_pcie(handle)
        gpm = gpm_between(*gpm_samples)
        found[name] = {
            "copied_bytes": copied,
            "seconds": elapsed_s,
            "copied_mib_per_s": copied / elapsed_s / 2**20,
            **{f"gpm_pcie_{way}_per_s": gpm[number] for way, number in (("tx", 20), ("rx", 21))},
            **{f"pcie_{way}_bytes": last[f"pcie_{way}_bytes"] - first[f"pcie_{way}_bytes"] for way in ("tx", "rx")},
            **{f"register_{way}_rise": (raw_last[way] - raw[way]) % 2**32 for way in ("tx", "rx")},
        }
    return found


def raw_pcie(handle: Any) -> dict[str, int]:
    """The registers behind the PCIe counters."""
    values = pynvml.nvmlDeviceGetFieldValues(handle, [fields.PCIE_TX, fields.PCIE_RX])
    return {"tx": values[0].value.uiVal, "rx": values[1].value.uiVal}


def gpm_between(first: Any, last: Any) -> dict[int, float]:
    """GPM's PCIe metrics between two samples, in its own unit."""
    request = pynvml.c_nvmlGpmMetricsGet_t()
    request.version, request.numMetrics = pynvml.NVML_GPM_METRICS_GET_VERSION, 2
    request.sample1, request.sample2 = first, last
    request.metrics[0].metricId, request.metrics[1].metricId = 20, 21
    pynvml.nvmlGpmMetricsGet(request)
    for sample in (first, last):
        pynvml.nvmlGpmSampleFree(sample)
    return {metric.metricId: float(metric.value) for metric in request.metrics[:2]}


def throttle() -> dict[str, Any]:
    """Every throttle counter under either numbering, beside violation status."""
    handle = pynvml.nvmlDeviceGetHandleByIndex(0)
    found: dict[str, Any] = {}
    for number in (*range(74, 82), *fields.OLD_THROTTLE_FIELDS, *fields.NEW_THROTTLE_FIELDS):
        value = pynvml.nvmlDeviceGetFieldValues(handle, [number])[0]
        read = {"type": value.valueType, "value": fields.decode(value.valueType, value.value)}
        found[f"field {number}"] = {"return": value.nvmlReturn} if value.nvmlReturn else read
    names = ("POWER", "THERMAL", "SYNC_BOOST", "BOARD_LIMIT", "LOW_UTILIZATION", "RELIABILITY")
    for policy, name in enumerate(names):
        try:
            found[f"violation {name}"] = pynvml.nvmlDeviceGetViolationStatus(handle, policy).violationTime
        except pynvml.NVMLError as error:
            found[f"violation {name}"] = str(error)
    return found


def record(
    folder: Path, name: str, lead_s: float, text: str, arguments: Sequence[str], seconds: float
) -> dict[str, Any]:
    """Records a load with the real sampler into the form of a recording; gives what the sampler cost."""
    spool = Path(tempfile.mkdtemp())
    # Nobody renews the lease while the load runs.
    sampler = SamplerProcess.start(spool / "sampler", node="node0", backends=["nvml"], lease_s=lead_s + seconds + 60)
    time.sleep(lead_s)
    with load(spool, *arguments, seconds=seconds) as spans_path:
        pass
    time.sleep(2.5)
    manifest = sampler.stop()
    tables, losses = read_tables(spool / "sampler")
    recording = MeasuredFolder(folder / name)
    recording.write_spans(pq.read_table(spans_path))
    recording.write_telemetry("node0", tables, {**manifest, "losses": losses, "load": text})
    paces = {tier: {name: facts.get(name) for name in KEPT} for tier, facts in manifest["tiers"].items()}
    return {"losses": losses, "sampler": manifest["sampler"], "tiers": paces, "devices": manifest["devices"]}


def table(found: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, str]]:
    """Nested figures as rows of a path and a value."""
    for name, value in found.items():
        where = f"{path} / {name}" if path else name
        if isinstance(value, Mapping):
            if value.keys() >= {"median_ms", "max_ms", "count"}:
                yield where, f"{value['median_ms']:.4f} ms, max {value['max_ms']:.4f} ms, n {value['count']}"
            else:
                yield from table(value, where)
        elif isinstance(value, list) and value and isinstance(value[0], Mapping):
            yield from table({str(index): one for index, one in enumerate(value)}, where)
        else:
            yield where, f"{value:.6g}" if isinstance(value, float) else str(value)


def main() -> None:
    """Runs every check and prints what it found."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, help="where nvml_check.json goes")
    parser.add_argument("--golden", type=Path, help="where the two recordings go")
    given = parser.parse_args()
    found: dict[str, Any] = {"date": datetime.now(UTC).date().isoformat(), "torch": torch.__version__}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        backend = NvmlBackend()
        found["devices"] = [info.to_json() for info in backend.devices()]
        found["facts"] = dict(backend.facts(DEVICE))
        found["columns"] = columns(backend)
        found["latency_idle"] = latencies(backend, 30)
        found["ring_age_idle"] = ring_age()
        found["throttle_before"] = throttle()
        found["ring"] = continuity(backend, folder)
        with load(folder, "--steady", "12", seconds=12):
            time.sleep(2)
            columns(backend)  # GPM's means now begin inside the load
            found["columns_busy"] = columns(backend)
            found["latency_busy"] = latencies(backend, 30)
            found["ring_age_busy"] = ring_age()
        found["throttle_after"] = throttle()
        found["copies"] = copies(backend)
        found["nvidia_ml_py"] = version("nvidia-ml-py")
        backend.close()
        if given.golden:
            found["golden"] = {
                "square": record(given.golden, "square", 2, "square wave 0.5 s", wave(20), 25),
                "idle_busy": record(given.golden, "idle_busy", 6, "idle, then products", ["--steady", "14"], 16),
            }
    print("\n".join(f"| {name} | {value} |" for name, value in table(found)))
    if given.out:
        given.out.mkdir(parents=True, exist_ok=True)
        (given.out / "nvml_check.json").write_text(json.dumps(found, indent=1, default=str))


if __name__ == "__main__":
    main()
