"""Settings of devices over stubs with the vendors' ABI: who may set them, within what, and that they come back."""

import json
import os
import random
import shutil
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import limit_deaths
import pytest

from wattune.errors import PlanError, TelemetryError
from wattune.limits.process import SettingsProcess
from wattune.limits.setter import FOLDER_VARIABLE
from wattune.orchestrate.telemetry_actor import TelemetryActor

pytestmark = [
    pytest.mark.skipif(shutil.which("g++") is None, reason="the stub library is built with g++"),
    pytest.mark.timeout(120),
]
OWNER = "GPU-5tub0000-0000-0000-0000-00000000000"
WATTS = {"power_limit_w": [300, 500]}


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("nvml")
    limit_deaths.build_nvml(folder)
    return folder


@pytest.fixture
def state(library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The settings of four devices, as a driver keeps them."""
    path = tmp_path / "state"
    path.write_bytes(limit_deaths.STUBS["nvml"].pack(random.Random(1)))
    monkeypatch.setenv("LD_LIBRARY_PATH", str(library))
    monkeypatch.setenv("LIMIT_STUB_STATE", str(path))
    monkeypatch.setenv(FOLDER_VARIABLE, str(tmp_path / "shared"))
    return path


@pytest.fixture
def setter(state: Path, tmp_path: Path) -> Iterator[SettingsProcess]:
    del state
    process = start(tmp_path / "first")
    yield process
    process.end()


def start(folder: Path, values: dict | None = None, num_devices: int = 4, lease_s: float = 20.0) -> SettingsProcess:
    return SettingsProcess.start(
        folder, backend="nvml", num_devices=num_devices, values=WATTS if values is None else values, lease_s=lease_s
    )


def limits_w(state: Path) -> list[float]:
    return [mw / 1000 for mw, *_ in struct.iter_unpack("11I", state.read_bytes())]


def sets(state: Path) -> list[str]:
    log = Path(f"{state}.log")
    return log.read_text().splitlines() if log.exists() else []


def until_as(state: Path, found: bytes, within_s: float = 20.0) -> bool:
    end_s = time.monotonic() + within_s
    while state.read_bytes() != found and time.monotonic() < end_s:
        time.sleep(0.02)
    return state.read_bytes() == found


def test_what_is_set_is_enforced_logged_and_restored(state: Path, setter: SettingsProcess, tmp_path: Path) -> None:
    found = state.read_bytes()
    setter.set({"power_limit_w": 300})
    assert limits_w(state) == [300] * 4
    setter.set({"power_limit_w": 500, "clock_mhz": 1500, "power_profile": "max_q"})
    assert [one[1:4] for one in struct.iter_unpack("11I", state.read_bytes())] == [(1500, 1500, 2)] * 4
    setter.set({"power_limit_w": 500})
    assert limits_w(state) == [500] * 4 and [one[1:4] for one in struct.iter_unpack("11I", state.read_bytes())] == [
        (0, 0, one[3]) for one in struct.iter_unpack("11I", found)
    ]
    with pytest.raises(TelemetryError, match=r"clock_mhz=1501 is none that device .* takes; use 1500 or 1515"):
        setter.set({"clock_mhz": 1501})
    setter.set({})
    assert state.read_bytes() == found
    setter.set({"power_limit_w": 300})
    setter.end()
    assert state.read_bytes() == found and not list((tmp_path / "shared").glob("*.json"))
    lines = [json.loads(line) for line in (tmp_path / "shared" / f"changes-{os.getuid()}.log").read_text().splitlines()]
    assert {(one["device"], one["to"]) for one in lines if one["axis"] == "power_limit_w"} >= {(f"{OWNER}3", 500_000)}
    assert all(one["pid"] and one["uid"] == os.getuid() and one["at"] for one in lines)


@pytest.mark.parametrize(
    ("values", "num_devices", "variable", "words"),
    [
        ({"power_limit_w": [500, 199]}, 4, "", "power_limit_w=199 is none that device .* takes; use 200 to 700"),
        ({"clock_mhz": [1501]}, 4, "", "clock_mhz=1501 is none that device .* takes; use 1500 or 1515"),
        ({"power_profile": ["hpc"]}, 4, "", "power_profile=hpc is none .*; use max_p or max_q or network"),
        (WATTS, 4, "LIMIT_STUB_DENIED", "nvmlDeviceSetPowerManagementLimit: Insufficient Permissions; run as root"),
        (WATTS, 2, "", "trials use 2 of the node's 4 devices, and all would be set; use all devices"),
    ],
)
def test_what_cannot_be_set_is_one_line_and_changes_nothing(
    values: dict,
    num_devices: int,
    variable: str,
    words: str,
    state: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = state.read_bytes()
    if variable:
        monkeypatch.setenv(variable, "1")
    with pytest.raises(PlanError, match=words) as caught:
        start(tmp_path / "first", values, num_devices)
    assert caught.value.exit_code == 2 and "\n" not in str(caught.value)
    assert sets(state) == [] and state.read_bytes() == found
    assert not list((tmp_path / "shared").glob("*.json")), "nothing is owed"


def test_a_setter_that_dies_without_a_word_is_told_whole(
    state: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\nkill -KILL $$\n")
    program.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(program))
    with pytest.raises(PlanError, match=r"the setter in .* ended while starting: .") as caught:
        start(tmp_path / "first", {"power_limit_w": 300}, 4)
    assert "\n" not in str(caught.value) and sets(state) == []


def test_a_device_has_one_owner(state: Path, setter: SettingsProcess, tmp_path: Path) -> None:
    setter.set({"power_limit_w": 300})
    with pytest.raises(PlanError, match=rf"device {OWNER}0 is set by process \d+ of user \d+; end that study"):
        start(tmp_path / "second")
    start(tmp_path / "third", {}, 0).end()  # pays debts, of which there is none
    assert limits_w(state) == [300] * 4
    setter.end()
    start(tmp_path / "second").end()


def test_a_lease_that_nobody_renews_ends_with_what_was_found(state: Path, tmp_path: Path) -> None:
    found = state.read_bytes()
    process = start(tmp_path / "first", lease_s=0.5)
    process.set({"power_limit_w": 300})
    assert limits_w(state) == [300] * 4
    assert until_as(state, found)


def test_a_setter_that_is_killed_leaves_a_debt_that_the_next_one_pays(state: Path, tmp_path: Path) -> None:
    found, process = state.read_bytes(), start(tmp_path / "first")
    process.set({"power_limit_w": 300})
    process._signal(signal.SIGKILL)
    assert process._ended_within(10)
    assert limits_w(state) == [300] * 4, "nobody restored it"
    start(tmp_path / "next", {}, 0)
    assert until_as(state, found) and not list((tmp_path / "shared").glob("*.json"))


def test_a_device_that_refuses_stays_owed_and_the_others_are_restored(
    state: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, flag = state.read_bytes(), tmp_path / "stuck"
    monkeypatch.setenv("LIMIT_STUB_STUCK", str(flag))
    process = start(tmp_path / "first")
    process.set({"power_limit_w": 300})
    flag.write_text("1")
    process.end()
    asked = list(struct.iter_unpack("11I", found))
    assert limits_w(state) == [asked[0][0] / 1000, 300, asked[2][0] / 1000, asked[3][0] / 1000]
    assert [one.stem for one in (tmp_path / "shared").glob("*.json")] == [f"{OWNER}1"]
    flag.unlink()
    start(tmp_path / "next", {}, 0)
    assert until_as(state, found)


def test_an_actor_sets_for_one_trial_and_replaces_a_setter_that_died(
    state: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    found, actor = state.read_bytes(), TelemetryActor("telemetry", "node", ["host", "nvml"])
    with pytest.raises(PlanError, match="power_limit_w=701 is none"):
        actor.own(4, {"power_limit_w": [701]})
    actor.own(4, WATTS)
    actor._set("first", 4, {"power_limit_w": 300})
    actor._set("second", 4, {"power_limit_w": 500})
    actor.stop("first")  # its sensors close late: the next trial has begun
    assert limits_w(state) == [500] * 4
    actor._setter._signal(signal.SIGKILL)
    assert actor._setter._ended_within(10)
    with pytest.raises(TelemetryError, match="set nothing"):  # nobody knows what the trial ran with
        actor.stop("second")
    assert until_as(state, found)
    actor._set("third", 4, {})
    assert state.read_bytes() == found
    actor._set("fourth", 4, {"power_limit_w": 300})
    assert limits_w(state) == [300] * 4
    actor.release()
    assert state.read_bytes() == found


@pytest.mark.skipif(os.getuid() != 0, reason="only root gives files to others")
def test_a_record_or_folder_of_a_third_user_is_not_believed(state: Path, tmp_path: Path) -> None:
    found, record = state.read_bytes(), tmp_path / "shared" / f"{OWNER}0.json"
    start(tmp_path / "first").end()
    boot = Path("/proc/sys/kernel/random/boot_id").read_text()
    record.write_text(json.dumps({"boot": boot, "pid": 1, "uid": 12345, "found": {"power_limit_w": 650_000}}))
    os.chown(record, 12345, -1)
    with pytest.raises(PlanError, match=r"has a record of user 12345, .*; run wattune as that user, or remove it"):
        start(tmp_path / "second")
    assert state.read_bytes() == found
    os.chown(tmp_path / "shared", 12345, -1)
    with pytest.raises(PlanError, match="must be a sticky folder of root or user 0, but is a folder of user 12345"):
        start(tmp_path / "third")


def test_thirty_deaths_at_random_moments_leave_devices_as_found(tmp_path: Path) -> None:
    script = Path(limit_deaths.__file__)
    done = subprocess.run(
        [sys.executable, script, "--num", "30", "--at-once", "6", "--csv", tmp_path / "rows.csv"],
        capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("(bar: 0)") == len(limit_deaths.BAD) and "30 deaths over nvml" in done.stdout
