"""Steps as spans: numbered from the first measured one, on the devices of all ranks."""

from wattune.clock import ClockAnchor
from wattune.schema import SPANS
from wattune.steps.files import Step
from wattune.steps.table import spans_of, tokens_per_step

ANCHOR = ClockAnchor(mono_ns=100, wall_ns=1100)


def steps(*tokens: int | None) -> list[Step]:
    return [Step(at, 10 * at, 10 * at + 9, each) for at, each in enumerate(tokens)]


def test_warm_up_is_negative_and_later_steps_are_left_out() -> None:
    table = spans_of(
        {0: steps(1, 1, 1, 1, 1)}, node="n", devices={0: "gpu0"}, anchor=ANCHOR, first_index=2, end_index=4
    )
    assert table.schema == SPANS
    assert table["step"].to_pylist() == [-2, -1, 0, 1]
    assert table["start_mono_ns"].to_pylist() == [0, 10, 20, 30]
    assert table["end_wall_ns"].to_pylist() == [1009, 1019, 1029, 1039]
    assert set(table["phase"].to_pylist()) == {"step"} and table["micro_batch"].null_count == 4


def test_a_rank_that_told_nothing_has_the_steps_of_the_lowest_one() -> None:
    told = {1: steps(1, 1), 2: [Step(0, 5, 7, 1)], 3: []}
    table = spans_of(told, node="n", devices={0: "a", 1: "b", 2: "c", 3: "d"}, anchor=ANCHOR)
    rows = list(
        zip(table["rank"].to_pylist(), table["device"].to_pylist(), table["end_mono_ns"].to_pylist(), strict=True)
    )
    assert rows == [(0, "a", 9), (0, "a", 19), (1, "b", 9), (1, "b", 19), (2, "c", 7), (3, "d", 9), (3, "d", 19)]
    assert spans_of({}, node="n", devices={0: "a"}, anchor=ANCHOR).num_rows == 0


def test_tokens_of_a_step_are_those_of_all_ranks_that_tell() -> None:
    told = {0: steps(100, 128, 132), 1: steps(50, 64, 64), 2: steps(None, None, None)}
    assert tokens_per_step(told, first_index=1) == 130 + 64
    assert tokens_per_step(told, end_index=1) == 150
    assert tokens_per_step({2: told[2]}) == 0 and tokens_per_step({}) == 0
