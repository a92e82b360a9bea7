"""The whole way of a calibration with simulated sensors: real loads and samplers, and what studies make of it."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import pytest

from wattune import api
from wattune.calibration import run as calibration
from wattune.calibration.run import Protocol, calibrate
from wattune.errors import SensorChoiceError, SpaceError, TelemetryError
from wattune.storage.files import with_calibrations, write_calibration
from wattune.storage.study import check_study_name
from wattune.telemetry.backend import DeviceInfo
from wattune.telemetry.probe import probe

Verb = Callable[..., tuple[int, str, str]]
QUICK = Protocol(waves=((0.5, 4), (2.0, 1)), num_pairs=2, block_s=0.6)
HERE = {name for name, is_there, *_ in probe() if is_there}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    told: list[tuple[str, float]] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WATTUNE_RUNTIME", str(tmp_path_factory.mktemp("locks")))
        # No power limit sets in, and no ring is drained: nothing but time passes.
        patch.setattr(calibration, "WARM_S", 0.5)
        patch.setattr(calibration, "LAST_DRAIN_S", 0.0)
        place = str(tmp_path_factory.mktemp("storage"))
        ((path, one),) = calibrate(
            "simulated", storage=place, protocol=QUICK, listener=lambda what, done: told.append((what, done))
        )
    assert json.loads(path.read_text())["uuid"] == one["uuid"]
    shares = [done for _, done in told]
    assert shares == sorted(shares)
    assert 0 <= shares[0] < 0.5 <= shares[-1] < 1
    return one


@pytest.mark.slow
def test_it_says_what_it_found_and_that_it_is_simulated(found: dict[str, Any]) -> None:
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert found["simulated"] is True
    assert found["signals"]["ring"]["sensor_period_s"] == pytest.approx(0.02, rel=0.1)
    assert found["limits"]["ring"]["finest_window_s"] < 0.06
    assert [wave["period_s"] for wave in found["waves"]] == [0.5, 2.0]
    cost = found["overhead"]
    assert cost["low"] <= cost["ratio"] <= cost["high"]
    assert cost["num_pairs"] == 2
    assert 0 <= cost["sampler_cpu_frac"] < 1


@pytest.mark.slow
def test_a_study_keeps_a_devices_limits_with_its_manifest(found: dict[str, Any], tmp_path: Path) -> None:
    path = write_calibration(tmp_path, found)
    assert path == tmp_path / "calibration" / f"{found['uuid']}.json"
    manifest = {"node": "n", "devices": {"gpu0": {"uuid": found["uuid"]}, "gpu1": {"uuid": "other"}, "host": {}}}
    known = with_calibrations(tmp_path, manifest)
    assert known["devices"]["gpu0"]["sensor_limits"] == found["limits"]
    assert known["devices"]["gpu1"] == {"uuid": "other"}
    assert known["node"] == "n"
    assert "sensor_limits" not in manifest["devices"]["gpu0"], "the sampler's own manifest is left alone"
    assert "link_peaks" not in known["devices"]["gpu0"], "simulated sensors count no bytes"
    write_calibration(tmp_path, found | {"link_peaks": {"pcie": 55e9}})
    assert with_calibrations(tmp_path, manifest)["devices"]["gpu0"]["link_peaks"] == {"pcie": 55e9}


def test_a_broken_calibration_is_an_error_not_a_guess(tmp_path: Path) -> None:
    path = write_calibration(tmp_path, {"uuid": "GPU-1", "limits": {}})
    path.write_text("[]")
    with pytest.raises(TelemetryError, match=r"GPU-1\.json is not a calibration.*calibrate gpu0 again"):
        with_calibrations(tmp_path, {"devices": {"gpu0": {"uuid": "GPU-1"}}})


def test_no_study_may_take_its_folder() -> None:
    with pytest.raises(SpaceError, match="calibration"):
        check_study_name("calibration")


@pytest.mark.parametrize("backend", ["amd_smi", "no_such"])
def test_what_cannot_be_calibrated_is_one_clear_error(backend: str) -> None:
    with pytest.raises(SensorChoiceError, match=f'backend "{backend}" cannot be calibrated; use --backend nvml'):
        calibrate(backend)


@pytest.mark.skipif("nvml" in HERE, reason="this machine has a GPU, so nothing is missing")
def test_without_such_a_device_it_is_one_clear_error() -> None:
    with pytest.raises(TelemetryError, match="NVML does not start"):
        calibrate("nvml")


def test_a_host_is_no_device_to_calibrate() -> None:
    with pytest.raises(TelemetryError, match="--backend simulated"):
        calibrate("host")


def test_a_load_that_takes_long_to_be_warm_keeps_its_sampler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch loads for longer than the sampler's lease on a busy machine, and nobody else renews it meanwhile."""
    program, renewed = tmp_path / "program", list[float]()
    program.write_text("#!/bin/sh\nsleep 1.2\necho ready\nexec sleep 60\n")
    program.chmod(0o700)
    monkeypatch.setattr(calibration.sys, "executable", str(program))
    info = DeviceInfo(device="gpu0", uuid="GPU-1", name="H200")
    with calibration.load(info, "n", tmp_path / "spans.parquet", [], lambda: renewed.append(time.monotonic())):
        assert len(renewed) >= 3 and all(b - a < 5 for a, b in pairwise([*renewed, time.monotonic()]))


def children_of_group(marker: str) -> list[int]:
    """Processes whose environment holds the marker: the loads and samplers of one command."""
    found = []
    for process in psutil.process_iter():
        try:
            if marker in process.environ().get("WATTUNE_RUNTIME", ""):
                found.append(process.pid)
        except psutil.Error:
            continue
    return found


def wait_for(condition: Callable[[], bool], longest_s: float) -> None:
    deadline_s = time.monotonic() + longest_s
    while not condition():
        assert time.monotonic() < deadline_s, f"not within {longest_s:g} s"
        time.sleep(0.1)


@pytest.mark.usefixtures("in_foreground")
def test_interrupted_it_leaves_no_process(tmp_path: Path) -> None:
    locks = tmp_path / "locks"
    environment = {**os.environ, "WATTUNE_RUNTIME": str(locks), "WATTUNE_STORAGE": str(tmp_path / "storage")}
    command = [sys.executable, "-m", "wattune", "calibrate", "--backend", "simulated", "--json"]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        wait_for(lambda: len(children_of_group(str(locks))) >= 3, 60)  # itself, sampler, load
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=30)
    assert process.returncode == 130
    assert json.loads(out)["error"]["exit_code"] == 130
    wait_for(lambda: not children_of_group(str(locks)), 20)
    assert children_of_group(str(locks)) == []
    assert not (tmp_path / "storage").exists()


@pytest.mark.skipif("nvml" in HERE, reason="this machine has a GPU, so nothing is missing")
@pytest.mark.parametrize("options", [[], ["--json"]])
def test_the_command_says_what_is_missing(wattune: Verb, tmp_path: Path, options: list[str]) -> None:
    code, out, err = wattune("calibrate", "--storage", tmp_path, *options)
    assert code == 1
    assert not out or json.loads(out)["error"]["exit_code"] == 1
    assert err.startswith("error: ")
    assert "nvml" in err.lower()
    assert "Traceback" not in err


def test_the_command_shows_what_was_found_and_where_it_is(
    found: dict[str, Any], wattune: Verb, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The verb and its tables over a calibration that was measured above; measuring it again would add nothing."""

    def kept_there(_backend: str, *, storage: str, listener: object) -> list[tuple[Path, dict[str, Any]]]:
        return [(write_calibration(Path(storage), found), found)]

    monkeypatch.setattr(api, "calibrate", kept_there)
    path = tmp_path / "calibration" / f"{found['uuid']}.json"
    for options in ([], ["--json"]):
        code, out, _ = wattune("calibrate", "--storage", tmp_path, *options)
        assert not code
        kept = json.loads(path.read_text())
        assert len(kept.pop("digest")) == 64 and kept.pop("format") == 4 and kept == found
        if options:
            assert json.loads(out)["calibrations"] == [{**found, "path": str(path)}]
        else:
            assert "SIMULATED" in out
            assert str(path) in out
            assert "ring" in out
