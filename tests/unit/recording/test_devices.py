"""Devices that count on a shared node: another user's energy is never the command's."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from recorded import record

from wattune.errors import PlanError, SensorChoiceError
from wattune.recording import recorder
from wattune.recording.attach import AttachedProcess
from wattune.recording.devices import OTHERS, Choice
from wattune.recording.recording import load, look, run_of
from wattune.run import Recorded
from wattune.storage.measured import MeasuredFolder
from wattune.telemetry.devices import without_own_processes

GOLDEN = Path(__file__).parents[2] / "golden" / "h200x4" / "dp4"
BACKENDS = ["host", f"replay:{GOLDEN}?start_s=5"]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("WATTUNE_RUNTIME", str(tmp_path / "runtime"))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(recorder, "LEAD_S", 0.3)
    monkeypatch.setattr(recorder, "TAIL_S", 0.3)


def recorded(path: Path) -> Recorded:
    found = run_of(path).recorded
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("command", "asked", "counting", "why"),
    [
        (["CUDA_VISIBLE_DEVICES=1", "sleep", "1"], "0,2", {"gpu0", "gpu2"}, "--devices 0,2"),
        pytest.param(
            ["env", "CUDA_VISIBLE_DEVICES=3", "sleep", "1"],
            None,
            {"gpu3"},
            "CUDA_VISIBLE_DEVICES=3 of the command",
            marks=pytest.mark.slow,
        ),
        (
            ["sh", "-c", "CUDA_VISIBLE_DEVICES=0,1 sleep 1; true"],
            None,
            {"gpu0", "gpu1"},
            "CUDA_VISIBLE_DEVICES=0,1 of the command",
        ),
        (["CUDA_VISIBLE_DEVICES=", "sleep", "1"], None, set(), "CUDA_VISIBLE_DEVICES= of the command"),
        (["sleep", "1"], None, {"gpu0", "gpu1", "gpu2", "gpu3"}, "nothing says which devices the command used"),
    ],
)
def test_others_are_kept_apart_and_in_no_sum(
    tmp_path: Path, command: list[str], asked: str | None, counting: set[str], why: str
) -> None:
    path = record(command, storage=tmp_path, backends=BACKENDS, name="a", devices=asked)
    found, run = recorded(path), run_of(path)
    names = {one.rpartition("/")[2] for one in found.devices}
    assert names == counting and found.devices_why == why
    assert {one.rpartition("/")[2] for one in found.others} == {"gpu0", "gpu1", "gpu2", "gpu3"} - counting
    each_w = [one["device_power_mean_w"] for one in found.devices.values()]
    if not counting:
        assert found.energy_j is None and "node_device_power_mean_w" not in run.metrics
    else:
        assert found.window_s is not None
        assert found.energy_j == pytest.approx(sum(each_w) * found.window_s, rel=1e-6)
        assert run.metrics["node_device_power_mean_w"] == pytest.approx(sum(each_w), rel=1e-6)
    # The folder alone tells the same, and its tables have no row of others.
    measured = load(path)
    assert {name for _, name in measured.devices} == counting
    assert {name for tier in measured.sources.values() for _, name in tier.devices} <= counting | {"host"}
    apart = MeasuredFolder(path / OTHERS)
    kept = {name for one in apart.manifests().values() for name in one["devices"]}
    assert kept == {"gpu0", "gpu1", "gpu2", "gpu3"} - counting


def test_a_simulated_device_obeys_the_same_variables(tmp_path: Path) -> None:
    path = record(["CUDA_VISIBLE_DEVICES=", "sleep", "1"], storage=tmp_path, backends=["simulated"], name="a")
    assert recorded(path).energy_j is None and len(recorded(path).others) == 1
    path = record(["CUDA_VISIBLE_DEVICES=0", "sleep", "1"], storage=tmp_path, backends=["simulated"], name="b")
    assert recorded(path).energy_j is not None and not recorded(path).others


@pytest.mark.parametrize("text", ["4", "GPU-none", "MIG-1", ""])
def test_a_device_that_is_not_there_ends_it_before_the_command(tmp_path: Path, text: str) -> None:
    marker = tmp_path / "ran"
    with pytest.raises(SensorChoiceError):
        record(["touch", str(marker)], storage=tmp_path, backends=BACKENDS, name="a", devices=text)
    assert not marker.exists() and not (tmp_path / "recordings" / "a").exists()


def test_a_recording_that_was_killed_and_the_live_view_have_no_other_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[set[str]] = []

    def watch(folder: Path, start_mono_ns: int) -> None:
        seen.append({name for _, name in look(folder, start_mono_ns).devices})

    def die(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(recorder, "_close", die)
    with pytest.raises(KeyboardInterrupt):
        command = ["CUDA_VISIBLE_DEVICES=2", "sleep", "2"]
        record(command, storage=tmp_path, backends=BACKENDS, name="a", watcher=watch)
    assert seen and all(each <= {"gpu2"} for each in seen)
    assert {name for _, name in load(tmp_path / "recordings" / "a").devices} == {"gpu2"}


def manifest(
    users: Mapping[str, Mapping[int, bool]], at_start: Mapping[str, list[int]] | None = None
) -> dict[str, Any]:
    early = at_start or {}
    return {
        "devices": {
            "host": {},
            **{
                f"gpu{slot}": {
                    "users": {str(pid): here for pid, here in users.get(f"gpu{slot}", {}).items()},
                    "at_start": {"other_processes": [{"pid": pid} for pid in early.get(f"gpu{slot}", [])]},
                }
                for slot in range(3)
            },
        }
    }


@pytest.mark.parametrize(
    ("users", "at_start", "told", "counting"),
    [
        ({"gpu1": {7: True}}, {}, [], ["gpu1"]),
        ({"gpu1": {7: True}, "gpu0": {99: True}}, {"gpu0": [99]}, [], ["gpu1"]),
        ({"gpu1": {7: True, 99: True}}, {}, [], ["gpu1"]),
        ({"gpu0": {99: True}}, {}, [], ["gpu1", "gpu2"]),  # the command used none
        ({}, {"gpu0": [99], "gpu1": [98], "gpu2": [97]}, [], []),
        ({"gpu2": {5000: False}}, {}, [], ["gpu0", "gpu1", "gpu2"]),  # a container hides numbers: it may be the command
        ({"gpu2": {5000: False}}, {"gpu2": [5000]}, [], ["gpu0", "gpu1"]),  # it was there before
        ({"gpu0": {5000: False}}, {}, ["gpu2"], ["gpu2"]),  # a rank told its device
        ({}, {}, [], ["gpu0", "gpu1", "gpu2"]),
    ],
)
def test_without_a_choice_the_processes_tell(
    users: dict[str, dict[int, bool]], at_start: dict[str, list[int]], told: list[str], counting: list[str]
) -> None:
    choice = Choice(None, {})
    choice.pids |= {7, 8}
    assert choice.counted(manifest(users, at_start), told)["counted"] == counting


SHARED_DRIVER = """
import json, pathlib, pytest
from fake_nvml import FakeGpu, RunningNvml
def processes(gpu):
    users = json.loads(pathlib.Path({users!r}).read_text())
    return [(pid, 10**9) for pid in users.get(gpu.uuid[-1], [])]
FakeGpu.processes = property(processes, lambda *_: None)
RunningNvml(3).install(pytest.MonkeyPatch())
"""


def test_the_driver_s_list_of_processes_tells_the_command_s_devices_from_a_stranger_s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole path: NVML's list in the sampler, the command's tree in the recorder, energy in the result."""
    users = tmp_path / "users"
    (tmp_path / "sitecustomize.py").write_text(SHARED_DRIVER.format(users=str(users)))
    monkeypatch.syspath_prepend(str(tmp_path))
    with subprocess.Popen(["sleep", "60"]) as stranger:
        users.write_text(f'{{"0": [{stranger.pid}]}}')
        script = f"""echo '{{"0": [{stranger.pid}], "1": ['$$']}}' > {users}; sleep 6"""
        for name in "abc":  # over a gap of readings, which a busy machine makes, no mean is told
            path = record(["sh", "-c", script], storage=tmp_path, backends=["host", "nvml"], name=name)
            found = recorded(path)
            if all("device_power_mean_w" in own for own in found.devices.values()):
                break
            users.write_text(f'{{"0": [{stranger.pid}]}}')
        stranger.kill()
    assert list(map(str, found.devices)) == [f"{load(path).facts['node']}/gpu1"]
    assert {one.rpartition("/")[2] for one in found.others} == {"gpu0", "gpu2"}
    assert found.devices_why == "processes of the command were on them" and found.window_s is not None
    (own,) = found.devices.values()
    assert found.energy_j == pytest.approx(own["device_power_mean_w"] * found.window_s, rel=1e-6)
    assert "other_gpu_users" not in run_of(path).quality_reasons


def test_what_a_variable_names_counts_with_what_the_processes_use() -> None:
    choice = Choice(None, {"CUDA_VISIBLE_DEVICES": "0"})
    choice.pids.add(7)
    found = choice.counted(manifest({"gpu2": {7: True}, "gpu1": {9: True}}))
    assert found["counted"] == ["gpu0", "gpu2"] and found["why"].endswith("and its processes")
    assert Choice(None, None).counted(manifest({"gpu2": {9: True}}))["counted"] == ["gpu0", "gpu1", "gpu2"]


def test_a_part_of_a_device_that_a_process_chooses_later_is_said_and_its_use_counts() -> None:
    choice = Choice(None, {"CUDA_VISIBLE_DEVICES": "MIG-1"})
    with pytest.raises(SensorChoiceError, match="part of a device"):
        choice.counted(manifest({}))
    with subprocess.Popen(["sleep", "600"], env={"CUDA_VISIBLE_DEVICES": "MIG-1"}) as job:
        choice.begin(job.pid)
        found = choice.counted(manifest({"gpu1": {job.pid: True}}))
        job.kill()
    assert found["counted"] == ["gpu1"]
    assert found["why"].startswith('processes of the command were on them; "MIG-1" is a part of a device')


def test_the_job_s_own_processes_are_no_strangers() -> None:
    choice = Choice(None, {}, ran_before=True)
    choice.pids |= {7, 8}
    sampled = manifest({}, {"gpu0": [7, 99]})
    kept = without_own_processes(sampled, choice.own_processes(sampled["devices"]), warm=False)
    assert kept["devices"]["gpu0"]["at_start"]["other_processes"] == [{"pid": 99}]


def test_in_a_container_whose_numbers_are_hidden_a_job_s_own_device_is_no_stranger_s() -> None:
    """A job that ran before has its processes on its device when the sampler begins."""
    hidden = 2**30  # no number of a process here
    sampled = manifest({"gpu1": {hidden: False}}, {"gpu1": [hidden], "gpu2": [os.getpid()]})
    assert Choice(None, {}, ran_before=True).counted(sampled)["counted"] == ["gpu0", "gpu1"]
    assert Choice(None, {}).counted(sampled)["counted"] == ["gpu0"]


def test_a_job_that_runs_is_recorded_until_it_ends_and_its_end_is_its_own(tmp_path: Path) -> None:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "1,3", "TOKEN": "s3cr3t0"}
    with subprocess.Popen(["sh", "-c", "sleep 2; sleep 2; exit 9", "--password", "s3cr3t0"], env=environment) as job:
        path = record(storage=tmp_path, backends=BACKENDS, name="a", attach=job.pid, seconds=60)
    assert job.returncode == 9
    found = recorded(path)
    assert found.exit_code is None and found.ended and not found.failure
    assert {one.rpartition("/")[2] for one in found.devices} == {"gpu1", "gpu3"}
    assert found.command[:2] == ("sh", "-c") and found.command[-1] == "***"
    assert found.window_s is not None and 0 < found.window_s < 30
    facts = load(path).facts
    assert facts["attached_pid"] == job.pid and "s3cr3t0" not in (path / "manifest.json").read_text()


@pytest.mark.usefixtures("in_foreground")
def test_an_interrupt_ends_the_recording_and_not_the_job(tmp_path: Path) -> None:
    def interrupt(_folder: Path, _start_mono_ns: int) -> None:
        signal.raise_signal(signal.SIGINT)

    with subprocess.Popen(["sleep", "60"]) as job:
        path = record(storage=tmp_path, backends=["host"], name="a", attach=job.pid, seconds=600, watcher=interrupt)
        assert job.poll() is None
        again = record(storage=tmp_path, backends=["host"], name="b", attach=job.pid, seconds=0.5)
        assert job.poll() is None
        job.kill()
    assert recorded(path).exit_code is None and recorded(again).exit_code is None


def test_children_that_come_later_count() -> None:
    ready, go = os.pipe()
    script = "import os, sys, subprocess; os.read(int(sys.argv[1]), 1); subprocess.run(['sleep', '600'])"
    command = [sys.executable, "-c", script, str(ready)]
    with subprocess.Popen(command, pass_fds=(ready,), env={"CUDA_VISIBLE_DEVICES": "2"}) as job:
        choice = Choice(None, {})
        choice.begin(job.pid)
        assert choice.look() and choice.pids == {job.pid} and not choice.look()
        os.write(go, b"x")
        deadline_s = time.monotonic() + 30
        while len(choice.pids) == 1 and time.monotonic() < deadline_s:
            choice.look()
            time.sleep(0.05)
        for pid in choice.pids:
            os.kill(pid, signal.SIGKILL)
    assert len(choice.pids) == 2
    assert choice.counted({"devices": {f"gpu{slot}": {} for slot in range(4)}})["counted"] == ["gpu2"]


def test_what_cannot_be_attached_to_is_one_line() -> None:
    with subprocess.Popen(["true"]) as gone:
        pass
    with pytest.raises(PlanError, match="no process has this number"):
        AttachedProcess(gone.pid)
    with subprocess.Popen(["sleep", "600"]) as job:
        job.kill()
        os.waitid(os.P_PID, job.pid, os.WEXITED | os.WNOWAIT)
        with pytest.raises(PlanError, match="has ended"):
            AttachedProcess(job.pid)
    with_thread = threading.Thread(target=time.sleep, args=(5,), daemon=True)
    with_thread.start()
    with pytest.raises(PlanError, match="no process"):
        AttachedProcess(with_thread.native_id or 0)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become somebody else")
def test_another_user_s_job_says_who_may() -> None:
    pid, parent = os.fork(), os.getppid()
    if pid == 0:
        os.setuid(65534)
        try:
            AttachedProcess(max(1, parent))
        except PlanError as error:
            os._exit(0 if "record as that user" in str(error) else 3)
        os._exit(4)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
