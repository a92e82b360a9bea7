"""One MLflow store: out of reach, interrupted while it is made, shared by processes."""

import ast
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import urlsplit

import pytest
from small_study import make_study
from tracked_trials import result_of, spec_of

from wattune.access import RETRY_AFTER_S, Access
from wattune.errors import TrackingError
from wattune.tracking.reader import read_study
from wattune.tracking.store import default_uri, log, search, ui_command, ui_url
from wattune.tracking.tracker import Tracker


def test_a_deleted_study_says_how_to_get_it_back(tracker, client, tmp_path):
    experiment_id = client.create_experiment(tracker.study_name)
    client.delete_experiment(experiment_id)
    with pytest.raises(TrackingError, match=f"experiments restore --experiment-id {experiment_id}"):
        tracker.log_trial(spec_of(), result_of(spec_of()), tmp_path / "none")


@pytest.fixture
def silent_server() -> Iterator[str]:
    """The address of a server that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


@pytest.fixture
def dead_server() -> str:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"http://127.0.0.1:{server.getsockname()[1]}"


def test_a_dead_server_costs_seconds_once_and_nothing_after_that(dead_server, tmp_path):
    tracker, spec = Tracker(dead_server, "study", clock=lambda: 1000.0), spec_of()
    with pytest.raises(TrackingError, match=r"cannot be reached \(.*refused\); .* `wattune sync`"):
        tracker.log_trial(spec, result_of(spec), tmp_path)
    with socket.create_server(("127.0.0.1", urlsplit(dead_server).port)) as server:
        server.setblocking(False)
        with pytest.raises(TrackingError, match="not tried again for 60 s"):
            tracker.log_trial(spec, result_of(spec, repeat=1), tmp_path)
        with pytest.raises(BlockingIOError):  # nobody has called
            server.accept()


def read_only(*folders: Path) -> list[str]:
    """Returns the beginning of a command that may read folders and not write to them."""
    if os.geteuid():
        for folder in folders:
            folder.chmod(0o500)
        return []
    if subprocess.run(["unshare", "-m", "true"], check=False, capture_output=True).returncode:
        pytest.skip("this machine lets root write everywhere")
    mounts = [f"mount --bind '{folder}' '{folder}' && mount -o remount,ro,bind '{folder}'" for folder in folders]
    return ["unshare", "-m", "sh", "-c", " && ".join([*mounts, 'exec "$@"']), "sh"]


SYNCS = """
import os, sys
import wattune.tracking.artifacts
from wattune.__main__ import main

for study in sys.argv[1:]:
    if (child := os.fork()) == 0:
        sys.argv[1:] = ["sync", os.path.basename(study), "--storage", os.path.dirname(study)]
        main()
    sys.stdout.write(f"{os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])}\\n")
"""
"""The command for each study: forks of a process that has loaded MLflow, which takes seconds."""


def test_a_read_only_storage_is_one_line_and_wrong_input(tmp_path: Path, empty_store: Path) -> None:
    storages = [tmp_path / "with a store", tmp_path / "without"]
    studies = [str(make_study(storage).path) for storage in storages]
    shutil.copyfile(empty_store, storages[0] / empty_store.name)
    command = [*read_only(*storages), sys.executable, "-c", SYNCS, *studies]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    for storage in storages:
        storage.chmod(0o700)
    assert (done.returncode, done.stdout) == (0, "2\n2\n"), done.stderr
    for storage, line in zip(storages, done.stderr.splitlines(), strict=True):
        assert f"{storage / 'mlflow.db'} cannot be written; results stay in the study folder, make it" in line
    assert "start the server" not in done.stderr


@pytest.fixture
def dripping_server() -> Iterator[str]:
    """The address of a server that sends a byte every 50 ms and never ends its answer."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        over = threading.Event()

        def drip() -> None:
            with suppress(OSError):
                connection, _ = server.accept()
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n")
                while not over.wait(0.05):
                    connection.sendall(b" ")

        threading.Thread(target=drip, daemon=True).start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}"
        over.set()


@pytest.mark.timeout(60)
def test_a_server_that_drips_is_given_up(dripping_server, tmp_path, monkeypatch):
    monkeypatch.setattr(Access, "answer_s", 1.5)
    tracker, spec = Tracker(dripping_server, "study"), spec_of()
    with pytest.raises(TrackingError, match=r"cannot be reached \(no answer within 2 s\); .* `wattune sync`"):
        tracker.log_trial(spec, result_of(spec), tmp_path)
    with pytest.raises(TrackingError, match="not tried again for 60 s"):
        tracker.delivered()
    assert tracker.page == "", "nothing was sent"


def test_a_silent_server_is_given_up_and_tried_again_later(silent_server, tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "1")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    now_s = 1000.0
    tracker, spec = Tracker(silent_server, "study", clock=lambda: now_s), spec_of()
    for wait_s, tried in ((0.0, True), (RETRY_AFTER_S - 1, False), (1.0, True)):
        now_s += wait_s
        with pytest.raises(TrackingError) as caught:
            tracker.log_trial(spec, result_of(spec), tmp_path)
        assert ("not tried again" not in str(caught.value)) is tried


def test_the_default_store_is_one_file_in_the_storage(tmp_path):
    assert default_uri(tmp_path) == f"sqlite:///{tmp_path}/mlflow.db"


FORKS = """
import os, signal, sys
from mlflow import MlflowClient
from sqlalchemy import event
from sqlalchemy.engine import Engine
import wattune.tracking.artifacts
from wattune.tracking.tracker import Tracker

def kill(connection, cursor, statement, *rest):
    if statement.startswith("CREATE INDEX index_params_run_uuid"):
        os.kill(os.getpid(), signal.SIGKILL)

def fork(name):
    if child := os.fork():
        return child
    if name == "killed":
        event.listen(Engine, "after_cursor_execute", kill)
    tracker = Tracker(sys.argv[1], name)
    tracker.delivered()
    sys.stdout.write(tracker.page + "\\n")
    sys.stdout.flush()
    os._exit(0)

def end_of(child):
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

ends = [end_of(fork("killed"))]
begun = os.listdir(os.path.dirname(sys.argv[1].removeprefix("sqlite:///")))
sys.exit(repr((ends + [end_of(child) for child in [fork("a"), fork("b")]], begun)))
"""
"""The first dies among MLflow's migrations, where the file it leaves cannot be opened again: they are no transaction.

Then two that need the store start at once. All are forks of a process that has loaded MLflow, which takes seconds.
"""


def test_a_store_whose_making_was_killed_is_made_by_the_next_calls_which_share_it(tmp_path):
    uri = default_uri(tmp_path / "storage")
    done = subprocess.run([sys.executable, "-c", FORKS, uri], timeout=100, check=False, capture_output=True, text=True)
    ends, begun = ast.literal_eval(done.stderr)
    assert ends == [-signal.SIGKILL, 0, 0] and "mlflow.db" not in begun and len(begun) > 1
    trackers = [Tracker(uri, name) for name in "ab"]
    assert not any(tracker.delivered() for tracker in trackers)
    assert {*done.stdout.split()} == {tracker.page for tracker in trackers}
    assert len({*done.stdout.split()}) == 2
    assert {path.name for path in (tmp_path / "storage").iterdir()} == {"mlflow.db", ".mlflow.db.lock"}


def test_the_ui_command_can_be_pasted_and_the_page_opened():
    file, server, page = "sqlite:////a b/mlflow.db", "https://mlflow.example:5000/", "#/experiments/3"
    told = "mlflow ui --backend-store-uri 'sqlite:////a b/mlflow.db' --artifacts-destination '/a b/mlartifacts'"
    assert ui_command(file).endswith(told)
    assert ui_url(file, page) == "http://127.0.0.1:5000/#/experiments/3", "where that command serves"
    assert (ui_command(server), ui_url(server, page)) == ("", "https://mlflow.example:5000/#/experiments/3")


def test_reading_never_makes_a_store(tmp_path):
    uri = default_uri(tmp_path / "none")
    with pytest.raises(TrackingError, match=f"no MLflow store {tmp_path}/none/mlflow.db; give the file"):
        read_study(uri, "study")
    assert not (tmp_path / "none").exists()


def test_pages_of_runs_are_searched_to_the_last_one():
    class Page(list):
        token = None

    asked = []

    def search_runs(experiments, where, max_results, page_token):
        asked.append((where, page_token))
        page = Page({None: ["a", "b"], "t": ["c"]}[page_token])
        page.token = "t" if page_token is None else None
        return page

    client = SimpleNamespace(search_runs=search_runs)
    assert list(search(client, "7", {"x": "1", "y": "2"}, "attributes.end_time > 5")) == ["a", "b", "c"]
    where = "tags.`x` = '1' and tags.`y` = '2' and attributes.end_time > 5"
    assert asked == [(where, None), (where, "t")]


@pytest.mark.parametrize(("count", "sizes"), [(0, []), (100, [100]), (250, [100, 100, 50])])
def test_parameters_are_sent_in_the_sizes_that_are_taken(count, sizes):
    sent = []
    client = SimpleNamespace(log_batch=lambda run_id, params: sent.append([param.key for param in params]))
    log(client, "r1", params={f"p{number}": "1" for number in range(count)})
    assert [len(part) for part in sent] == sizes
    assert [key for part in sent for key in part] == [f"p{number}" for number in range(count)]
