"""Storage at a URL: requests of a trial among more and more, and what fetching a study takes.

The requests are those to an S3 server of this process (moto's). The fetch is from another folder, so that its processor
time is the platform's own.
"""

import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from at_scale_rows import Fit, Row, measures

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "fakes"))
from study_files import DOCUMENT, measured, result_of

from wattune.storage.remote import RemoteStorage
from wattune.storage.study import StudyFolder

AMONG = (20, 80, 320)
"""Trials in the store when the requests of one more are counted."""

FETCHED = (200, 600, 1_800)


@contextmanager
def s3_server() -> Iterator[str]:
    """An S3 server of this process, and the URL of a storage there."""
    import boto3
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    address = f"http://{host}:{port}"
    os.environ |= {"AWS_ENDPOINT_URL": address, "AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret"}
    boto3.client("s3", region_name="us-east-1").create_bucket(Bucket="studies")
    try:
        yield "s3://studies/group"
    finally:
        server.stop()


@measures(timeout_s=200)
def requests() -> Iterator[Row]:
    """Counts S3 requests of one more trial, and how many of them list anything."""
    from s3fs import S3FileSystem

    seen, really = Counter[str](), S3FileSystem._call_s3

    async def call(self: S3FileSystem, method: str, *args: object, **kwargs: object) -> object:
        seen[method] += 1
        return await really(self, method, *args, **kwargs)

    S3FileSystem._call_s3 = call
    with s3_server() as url, tempfile.TemporaryDirectory() as place:
        study, remote = StudyFolder.create(Path(place), "mine", DOCUMENT), RemoteStorage(url)
        found: list[Counter[str]] = []
        for repeat in range(AMONG[-1] + 1):
            seen.clear()
            remote.send_trial("mine", measured(study, result_of(repeat=repeat)))
            if repeat in AMONG:
                found.append(Counter(seen))
    yield Fit.of(AMONG, [one.total() for one in found]).row("S3 requests of a trial, by trials in the store", 0.05)
    yield Row("S3 listings of a trial", "", bar=2, value=max(one["list_objects_v2"] for one in found))


@measures(timeout_s=300)
def fetch() -> Iterator[Row]:
    """Times a fetch of all results of a study, and counts those that came."""
    os.fsync = lambda _file: None  # of thousands of small files: minutes of the disk's
    cpu_s, num_lost = [], 0
    for num_trials in FETCHED:
        with tempfile.TemporaryDirectory() as place:
            study = StudyFolder.create(Path(place) / "here", "mine", DOCUMENT)
            for repeat in range(num_trials):
                measured(study, result_of(repeat=repeat))
            begun_s = time.process_time()
            there = RemoteStorage((Path(place) / "here").as_uri()).fetch_study("mine", Path(place) / "there")
            cpu_s.append(time.process_time() - begun_s)
            num_lost += num_trials - len(there.results())
    yield Fit.of(FETCHED, cpu_s).row("CPU of fetching a study's results, by trials", 1.15)
    yield Row(f"CPU of fetching {FETCHED[-1]:,} trials", "s", value=cpu_s[-1])
    yield Row("trials that did not come", "", bar=0, value=num_lost)
