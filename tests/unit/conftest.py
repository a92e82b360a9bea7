"""Settings that every unit test may count on, the command line, and a store that those share which send something."""

import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import settings

from wattune.tracking.store import default_uri

# A machine shared with other work may take any time for an example. `make nightly` asks for more of them.
settings.register_profile("shared_machine", deadline=None, max_examples=int(os.environ.get("EXAMPLES", "50")))
settings.load_profile("shared_machine")


@pytest.fixture
def store_in(empty_store: Path) -> Callable[[Path], str]:
    """Puts an empty store into a storage folder; returns its URI.

    MLflow makes its tables by dozens of migrations, which take a processor a second. That they are made where they are
    missing is what tests of `wattune.tracking.store` are about.
    """

    def put(storage: Path) -> str:
        storage.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(empty_store, storage / empty_store.name)
        return default_uri(storage)

    return put


@pytest.fixture
def wattune(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Runs the command line in this process; gives its exit code, and what it printed on both streams."""
    from wattune.cli import main

    def run(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["wattune", *map(str, arguments)])
        code = 0
        try:
            main()
        except SystemExit as leaving:
            code = int(leaving.code or 0)
        return code, *capsys.readouterr()

    return run
