"""The race against equal allocation, in a few small simulated studies."""

import pytest
import racing as benchmark


@pytest.mark.slow
def test_the_race_needs_fewer_repeats_than_all_in_turn() -> None:
    rows = {way: benchmark.count(benchmark.CASES[0], way, 10, 0, 30) for way in ("race", "all in turn")}
    assert rows["race"]["num_repeats_mean"] < rows["all in turn"]["num_repeats_mean"]
    assert rows["race"]["told_frac"] > rows["all in turn"]["told_frac"]


def test_a_race_that_names_others_or_takes_longer_falls_short() -> None:
    good = dict(zip(benchmark.COLUMNS, ("x", "race", 100, 0.8, 0.95, 12.0, 10.0), strict=True))
    turns = good | {"way": "all in turn", "num_repeats_mean": 30.0}
    assert benchmark.falls_short([good, turns]) == []
    assert len(benchmark.falls_short([good | {"named_frac": 0.8}, turns])) == 1
    assert len(benchmark.falls_short([good | {"num_repeats_mean": 31.0}, turns])) == 1
