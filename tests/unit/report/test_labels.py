"""Names beside points: none covers another, a point or a bound's text."""

import html
import random

import pytest
from made_report import figure_of, ranked, trial

from wattune.report.pareto import CHAR_WIDTH_PX, PLOT_PX, pareto, placed

SIZE = (800.0, 400.0)


def box(point, text, side):
    """The rectangle that plotly fills with a text of 12 pixels at a side of a marker, with at least its own padding."""
    width, height = CHAR_WIDTH_PX * len(text), 15
    x = {"left": point[0] - width - 6, "right": point[0] + 6, "center": point[0] - width / 2}[side.split()[1]]
    y = {"top": point[1] - height - 6, "bottom": point[1] + 6, "middle": point[1] - height / 2}[side.split()[0]]
    return x, y, x + width, y + height


def meet(a, b, slack=4.0):
    return a[0] < b[2] - slack and b[0] < a[2] - slack and a[1] < b[3] - slack and b[1] < a[3] - slack


@pytest.mark.parametrize("seed", range(5))
def test_no_two_names_meet_and_none_covers_a_point(seed):
    draw = random.Random(seed)
    points = [(draw.uniform(0, 800), draw.uniform(0, 400)) for _ in range(40)]
    texts = [f"dp{n} tp2 mbs1" for n in range(40)]
    sides = placed(points, texts, SIZE)
    boxes = [box(*one) for one in zip(points, texts, sides, strict=True) if one[2]]
    assert len(boxes) > 10, "most have room"
    assert not any(meet(a, b) for n, a in enumerate(boxes) for b in boxes[:n])
    assert not any(a[0] < x < a[2] and a[1] < y < a[3] for a in boxes for x, y in points)


def test_the_first_name_wins_and_what_has_no_room_has_no_name():
    close = [(400.0, 200.0)] * 20
    sides = placed(close, ["a name that is long"] * 20, SIZE)
    assert sides[0] == "" or sides.count("") > 10
    assert placed([(400.0, 200.0)], ["alone"], SIZE) == ["top center"]
    assert placed([(400.0, 200.0)], [""], SIZE) == [""]
    assert placed([(400.0, 200.0)], ["x" * 200], SIZE) == [""], "wider than the figure"
    assert placed([(795.0, 200.0)], ["at the edge"], SIZE) == ["middle left"]
    assert placed([(400.0, 200.0)], ["a"], SIZE, [(0, 0, 800, 199)]) == ["bottom center"]


def test_names_in_the_trade_off_do_not_meet():
    """Ten trials at nearly the same power and speed, as repeats of one idea are."""
    ranking = ranked(
        [trial(n, 40_000.0 + 40 * n, 2300.0 + 3 * n) for n in range(1, 10)] + [trial(16, 60_000.0, 2900.0)]
    )
    data, layout = figure_of(pareto(ranking))
    (low_x, high_x), (low_y, high_y) = layout["xaxis"]["range"], layout["yaxis"]["range"]
    boxes = []
    for trace in data:
        for x, y, text, side in zip(
            trace["x"], trace["y"], trace.get("text", ()), trace.get("textposition", ()), strict=False
        ):
            if text:
                spot = PLOT_PX[0] * (x - low_x) / (high_x - low_x), PLOT_PX[1] * (high_y - y) / (high_y - low_y)
                boxes.append(box(spot, html.unescape(text.replace("<b>", "").replace("</b>", "")), side))
    assert len(boxes) >= 3
    assert not any(meet(a, b) for n, a in enumerate(boxes) for b in boxes[:n])
    assert any("<b>" in text for trace in data for text in trace.get("text", ())), "the best one has its name"


def test_a_name_keeps_off_lines_where_it_has_another_place_and_bold_ones_are_wider():
    bar = (300.0, 0.0, 500.0, 205.0)
    assert placed([(400.0, 200.0)], ["name"], SIZE, avoided=[bar]) == ["bottom center"]
    assert placed([(400.0, 200.0)], ["name"], SIZE, avoided=[(0, 0, 800, 400)]) == ["top center"], (
        "else none had a name"
    )
    edge = (392.0 + CHAR_WIDTH_PX * 5, 200.0)  # fits to the left of something, but not in bold
    taken = [(0, 0, 380, 400), (edge[0] - 8, 0, 800, 400)]
    assert placed([edge], ["12345"], SIZE, taken, reaches=[9.0]) == ["middle left"]
    assert placed([edge], ["12345"], SIZE, taken, reaches=[9.0], bold=[True]) == [""]
