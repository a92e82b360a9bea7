"""Leases and locks on real files, with clocks that tests move."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from wattune.errors import TelemetryError
from wattune.private_folder import start_ticks
from wattune.telemetry.sampler.lease import DeviceLocks, FileLock, Lease, lock_holder, renew, runtime_folder


class Clock:
    def __init__(self) -> None:
        self.s = 100.0

    def __call__(self) -> int:
        return int(self.s * 1e9)


@pytest.fixture
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("WATTUNE_RUNTIME", str(tmp_path / "runtime"))
    return tmp_path / "runtime"


def test_a_lease_expires_unless_it_is_touched(tmp_path: Path) -> None:
    path, clock = tmp_path / "lease", Clock()
    path.touch()
    lease = Lease(path, 10, clock)

    def looks_until_expired(most: int) -> int:
        for look in range(1, most + 1):
            clock.s += 1.1
            if lease.expired():
                return look
        return 0

    assert not lease.expired()
    assert looks_until_expired(9) == 0
    os.utime(path, (1, 1))  # whatever the wall clock says: a change is a renewal
    assert looks_until_expired(20) == 11


def test_a_node_that_stood_still_does_not_end_what_its_owner_renews_when_it_goes_on(tmp_path: Path) -> None:
    path, clock = tmp_path / "lease", Clock()
    path.touch()
    lease = Lease(path, 10, clock)
    assert not lease.expired()
    clock.s += 3600.0
    assert not lease.expired(), "the sampler may look before its owner renews"
    went_on_s = clock.s
    while not lease.expired():
        clock.s += 0.8
    assert clock.s - went_on_s == pytest.approx(8.0, abs=0.8), "an owner that does not come back is gone all the same"


def test_an_owner_that_is_stopped_keeps_its_lease_and_goes_on_with_it(tmp_path: Path) -> None:
    """Ctrl-Z stops a recorder and its command, and no sampler: that is in a session of its own."""
    path, clock = tmp_path / "lease", Clock()
    path.touch()
    code = (
        "import os, signal, sys; from pathlib import Path; from wattune.telemetry.sampler.lease import renew\n"
        "renew(Path(sys.argv[1]))\n"
        "os.kill(os.getpid(), signal.SIGSTOP)\n"
        "renew(Path(sys.argv[1])); print('again', flush=True); input()"
    )
    command = [sys.executable, "-c", code, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as owner:
        os.waitid(os.P_PID, owner.pid, os.WSTOPPED)
        lease = Lease(path, 10, clock)

        def expires_within(duration_s: float) -> bool:
            until_s = clock.s + duration_s
            while clock.s < until_s and not (over := lease.expired()):
                clock.s += 0.8
            return over

        assert not expires_within(100.0)
        owner.send_signal(signal.SIGCONT)
        assert owner.stdout is not None and owner.stdout.readline() == "again\n"
        assert not expires_within(9.0) and expires_within(2.0), "and renews it itself from then on"
        lease = Lease(path, 10, clock)
        owner.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, owner.pid, os.WSTOPPED)
        assert not expires_within(100.0)
        owner.kill()
        os.waitid(os.P_PID, owner.pid, os.WEXITED | os.WNOWAIT)
        assert expires_within(11.0), "an owner that ended comes back no more"


def test_a_lease_names_who_renewed_it_last(tmp_path: Path) -> None:
    path = tmp_path / "lease"
    with pytest.raises(FileNotFoundError):
        renew(path)
    path.write_text("9" * 48)
    os.utime(path, (1, 1))
    renew(path)
    assert path.read_text().split() == [str(os.getpid()), str(start_ticks(os.getpid()))]
    assert path.stat().st_mtime > 1


def test_a_deleted_lease_has_expired(tmp_path: Path) -> None:
    assert Lease(tmp_path / "lease", 10, Clock()).expired()


def test_a_lock_names_its_holder_and_ends_with_it(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    assert lock_holder(path) is None
    lock = FileLock.take(path)
    assert lock is not None
    assert lock_holder(path) == 0
    lock.write_holder(4711)
    assert lock_holder(path) == 4711
    assert FileLock.take(path) is None
    lock.release()
    assert lock_holder(path) is None


def test_an_inherited_lock_lives_as_long_as_the_child(tmp_path: Path) -> None:
    lock = FileLock.take(tmp_path / "lock")
    assert lock is not None
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, pass_fds=[lock.fileno()])
    lock.release()
    assert lock_holder(tmp_path / "lock") == 0
    child.communicate(b"\n", timeout=10)
    assert lock_holder(tmp_path / "lock") is None


def test_two_samplers_never_hold_one_device(runtime: Path) -> None:
    with DeviceLocks("nvml", ["GPU-1", "GPU-2"]):
        with pytest.raises(TelemetryError, match=rf"device GPU-2 of backend nvml .* process {os.getpid()}"):
            DeviceLocks("nvml", ["GPU-3", "GPU-2"])
        # All or none: the lock it did get is free again. Another backend's device is another device.
        DeviceLocks("nvml", ["GPU-3"]).release()
        DeviceLocks("replay", ["GPU-2"]).release()
    DeviceLocks("nvml", ["GPU-1", "GPU-2"]).release()


def test_a_sampler_waits_for_devices_that_become_free(runtime: Path) -> None:
    runtime_folder()
    path = runtime / "host-host.lock"
    lock = FileLock.take(path)
    assert lock is not None
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(0.3)"], pass_fds=[lock.fileno()])
    lock.release()
    DeviceLocks("host", ["host"], wait_s=10).release()
    assert child.wait(timeout=10) == 0


def test_a_runtime_folder_others_can_write_to_is_refused(runtime: Path) -> None:
    runtime.mkdir(mode=0o700)
    runtime.chmod(0o777)
    with pytest.raises(TelemetryError, match="only user"):
        runtime_folder()


def test_a_link_is_no_runtime_folder(runtime: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    runtime.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(TelemetryError, match="only user"):
        runtime_folder()
