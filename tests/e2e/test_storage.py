"""A study kept at a URL: sent while it runs, read from elsewhere, continued elsewhere, and no worse off without it."""

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import boto3
import pytest
from moto.server import ThreadedMotoServer

pytestmark = [pytest.mark.ray, pytest.mark.timeout(900)]

Run = Callable[..., "subprocess.CompletedProcess[str]"]
BUCKET = "studies"


@pytest.fixture
def server(environment: dict[str, str], monkeypatch: pytest.MonkeyPatch):
    """An S3 server on this machine, and what a user's environment says of one."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    settings = {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    environment |= settings  # the dictionary every command of the test is started with
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    boto3.client("s3").create_bucket(Bucket=BUCKET)
    yield server
    server.stop()


@pytest.fixture
def url(server: ThreadedMotoServer) -> str:
    return f"s3://{BUCKET}/group one"


def objects() -> dict[str, bytes]:
    client = boto3.client("s3")
    listed = client.list_objects_v2(Bucket=BUCKET).get("Contents", [])
    return {one["Key"]: client.get_object(Bucket=BUCKET, Key=one["Key"])["Body"].read() for one in listed}


@pytest.mark.slow
def test_a_study_at_a_url_is_read_and_continued_from_anywhere(
    wattune: Run, write_space, results, storage: Path, url: str
) -> None:
    space = write_space("sent")
    done = wattune("run", space, "--storage", url, "--json")
    assert done.returncode == 0, done.stderr
    study = storage / "sent"
    files = (path for path in study.rglob("*") if path.is_file() and not path.name.startswith("."))
    here = {f"group one/sent/{path.relative_to(study).as_posix()}": path.read_bytes() for path in files}
    assert objects() == here
    ranked = json.loads(done.stdout)["feasible"]

    # Another machine: nothing is there but the URL.
    shutil.rmtree(storage)
    again = wattune("rank", "sent", "--storage", url, "--json")
    assert again.returncode == 0, again.stderr
    assert json.loads(again.stdout)["feasible"] == ranked
    (trial,) = study.glob("trials/*")
    assert {path.name for path in trial.iterdir()} == {"spec.json", "run.json"}
    analysed = json.loads(wattune("analyze", f"{url}/sent/trials/{trial.name}", "--json").stdout)
    stored = json.loads((trial / "run.json").read_text())["metrics"]
    assert analysed["metrics"].items() >= {"tokens_per_s": pytest.approx(stored["tokens_per_s"])}.items()
    assert wattune("report", f"{url}/sent").returncode == 0
    assert (study / "report.html").stat().st_size > 10_000

    # The same command there runs nothing again.
    shutil.rmtree(storage)
    before = objects()
    more = wattune("run", space, "--storage", url, "--json")
    assert more.returncode == 0, more.stderr
    assert {key: value for key, value in objects().items() if "/trials/" in key} == {
        key: value for key, value in before.items() if "/trials/" in key
    }
    unknown = wattune("rank", "other", "--storage", url)
    assert unknown.returncode == 2 and "which holds: sent" in unknown.stderr


@pytest.mark.slow
def test_a_dead_store_stops_no_study_and_sync_sends_what_waits(
    wattune: Run, write_space, storage: Path, server: ThreadedMotoServer, url: str
) -> None:
    space = write_space("waits")
    server.stop()
    done = wattune("run", space, "--storage", url)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "run `wattune sync`" in done.stderr and str(storage / "waits") in done.stderr
    (result,) = (storage / "waits").glob("trials/*/run.json")
    assert json.loads(result.read_text())["status"] == "completed"
    assert wattune("rank", "waits").returncode == 0
    refused = wattune("sync", "waits", "--storage", url)
    assert refused.returncode == 1 and "Traceback" not in refused.stderr

    host, port = server.get_host_and_port()
    revived = ThreadedMotoServer(ip_address=host, port=port, verbose=False)
    revived.start()
    try:
        boto3.client("s3").create_bucket(Bucket=BUCKET)
        for stored in (1, 0):
            sent = wattune("sync", "waits", "--storage", url, "--json")
            assert sent.returncode == 0, sent.stderr
            assert json.loads(sent.stdout)["stored"] == stored
        assert f"group one/waits/trials/{result.parent.name}/run.json" in objects()
    finally:
        revived.stop()


@pytest.mark.slow
def test_a_recording_goes_to_the_url_too(
    wattune: Run, environment: dict[str, str], tmp_path: Path, storage: Path, url: str
) -> None:
    environment |= {"WATTUNE_RUNTIME": str(tmp_path / "runtime")}
    done = wattune("record", "--name", "mine", "--storage", url, "--", "sleep", "1")
    assert done.returncode == 0, done.stderr
    assert {"group one/recordings/mine/manifest.json"} <= objects().keys()
    analysed = wattune("analyze", f"{url}/recordings/mine", "--json")
    assert analysed.returncode == 0, analysed.stderr
    server_gone = wattune("record", "--name", "two", "--storage", "s3://no-such-bucket/x", "--", "sh", "-c", "exit 3")
    assert server_gone.returncode == 3 and "results stay in the" in server_gone.stderr
    assert (storage / "recordings" / "two" / "manifest.json").exists()
