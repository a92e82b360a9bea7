"""The private folder of a local Ray cluster comes and goes with it."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from wattune.orchestrate.ray_folder import KEPT_S, ray_folder, remove_left, scratch_place, temporary_files_in
from wattune.private_folder import NotPrivateError


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("wattune.orchestrate.ray_folder._LONGEST", 200)
    return tmp_path / f"wattune-{os.getuid()}"


def test_only_this_user_enters_it_and_it_goes_with_the_cluster(base: Path) -> None:
    with ray_folder() as folder:
        assert folder.parent == base
        assert folder.stat().st_mode & 0o777 == 0o700
        (folder / "session").mkdir()
        with ray_folder() as other:  # a second study at the same time
            assert other != folder and folder.exists()
        assert (folder / "session").exists()
    assert list(base.iterdir()) == []


def test_what_a_killed_study_left_goes_with_the_next_one(base: Path) -> None:
    code = (
        "import tempfile, os, sys, signal; tempfile.tempdir = sys.argv[1]\n"
        "from wattune.orchestrate import ray_folder\n"
        "ray_folder._LONGEST = 200\n"
        "with ray_folder.ray_folder(): os.kill(os.getpid(), signal.SIGKILL)"
    )
    subprocess.run([sys.executable, "-c", code, str(base.parent)], timeout=60, check=False)
    assert len(list(base.glob("ray-*"))) == 1
    with ray_folder() as folder:
        assert list(base.glob("ray-*")) == [folder]


def test_a_folder_that_goes_while_others_are_looked_at_is_no_error(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Studies that start and end at once remove each other's folders from under the look."""
    for name in ("ray-a", "ray-b"):
        (base / name).mkdir(parents=True)
        os.utime(base / name, (0, 0))

    def others_go(_lock: Path) -> None:
        for path in base.glob("ray-*"):
            path.rmdir()

    monkeypatch.setattr("wattune.orchestrate.ray_folder.lock_holder", others_go)
    remove_left(base)
    assert not list(base.glob("ray-*"))


def test_processes_that_a_killed_study_left_end_with_the_next_one_and_no_others(base: Path) -> None:
    """A raylet or worker that outlives its driver holds memory and devices."""
    waits = [sys.executable, "-c", "import time; time.sleep(600)"]
    with ray_folder() as alive:
        dead = base / "ray-dead"
        (dead / "tmp").mkdir(parents=True)
        (dead / "owner").touch()  # nobody holds its lock
        places = {"left": dead / "tmp", "of another study": alive / "tmp", "stranger": base.parent}
        running = {
            name: subprocess.Popen(waits, env=os.environ | {"TMPDIR": str(place)}) for name, place in places.items()
        }
        try:
            remove_left(base)
            running["left"].wait(30)
            assert running["of another study"].poll() is None and running["stranger"].poll() is None
        finally:
            for process in running.values():
                process.kill()
                process.wait(30)
        assert not dead.exists() and alive.exists()


def test_logs_of_a_failed_study_stay_for_a_day(base: Path) -> None:
    with pytest.raises(ValueError), ray_folder() as folder:
        raise ValueError
    remove_left(base)
    assert folder.exists()
    old_s = time.time() - KEPT_S - 1
    os.utime(folder / "failed", (old_s, old_s))
    remove_left(base)
    assert not folder.exists()


def test_of_several_failed_studies_the_latest_logs_alone_stay(base: Path) -> None:
    folders = []
    for age_s in (300, 100, 200):
        with pytest.raises(ValueError), ray_folder() as folder:
            raise ValueError
        then_s = time.time() - age_s
        os.utime(folder / "failed", (then_s, then_s))
        folders.append(folder)
    remove_left(base)
    assert [folder.exists() for folder in folders] == [False, True, False]


def test_an_error_that_a_stop_caused_leaves_nothing(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("wattune.orchestrate.ray_folder.asked", lambda: True)
    with pytest.raises(ValueError), ray_folder():
        raise ValueError
    assert list(base.glob("ray-*")) == []


def test_sockets_have_room_where_the_temporary_folder_is_deep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = tmp_path / ("d" * 60)
    deep.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(deep))
    with ray_folder() as folder:
        assert len(str(folder)) + 69 <= 107


def test_a_folder_that_another_made_first_is_refused(base: Path) -> None:
    base.symlink_to(base.parent)
    with pytest.raises(NotPrivateError), ray_folder():
        pass


def test_temporary_files_of_a_cluster_go_with_it(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(base.parent))
    code = "import tempfile; print(tempfile.gettempdir())"
    with ray_folder() as folder:
        with temporary_files_in(folder):
            done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
        assert done.stdout.split() == [str(folder / "tmp")]
        assert os.environ["TMPDIR"] == str(base.parent)
    assert list(base.iterdir()) == []


def test_temporary_files_of_the_driver_are_there_too(base: Path) -> None:
    assert scratch_place() is None
    with ray_folder() as folder:
        assert scratch_place() == folder / "tmp" and (folder / "tmp").is_dir()
    assert scratch_place() is None


def test_what_ray_wrote_after_its_end_goes_later(base: Path) -> None:
    with ray_folder():
        late = base / "ray-00000000"
        (late / "session").mkdir(parents=True)
        remove_left(base)
        assert late.exists()  # it may be one that another study is making
        for age_s in (100, -3600):  # or the wall clock was set back since
            late.mkdir(exist_ok=True)
            then_s = time.time() - age_s
            os.utime(late, (then_s, then_s))
            remove_left(base)
            assert not late.exists() and len(list(base.glob("ray-*"))) == 1
