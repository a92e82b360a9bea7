"""Clocks by stage: the linear program against every choice of small pipelines, and a real frontier."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from specs import trial_spec

from wattune.cost.batch import batches
from wattune.cost.defaults import default_coefficients
from wattune.cost.estimate import predict
from wattune.cost.stage_clocks import _of_direction, clock_frontier, convex, graph, least_energy
from wattune.cost.step_time.predict import StepModel, StepPipeline
from wattune.errors import PlanError
from wattune.plans.schedule import passes, replay

SHAPES = ((2, 1, 2), (3, 1, 1), (2, 2, 1), (2, 1, 1), (4, 1, 1))
"""Stages, chunks and micro-batches of pipelines of at most eight passes."""


def random_pipeline(rng, num_stages, num_chunks, num_micro_batches):
    """Passes whose seconds are whole numbers, and convex energies of them: then the optimum is whole too."""
    orders = [
        passes(stage, num_stages=num_stages, num_chunks=num_chunks, num_micro_batches=num_micro_batches)
        for stage in range(num_stages)
    ]
    curves = []
    for _ in range(sum(map(len, orders))):
        time_s = rng.integers(2, 6) + np.arange(rng.integers(2, 5), dtype=float)
        slopes = np.sort(-rng.uniform(0.1, 30, len(time_s) - 1))
        curves.append((time_s, 100 + np.concatenate([[0], np.cumsum(slopes)])))
    return orders, curves


def every_choice(orders, curves, wait_w):
    """Makespan and energy of every combination of seconds, by replay."""
    nodes, _ = graph(orders)
    places = np.array(list(product(*(range(len(time_s)) for time_s, _ in curves)))).T
    durations = [{} for _ in orders]
    busy_s = energy_j = 0.0
    for (stage, one), (time_s, joules), place in zip(nodes, curves, places, strict=True):
        durations[stage][one] = time_s[place]
        busy_s, energy_j = busy_s + time_s[place], energy_j + joules[place]
    end_s = replay(orders, durations)
    return end_s, energy_j - wait_w * busy_s


@pytest.mark.parametrize(
    "seeds", [range(50), pytest.param(range(50, 200), marks=pytest.mark.slow)], ids=["ten of a shape", "thirty more"]
)
def test_no_choice_of_a_small_pipeline_takes_less_energy(seeds):
    for seed in seeds:
        rng = np.random.default_rng(seed)
        orders, curves = random_pipeline(rng, *SHAPES[seed % len(SHAPES)])
        wait_w = rng.uniform(0, 5)
        end_s, energy_j = every_choice(orders, curves, wait_w)
        makespan_s = float(rng.integers(end_s.min(), end_s.max() + 1))
        least = energy_j[end_s <= makespan_s].min()
        _, pairs = graph(orders)
        found_s = least_energy(pairs, curves, wait_w, makespan_s)
        found = sum(np.interp(s, *curve) - wait_w * s for s, curve in zip(found_s, curves, strict=True))
        assert found == pytest.approx(least, rel=1e-3), seed
        fastest = sum(curve[1][0] - wait_w * curve[0][0] for curve in curves)
        assert found <= fastest + 1e-9, seed
        with pytest.raises(PlanError, match="as short as"):
            least_energy(pairs, curves, wait_w, end_s.min() - 0.5)


def test_a_hull_is_convex_falls_and_lies_below():
    rng = np.random.default_rng(0)
    time_s, energy_j = np.sort(rng.uniform(1, 2, 60)), rng.uniform(1, 9, 60)
    hull = convex(time_s, energy_j)
    assert (np.diff(hull[0]) > 0).all() and (np.diff(hull[1]) < 0).all()
    assert (np.diff(np.diff(hull[1]) / np.diff(hull[0])) > 0).all()
    below = time_s <= hull[0][-1]
    assert (np.interp(time_s[below], *hull) <= energy_j[below] + 1e-9).all()


def one(**plan):
    ((_, batch),) = batches([trial_spec("llama3_70b", on="1x8 h200_sxm", engine="megatron", batch=16, **plan)])
    return batch, default_coefficients(batch.device)


def test_a_frontier_saves_energy_for_free_and_more_for_time():
    batch, coefficients = one(pp=4, tp=2)
    told = []
    found = clock_frontier(batch, coefficients, 1e5, lambda what, done_frac: told.append((done_frac, what)))
    assert told == sorted(told) and "128 passes in a step 0.0% longer" in told[0][1] and len(told) >= len(found) - 1
    energy = [each.energy_per_step_j for each in found]
    assert energy[1] < 0.97e5 and (np.diff(energy) < 0).all()  # the last stage has the head: all others wait for it
    assert found[1].step_time_s == pytest.approx(found[0].step_time_s)
    assert (np.diff([each.step_time_s for each in found[1:]]) > 0).all()
    assert found[-1].step_time_s < 1.21 * found[0].step_time_s
    for each in found[1:]:
        assert [len(stage) for stage in each.clocks_mhz] == [32] * 4
        assert {name for stage in each.clocks_mhz for name, _ in stage} == {"forward", "backward"}
        clocks = {clock for stage in each.clocks_mhz for _, clock in stage}
        assert all(clock % 15 == 0 and 780 < clock <= 1980 for clock in clocks)
    slowest = [min(clock for _, clock in stage) for stage in found[1].clocks_mhz]
    assert slowest[-1] == max(slowest)


@pytest.mark.parametrize("plan", [{"pp": 4, "tp": 2}, {"pp": 2, "tp": 4}], ids=str)
def test_the_energy_of_passes_is_that_of_the_estimate(plan):
    batch, coefficients = one(**plan)
    power, parts = coefficients.power, predict(batch, coefficients)
    model = StepModel(batch, coefficients.step_time, power)
    pipeline = StepPipeline(model, np.zeros(1, np.int64))
    kinds = [_of_direction(pipeline, name, pipeline.clock[0][None]) for name in ("forward", "backward")]
    busy_s, energy_j = (pipeline.m[0] * sum(each).sum(axis=(0, 1)) for each in zip(*kinds, strict=True))
    step_s = parts.step.step_time_s[0]
    waits_j = (power.idle_w + power.wait_w) * (step_s - busy_s)
    assert ((energy_j + waits_j) / step_s).mean() == pytest.approx(
        parts.power["device_power_mean_w"].value[0], rel=0.03
    )


def test_traffic_and_waits_of_a_pass_have_powers_of_their_own(monkeypatch):
    batch, coefficients = one(pp=4, tp=2)
    power = replace(coefficients.power, idle_w=100.0, active_w=40.0, link_w=17.0, wait_w=5.0)
    model = StepModel(batch, coefficients.step_time, power)
    pipeline = StepPipeline(model, np.zeros(1, np.int64))
    clocks = pipeline.clock[0][None]
    compute_s = pipeline.pass_s("forward", clocks)[0]

    def passes(traffic_s, excess_s):
        told = (compute_s, np.full_like(compute_s, traffic_s), np.full_like(compute_s, excess_s), compute_s)
        monkeypatch.setattr(StepPipeline, "pass_s", lambda *_: told)
        return np.array(_of_direction(pipeline, "forward", clocks))

    seconds, joules = passes(2.0, 3.0) - passes(0.0, 0.0)
    assert seconds == pytest.approx(np.full_like(compute_s, 5.0))
    assert joules == pytest.approx(np.full_like(compute_s, 5 * 100 + 2 * (40 + 17) + 3 * 5), rel=1e-6)


def test_one_stage_has_nothing_to_wait_for():
    with pytest.raises(PlanError, match="pp=1 has one stage"):
        clock_frontier(*one(tp=8), 1e5)
