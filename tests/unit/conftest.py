"""Settings that every unit test may count on, and a store that those share which send something."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import settings

from wattune.tracking.store import default_uri

# A machine shared with other work may take any time for an example.
settings.register_profile("shared_machine", deadline=None)
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
