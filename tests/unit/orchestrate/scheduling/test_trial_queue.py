"""How many trials are still to come, as it is told with every event."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest

from wattune.orchestrate.events import TrialEvent
from wattune.trial import Measure, TrialSpec, TrialStatus

COMPLETED, OUT_OF_MEMORY = TrialStatus.COMPLETED, TrialStatus.OUT_OF_MEMORY


def left_after_each(world: Any, specs: list[TrialSpec], *statuses: TrialStatus, **options: Any) -> list[int]:
    """Runs all that is proposed, the first of them to the given ends; what was said to be left after each."""
    controller, ends, number = world.controller(specs, **options), iter(statuses), 0
    while (running := controller.next(f"t{number}")) is not None:
        world.run(controller, running, f"t{number}", next(ends, COMPLETED))
        number += 1
    return [event.num_left for event in world.heard if isinstance(event, TrialEvent) and event.kind == "finished"]


def test_it_counts_down_to_nothing(world: Any, specs: list[TrialSpec]) -> None:
    assert left_after_each(world, specs, measure=Measure(reference_every=0)) == [2, 1, 0]


def test_repeats_of_what_failed_are_not_to_come(world: Any, specs: list[TrialSpec]) -> None:
    measure = Measure(repeats=3, reference_every=0)
    # Of nine, two are not run.
    assert left_after_each(world, specs, OUT_OF_MEMORY, measure=measure) == [6, 5, 4, 3, 2, 1, 0]
    assert left_after_each(world, specs, measure=measure)[-1] == 0, "nor when the study is opened again"


def test_anchors_and_finalists_are_expected(world: Any, make_specs: Callable[[int], list[TrialSpec]]) -> None:
    specs = make_specs(8)
    told = left_after_each(world, specs, measure=Measure(reference_every=3, soak_finalists=1), finalists=specs[:1])
    assert told[0] == 7 + 2 + 1 and told[-1] == 0
    assert all(late <= early for early, late in pairwise(told))


@pytest.mark.parametrize("count", [1, 200])
def test_what_is_announced_is_what_comes(world: Any, make_specs: Callable[[int], list[TrialSpec]], count: int) -> None:
    told = left_after_each(world, make_specs(count), measure=Measure(reference_every=0, repeats=2))
    assert told == list(range(2 * count - 1, -1, -1))
