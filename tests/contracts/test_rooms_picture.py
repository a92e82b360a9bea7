"""The picture of the rooms in ARCHITECTURE.md shows the rooms there are."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "platform" / "wattune"
PICTURE = ROOT / "docs" / "pictures" / "rooms_after.svg"


def test_every_room_is_in_the_picture_and_no_other() -> None:
    """Draw it anew after a commit of a new room: `python docs/_site/rooms.py HEAD docs/pictures/rooms_after.svg`."""
    rooms = {path.parent.name for path in PACKAGE.rglob("*.py")} - {PACKAGE.name}
    rooms |= {path.stem for path in PACKAGE.glob("*.py")} - {"__init__"}
    shown = re.findall(r'<text class="room"[^>]*>([^<]*)</text>', PICTURE.read_text())
    assert sorted(set(shown)) == sorted(rooms)
