"""Studies in an S3 server (moto's): what a trial costs, what goes on after a kill, and where credentials are not."""

import os
import subprocess
import sys
import threading
from collections import Counter
from hashlib import sha256
from pathlib import Path
from typing import ClassVar

import boto3
import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from moto.server import ThreadedMotoServer
from s3fs import S3FileSystem
from study_files import DOCUMENT, SPEC, contents, measured, result_of

from wattune.access import Access
from wattune.errors import TrackingError
from wattune.storage.remote import RemoteStorage
from wattune.storage.study import StudyFolder, TrialFolder
from wattune.upload import Uploader, to_storage


@pytest.fixture
def here(tmp_path: Path) -> StudyFolder:
    return StudyFolder.create(tmp_path / "here", "mine", DOCUMENT)


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"s3://studies/{tmp_path.name}"  # moto's servers of one process share what they hold


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch):
    """An S3 server, and the calls that it gets: by name, and the most `put_object` at a time."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    for name, value in {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "us-east-1",
    }.items():
        monkeypatch.setenv(name, value)
    boto3.client("s3").create_bucket(Bucket="studies")
    S3FileSystem.clear_instance_cache()
    seen, running, really = Counter(), Counter(), S3FileSystem._call_s3

    async def call(self, method, *args, **kwargs):
        seen[method] += 1
        running[method] += 1
        seen["at once"] = max(seen["at once"], running["put_object"])
        try:
            return await really(self, method, *args, **kwargs)
        finally:
            running[method] -= 1

    monkeypatch.setattr(S3FileSystem, "_call_s3", call)
    yield seen
    server.stop()


def trial_of(study: StudyFolder, repeat: int, num_files: int) -> TrialFolder:
    folder = measured(study, result_of(repeat=repeat))
    for number in range(num_files):
        (folder.path / f"further{number}.bin").write_bytes(os.urandom(50))
    folder.write_result(result_of(repeat=repeat))
    return folder


def test_a_trial_costs_the_same_calls_among_many_and_of_many_files(here: StudyFolder, calls: Counter, url: str) -> None:
    remote, costs = RemoteStorage(url), []
    for repeat in range(8):
        num_files = 40 if repeat == 7 else 2
        folder = trial_of(here, repeat, num_files)
        calls.clear()
        assert remote.send_trial("mine", folder)
        num_puts = calls.pop("put_object") - len(contents(folder.path))
        at_once = calls.pop("at once")
        costs.append((num_puts, dict(calls)))
    assert all(cost == costs[0] for cost in costs), costs
    assert costs[0][0] == 1 and costs[0][1]["list_objects_v2"] <= 2
    assert 1 < at_once <= 4
    calls.clear()
    assert not remote.send_trial("mine", folder)
    assert calls["list_objects_v2"] == 1 and not calls["put_object"]


def test_trials_are_sent_side_by_side(here: StudyFolder, calls: Counter, url: str, tmp_path: Path) -> None:
    remote = RemoteStorage(url)
    meet, really = threading.Barrier(2, timeout=30), remote.send_trial
    remote.send_trial = lambda *trial: (meet.wait(), really(*trial))[1]
    with Uploader("storage", to_storage(here, remote), remote.at_once) as uploader:
        for repeat in range(4):
            folder = trial_of(here, repeat, 3)
            uploader.send(SPEC, folder.result())
    assert uploader.problem == ""
    remote.send_study(here)
    assert contents(remote.fetch_study("mine", tmp_path / "there", whole=True).path) == contents(here.path)


KILLED = """
import os, signal, sys
from pathlib import Path
from typing import ClassVar
from s3fs import S3FileSystem
from wattune.storage.remote import RemoteStorage
from wattune.storage.study import TrialFolder

really, left = S3FileSystem._call_s3, int(sys.argv[2])
async def call(self, method, *args, **kwargs):
    global left
    if method == "put_object":
        left -= 1
        if left < 0:
            os.kill(os.getpid(), signal.SIGKILL)
    return await really(self, method, *args, **kwargs)
S3FileSystem._call_s3 = call
RemoteStorage(sys.argv[1]).send_trial("mine", TrialFolder(Path(sys.argv[3])))
"""


def test_after_a_kill_an_upload_goes_on_with_what_is_missing(
    here: StudyFolder, calls: Counter, url: str, tmp_path: Path
) -> None:
    remote, folder = RemoteStorage(url), trial_of(here, 0, 20)
    num_files = len(contents(folder.path))
    killed = subprocess.run([sys.executable, "-c", KILLED, url, "16", str(folder.path)], timeout=100)
    assert killed.returncode == -9
    client = boto3.client("s3")

    def there() -> set[str]:
        listed = client.list_objects_v2(Bucket="studies", Prefix=url.removeprefix("s3://studies/")).get("Contents", [])
        return {one["Key"].rpartition("/")[2] for one in listed}

    before = there()
    assert ".sending" in before and "run.json" not in before and len(before) > 10
    calls.clear()
    assert remote.send_trial("mine", folder)
    assert calls["put_object"] == num_files - (len(before) - 1), "what had arrived is not sent again"
    assert ".sending" not in there()
    remote.send_study(here)
    assert contents(remote.fetch_study("mine", tmp_path / "there", whole=True).path) == contents(here.path)


def test_what_nodes_sent_ahead_stays_and_is_not_on_the_studys_node(
    here: StudyFolder, calls: Counter, url: str, tmp_path: Path
) -> None:
    remote, folder = RemoteStorage(url), measured(here, result_of())
    place, content = f"mine/trials/{folder.path.name}", b"rows of node1"
    (folder.path / "run.json").unlink()
    remote.send_ahead(place, {"telemetry/node9/fast.parquet": b"of an attempt before"})
    remote.send_ahead(place, {"telemetry/node1/fast.parquet": content})
    calls.clear()
    folder.write_result(result_of(), {"telemetry/node1/fast.parquet": sha256(content).hexdigest()})
    assert remote.send_trial("mine", folder)
    assert calls["put_object"] == len(contents(folder.path)) + 1, "it does not go through this machine"
    assert calls["list_objects_v2"] == 1
    remote.send_study(here)
    there = remote.fetch_study("mine", tmp_path / "there", whole=True).trial(SPEC.trial_id, 0)
    assert contents(there.path) == {**contents(folder.path), "telemetry/node1/fast.parquet": content}
    assert there.check().missing == () and folder.check().missing == ("telemetry/node1/fast.parquet",)
    with pytest.raises(TrackingError, match="holds a result of this trial"):
        remote.send_ahead(place, {"telemetry/node1/fast.parquet": b"of another machine"})
    with pytest.raises(TrackingError, match="is another place on each machine"):
        RemoteStorage(f"file://{tmp_path}/store").send_ahead(place, {})


class Leaky(MemoryFileSystem):
    """A store whose errors tell all they were given, as some libraries' do."""

    protocol = "leaky"
    said: ClassVar[dict] = {}

    def find(self, path, **_):
        raise PermissionError(f"403 for {path}: {self.said}, bare {' '.join(map(str, self.said.values()))}")


@pytest.fixture(scope="module")
def leaky() -> None:
    fsspec.register_implementation("leaky", Leaky, clobber=True)


SECRETS = st.text("abcdefghijkXYZ0123456789+/=_-", min_size=12, max_size=40).filter(lambda one: not one.startswith("-"))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    secret=SECRETS,
    where=st.sampled_from(["password", "query", "environment", "options"]),
    name=st.sampled_from(["secret", "account_key", "sas_token", "password", "aws_session_token", "client_secret"]),
)
def test_no_message_log_or_file_holds_a_credential(
    leaky: None, tmp_path_factory: pytest.TempPathFactory, caplog: pytest.LogCaptureFixture, secret, where, name
) -> None:
    tmp_path, url = tmp_path_factory.mktemp("secret"), "leaky://host/group"
    if where == "password":
        secret = secret.replace("/", "_")
        url = f"leaky://me:{secret}@host/group"
    elif where == "query":
        secret = secret.replace("+", "-").replace("=", "_")
        url = f"{url}?{name}={secret}"
    with pytest.MonkeyPatch.context() as patch:
        if where == "environment":
            patch.setenv(f"FSSPEC_LEAKY_{name.upper()}", secret)
        elif where == "options":
            patch.setitem(fsspec.config.conf, "leaky", {name: secret})
        patch.setattr(Leaky, "said", {"url": url, "value": secret})
        patch.setattr(Access, "answer_s", 20.0)
        study = StudyFolder.create(tmp_path / "here", "mine", DOCUMENT)
        remote = RemoteStorage(url)
        with pytest.raises(TrackingError) as failed:
            remote.send_trial("mine", measured(study, result_of()))
    assert "403" in str(failed.value) and "***" in str(failed.value)
    seen = f"{failed.value}{remote.shown}{caplog.text}".encode() + b"".join(contents(tmp_path).values())
    assert secret.encode() not in seen
