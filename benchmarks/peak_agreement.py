"""Compares peaks and energy of square waves with the driver's ring drained elsewhere, and with other tools.

    python benchmarks/peak_agreement.py [--out FOLDER]        # needs an NVIDIA GPU, torch and pynvml

Waves of 0.2 to 4 s, each for 12 s. Beside wattune's sampler at its default rates run, each in a process of its own that
shares no code with it: a drain of the ring, a poll of instant power at 100 Hz, MLflow's GPU monitor asked once a second
(it asks every 10 s by default), and Zeus's PowerMonitor. The last two run where they are installed. The script prints
the rows of benchmarks/results/peak_agreement.md.
"""

import argparse
import contextlib
import json
import multiprocessing
import platform
import queue
import tempfile
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from wattune.calibration.fit import TAIL_S, Fit, Wave, fit, origin_ns, waves_of
from wattune.calibration.run import find_devices, load, sampling
from wattune.telemetry.files.segments import read_tables
from wattune.units import NS_PER_S

WAVES = ((0.2, 60), (0.5, 24), (1.0, 12), (2.0, 6), (4.0, 3))
PEAK_WITHIN_FRAC = 0.01
ENERGY_WITHIN_FRAC = 0.005
DRAIN_S = 0.37
"""Another period than the sampler's drain, so that the two never ask at the same moments for long."""

Samples = list[tuple[int, float]]
"""Wall time in nanoseconds and watts."""


def drain(uuid: str, stop: Event) -> Samples:
    """The driver's own history, every sample it has recorded since the one before."""
    import pynvml

    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
    seen: dict[int, float] = {}
    last_us = 0
    while not stop.wait(DRAIN_S):
        _, found = pynvml.nvmlDeviceGetSamples(handle, pynvml.NVML_TOTAL_POWER_SAMPLES, last_us)
        for sample in found:
            if sample.timeStamp:
                seen[sample.timeStamp * 1000] = sample.sampleValue.uiVal / 1e3
        last_us = max(seen, default=0) // 1000
    return sorted(seen.items())


def poll(uuid: str, stop: Event) -> Samples:
    """Instant power (field 186), asked for a hundred times a second."""
    import pynvml

    pynvml.nvmlInit()
    handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
    samples = []
    while not stop.wait(0.01):
        field = pynvml.nvmlDeviceGetFieldValues(handle, [pynvml.NVML_FI_DEV_POWER_INSTANT])[0]
        if field.nvmlReturn == 0:
            samples.append((time.time_ns(), field.value.uiVal / 1e3))
    return samples


def mlflow(uuid: str, stop: Event) -> Samples:
    """Records the power that MLflow's system metrics log."""
    import pynvml
    from mlflow.system_metrics.metrics.gpu_monitor import GPUMonitor

    monitor = GPUMonitor()
    index = pynvml.nvmlDeviceGetIndex(pynvml.nvmlDeviceGetHandleByUUID(uuid))
    samples = []
    while not stop.wait(1.0):
        monitor.collect_metrics()
        samples.append((time.time_ns(), monitor.aggregate_metrics()[f"gpu_{index}_power_usage_watts"]))
        monitor.clear_metrics()
    return samples


def zeus(uuid: str, stop: Event) -> Samples:
    """Records the power that Zeus's PowerMonitor gives at the shortest period it advises."""
    import pynvml
    from zeus.monitor.power import PowerMonitor

    pynvml.nvmlInit()
    index = pynvml.nvmlDeviceGetIndex(pynvml.nvmlDeviceGetHandleByUUID(uuid))
    monitor = PowerMonitor(gpu_indices=[index], update_period=0.05)
    stop.wait()
    timeline = monitor.get_power_timeline("device_instant")[index]
    monitor.stop()
    return [(round(at_s * NS_PER_S), power_w) for at_s, power_w in timeline]


OTHERS: dict[str, tuple[Callable[[str, Event], Samples], str | None, str]] = {
    "drain": (drain, None, "ring drained in another process"),
    "poll": (poll, None, "instant power polled at 100 Hz"),
    "mlflow": (mlflow, "mlflow", "MLflow system metrics, every second"),
    "zeus": (zeus, "zeus", "Zeus PowerMonitor, every 50 ms"),
}
"""By name: what runs, the package it needs, and what the table calls it."""


def _watch(name: str, uuid: str, stop: Event, told: "multiprocessing.Queue[tuple[str, Samples | str]]") -> None:
    try:
        told.put((name, OTHERS[name][0](uuid, stop)))
    except Exception as error:  # whatever keeps another tool from measuring is said in the table, and ends nothing
        told.put((name, f"failed: {type(error).__name__}: {error}"))


def record(folder: Path) -> tuple[Fit, list[Wave], dict[str, Samples | str], int, dict[str, Any]]:
    """Runs the waves with everyone watching.

    Returns:
        wattune's view, the waves, the others' samples or why there are none, the wall time of the waves' origin, and
        the sampler's manifest.
    """
    info = find_devices("nvml")[0]
    assert info.uuid is not None, "find_devices leaves out those without"
    context = multiprocessing.get_context("spawn")
    stop, told = context.Event(), context.Queue()
    found: dict[str, Samples | str] = {
        name: "absent" for name, (_, package, _) in OTHERS.items() if package and find_spec(package) is None
    }
    names = [name for name in OTHERS if name not in found]
    watchers = [context.Process(target=_watch, args=(name, info.uuid, stop, told)) for name in names]
    options = [str(part) for wave in WAVES for part in ("--wave", *wave)]
    spans_path, node = folder / "spans.parquet", platform.node()
    with sampling(folder / "sampler", node, ["nvml", "host"], {}) as sampler:
        for watcher in watchers:
            watcher.start()
        try:
            with load(info, node, spans_path, options) as process:
                while process.poll() is None:
                    sampler.renew()
                    time.sleep(0.5)
            assert process.returncode == 0, "the load failed"
            time.sleep(1.5)
        finally:
            stop.set()
        with contextlib.suppress(queue.Empty):
            for _ in names:
                name, samples = told.get(timeout=20)
                found[name] = samples
        for watcher in watchers:
            watcher.terminate()
        manifest = sampler.stop()
    found |= {name: "said nothing" for name in names if name not in found}
    spans = pq.read_table(spans_path)
    wall_ns = origin_ns(spans) + spans["start_wall_ns"][0].as_py() - spans["start_mono_ns"][0].as_py()
    seen = fit(read_tables(folder / "sampler")[0], info.device, spans, WAVES)
    return seen, waves_of(spans, WAVES), found, wall_ns, {**manifest, "device": info.to_json()}


def inside(samples: Samples, wave: Wave, origin_wall_ns: int) -> np.ndarray:
    """The watts told during a wave, and until `TAIL_S` after it."""
    at_s = np.array([(at_ns - origin_wall_ns) / NS_PER_S for at_ns, _ in samples])
    watts = np.array([power_w for _, power_w in samples])
    return watts[(at_s >= wave.start_s[0]) & (at_s <= wave.end_s[-1] + TAIL_S)]


def table(seen: Fit, waves: list[Wave], found: Mapping[str, Samples | str], wall_ns: int) -> tuple[list[str], bool]:
    """The lines of the table, and whether both targets are met."""
    titles = [title for name, (_, _, title) in OTHERS.items() if name != "drain"]
    head = ["wave", "wattune 20 ms", OTHERS["drain"][2], "differ by", "energy differs by", "wattune 1 s", *titles]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    met = True
    for wave, mine in zip(waves, seen.waves, strict=True):
        peaks = {}
        for name, samples in found.items():
            watts = inside(samples, wave, wall_ns) if not isinstance(samples, str) else np.empty(0)
            if len(watts):
                peaks[name] = float(watts.max())
        ours_w, error = mine.peaks_w["20ms"], mine.energy_error_frac
        apart = abs(ours_w / peaks["drain"] - 1) if "drain" in peaks else None
        met &= apart is not None and apart <= PEAK_WITHIN_FRAC and error is not None and error <= ENERGY_WITHIN_FRAC
        cells = [
            f"{wave.period_s:g} s",
            f"{ours_w:.0f} W",
            f"{peaks['drain']:.0f} W" if "drain" in peaks else str(found["drain"]),
            "-" if apart is None else f"{apart:.2%}",
            "-" if error is None else f"{error:.2%}",
            f"{mine.peaks_w['1s']:.0f} W" if "1s" in mine.peaks_w else "-",
            *(f"{peaks[n]:.0f} W" if n in peaks else str(found[n])[:60] for n in OTHERS if n != "drain"),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return lines, met


def main() -> None:
    """Measures, prints the table of highest readings, and writes it where `--out` says."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        seen, waves, found, wall_ns, manifest = record(Path(folder))
    lines, met = table(seen, waves, found, wall_ns)
    device = manifest["device"]
    versions = []
    for package in ("torch", "nvidia-ml-py", "mlflow-skinny", "zeus"):
        try:
            versions.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            versions.append(f"{package} absent")
    ring = seen.signals["ring"]
    text = [
        "# Peaks and energy of square waves",
        "",
        (
            f"{datetime.now(UTC):%Y-%m-%d}, {device['name']}, driver {device.get('driver')}, {', '.join(versions)}; "
            "bf16 8192^3 products, half of each period, 12 s a wave. The highest reading of each. Ring period "
            f"{1e3 * ring.sensor_period_s:.2f} ms."
        ),
        "",
        *lines,
        "",
        (
            f"Targets: the 20 ms peak within {PEAK_WITHIN_FRAC:.0%} of the other drain, the integral within "
            f"{ENERGY_WITHIN_FRAC:.1%} of the energy counter over 12 s and more: {'met' if met else 'MISSED'}."
        ),
        f"Over all waves the integral is {ring.gain_frac:.4f} of the counter." if ring.gain_frac else "No counter.",
        "",
    ]
    print("\n".join(text))
    if given.out:
        given.out.mkdir(parents=True, exist_ok=True)
        (given.out / "peak_agreement.md").write_text("\n".join(text))
        facts = {"device": device, **seen.to_json(), "sampler": manifest["sampler"], "tiers": manifest["tiers"]}
        (given.out / "peak_agreement.json").write_text(json.dumps(facts, indent=1, default=str))


if __name__ == "__main__":
    main()
