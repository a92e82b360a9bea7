"""The picture of a trial: what is measured is where it should be on it."""

from xml.etree import ElementTree

import numpy as np
import pytest

from wattune.tracking.picture import HEIGHT, WIDTH, trial_picture

TIMES = np.arange(0.0, 20.0, 0.1)
NONE = np.empty(0), np.empty(0)


def drawn(picture: str) -> tuple[list[str], list[tuple[str, np.ndarray]]]:
    """The texts, and each line's colour with its points."""
    root = ElementTree.fromstring(picture)
    texts = [one.text or "" for one in root.iter() if one.tag.endswith("}text")]
    lines = [
        (one.get("stroke"), np.array([point.split(",") for point in one.get("points").split()], dtype=float))
        for one in root.iter()
        if one.tag.endswith("}polyline")
    ]
    return texts, lines


def test_a_peak_stands_where_and_as_high_as_it_was():
    watts = np.full(200, 2000.0)
    watts[50] = 2800.0
    steps = np.arange(0.0, 20.0, 0.5), np.full(40, 0.5)
    texts, ((_, power), (_, step)) = drawn(
        trial_picture("tp2 #0", "131 k/s", {"n": (TIMES, watts)}, steps, simulated=False)
    )
    highest = power[power[:, 1].argmin()]
    share = (highest[0] - power[0, 0]) / (power[-1, 0] - power[0, 0])
    assert share == pytest.approx(50 / 199, abs=0.002)
    assert len(np.unique(step[:, 1])) == 1 and step[:, 1].min() > power[:, 1].max(), "below the power"
    assert texts[:2] == ["tp2 #0", "131 k/s"] and {"node power [W]", "step [ms]", "500", "2500"} <= set(texts)
    assert "SIMULATED" not in texts


def test_a_long_trace_keeps_its_peak_and_stays_small():
    times = np.arange(0.0, 2000.0, 0.01)
    watts = 2000.0 + np.sin(times)
    watts[123_456] = 2900.0
    picture = trial_picture("x", "", {"n": (times, watts)}, NONE, simulated=True)
    texts, ((_, power),) = drawn(picture)
    assert len(picture) < 30_000 and (power[:, 1] < 100).sum() == 1, "one point stands out"
    assert "SIMULATED" in texts


def test_every_line_and_text_is_on_the_picture():
    many = {f"n{number}": (TIMES, np.full(200, 100.0 * number)) for number in range(8)}
    steps = np.array([0.0, 3.0]), np.array([3.0, 17.5])
    _, lines = drawn(trial_picture("x", "", many, steps, simulated=False))
    assert len(lines) == 9 and len({color for color, _ in lines}) == 7, "the colours begin again"
    points = np.concatenate([points for _, points in lines])
    assert points.min() >= 0 and points[:, 0].max() <= WIDTH and points[:, 1].max() <= HEIGHT


@pytest.mark.parametrize("value", [0.0, 700.0, -1.0])
def test_a_constant_has_a_scale_too(value):
    texts, _ = drawn(trial_picture("x", "", {"n": (TIMES, np.full(200, value))}, NONE, simulated=False))
    assert any(text.lstrip("-").replace(".", "").isdigit() for text in texts)


def test_text_of_users_stays_text():
    hostile = "</svg><script>alert(1)</script>"
    texts, _ = drawn(trial_picture(hostile, hostile, {hostile: (TIMES, TIMES)}, NONE, simulated=False))
    assert texts[:2] == [hostile, hostile]


def test_nothing_to_draw_is_no_picture():
    assert trial_picture("x", "", {}, NONE, simulated=False) == ""
    assert trial_picture("x", "", {"n": NONE}, NONE, simulated=False) == ""
