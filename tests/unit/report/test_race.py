"""The chart of a race of finalists."""

from dataclasses import replace

import pytest
from made_report import figure_of
from made_trials import FASTEST, POWER, Pair, asked, speed

from wattune.ranking.order import rank
from wattune.report.race import race


def pairs(num_repeats: int) -> list[Pair]:
    runs = [speed(1, 1000.0), speed(2, 1004.0), speed(3, 700.0), *(speed(2, 1012.0, repeat=n) for n in range(1, 9))]
    made = []
    for index, (spec, result) in enumerate(runs[: 3 + num_repeats]):
        numbers = replace(result.numbers, race_until_probability=0.95 if result.repeat else None)
        made.append((spec, replace(result, tags={"simulated": "true"}, numbers=numbers, end_wall_ns=index + 1)))
    return made


def test_it_shows_how_the_probability_moved_and_where_the_race_ends() -> None:
    chart = race(rank(pairs(8), asked(FASTEST, POWER)))
    data, layout = figure_of(chart)
    first, second = data
    assert "mbs2" in first["name"] and "mbs1" in second["name"], "the winner first"
    assert list(first["x"]) == list(range(9))
    assert first["y"][0] < 0.7 < first["y"][-1]
    assert [a + b for a, b in zip(first["y"], second["y"], strict=True)] == pytest.approx([1.0] * 9)
    assert first["marker"]["symbol"] != second["marker"]["symbol"] and first["line"]["dash"] != second["line"]["dash"]
    assert "told apart at 0.95" in [note.get("text") for note in layout["annotations"]]
    assert chart is not None and chart.stamp == "SIMULATED"


def test_without_a_race_or_over_several_studies_there_is_none() -> None:
    assert race(rank(pairs(0), asked(FASTEST, POWER))) is None
    assert race(rank({"a": pairs(2), "b": pairs(2)}, asked(FASTEST, POWER))) is None


def test_that_none_may_keep_every_bound_is_a_line_of_its_own() -> None:
    close = replace(POWER, factor=2010.0)
    data, _ = figure_of(race(rank(pairs(3), asked(FASTEST, close))))
    assert data[-1]["name"] == "none keeps every bound" and max(data[-1]["y"]) > 0.01
