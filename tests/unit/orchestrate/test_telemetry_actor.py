"""A telemetry actor without Ray: processors of the sampler, strangers among processes, readings."""

import itertools
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pyarrow as pa
import pytest
import ray

from wattune.clock import ClockAnchor
from wattune.errors import TelemetryError
from wattune.orchestrate import telemetry_actor
from wattune.orchestrate.cluster import Node
from wattune.orchestrate.telemetry_actor import (
    TelemetryActor,
    actor_name,
    spare_cpus,
)
from wattune.storage.digests import digests_of
from wattune.storage.measured import MeasuredFolder
from wattune.storage.remote import RemoteStorage
from wattune.telemetry.sampler.lease import lock_holder
from wattune.telemetry.sampler.process import SamplerProcess


@pytest.mark.parametrize(
    ("cpus", "ranks", "own"),
    [(range(2), 2, ()), (range(3), 2, ()), (range(4), 2, (3,)), (range(192), 8, (191,)), (range(64), 0, ())],
)
def test_a_sampler_has_a_processor_of_its_own_where_ranks_leave_one(cpus: range, ranks: int, own: tuple[int]) -> None:
    assert spare_cpus(list(cpus), ranks) == own


LEAVES = """
import os, threading
from wattune.orchestrate.telemetry_actor import leave_to_sampler

allowed = sorted(os.sched_getaffinity(0))
wait = threading.Event()
thread = threading.Thread(target=wait.wait)
thread.start()
leave_to_sampler(())
assert os.sched_getaffinity(thread.native_id) == set(allowed)
leave_to_sampler(tuple(allowed))  # nothing would be left: nothing is changed
assert os.sched_getaffinity(thread.native_id) == set(allowed)
if len(allowed) > 1:
    leave_to_sampler((allowed[-1],))
    for task in (thread.native_id, threading.get_native_id()):
        assert os.sched_getaffinity(task) == set(allowed[:-1]), task
wait.set()
print("done")
"""


def test_every_thread_keeps_off_the_samplers_processor() -> None:
    done = subprocess.run([sys.executable, "-c", LEAVES], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.strip() == "done"


@pytest.fixture
def actor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TelemetryActor:
    """An actor on a node whose sensors play the recording of a load on four H200s back."""
    monkeypatch.setenv("WATTUNE_RUNTIME", str(tmp_path / "runtime"))
    monkeypatch.setattr(telemetry_actor, "spool_folder", lambda name: tmp_path / name)
    recording = Path(__file__).parents[2] / "golden" / "h200x4" / "dp4"
    return TelemetryActor("actor", "n0", [f"replay:{recording}?start_s=20"])


def test_power_and_temperatures_of_a_running_trial_are_read_from_the_samplers_files(
    actor: TelemetryActor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sensed = actor.start("trial", 1)
    assert sorted(sensed.device_names.values()) == ["gpu0", "gpu1", "gpu2", "gpu3"]
    deadline_s = time.monotonic() + 30
    power_w, temperatures_c = None, {}
    while (power_w is None or not temperatures_c) and time.monotonic() < deadline_s:
        time.sleep(0.5)
        power_w, temperatures_c = actor.node_power_w("trial"), actor.temperatures_c()
    assert power_w is not None and 1000 < power_w < 2900, "four H200s under load"
    assert temperatures_c.keys() == set(sensed.device_names.values())
    assert all(20 < value < 95 for value in temperatures_c.values())
    actor.stop("trial")
    recorded = actor.recording("trial", tmp_path / "not seen")
    assert recorded.manifest["closed"] is True and recorded.files and not recorded.digests
    refused = actor.recording("trial", tmp_path / "not seen", None, f"file://{tmp_path}")
    assert refused.files == recorded.files and "another place on each machine" in refused.unsent
    store: dict[str, bytes] = {}
    monkeypatch.setattr(RemoteStorage, "send_ahead", lambda _self, _place, files: store.update(files))
    sent = actor.recording("trial", tmp_path / "not seen", None, "s3://studies")
    assert store == {f"telemetry/n0/{name}": content for name, content in recorded.files.items()} and not sent.files
    assert sent.digests == {name: sha256(content).hexdigest() for name, content in store.items()}
    assert sent.sent == {name: len(content) for name, content in store.items()}
    (tmp_path / "study").mkdir()
    (mark := tmp_path / "study" / ".seen").touch()
    written = actor.recording("trial", mark)
    assert written.digests == digests_of(mark.parent, "run.json") and not written.files, "nothing comes through Ray"
    assert {name: (mark.parent / "telemetry/n0" / name).read_bytes() for name in recorded.files} == recorded.files
    assert MeasuredFolder(mark.parent).telemetry()["fast"].num_rows > 0
    assert pickle.loads(pickle.dumps(written)) == written
    own = actor.recording("trial", mark, {"n0": {"gpu1"}}).manifest["devices"]
    assert own.keys() == {"gpu1"}, "of devices that the trial used alone"
    after_c = actor.temperatures_c()
    assert after_c.keys() == temperatures_c.keys(), "a sampler runs for it where none does"
    began_s = time.monotonic()
    following = actor.start("next")
    assert (following.device_names, following.cpus) == (sensed.device_names, ())
    assert not (actor._spool / "next" / "manifest.json").exists(), f"waited {time.monotonic() - began_s:.2f} s for it"
    assert sorted(actor.ready("next").values()) == sorted(sensed.device_names.values()), "a replay draws new uuids"
    actor.stop("next")


def test_two_clusters_on_parts_of_a_node_each_read_their_own_devices(
    actor: TelemetryActor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cluster's raylet has `CUDA_VISIBLE_DEVICES`; a sampler of all devices would keep the other cluster's out."""
    monkeypatch.setattr(telemetry_actor, "node_environment", lambda: {"CUDA_VISIBLE_DEVICES": "2,3", "TOKEN": "s3cr3t"})
    actor.start("trial", 1)
    pid = lock_holder(actor._spool / "trial" / "sampler.lock")
    assert "s3cr3t" not in Path(f"/proc/{pid}/cmdline").read_text(), "anybody may read how it was called"
    taken = {path.stem.rsplit("-", 1)[-1] for path in (tmp_path / "runtime").glob("replay-*.lock")}
    actor.stop("trial")
    assert taken == {"gpu2", "gpu3"}


def test_a_sampler_killed_while_it_opens_its_sensors_is_started_once_more(
    actor: TelemetryActor, tmp_path: Path
) -> None:
    names = actor.start("first").device_names
    actor.stop("first")
    actor.start("next")
    pid = lock_holder(actor._spool / "next" / "sampler.lock")
    assert pid and not (actor._spool / "next" / "manifest.json").exists()
    os.kill(pid, signal.SIGKILL)
    assert sorted(actor.ready("next").values()) == sorted(names.values())
    actor.stop("next")
    assert actor.recording("next", tmp_path).manifest["closed"] is True


def test_checks_of_a_running_trial_cover_every_second_however_far_apart_they_are(
    actor: TelemetryActor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both devices are drained once a second; one look takes long, and one comes before anything new."""
    wall_ns, late_ns, windows, now_s = 10**18, 10**9, [], [0.0]
    rows = [
        {"device": device, "sensor_ns": wall_ns + tick * 10**8, "mono_ns": (tick // 10 + 1) * 10**9 + shift * 10**7}
        for tick in range(1000)
        for shift, device in enumerate(("gpu0", "gpu1"))
    ]

    def read(_folder: Path, *, start_mono_ns: int) -> tuple[dict[str, pa.Table], list[str]]:
        until_ns = round(now_s[0] * 1e9) - late_ns
        return {"ring": pa.Table.from_pylist([one for one in rows if start_mono_ns <= one["mono_ns"] <= until_ns])}, []

    def peak_w(tables: Any, _node: str, _manifest: Any, window: tuple[int, int]) -> float | None:
        windows.append(window)
        ring = tables["ring"].to_pylist()
        first_ns = max(min(one["sensor_ns"] for one in ring if one["device"] == name) for name in ("gpu0", "gpu1"))
        assert first_ns <= window[0], "all of the window was read"
        return 500.0 if now_s[0] != 7.5 else None  # one look cannot tell it

    monkeypatch.setattr(telemetry_actor, "read_tables", read)
    monkeypatch.setattr(telemetry_actor, "node_power_peak_w", peak_w)
    monkeypatch.setattr(SamplerProcess, "manifest", lambda _: {"devices": {}})
    for now_s[0] in (3.0, 4.5, 6.1, 6.2, 7.5, 9.0, 31.0, 32.0):
        clock = ClockAnchor(mono_ns=round(now_s[0] * 1e9), wall_ns=wall_ns + round(now_s[0] * 1e9))
        monkeypatch.setattr(telemetry_actor.ClockAnchor, "now", lambda clock=clock: clock)
        actor.node_power_w("trial")
    assert windows[0][0] == wall_ns, "from the first reading on"
    told = [window for at, window in enumerate(windows) if at != 4]
    assert all(later[0] == max(min(sooner[1], later[1]) - 10**9, wall_ns) for sooner, later in itertools.pairwise(told))
    actor.start("trial", 1)
    actor.release()
    now_s[0] = 80.0
    monkeypatch.setattr(
        telemetry_actor.ClockAnchor, "now", lambda: ClockAnchor(mono_ns=80 * 10**9, wall_ns=wall_ns + 80 * 10**9)
    )
    actor.node_power_w("trial")
    assert windows[-1][0] == wall_ns + 73 * 10**9, "another attempt begins anew"


def test_an_actor_of_a_stopped_study_leaves_neither_a_sampler_nor_files(actor: TelemetryActor, tmp_path: Path) -> None:
    actor.release()  # nothing runs
    actor.start("trial", 1)
    sampler = SamplerProcess.attach(tmp_path / "actor" / "trial")
    actor.release()
    assert not sampler.alive() and not (tmp_path / "actor").exists()
    actor.start("trial", 1)
    actor.stop("trial")  # and its driver is ended before it has the rest removed
    actor.release()
    assert not (tmp_path / "actor").exists()


def test_studies_that_share_a_cluster_share_no_actor(new_node: Any) -> None:
    node = new_node("n0")
    assert actor_name(node, ["host"], "01000000") != actor_name(node, ["host"], "02000000")
    assert actor_name(node, ["host"], "01000000") != actor_name(node, ["host", "nvml"], "01000000")


@pytest.mark.parametrize("after", ["start", "release"])
def test_a_sampler_that_was_still_starting_when_its_actor_died_holds_up_nothing(
    actor: TelemetryActor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: str
) -> None:
    starting = SamplerProcess(tmp_path / "actor" / "trial")
    starting.folder.mkdir(parents=True)
    # What holds the lock and has written no manifest is a sampler that starts.
    (tmp_path / "sleeps_for_long.py").write_text("import time; time.sleep(60)")
    monkeypatch.syspath_prepend(tmp_path)
    starting._spawn("sleeps_for_long", {})
    restarted = TelemetryActor("actor", "n0", actor._backends)
    if after == "start":
        assert restarted.start("trial").device_names
        restarted.stop("trial")
        assert restarted.recording("trial", tmp_path).manifest["closed"] is True
    else:
        restarted.release()
        assert not starting.alive() and not starting.folder.exists()


def test_a_lease_that_cannot_be_renewed_once_does_not_end_the_renewing(
    actor: TelemetryActor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("wattune.orchestrate.telemetry_actor.RENEW_INTERVAL_S", 0.01)
    renewed = threading.Semaphore(0)

    class WithoutFolder:
        def renew(self) -> None:
            renewed.release()
            raise TelemetryError("the folder was cleared")

    actor._sampler = cast(SamplerProcess, WithoutFolder())
    assert all(renewed.acquire(timeout=10) for _ in range(2))
    actor._sampler = None


def test_the_name_of_an_actor_is_one_folder_whatever_a_backend_is_given(monkeypatch, tmp_path: Path) -> None:
    node = Node(node_id="n", name="node0", num_cpus=1, num_gpus=0)
    named = telemetry_actor.actor_name(node, ["host", "replay:/a/../b?start_s=19"], "01")
    assert named == "telemetry-host-replay__a_.._b_start_s_19-01-n"
    assert telemetry_actor.actor_name(node, ["host", "nvml"], "01") == "telemetry-host-nvml-01-n"
    monkeypatch.setattr(telemetry_actor, "temporary_folder", lambda *parts: tmp_path.joinpath(*parts))
    assert telemetry_actor.spool_folder(named).parent == tmp_path / "spool"


def test_a_telemetry_actors_process_loads_no_tune() -> None:
    """Nor what comes with it, pandas and Ray Data: each node of a study would start half a second later."""
    code = "import sys, wattune.orchestrate.telemetry_actor\n"
    code += "print([name for name in ('ray.tune', 'ray.data', 'pandas', 'torch') if name in sys.modules])"
    seen = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert seen.stdout.strip() == "[]"


def test_a_nodes_clock_is_asked_now_and_then_and_a_set_wall_clock_is_seen_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ahead_ns, own_ns, asked = 7 * 10**9, [10**12], []
    monkeypatch.setattr(telemetry_actor.time, "monotonic_ns", lambda: own_ns[0])
    monkeypatch.setattr(
        telemetry_actor.ClockAnchor, "now", lambda: ClockAnchor(mono_ns=own_ns[0], wall_ns=own_ns[0] + 50)
    )

    def answer(_pending: object, timeout: float) -> int:
        asked.append(timeout)
        own_ns[0] += 2 * (900_000 if len(asked) == 1 else 400_000)  # there and back
        return own_ns[0] + ahead_ns - 400_000

    monkeypatch.setattr(ray, "get", answer)
    clocks, actor = telemetry_actor.NodeClocks(), SimpleNamespace(mono_ns=SimpleNamespace(remote=lambda: None))

    def offset(wall_minus_mono_ns: int) -> dict[str, int]:
        told = ClockAnchor(mono_ns=0, wall_ns=wall_minus_mono_ns)
        return clocks.offset("node", actor, told)  # type: ignore[arg-type]

    first = offset(60)
    assert first["clock_offset_ns"] == ahead_ns + 10 and len(asked) == 2, "the second exchange was short enough"
    assert 400_000 <= first["clock_offset_uncertainty_ns"] < 401_000
    own_ns[0] += 50 * 10**9
    later = offset(60 - 3_000_000_000)
    assert later["clock_offset_ns"] == ahead_ns + 10 - 3_000_000_000 and len(asked) == 2
    assert later["clock_offset_uncertainty_ns"] == pytest.approx(5_400_000, rel=0.01), "two clocks drift apart"
    own_ns[0] += 51 * 10**9
    offset(60)
    assert len(asked) == 3
