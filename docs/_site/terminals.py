"""Terminals of a given width: a command runs on one; what it shows becomes text with colours, and a picture."""

import codecs
import fcntl
import io
import math
import os
import pty
import re
import select
import shlex
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.terminal_theme import TerminalTheme
from rich.text import Text

ROWS: Final = 60
_WIDEST_PX: Final = 1800
_TOKEN: Final = re.compile(r"\x1b\[[\d;?]*[A-Za-z]|\n|\r|\x1b.|[^\x1b\r\n]+")
_STYLE: Final = re.compile(r"\x1b\[[\d;]*m")
_UNFINISHED: Final = re.compile(r"\x1b(\[[\d;?]*)?$")
_THEME: Final = TerminalTheme(
    (255, 255, 255),
    (29, 36, 51),
    [
        (40, 44, 52),
        (190, 50, 40),
        (20, 125, 60),
        (160, 100, 0),
        (0, 95, 175),
        (140, 60, 150),
        (0, 125, 135),
        (90, 98, 112),
    ],
)


class Screen:
    """Lines of a terminal as rich writes them: whole lines, the cursor moved up and lines erased between."""

    def __init__(self) -> None:
        """Is empty."""
        self.lines = [""]
        self._row = 0
        self._pending = ""

    def write(self, text: str) -> None:
        """Takes what a program wrote."""
        text = self._pending + text
        cut = _UNFINISHED.search(text)
        text, self._pending = (text[: cut.start()], text[cut.start() :]) if cut else (text, "")
        for piece in _TOKEN.findall(text):
            if piece == "\n":
                self._row += 1
                if self._row == len(self.lines):
                    self.lines.append("")
            elif piece.startswith("\x1b[") and piece.endswith("A"):
                self._row = max(0, self._row - int(piece[2:-1] or 1))
            elif piece == "\x1b[2K":
                self.lines[self._row] = ""
            elif not piece.startswith(("\x1b", "\r")) or piece.endswith("m"):
                self.lines[self._row] += piece

    @property
    def text(self) -> str:
        """All lines with their colours, without the empty ones at the end."""
        return "\n".join(self.lines).rstrip()


def shown(
    typed: str, width: int, *, cwd: Path, at: Callable[[str], bool] | None = None, within_s: float = 900.0
) -> tuple[str, str, int]:
    """Runs a command of wattune's on a terminal of its own.

    Args:
        typed: The command as typed.
        width: Columns of the terminal.
        cwd: Folder it is typed in.
        at: Whether to keep what is shown at this moment, by its text without colours; the last such moment counts.
        within_s: Longest it may run.

    Returns:
        What was shown at the end, what was shown at the moment, and the exit code.
    """
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, width, 0, 0))
    kept = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")}
    running = subprocess.Popen(
        [sys.executable, "-m", *shlex.split(typed)],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
        cwd=cwd,
        env=kept | {"TERM": "xterm-256color", "COLORTERM": "truecolor"},
    )
    os.close(theirs)
    screen, moment, end_s = Screen(), "", time.monotonic() + within_s
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    try:
        while time.monotonic() < end_s:
            if not select.select([ours], [], [], 0.5)[0]:
                continue
            try:
                read = os.read(ours, 65536)
            except OSError:  # the program has closed it
                break
            if not read:
                break
            screen.write(decoder.decode(read))
            if at is not None and at(_STYLE.sub("", screen.text)):
                moment = screen.text
        code = running.wait(max(1.0, end_s - time.monotonic()))
    finally:
        running.kill()
        running.wait(30)
        os.close(ours)
    return screen.text, moment, code


def draw(typed: str, answer: str, width: int, path: Path) -> tuple[int, int]:
    """Draws a terminal with a command and its answer as SVG, as rich draws terminals.

    Args:
        typed: The command as typed.
        answer: What the terminal then showed, with its colours.
        width: Columns of the terminal.
        path: The file.

    Returns:
        Width and height of the picture in pixels.
    """
    console = Console(record=True, width=width, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    console.print(Text(f"$ {typed}", style="bold"))
    for line in answer.splitlines():
        console.print(Text.from_ansi(line.rstrip()), soft_wrap=True)
    drawn = console.export_svg(title="", theme=_THEME, font_aspect_ratio=0.6)
    path.write_text(re.sub(r"@font-face \{.*?\}\s*", "", drawn, flags=re.DOTALL))  # nothing is fetched
    size = re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', drawn)
    assert size is not None, "an SVG has a size"
    scale = _WIDEST_PX / max(_WIDEST_PX, float(size[1]))
    return math.ceil(scale * float(size[1])), math.ceil(scale * float(size[2]))
