"""Places for the names of points, so that no name covers another name or a point."""

from collections.abc import Sequence
from typing import Final

CHAR_WIDTH_PX: Final = 7.2
"""Width of a character at `FONT_PX`: 0.6 em, as in DejaVu Sans, the widest font of the page's list."""
BOLD_CHAR_WIDTH_PX: Final = 8.3
"""The same in bold: 0.69 em."""
FONT_PX: Final = 12
_LINE_PX: Final = 15
_POINT_PX: Final = 9
"""Half the width of the greatest marker."""

_SIDES: Final = (
    ("top center", 0, -1),
    ("bottom center", 0, 1),
    ("middle right", 1, 0),
    ("middle left", -1, 0),
    ("top right", 1, -1),
    ("top left", -1, -1),
    ("bottom right", 1, 1),
    ("bottom left", -1, 1),
)
"""Plotly's names of places beside a point, in the order they are tried, and their directions."""

Box = tuple[float, float, float, float]
"""Left, top, right and bottom in pixels."""


def placed(
    points: Sequence[tuple[float, float]],
    texts: Sequence[str],
    size: tuple[float, float],
    taken: Sequence[Box] = (),
    *,
    avoided: Sequence[Box] = (),
    bold: Sequence[bool] = (),
    reaches: Sequence[float] = (),
) -> list[str]:
    """Finds a place for the name of each point: the side of it as plotly names it, empty where its name has no room.

    `points` are pixels from the left and from the top, and `texts` their names, empty where one has none; earlier ones
    are placed first, inside of `size`. Places that are `taken` hold something else. Those that are `avoided`, such as
    lines, are covered only where there is no other. `reaches` are pixels between a point's middle and its name, those
    of the greatest marker by default.
    """
    wide = [BOLD_CHAR_WIDTH_PX if one else CHAR_WIDTH_PX for one in bold or [False] * len(points)]
    reaches = reaches or [float(_POINT_PX)] * len(points)
    halves = [min(_POINT_PX, reach - 1) for reach in reaches]
    boxes = [(x - half, y - half, x + half, y + half) for (x, y), half in zip(points, halves, strict=True)]
    filled = list(taken)
    sides = []
    for number, ((x, y), text) in enumerate(zip(points, texts, strict=True)):
        others = [*filled, *boxes[:number], *boxes[number + 1 :]] if text else []
        free: list[tuple[int, int, str, Box]] = []
        for side, across, down in _SIDES if text else ():
            box = _box(x, y, wide[number] * len(text), reaches[number], across, down)
            inside = box[0] >= 0 and box[1] >= 0 and box[2] <= size[0] and box[3] <= size[1]
            if inside and not any(_overlap(box, other) for other in others):
                free.append((sum(_overlap(box, line) for line in avoided), len(free), side, box))
        if free:
            _, _, side, box = min(free)
            filled.append(box)
        sides.append(side if free else "")
    return sides


def _box(x: float, y: float, width: float, reach: float, across: int, down: int) -> Box:
    left = x - width / 2 if not across else x + reach if across > 0 else x - reach - width
    top = y - _LINE_PX / 2 if not down else y + reach if down > 0 else y - reach - _LINE_PX
    return left, top, left + width, top + _LINE_PX


def _overlap(a: Box, b: Box) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]
