"""Axes of candidates: ranks of numbers, names of choices, and the nearest candidate that is left."""

from dataclasses import replace

import pytest
from known_space import BASE, SPECS

from wattune.plans.program import Program
from wattune.search.strategies.snapping import Axes


def test_values_of_a_candidate_lead_back_to_it():
    axes = Axes(SPECS, seed=0)
    for row in (0, 7, 100):
        assert axes.take_nearest(axes.params[row]) == row


def test_a_candidate_that_is_taken_gives_way_to_its_neighbour():
    axes = Axes(SPECS, seed=0)
    params = axes.params[axes.take_nearest(axes.params[5])]
    second = axes.take_nearest(params)
    assert second != 5 and axes.num_free == len(SPECS) - 2
    differing = [name for name in params if axes.params[second][name] != params[name]]
    assert len(differing) == 1


def test_a_candidate_of_another_space_is_not_taken():
    axes = Axes(SPECS, seed=0)
    assert axes.take(replace(BASE, engine="megatron")) is None
    assert axes.num_free == len(SPECS)


def with_flags(*flags):
    return replace(BASE, program=Program(environment=(("X", "{x}"),), flags=flags))


@pytest.mark.parametrize(("given", "values"), [((25, "auto", 50), ["25.0", "50.0", "auto"]), ((0, 1), [0, 1])])
def test_a_flag_with_a_name_among_its_numbers_is_a_choice_and_one_of_0_and_1_an_axis(given, values):
    assert Axes([with_flags(("x", value)) for value in given], seed=0).values == {"flags.x": values}


@pytest.mark.parametrize("seed", range(4))
def test_a_flag_that_one_engine_lacks_tells_trials_of_the_other_apart(seed):
    specs = [with_flags(), *(with_flags(("x", value), ("y", name)) for value in (1, 2) for name in "ab")]
    axes = Axes(specs, seed=seed)  # the seed decides which one is first
    assert len({tuple(params.values()) for params in axes.params}) == len(specs)
