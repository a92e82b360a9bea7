"""Rounds of optimizers: one step for each, however many optimizers a program has."""

from types import SimpleNamespace
from typing import Any

import pytest

from wattune.steps.process.optimizer import Rounds, attach


class Written:
    def __init__(self) -> None:
        self.steps: list[tuple[int, int]] = []

    def step(self, start_ns: int, end_ns: int) -> None:
        self.steps.append((start_ns, end_ns))


def optimizer(*groups: object) -> Any:
    return SimpleNamespace(param_groups=[{"params": [group]} for group in groups or (object(),)])


@pytest.mark.parametrize("count", [1, 2, 5])
def test_programs_with_several_optimizers_count_one_step_a_round(count: int) -> None:
    written, all_of_them = Written(), [optimizer() for _ in range(count)]
    rounds = Rounds(written)  # type: ignore[arg-type]
    for _ in range(10):
        for each in all_of_them:
            rounds.stepped(each)
    assert len(written.steps) == 9
    assert all(end == start for (_, end), (start, _) in zip(written.steps, written.steps[1:], strict=False))


def test_deepspeeds_calls_for_each_group_of_one_optimizer_are_one_step() -> None:
    written, one = Written(), optimizer()
    rounds = Rounds(written)  # type: ignore[arg-type]
    groups = [{"params": [object()]}, {"params": [object()]}]
    for _ in range(6):
        for group in groups:
            one.param_groups = [group]
            rounds.stepped(one)
    assert len(written.steps) == 5


def test_an_optimizer_without_parameters_counts_too() -> None:
    written = Written()
    rounds = Rounds(written)  # type: ignore[arg-type]
    for _ in range(3):
        rounds.stepped(SimpleNamespace(param_groups=[]))
    assert len(written.steps) <= 2


def test_torch_calls_the_hook_after_each_step_and_a_broken_optimizer_breaks_nothing() -> None:
    hooks: list[Any] = []
    attach(SimpleNamespace(register_optimizer_step_post_hook=hooks.append))  # type: ignore[arg-type]
    assert hooks[0](object(), (), {}) is None  # no param_groups
    assert hooks[0](optimizer(), (), {}) is None
    attach(SimpleNamespace())  # type: ignore[arg-type] - a torch without it
