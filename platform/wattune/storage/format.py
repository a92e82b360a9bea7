"""The format of every file that wattune keeps: one number, written into each and checked here.

JSON files and `study.yaml` say it as `format`, Parquet files in their footer and MLflow's runs in a tag as
`wattune.format`. What 0.1.0 writes is format 4. Formats 0 to 3 were never released, and their numbers are not used
again.
"""

from collections.abc import Mapping
from typing import Any, Final

FORMAT: Final = 4
"""The format that this code writes, and the only one that it reads."""

FORMAT_KEY: Final = "format"
"""Key of the format in a JSON or YAML file."""

FORMAT_TAG: Final = "wattune.format"
"""Key of the format in the footer of a Parquet file, and tag of a run in MLflow."""


class FormatError(ValueError):
    """A file of another format than this code reads."""


def check_format(found: Any) -> None:
    """Makes sure that the format a file says, None where it says none, is the one that this code reads.

    Raises `FormatError`: an earlier or a later wattune wrote it, or it is no format. The message has no place.
    """
    text = str(found)
    if text == str(FORMAT) and not isinstance(found, float):
        return
    if found is None or (text.isdecimal() and text.isascii() and int(text[:40]) < FORMAT):
        raise FormatError("written before 0.1.0; measure again, or read it with commit b47a596")
    if text.isdecimal() and text.isascii():
        raise FormatError(
            f"format {text[:40]}, written by a newer wattune; this one reads format {FORMAT}: install the newer one"
        )
    raise FormatError(f"format: got {text[:40]}, allowed: {FORMAT}; restore the file")


def without_format(data: Mapping[str, Any], *, elsewhere: bool = False) -> dict[str, Any]:
    """Returns an object without its format, which this code reads. One made `elsewhere` need not say any.

    Raises `FormatError`: it is of another format.
    """
    if FORMAT_KEY in data or not elsewhere:
        check_format(data.get(FORMAT_KEY))
    return {name: value for name, value in data.items() if name != FORMAT_KEY}
