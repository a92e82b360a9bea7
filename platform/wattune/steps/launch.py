"""The environment of a command that tells its steps."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from wattune.steps import inject
from wattune.steps.process.writer import FOLDER_VARIABLE

INJECTED: Final = Path(inject.__file__).parent
"""The folder with the `sitecustomize` that finds the steps of an unchanged program."""


def environment(
    folder: Path, base: Mapping[str, str], *, hooks: bool = True, unbuffered: bool = True
) -> dict[str, str]:
    """Returns the environment of a command whose steps are read.

    Its processes write to `folder`, which the caller makes for this user alone. `hooks` find the steps of a program
    that does not tell them, by a `sitecustomize` on `PYTHONPATH`; one that the program has already still runs. Without
    them only `wattune.spans` writes steps. `unbuffered` has Python write each line at once, also into a pipe: a pattern
    tells the time of a step by the arrival of its line.
    """
    found = {**base, FOLDER_VARIABLE: str(folder.absolute())}
    if unbuffered:
        found.setdefault("PYTHONUNBUFFERED", "1")
    if hooks:
        found["PYTHONPATH"] = os.pathsep.join([str(INJECTED), *filter(None, [base.get("PYTHONPATH")])])
    return found
