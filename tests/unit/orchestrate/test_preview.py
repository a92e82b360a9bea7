"""What a study says it will do, before it starts: all that is left, and what this call does of it at most."""

import math

import pytest

from wattune.catalog.hardware import ClusterSpec
from wattune.orchestrate.events import Placement, Preview, TrialEvent
from wattune.orchestrate.scheduling.budget import Budget
from wattune.trial import Measure, TrialStatus


def test_the_preview_counts_before_anything_starts(world, specs) -> None:
    measure = Measure(min_seconds=10, repeats=2, soak_finalists=1, soak_seconds=100)
    world.controller(specs, measure=measure)
    preview, placement = world.heard
    assert isinstance(preview, Preview) and isinstance(placement, Placement)
    assert (preview.num_left, preview.num_finalists, preview.num_done) == (7, 1, 0)
    assert not preview.measured and preview.device_s == 160 and placement.wall_s == 160


def test_the_preview_knows_how_long_finished_trials_took(world, make_specs) -> None:
    spec = make_specs(4, ClusterSpec(device="cpu", devices_per_node=2))
    world.write(spec[0], took_s=30)
    world.write(spec[1], took_s=50, status=TrialStatus.OUT_OF_MEMORY)
    world.controller(spec, measure=Measure(min_seconds=1))
    preview = world.heard[0]
    assert preview.measured and preview.device_s == 2 * 2 * 30
    assert preview.done == {TrialStatus.COMPLETED: 1, TrialStatus.OUT_OF_MEMORY: 1}


def test_the_preview_says_what_a_budget_of_trials_lets_this_call_do(world, make_specs) -> None:
    small, large = make_specs(6), make_specs(6, ClusterSpec(device="cpu", devices_per_node=2))
    measure = Measure(min_seconds=10, reference_every=5)
    controller = world.controller([*small, *large], measure=measure, budget=Budget(max_trials=8))
    preview, placement = world.heard[:2]
    assert (preview.num_left, preview.num_now, preview.num_references) == (14, 8, 2)
    assert preview.device_s == 7 * 10 + 7 * 20, "all of it is still told"
    assert preview.device_now_s == placement.device_s == 7 * 10 + 20, (
        "the first eight in line, a reference trial among them"
    )
    assert placement.wall_s == 80 and not placement.cut_short
    assert len(world.drain(controller)) == 8
    told = [event.num_left for event in world.heard if isinstance(event, TrialEvent) and event.kind == "finished"]
    assert told == [7, 6, 5, 4, 3, 2, 1, 0]
    assert controller.num_left == 5, "without references"


def test_a_budget_of_hours_bounds_what_is_announced(world, make_specs, new_node) -> None:
    world.nodes.append(new_node("n1"))
    specs, measure = make_specs(12, ClusterSpec(device="cpu", devices_per_node=2)), Measure(min_seconds=10)
    for hours, cut_short in ((0.01, True), (1, False)):
        world.heard.clear()
        world.controller(specs, measure=measure, budget=Budget(max_hours=hours))
        preview, placement = world.heard
        assert preview.most_s == pytest.approx(hours * 3600, abs=5) and preview.num_now == preview.num_left == 13
        assert placement.cut_short is cut_short
        wall_s, device_s = (36, 36 * 2 * 2) if cut_short else (13 * 10 / 2, 13 * 10 * 2)
        assert placement.wall_s == pytest.approx(wall_s, abs=5)
        assert placement.device_s == pytest.approx(device_s, abs=20)
    world.heard.clear()
    world.controller(specs, measure=measure)
    assert world.heard[0].most_s == math.inf and world.heard[0].num_now == 13
