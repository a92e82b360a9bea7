"""Imbalance of experts: the busiest rank over the mean one."""

import pytest

from wattune.analysis.metrics.utilization import expert_imbalance_frac


@pytest.mark.parametrize(("ep", "expected"), [(2, 12 / 8 - 1), (4, 8 / 4 - 1)])
def test_ranks_hold_runs_of_experts(ep: int, expected: float) -> None:
    assert expert_imbalance_frac([((8, 4, 2, 2),)], ep) == pytest.approx(expected)


def test_what_ranks_sent_is_summed_before_it_is_compared() -> None:
    assert expert_imbalance_frac([((6, 2),), ((2, 6),)], ep=2) == 0.0


def test_layers_are_averaged_and_each_waits_for_its_own_busiest_rank() -> None:
    crossed = [((4, 0), (0, 4))]  # even over both layers together, and yet each waits
    assert expert_imbalance_frac(crossed, ep=2) == pytest.approx(1.0)
    assert expert_imbalance_frac([((4, 0), (2, 2))], ep=2) == pytest.approx(0.5)


@pytest.mark.parametrize("tokens", [[], [()], [(), ()], [((0, 0),)]])
def test_without_experts_there_is_none(tokens: list[tuple[tuple[int, ...], ...]]) -> None:
    assert expert_imbalance_frac(tokens, ep=2) is None
