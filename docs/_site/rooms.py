"""Draws the rooms of the package: floors as `.importlinter` declares them, with every module.

`make docs` draws the tree as it stands, into `docs/pictures/rooms_after.svg`; a commit is drawn so:

    python docs/_site/rooms.py docs/pictures/rooms_before.svg --commit dddb227
"""

import argparse
import configparser
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
PACKAGE: Final = "platform/wattune/"

WIDTH: Final = 1560
MARGIN: Final = 16
GAP: Final = 8
TITLE: Final = 20
"""Height of a room's name, in pixels, as all lengths here."""
LINE: Final = 14
LETTER: Final = 5.9
"""Width of a letter of a module's name, at most; names are drawn in a monospaced font of 9.5 px."""
BOLD: Final = 7.4
"""Width of a letter of a room's name."""
SHADES: Final = ("#ffffff", "#e6f4f1", "#c4e4de")
"""Fills of a floor's rooms, of the rooms inside, and of those inside these."""
STYLE: Final = (
    "text {font: 9.5px monospace; fill: #33413f} .room {font: bold 12px sans-serif; fill: #0c3f38} "
    ".head {font: 14px sans-serif}"
)


@dataclass
class Room:
    """A package or a module of the top level, with the modules and the rooms in it."""

    name: str
    modules: list[str] = field(default_factory=list)
    rooms: dict[str, "Room"] = field(default_factory=dict)

    @property
    def num_modules(self) -> int:
        """Modules in it and in the rooms inside."""
        return len(self.modules) + sum(room.num_modules for room in self.rooms.values())

    def natural_width(self) -> float:
        """Returns a width at which its modules take a few lines."""
        letters = sum(len(name) + 2 for name in self.modules)
        own = max(len(self.name) * BOLD, letters * LETTER / max(1, min(4, len(self.modules) // 3)))
        inside = [room.natural_width() + GAP for room in self.rooms.values()]
        return max(own, max(inside, default=0), min(sum(inside), 760)) + 2 * GAP

    def lines(self, width: float) -> list[str]:
        """Returns the names of its modules, in lines that a width holds."""
        found: list[str] = []
        for name in self.modules:
            longer = f"{found[-1]}  {name}" if found else name
            if found and len(longer) * LETTER <= width - 2 * GAP:
                found[-1] = longer
            else:
                found.append(name)
        return found

    def height(self, width: float) -> float:
        """Returns the height it needs at a width."""
        inside = sum(height + GAP for _, height in _shelves(list(self.rooms.values()), width - 2 * GAP))
        return TITLE + len(self.lines(width)) * LINE + GAP + inside


def _shelves(rooms: Sequence[Room], width: float) -> list[tuple[list[tuple[Room, float]], float]]:
    """Puts rooms side by side, on as many shelves as they need: the rooms of each with their widths, and its height."""
    shelves: list[list[Room]] = []
    for room in rooms:
        taken = sum(other.natural_width() + GAP for other in shelves[-1]) if shelves else width
        if taken + room.natural_width() > width:
            shelves.append([])
        shelves[-1].append(room)
    found = []
    for shelf in shelves:
        free = width - sum(room.natural_width() for room in shelf) - GAP * (len(shelf) - 1)
        share = free / sum(room.natural_width() for room in shelf)
        sized = [(room, room.natural_width() * (1 + share)) for room in shelf]
        found.append((sized, max(room.height(wide) for room, wide in sized)))
    return found


def _draw(room: Room, x: float, y: float, width: float, height: float, depth: int = 0) -> list[str]:
    place = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"'
    drawn = [
        f'<rect {place} rx="3" fill="{SHADES[depth]}" stroke="#5b8f87"/>',
        f'<text class="room" x="{x + GAP:.1f}" y="{y + 14:.1f}">{escape(room.name)}</text>',
    ]
    y += TITLE
    for line in room.lines(width):
        drawn.append(f'<text x="{x + GAP:.1f}" y="{y + 10:.1f}">{escape(line)}</text>')
        y += LINE
    for shelf, high in _shelves(list(room.rooms.values()), width - 2 * GAP):
        left = x + GAP
        for inner, wide in shelf:
            drawn += _draw(inner, left, y, wide, high, depth + 1)
            left += wide + GAP
        y += high + GAP
    return drawn


def _git(*arguments: str) -> str:
    return subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=True).stdout


def _files(commit: str | None) -> tuple[str, list[str]]:
    """Returns the layers' file and the paths of the package."""
    if commit is None:
        paths = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / PACKAGE).rglob("*.py"))
        return (ROOT / ".importlinter").read_text(), paths
    return _git("show", f"{commit}:.importlinter"), _git("ls-tree", "-r", "--name-only", commit, PACKAGE).splitlines()


def house(commit: str | None) -> list[list[Room]]:
    """Returns the rooms by floor, the highest first: of a commit, or of the tree as it stands."""
    declared, paths = _files(commit)
    settings = configparser.ConfigParser()
    settings.read_string(declared)
    layers = settings["importlinter:contract:layers"]["layers"].split("\n")
    floors = [[Room(name.strip()) for name in layer.split("|")] for layer in layers if layer.strip()]
    by_name = {room.name: room for floor in floors for room in floor}
    for path in paths:
        *folders, name = path.removeprefix(PACKAGE).removesuffix(".py").split("/")
        if not path.endswith(".py") or name == "__init__" or not folders:
            continue
        room = by_name[folders[0]]
        for folder in folders[1:]:
            room = room.rooms.setdefault(folder, Room(folder))
        room.modules.append(name)
    return floors


def picture(commit: str | None = None) -> str:
    """Draws the house as SVG."""
    floors, y, drawn = house(commit), 44.0, list[str]()
    for floor in floors:
        top = y
        for shelf, high in _shelves(floor, WIDTH - 2 * MARGIN):
            x = float(MARGIN)
            for room, wide in shelf:
                drawn += _draw(room, x, y, wide, high)
                x += wide + GAP
            y += high + GAP
        y += GAP
        drawn.insert(0, f'<rect x="0" y="{top - GAP:.1f}" width="{WIDTH}" height="{y - top:.1f}" fill="#f4f6f6"/>')
    rooms = [room for floor in floors for room in floor]
    packages = [room for room in rooms if room.modules or room.rooms]
    folders = packages + [inner for room in packages for inner in _inside(room)]
    largest = max(folders, key=lambda room: len(room.modules))
    modules = sum(room.num_modules for room in packages) + len(rooms) - len(packages)
    said = (
        f"{modules} modules in {len(folders)} folders on {len(floors)} floors; imports point down; "
        f"the fullest folder, {largest.name}, has {len(largest.modules)} modules"
    )
    day = commit and _git("show", "-s", "--format= on %cd, %h", "--date=format:%Y-%m-%d", commit).rstrip()
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y:.0f}" width="{WIDTH}" height="{y:.0f}">',
            f"<style>{STYLE}</style>",
            f'<rect width="{WIDTH}" height="{y:.0f}" fill="#ffffff"/>',
            f'<text class="head" x="{MARGIN}" y="24">{escape(f"wattune{day or str()}: {said}")}</text>',
            *drawn,
            "</svg>\n",
        ]
    )


def _inside(room: Room) -> list[Room]:
    return [deeper for inner in room.rooms.values() for deeper in (inner, *_inside(inner))]


def main() -> None:
    """Draws the house."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="SVG file to write")
    parser.add_argument("--commit", help="commit to draw; without it, the tree as it stands")
    arguments = parser.parse_args()
    arguments.out.write_text(picture(arguments.commit))


if __name__ == "__main__":
    main()
