# ruff: noqa: E501 - a shape is a line
"""Clocks of foreign logs: zones, steps of the clock, midnight, summer time, several files and several nodes."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from foreign_logs import LOGS

Verb = Callable[..., tuple[int, str, str]]


def csv(path: Path, stamps: list[str], *, watts: float = 100.0, more: str = "0") -> Path:
    rows = [f"{stamp}, {more}, {watts + at:.2f} W" for at, stamp in enumerate(stamps)]
    path.write_text("timestamp, index, power.draw [W]\n" + "\n".join(rows) + "\n")
    return path


def seconds(start: int, count: int, form: Callable[[int], str]) -> list[str]:
    return [form(start + at) for at in range(count)]


def clock(at: int) -> str:
    return f"{at // 3600 % 24:02d}:{at // 60 % 60:02d}:{at % 60:02d}"


def am_pm(at: int) -> str:
    hour = at // 3600 % 24
    return f"1/2/2026 {hour % 12 or 12}:{at // 60 % 60:02d}:{at % 60:02d} {'AM' if hour < 12 else 'PM'}"


HALF_PAST = 12 * 3600 - 30
DAY = 24 * 3600

SHAPES: dict[str, tuple[list[str], str]] = {
    "am_pm": (seconds(HALF_PAST, 60, am_pm), ""),
    "midnight": (seconds(DAY - 30, 60, clock), ""),
    "dated_midnight": ([f"2026/01/{2 + (at >= 30):02d} {clock(DAY - 30 + at)}.000" for at in range(60)], ""),
    "summer_ends": ([f"2026/10/25 {clock(3 * 3600 - 30 + at - (3600 if at >= 30 else 0))}" for at in range(60)], "stepped"),
    "summer_begins": ([f"2026/03/29 {clock(2 * 3600 - 30 + at + (3600 if at >= 30 else 0))}" for at in range(60)], "stepped"),
    "set_back": ([f"2026-01-02T{clock(36000 + at - (5 if at >= 30 else 0))}Z" for at in range(60)], "stepped"),
    "epoch_ms": (seconds(0, 60, lambda at: str(1_767_348_000_000 + 1000 * at)), ""),
    "epoch_us": (seconds(0, 60, lambda at: str(1_767_348_000_000_000 + 10**6 * at)), ""),
    "epoch_ns": (seconds(0, 60, lambda at: str(1_767_348_000_000_000_000 + 10**9 * at)), ""),
    "offset": (seconds(36000, 60, lambda at: f"2026-01-02 {clock(at)}+05:30"), ""),
    "day_first": (seconds(36000, 60, lambda at: f"02.01.2026 {clock(at)}"), ""),
    "ctime": (seconds(36000, 60, lambda at: f"Fri Jan  2 {clock(at)} CET 2026"), ""),
}  # fmt: skip


def imported(wattune: Verb, storage: Path, *arguments: Any) -> dict[str, Any]:
    code, out, err = wattune("import", *arguments, "--storage", storage, "--name", "N", "--json")
    assert code == 0, err
    found: dict[str, Any] = json.loads(out)
    return found


@pytest.mark.parametrize("name", SHAPES)
def test_a_minute_is_a_minute_on_every_clock(wattune: Verb, tmp_path: Path, name: str) -> None:
    stamps, said = SHAPES[name]
    found = imported(wattune, tmp_path, csv(tmp_path / "a.csv", stamps))
    assert found["window_s"] == pytest.approx(59.0)
    assert found["metrics"]["total_energy_j"] == pytest.approx(sum(100.5 + at for at in range(59)))
    assert ("clock_stepped" in found["quality_reasons"]) == bool(said)


def test_a_zone_shifts_what_names_none(wattune: Verb, tmp_path: Path) -> None:
    stamps = seconds(36000, 10, lambda at: f"2026/07/02 {clock(at)}")
    found = imported(wattune, tmp_path, csv(tmp_path / "a.csv", stamps), "--timezone", "Europe/Berlin")
    facts = json.loads((Path(found["folder"]) / "manifest.json").read_text())
    assert facts["recorded"].startswith("2026-07-02T08:00:00")
    code, _, err = wattune("import", tmp_path / "a.csv", "--storage", tmp_path, "--timezone", "Mars/Olympus")
    assert code == 2 and "Mars/Olympus" in err


def test_a_row_without_a_time_leaves_the_zone(wattune: Verb, tmp_path: Path) -> None:
    stamps = seconds(36000, 10, lambda at: f"2026-07-02 {clock(at)}+02:00")
    found = imported(wattune, tmp_path, csv(tmp_path / "a.csv", [*stamps[:5], "?", *stamps[6:]]))
    facts = json.loads((Path(found["folder"]) / "manifest.json").read_text())
    assert facts["recorded"].startswith("2026-07-02T08:00:00") and found["window_s"] == pytest.approx(9.0)


def test_two_runs_in_a_file_are_refused(wattune: Verb, tmp_path: Path) -> None:
    stamps = [*seconds(7 * 3600, 9, clock), *seconds(36000, 9, clock)]
    dated = [f"2026/01/02 {stamp}" for stamp in [*stamps[9:], *stamps[:9]]]
    code, _, err = wattune("import", csv(tmp_path / "a.csv", dated), "--storage", tmp_path)
    assert code == 2 and "runs back by" in err


def test_a_log_that_goes_on_in_another_file_is_one_node(wattune: Verb, tmp_path: Path) -> None:
    parts = [csv(tmp_path / f"{at}.csv", seconds(36000 + 30 * at, 30, lambda one: f"2026-01-02 {clock(one)}Z")) for at in (1, 0)]  # fmt: skip
    found = imported(wattune, tmp_path, *parts)
    assert list(found["devices"]) == ["node0/gpu0"] and found["window_s"] == pytest.approx(59.0)


def test_the_same_devices_at_the_same_times_are_of_two_nodes(wattune: Verb, tmp_path: Path) -> None:
    stamps = seconds(36000, 30, lambda at: f"2026-01-02 {clock(at)}Z")
    files = [csv(tmp_path / f"{name}.csv", stamps, watts=watts) for name, watts in (("a", 100.0), ("b", 200.0))]
    assert list(imported(wattune, tmp_path, *files)["devices"]) == ["a/gpu0", "b/gpu0"]
    for named in (["--node", "n"], ["--node", "x", "--node", "y"]):
        found = imported(wattune, tmp_path / named[1], *files, *named)
        assert list(found["devices"]) == ([f"{one}/gpu0" for one in ("x", "y")] if "y" in named else ["n/gpu0"])
    code, _, err = wattune("import", files[0], files[0], "--storage", tmp_path)
    assert code == 2 and "given twice" in err
    assert wattune("import", *files, "--node", "../x", "--storage", tmp_path)[0] == 2


def test_a_chassis_and_its_devices_are_one_node(wattune: Verb, tmp_path: Path) -> None:
    files = []
    for name in ("exporter.prom", "redfish.json"):
        (tmp_path / name).write_text(str(LOGS[name].text))
        files.append(tmp_path / name)
    found = imported(wattune, tmp_path, *files)
    assert list(found["devices"]) == ["n7/gpu0", "n7/gpu1"]
    assert found["metrics"]["node_power_mean_w"] > 1500 > found["metrics"]["node_device_power_mean_w"]


ROCM = "device,Temperature (Sensor edge) (C),Current Socket Graphics Package Power (W),GPU use (%)"


def test_a_log_without_times_needs_an_interval(wattune: Verb, tmp_path: Path) -> None:
    rocm = "\n".join(f"{ROCM}\ncard0,61.0,{at}.4,99\ncard1,60.0,510.0,99\n" for at in range(500, 560))
    uuids = "uuid, power.draw [W]\n" + "GPU-a, 500.00 W\nGPU-b, 400.00 W\n" * 60
    for name, text in (("dcgmi", str(LOGS["dcgmi_untimed.txt"].text)), ("rocm", rocm), ("uuids", uuids)):
        (tmp_path / name).write_text(text)
        code, _, err = wattune("import", tmp_path / name, "--storage", tmp_path)
        assert code == 2 and "has no column of times" in err and "--interval" in err
        found = imported(wattune, tmp_path / f"of_{name}", tmp_path / name, "--interval", "0.5")
        assert found["window_s"] == pytest.approx(29.5) and len(found["devices"]) == 2


def test_devices_that_nothing_tells_apart_are_refused(wattune: Verb, tmp_path: Path) -> None:
    rows = [f"2026-01-02 {clock(36000 + at)}.1{gpu}0Z, {100 + gpu} W" for at in range(9) for gpu in range(4)]
    (tmp_path / "a.csv").write_text("timestamp, power.draw [W]\n" + "\n".join(rows))
    code, _, err = wattune("import", tmp_path / "a.csv", "--storage", tmp_path)
    assert code == 2 and "no column says of which device" in err


def test_a_model_s_name_is_no_device(wattune: Verb, tmp_path: Path) -> None:
    rows = [f"2026-01-02 {clock(36000 + at)}Z, NVIDIA A100 80GB, {100 + gpu}" for at in range(9) for gpu in range(4)]
    (tmp_path / "a.csv").write_text("timestamp, gpu, power_w\n" + "\n".join(rows))
    code, _, err = wattune("import", tmp_path / "a.csv", "--storage", tmp_path)
    assert code == 2 and "no column says of which device" in err
