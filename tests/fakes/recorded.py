"""Records as a user does, into a folder of a test's own."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import wattune


def record(command: Sequence[str] = (), *, storage: Path, **asked: Any) -> Path:
    """Returns the recording's folder."""
    found = wattune.record(command, storage=str(storage), **asked).recorded
    assert found is not None
    return Path(found.place)
