"""A study in MLflow behind a real server, with sqlite and with PostgreSQL behind it; gone and back again."""

import os
import pwd
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from mlflow_server import free_port, mlflow_server
from small_study import make_study, ranking_of

from wattune import api
from wattune.ranking.sources import Source, rank_sources
from wattune.storage.study import StudyFolder

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

POSTGRES = sorted(Path("/usr/lib/postgresql").glob("*/bin")) if Path("/usr/lib/postgresql").is_dir() else []


@pytest.fixture
def postgresql(tmp_path: Path) -> Iterator[str]:
    """A database of our own; PostgreSQL refuses to run as root, so as nobody there."""
    if not POSTGRES:
        pytest.skip(
            "this machine has no PostgreSQL, which no package of ours brings: on Debian, apt-get install postgresql"
        )
    user = "nobody" if os.geteuid() == 0 else None
    folder, port = tmp_path / "database", free_port()
    if user is not None:
        owner = pwd.getpwnam(user)
        folder = Path("/tmp") / f"wattune-postgresql-{os.getpid()}"
        folder.mkdir()
        os.chown(folder, owner.pw_uid, owner.pw_gid)

    def run(program: str, *arguments: str) -> None:
        done = subprocess.run(
            [str(POSTGRES[-1] / program), *arguments],
            user=user,
            cwd="/",
            env={"LC_ALL": "C", "PATH": os.environ["PATH"]},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr

    run("initdb", "-D", str(folder / "data"), "-U", "wattune", "-A", "trust", "-N", "-E", "UTF8")
    settings = f"-p {port} -k {folder} -c listen_addresses=127.0.0.1 -c fsync=off"
    run("pg_ctl", "-D", str(folder / "data"), "-l", str(folder / "log"), "-w", "-o", settings, "start")
    try:
        run("createdb", "-h", "127.0.0.1", "-p", str(port), "-U", "wattune", "mlflow")
        yield f"postgresql://wattune@127.0.0.1:{port}/mlflow"
    finally:
        run("pg_ctl", "-D", str(folder / "data"), "-m", "immediate", "stop")
        shutil.rmtree(folder, ignore_errors=True)


def check_study(study: StudyFolder, url: str) -> None:
    """Sends a study, twice, and reads the same ranking back without being told what it is after."""
    assert api.sync(study, tracking_uri=url) == {"sent": 3}
    assert api.sync(study, tracking_uri=url) == {"sent": 0}
    own, read = ranking_of(study).to_json(), rank_sources([Source.of_store(url, study.name)]).to_json()
    scatter = {study.name: own["scatter"][""]}  # `ranking_of` is given results, and no study's name
    assert read == own | {"scatter": scatter}


def test_a_server_with_sqlite_holds_the_study(tmp_path: Path) -> None:
    study = make_study(tmp_path)
    with mlflow_server(f"sqlite:///{tmp_path}/server.db", tmp_path / "artifacts", free_port()) as url:
        check_study(study, url)


def test_a_server_with_postgresql_holds_the_study(tmp_path: Path, postgresql: str) -> None:
    study = make_study(tmp_path)
    with mlflow_server(postgresql, tmp_path / "artifacts", free_port()) as url:
        check_study(study, url)


def test_what_a_dead_server_did_not_get_is_sent_once_when_it_is_back(tmp_path: Path) -> None:
    study, port = make_study(tmp_path), free_port()
    store, artifacts = f"sqlite:///{tmp_path}/server.db", tmp_path / "artifacts"
    command = [sys.executable, "-m", "wattune", "sync", str(study.path), "--tracking-uri", f"http://127.0.0.1:{port}"]
    start_s = time.monotonic()
    dead = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert dead.returncode == 1
    assert "cannot be reached" in dead.stderr
    assert "Traceback" not in dead.stderr
    assert time.monotonic() - start_s < 60
    with mlflow_server(store, artifacts, port) as url:
        check_study(study, url)
