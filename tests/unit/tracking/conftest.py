"""A store for all tests of tracking, and a study of its own for each."""

import shutil
from pathlib import Path

import pytest

from wattune.tracking.store import default_uri
from wattune.tracking.tracker import Tracker


@pytest.fixture(scope="session")
def uri(tmp_path_factory: pytest.TempPathFactory, empty_store: Path) -> str:
    """One store for all tests: its tables take seconds to make."""
    storage = tmp_path_factory.mktemp("a storage")
    shutil.copyfile(empty_store, storage / empty_store.name)
    return default_uri(storage)


@pytest.fixture
def client(uri: str):
    from wattune.tracking.artifacts import BesideClient
    from wattune.tracking.store import sqlite_file

    return BesideClient(uri, sqlite_file(uri))


@pytest.fixture
def tracker(uri: str, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tracker:
    """A tracker of a study of its own, in a current directory that has to stay empty."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    name = "".join(c if c.isalnum() else "-" for c in request.node.name)
    yield Tracker(uri, name)
    assert list(elsewhere.iterdir()) == []
