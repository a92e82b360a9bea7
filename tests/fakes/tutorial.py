"""Reads docs/tutorial.md: its commands in their order, and its sentences. No command is written down a second time."""

import re
import shlex
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "tutorial.md").read_text()
PROSE = " ".join(re.sub(r"^```.*?^```", "", TEXT, flags=re.MULTILINE | re.DOTALL).split())

_SECTION = re.compile(r"^## (\d+)\. ", re.MULTILINE)
_PART = re.compile(r"^```\n(.*?)^```|`(wattune\s[^`]+)`", re.MULTILINE | re.DOTALL)
_NEEDS_MORE = ("plan", "rank", "compare", "run", "rank --json")
"""Names of commands in prose, without what they need to run."""

STAND_INS = {
    "scale_up": "cpu_smoke",
    "scale_out": "again",
    "http://mlflow.example:5000": "sqlite:///wattune-studies/mlflow.db",
    "...": "sqlite:///other.db",
}
"""Arguments that stand for something of the reader's, and what a test has in their place."""


@dataclass(frozen=True)
class Command:
    """A command of the page."""

    section: int
    text: str
    remark: str
    """The remark behind it."""
    folder: str
    """Path before the program's name, as typed; empty where a shell finds it."""

    @property
    def words(self) -> list[str]:
        """The command as a shell splits it, with stand-ins for what only the reader has."""
        return [STAND_INS.get(word, word) for word in shlex.split(self.text)]


def commands() -> list[Command]:
    """Returns every command of the page in the order it tells them."""
    starts = [*((int(match[1]), match.start()) for match in _SECTION.finditer(TEXT)), (0, len(TEXT))]
    found = []
    for (section, begin), (_, end) in pairwise(starts):
        for match in _PART.finditer(TEXT, begin, end):
            lines = match[1].splitlines() if match[1] else [" ".join(match[2].split())]
            for line in filter(None, lines):
                text, _, remark = line.partition("  #")
                folder, named = re.fullmatch(r"((?:\.venv/bin/)?)(.*)", text.strip()).groups()
                if named.removeprefix("wattune ") not in _NEEDS_MORE:
                    found.append(Command(section, named, remark.strip(), folder))
    return found


def edit_as_told(space: Path) -> dict[str, str]:
    """Changes the space as section 6 tells the reader to; returns what it names."""
    told = re.search(
        r"add `(\d+)` to `(\w+)`, write `(\w+): (\d+)` into `(\w+)`, and raise the bound to (\d+) W", PROSE
    )
    assert told is not None, "section 6 no longer says what to change"
    value, axis, key, count, part, bound = told.groups()
    document = yaml.safe_load(space.read_text())
    document["space"][axis].append(int(value))
    document[part][key] = int(count)
    (constraint,) = document["constraints"]
    document["constraints"] = [f"{constraint.rsplit(' ', 1)[0]} {bound}"]
    space.write_text(yaml.safe_dump(document))
    return {"value": value, "axis": axis, "part": part, "key": key, "count": count, "bound": bound}
