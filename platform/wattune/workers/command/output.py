"""A command's output, bounded: the beginning, and the end that says what went wrong."""

from collections import deque
from typing import Final

HEAD_BYTES: Final = 256 * 1024
"""Bytes kept from the beginning: versions, arguments, the first warnings."""

TAIL_BYTES: Final = 768 * 1024
"""Bytes kept from the end."""

LONGEST_LINE: Final = 16 * 1024
"""Characters of a line that are kept; a progress bar may write megabytes without an end of line."""


class Output:
    """Lines of a running command, the middle left out where there are too many."""

    def __init__(self, head_bytes: int = HEAD_BYTES, tail_bytes: int = TAIL_BYTES) -> None:
        """Starts empty; keeps so many bytes from the beginning and from the end."""
        self._head: list[str] = []
        self._head_left, self._tail_left = head_bytes, tail_bytes
        self._tail: deque[str] = deque()
        self._overwritten = ""
        self.num_left_out = 0
        """Lines between beginning and end that are not kept."""

    def add(self, line: str) -> None:
        """Takes a line without its end; a carriage return at its end says that the next one overwrites it."""
        before, self._overwritten = self._overwritten, ""
        if line.endswith("\r"):
            self._overwritten = line[:LONGEST_LINE].rstrip("\r") or before
            return
        line = line[:LONGEST_LINE] or before  # nothing follows: a line feed ended the line after all
        size = len(line) + 1
        if not self._tail and size <= self._head_left:
            self._head.append(line)
            self._head_left -= size
            return
        self._tail.append(line)
        self._tail_left -= size
        while self._tail_left < 0 and len(self._tail) > 1:
            self._tail_left += len(self._tail.popleft()) + 1
            self.num_left_out += 1

    @property
    def lines(self) -> list[str]:
        """Every line that is kept, in order."""
        return [*self._head, *self._tail, *filter(None, [self._overwritten])]

    @property
    def text(self) -> str:
        """All of it as a text; where lines are left out, it says how many."""
        gap = [f"... {self.num_left_out} lines left out ..."] if self.num_left_out else []
        lines = [*self._head, *gap, *self._tail]
        return "".join(f"{line}\n" for line in lines)
