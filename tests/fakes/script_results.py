"""Results that a script prints as `RESULT {json}`, where Ray's threads write to the same output at any moment."""

import json
from typing import Any, Final

MARK: Final = "RESULT "
"""Before each result. A script prints mark and JSON as one text, which no other thread's words divide."""


def results(output: str) -> list[dict[str, Any]]:
    """Reads every result, whatever stands before and behind it, on its line too.

    Raises:
        json.JSONDecodeError: What follows a mark is no whole JSON.
    """
    decoder = json.JSONDecoder()
    return [decoder.raw_decode(part)[0] for part in output.split(MARK)[1:]]
