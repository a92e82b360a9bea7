"""The part of a command that its figures are of: as asked for, found by itself, or said why not."""

import pytest

from wattune.errors import PlanError
from wattune.recording.window import parse_window, with_window
from wattune.steps.files import Step
from wattune.workers.command.program_run import ProgramOutcome

S = 10**9
START, END = 100 * S, 200 * S


def steps(*times_s: float, start_s: float = 130.0) -> list[Step]:
    found, at_s = [], start_s
    for index, time_s in enumerate(times_s):
        found.append(Step(index, round(at_s * S), round((at_s + time_s) * S)))
        at_s += time_s
    return found


def window(text: str, *told: list[Step]) -> ProgramOutcome:
    return with_window(ProgramOutcome(steps=dict(enumerate(told)), start_mono_ns=START, end_mono_ns=END), text)


@pytest.mark.parametrize(
    ("text", "kind", "start", "end"),
    [
        ("steady", "steady", 0, None),
        ("command", "command", 0, None),
        ("10s:50s", "time", 10, 50),
        ("0.5s:", "time", 0.5, None),
        (":50s", "time", 0, 50),
        ("steps:20:100", "steps", 20, 100),
        ("steps:20:", "steps", 20, None),
        ("steps::7", "steps", 0, 7),
    ],
)
def test_choices_are_read(text: str, kind: str, start: float, end: float | None) -> None:
    assert parse_window(text) == (kind, start, end)


@pytest.mark.parametrize(
    "text",
    ["", ":", "10:50", "10s-50s", "steps:a:b", "steps::", "1.2.3s:4s", "-1s:3s", "x" * 500, f"steps:{'9' * 400}:"],
)
def test_other_texts_are_refused_with_what_is_allowed(text: str) -> None:
    with pytest.raises(PlanError, match=r"allowed: steady, command, a time such as 10s:50s"):
        parse_window(text)


@pytest.mark.parametrize("text", ["50s:10s", "10s:10s", "steps:9:3"])
def test_an_end_before_the_start_is_refused(text: str) -> None:
    with pytest.raises(PlanError, match="ends before it begins"):
        parse_window(text)


def test_the_steady_part_is_found_by_itself() -> None:
    told = steps(9.0, 3.0, 1.5, *[1.0] * 30)
    found = window("steady", told)
    assert (found.first_index, found.end_index) == (3, 33)
    assert found.window_mono_ns == (told[3].start_mono_ns, told[-1].end_mono_ns)
    assert found.window_why == "steps 3 to 32 of 33: the steady part, found by itself"


def test_ranks_a_constant_time_apart_have_the_steady_part_of_each() -> None:
    times_s = (1.1,) * 3 + (1.0,) * 17
    found = window("steady", steps(*times_s), steps(*times_s, start_s=134.0))  # as stages of a pipeline
    assert (found.first_index, found.end_index) == (3, 20)
    assert found.window_mono_ns == (round(133.3 * S), round(154.3 * S))


def test_too_few_steps_to_find_a_steady_part_are_not_called_one() -> None:
    found = window("steady", steps(20.0, *(1.0,) * 6))
    assert (found.first_index, found.end_index) == (0, 7) and found.window_why.endswith("too few to find a steady part")


def test_a_warm_up_longer_than_half_is_found_too() -> None:
    found = window("steady", steps(*[5.0 * 0.9**at for at in range(20)], *[0.5] * 11))
    assert found.first_index is not None and found.first_index >= 20


def test_where_no_part_is_steady_all_steps_count_and_it_is_said() -> None:
    found = window("steady", steps(*[1.0 + 0.1 * at for at in range(20)]))
    assert (found.first_index, found.end_index) == (0, 20) and "no steady part was found" in found.window_why


def test_without_steps_it_is_the_whole_command() -> None:
    found = window("steady")
    assert (found.window_mono_ns, found.end_index) == ((START, END), None)
    assert found.window_why == window("command", steps(1, 1, 1)).window_why == "the whole command"
    assert "a single step" in window("steady", steps(3.0)).window_why


def test_steps_that_were_asked_for() -> None:
    told = steps(*[1.0] * 30)
    found = window("steps:10:20", told)
    assert (found.first_index, found.end_index, found.window_mono_ns[0]) == (10, 20, told[10].start_mono_ns)
    assert window("steps:25:90", told).end_index == 30
    assert "only 30 steps were found" in window("steps:40:90", told).window_why
    assert "0 steps were found" in window("steps:0:5").window_why


def test_a_time_takes_the_whole_steps_inside_it_else_the_time_itself() -> None:
    told = steps(*[1.0] * 30)  # from 30 s of the command on
    found = window("31.5s:35s", told)
    assert (found.first_index, found.end_index) == (2, 5) and "31.5 s to 35 s of the command" in found.window_why
    early = window("1s:20s", told)
    assert (early.window_mono_ns, early.end_index) == ((START + S, START + 20 * S), None)
    assert window("40s:", told).end_index == 30
    assert window("90s:500s").window_mono_ns[1] == END
    assert "it ended after 100.0 s" in window("150s:", told).window_why


def test_only_steps_that_all_ranks_finished_count() -> None:
    first, second = steps(*[1.0] * 20), steps(*[1.0] * 18, start_s=130.2)
    found = window("steps:0:", first, second)
    assert found.end_index == 18
    assert found.window_mono_ns == (first[0].start_mono_ns, second[-1].end_mono_ns)
