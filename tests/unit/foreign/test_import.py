# ruff: noqa: E501 - lines of logs are as long as the tools write them
"""Logs of other tools become recordings: units, marks of what was not read, clocks, and what a source cannot show."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from foreign_logs import LOGS

Verb = Callable[..., tuple[int, str, str]]

CASES = Path(__file__).parents[2] / "fixtures" / "cases" / "import"


def imported(wattune: Verb, *files: Path, storage: Path, name: str = "N", more: tuple[str, ...] = ()) -> dict[str, Any]:
    code, out, err = wattune("import", *files, "--storage", storage, "--name", name, "--json", *more)
    assert code == 0, err
    found: dict[str, Any] = json.loads(out)
    return found


def rows(found: dict[str, Any], tier: str, node: str = "node0") -> list[dict[str, Any]]:
    read: list[dict[str, Any]] = pq.read_table(
        Path(found["folder"]) / "telemetry" / node / f"{tier}.parquet"
    ).to_pylist()
    return read


def test_the_case_of_nvidia_smi(wattune: Verb, tmp_path: Path) -> None:
    found = imported(wattune, CASES / "nvidia_smi.csv", storage=tmp_path)
    assert Path(found["folder"]) == tmp_path / "recordings" / "N"
    slow, fast = rows(found, "slow"), rows(found, "fast")
    assert [(row["device"], row["power_average_w"]) for row in slow] == [
        ("gpu0", pytest.approx(512.33)), ("gpu0", pytest.approx(518.9)), ("gpu1", None), ("gpu1", pytest.approx(499.1)),
    ]  # fmt: skip
    assert [row["event_reasons"] for row in fast] == [4, 4, 4, 0]
    assert [row["gpu_temp_c"] for row in fast] == [61, 61, 60, None]
    assert [row["sm_clock_mhz"] for row in fast] == [1605, 1605, 1605, 1620]
    assert wattune("analyze", "N", "--storage", tmp_path)[0] == 0


def nvidia_smi(path: Path, *, seconds: int = 60, period_s: float = 1.0, power: str = "power.draw [W]") -> float:
    """Writes a log of two GPUs whose power changes; returns the trapezoid under it in joules."""
    lines, energy_j, before = [f"timestamp, index, {power}, temperature.gpu"], 0.0, [0.0, 0.0]
    for at in range(int(seconds / period_s)):
        for gpu in range(2):
            watts = 400.0 + 100 * gpu + (at * 37 % 200)
            energy_j += 0.0 if at == 0 else (watts + before[gpu]) / 2 * period_s
            before[gpu] = watts
            clock = 10 * 3600 + at * period_s
            stamp = f"{int(clock // 3600):02d}:{int(clock // 60 % 60):02d}:{clock % 60:06.3f}"
            lines.append(f"2026/01/02 {stamp}, {gpu}, {watts:.2f} W, 60")
    path.write_text("\n".join(lines) + "\n")
    return energy_j


def test_a_mean_of_a_second_gives_energy_and_no_peak(wattune: Verb, tmp_path: Path) -> None:
    energy_j = nvidia_smi(tmp_path / "a.csv")
    found = imported(wattune, tmp_path / "a.csv", storage=tmp_path)
    assert found["metrics"]["total_energy_j"] == pytest.approx(energy_j, rel=0.005)
    assert sum(one["energy_j"] for one in found["energies"].values()) == pytest.approx(energy_j, rel=1e-6)
    assert not [name for name in found["metrics"] if "peak" in name or "ramp" in name or "excursion" in name]
    assert "power_averaged" in found["quality_reasons"] and found["quality"] == "indicative"


@pytest.mark.parametrize(("period_s", "shown"), [(0.02, {"100ms", "1s"}), (0.2, {"1s"}), (10.0, set())])
def test_instants_give_the_peaks_that_they_resolve(
    wattune: Verb, tmp_path: Path, period_s: float, shown: set[str]
) -> None:
    energy_j = nvidia_smi(tmp_path / "a.csv", period_s=period_s, power="power.draw.instant [W]")
    metrics = imported(wattune, tmp_path / "a.csv", storage=tmp_path)["metrics"]
    assert metrics["total_energy_j"] == pytest.approx(energy_j, rel=0.005)
    assert {name.split("_")[-2] for name in metrics if name.startswith("device_power_peak")} == shown


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is empty"),
        (b"\x7fELF\x00\x01", "is no text"),
        (b"hello world\nhow are you\n", "of no format that is known"),
        (b"1767348000, 2.345\n1767348001, 2.340\n1767348002, 2.301\n", "of no format that is known"),
        (b"index, power.draw [W]\n0, 71.2 W\n", "has no column of times"),
        (
            b"GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-1234)\n",
            "recognised as a list of devices without readings (index",
        ),
        (
            b"GPU 0: NVIDIA H100 (UUID: GPU-a)\n  MIG 1g.10gb Device  0: (UUID: MIG-b)\n",
            "a list of devices without readings",
        ),
        (b'timestamp,node_power_w\n2026-01-02 10:00:00,"5,000"\n2026-01-02 10:00:01,"5,000"\n', 'got "5,000"'),
        (b"timestamp, name\n2026/01/02 10:00:00.101, NVIDIA H100\n", "a recording has none of its columns"),
        (b"timestamp, index, power.draw [W]\n", "a header and no row"),
        (b"timestamp, index, power.draw [W]\n2026/01/02 10:00:00.101, 0, 512000 W\n", "which is 512000 W"),
        (b"timestamp, index, power.draw [W]\n2026/01/02 10:00:00.101, 0, fast\n", 'got "fast"'),
        (b"timestamp, index, power.draw [W]\nsoon, 0, 5 W\nlater, 0, 5 W\n", 'got "soon"'),
        (b"timestamp, index, power.draw [W]\n2026/01/02 10:00:00.101, 0, 5 W\n", "a single reading"),
    ],
)
def test_what_is_no_log_is_one_line_and_leaves_nothing(
    wattune: Verb, tmp_path: Path, content: bytes, said: str
) -> None:
    (tmp_path / "log").write_bytes(content)
    code, _, err = wattune("import", tmp_path / "log", "--storage", tmp_path / "s")
    assert code == 2 and said in err and "Traceback" not in err
    assert not list((tmp_path / "s").rglob("*.json"))


@pytest.mark.parametrize("name", LOGS)
def test_each_format_has_the_energy_of_its_own_integral(wattune: Verb, tmp_path: Path, name: str) -> None:
    log = LOGS[name]
    (tmp_path / name).write_bytes(log.text if isinstance(log.text, bytes) else log.text.encode())
    if log.note:
        code, _, err = wattune("import", tmp_path / name, "--storage", tmp_path)
        assert code == 2 and log.note in err
        return
    found = imported(wattune, tmp_path / name, storage=tmp_path)
    energies = {key: one["energy_j"] for key, one in found["energies"].items()}
    assert {key: energies.get(key) for key in log.energies_j} == pytest.approx(log.energies_j, rel=0.005)
    powers = [joules for key, joules in log.energies_j.items() if "/gpu" in key and "_w" in key]
    if powers and "instant" not in str(log.energies_j):
        assert found["metrics"]["total_energy_j"] == pytest.approx(sum(powers), rel=0.005)
    assert not [one for one in found["metrics"] if "peak_20ms" in one or "peak_100ms" in one or "peak_1s" in one]
    assert found["quality"] == "indicative"
    assert wattune("analyze", "N", "--storage", tmp_path, "--json")[0] == 0


def megatron(path: Path, *, zone_s: int = 0) -> None:
    """Writes fifty steps of a second, the first ten of them slower, beside `nvidia_smi`."""
    lines, clock = [], 10 * 3600 + 2.0 + zone_s
    for step in range(1, 41):
        clock += 2.0 if step < 10 else 1.0
        stamp = f"{int(clock // 3600):02d}:{int(clock // 60 % 60):02d}:{int(clock % 60):02d}"
        lines.append(
            f" [2026-01-02 {stamp}.000000] iteration {step:8d}/ 40 | consumed samples: {step * 8} | loss: 1.2E+00"
        )
    path.write_text("\n".join(lines) + "\n")


def test_a_training_log_gives_the_steps(wattune: Verb, tmp_path: Path) -> None:
    nvidia_smi(tmp_path / "a.csv")
    megatron(tmp_path / "train.log")
    more = ("--steps", str(tmp_path / "train.log"), "--tokens-per-step", "1000")
    found = imported(wattune, tmp_path / "a.csv", storage=tmp_path, more=more)
    assert found["metrics"]["step_time_s"] == pytest.approx(1.0)
    assert found["metrics"]["tokens_per_s"] == pytest.approx(1000, rel=0.01)
    mean_w = found["metrics"]["node_device_power_mean_w"]
    assert found["metrics"]["energy_per_step_j"] == pytest.approx(mean_w, rel=0.01)
    (tmp_path / "steps.csv").write_text(
        "step,time\n" + "".join(f"{at},2026-01-02T10:00:{at:02d}Z\n" for at in range(5, 55))
    )
    more = ("--steps", str(tmp_path / "steps.csv"))
    assert imported(wattune, tmp_path / "a.csv", storage=tmp_path, name="M", more=more)["metrics"]["step_time_s"] == 1.0


def test_steps_are_those_of_all_nodes(wattune: Verb, tmp_path: Path) -> None:
    files = [tmp_path / "a.csv", tmp_path / "b.csv"]
    for file in files:
        nvidia_smi(file)
    files[1].write_text(files[1].read_text().replace(", 60\n", ", 61\n"))
    meter = tmp_path / "dcmi.csv"
    meter.write_text("timestamp,node_power_w\n" + "".join(f"2026-01-02T10:00:{at:02d}Z,700\n" for at in range(60)))
    megatron(tmp_path / "train.log")
    of_all = {("a", "gpu0"), ("a", "gpu1"), ("b", "gpu0"), ("b", "gpu1")}
    for name, logs, devices in (("M", files, of_all), ("N", [meter], {("node0", "host")})):
        found = imported(wattune, *logs, storage=tmp_path, name=name, more=("--steps", str(tmp_path / "train.log")))
        spans = pq.read_table(Path(found["folder"]) / "spans.parquet").to_pylist()
        assert {(row["node"], row["device"]) for row in spans} == devices
        assert found["metrics"]["step_time_s"] == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("step 1\nstep 2\n", "has no times on its lines"),
        ("2026-01-02 10:00:01 hello\n2026-01-02 10:00:02 world\n", "no steps were found"),
        ("10:00:01 iteration 1\n10:00:02 iteration 2\n", "tell no date"),
        ("step,device,power_w\n1,0,500\n2,0,500\n", "has no times on its lines"),
    ],
)
def test_what_has_no_steps_is_refused(wattune: Verb, tmp_path: Path, text: str, said: str) -> None:
    nvidia_smi(tmp_path / "a.csv")
    (tmp_path / "train.log").write_text(text)
    code, _, err = wattune("import", tmp_path / "a.csv", "--storage", tmp_path, "--steps", tmp_path / "train.log")
    assert code == 2 and said in err.replace("tells", "tell")


def test_files_that_are_not_there_are_named(wattune: Verb, tmp_path: Path) -> None:
    nvidia_smi(tmp_path / "a.csv")
    code, _, err = wattune("import", tmp_path / "a.csv", "--storage", tmp_path, "--steps", tmp_path / "none.log")
    assert code == 2 and "none.log cannot be read" in err
    code, _, err = wattune("import", tmp_path / "b.csv", tmp_path, "--storage", tmp_path)
    assert code == 2 and err.count("is not a file") == 2
    imported(wattune, tmp_path / "a.csv", storage=tmp_path)
    code, _, err = wattune("import", tmp_path / "a.csv", "--storage", tmp_path, "--name", "N")
    assert code == 2 and "is there already" in err


def test_logs_of_two_zones_are_not_joined(wattune: Verb, tmp_path: Path) -> None:
    nvidia_smi(tmp_path / "a.csv")
    megatron(tmp_path / "train.log", zone_s=3600)
    code, _, err = wattune("import", tmp_path / "a.csv", "--storage", tmp_path, "--steps", tmp_path / "train.log")
    assert code == 2 and "begin +36" in err and "--timezone" in err


OTHER_SHAPES = {
    "single reasons": (
        "timestamp, index, power.draw [W], clocks_event_reasons.sw_power_cap, clocks_event_reasons.hw_thermal_slowdown, "
        "clocks.max.sm [MHz]\n" + "".join(f"{{at}}, 0, 5{n}0.00 W, Active, [N/A], 1980 MHz\n" for n in range(5)),
        {"node0/gpu0/power_average_w": 520.0 * 4},
    ),
    "a comma before the watts of a meter": (
        "Timestamp,Watts\n" + "".join(f"{{at}},7{n}0\n" for n in range(5)), {"node0/host/node_power_w": 720.0 * 4}
    ),
    "outlets": (
        "timestamp,outlet,power_w\n" + "".join(f"{{at}},{one},700\n" for _ in range(5) for one in ("A1", "A2")),
        {"A1/host/node_power_w": 2800.0, "A2/host/node_power_w": 2800.0},
    ),
    "all bits of AMD": (
        "timestamp,gpu,power_usage\n" + "".join(f"{{at}},0,{watts}\n" for watts in (500, 65535, 500, -1, 500)),
        {"node0/gpu0/power_average_w": 2000.0},
    ),
    "decimal comma": (
        "Time;GPU0 (W)\n" + "".join("{at};512,25\n" for _ in range(5)), {"node0/gpu0/power_average_w": 512.25 * 4}
    ),
    "sensor list": (
        "".join("{at}\nPwr Consumption  | 1500.000  | Watts      | ok    | na\nFan1 | 900.0 | RPM | ok\n" for _ in range(5)),
        {"node0/host/node_power_w": 6000.0},
    ),
    "ipmitool -c sdr below times": (
        "".join("{at}\nTemp,45,degrees C,ok\nFan1,,RPM,ns\nPwr Consumption,1500,Watts,ok\n" for _ in range(5)),
        {"node0/host/node_power_w": 6000.0},
    ),
    "ipmitool -c sdr behind times": (
        "".join("{at},Pwr Consumption,1500,Watts,ok\n" for _ in range(5)), {"node0/host/node_power_w": 6000.0}
    ),
    "reasons as floats": (
        ('DCGM_FI_DEV_POWER_USAGE{gpu="0"} 500 1767348000000\nDCGM_FI_DEV_CLOCK_THROTTLE_REASONS{gpu="0"} 4 1767348000000\n'
         'DCGM_FI_DEV_POWER_USAGE{gpu="0"} 500 1767348001000\n'),
        {"node0/gpu0/power_average_w": 500.0},
    ),
    "tabs behind times": (
        "time\tgpu\tpower_w\n" + "".join(f"{{at}}\t0\t{watts}\n" for watts in (500, 600, 500)),
        {"node0/gpu0/power_average_w": 1100.0},
    ),
    "rapl": (
        "timestamp,rapl_package_0_energy_uj\n" + "".join(f"{{at}},{n * 150_000_000}\n" for n in range(5)),
        {"node0/host/package_power_w": 600.0},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHER_SHAPES)
def test_other_shapes(wattune: Verb, tmp_path: Path, name: str) -> None:
    text, energies = OTHER_SHAPES[name]
    parts = text.split("{at}")
    each = 2 if name == "outlets" else 1
    stamps = [f"2026-01-02 10:00:{at // each:02d}" for at in range(len(parts) - 1)]
    (tmp_path / "meter.csv").write_text(parts[0] + "".join(a + b for a, b in zip(stamps, parts[1:], strict=True)))
    found = imported(wattune, tmp_path / "meter.csv", storage=tmp_path)
    assert {key: one["energy_j"] for key, one in found["energies"].items()} == pytest.approx(energies)


def test_what_a_log_cannot_show_is_said(wattune: Verb, tmp_path: Path) -> None:
    nvidia_smi(tmp_path / "a.csv", period_s=10)
    code, out, _ = wattune("import", tmp_path / "a.csv", "--storage", tmp_path)
    assert code == 0 and "power_average_w: its readings show no peak over less than 20 s" in out


def test_recordings_of_logs_are_ranked_and_compared(wattune: Verb, tmp_path: Path) -> None:
    for name, seconds in (("short", 30), ("long", 60)):
        nvidia_smi(tmp_path / "a.csv", seconds=seconds)
        imported(wattune, tmp_path / "a.csv", storage=tmp_path, name=name)
    code, out, _ = wattune("rank", "short", "long", "--storage", tmp_path, "--json")
    assert code == 0 and json.loads(out)["feasible"][0]["trial_id"] == "short"
    assert wattune("compare", "short", "long", "--storage", tmp_path, "--json")[0] == 0


def mlflow(folder: Path, **metrics: float) -> None:
    """Writes metrics of a run into MLflow's file store."""
    system = folder / "metrics" / "system"
    system.mkdir(parents=True)
    (folder / "meta.yaml").write_text("run_id: ab12\n")
    (folder / "metrics" / "loss").write_text("1767348000000 2.3 0\n1767348001000 2.2 1\n")
    for name, value in metrics.items():
        (system / name).write_text("".join(f"{1767348000000 + 1000 * at} {value} {at}\n" for at in range(5)))


def test_a_run_of_mlflow_is_its_metrics(wattune: Verb, tmp_path: Path) -> None:
    alike = {f"gpu_{gpu}_{of}": 98.0 for gpu in (0, 1) for of in ("power_usage_watts", "utilization_percentage")}
    mlflow(tmp_path / "run", **alike)
    for folder in (tmp_path / "run", tmp_path / "run" / "metrics" / "system"):
        found = imported(wattune, folder, storage=tmp_path, name=folder.name)
        assert {key: one["energy_j"] for key, one in found["energies"].items()} == {
            "node0/gpu0/power_average_w": 392.0, "node0/gpu1/power_average_w": 392.0,
        }  # fmt: skip
    code, out, _ = wattune("import", *sorted((tmp_path / "run/metrics/system").iterdir()), "--storage", tmp_path)
    assert code == 0 and out.count("left out, since a recording has none of its columns") == 2
    code, _, err = wattune("import", tmp_path / "run/metrics/loss", "--storage", tmp_path)
    assert code == 2 and "a recording has none of its columns" in err


def test_two_nodes_files_of_one_name_are_two_nodes(wattune: Verb, tmp_path: Path) -> None:
    files = [tmp_path / one / "gpus.csv" for one in ("n1", "n2", "n2/n2")]
    for file, seconds in zip(files, (30, 60, 40), strict=True):
        file.parent.mkdir()
        nvidia_smi(file, seconds=seconds)
    assert {key[:2] for key in imported(wattune, *files[:2], storage=tmp_path)["devices"]} == {"n1", "n2"}
    code, _, err = wattune("import", *files[1:], "--storage", tmp_path, "--name", "M")
    assert code == 2 and "--node A --node B" in err
