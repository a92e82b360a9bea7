"""Schedules against their closed forms, and their replay against a longest path found another way."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wattune.cost.step_time.pipeline import bubble_ratio
from wattune.errors import PlanError
from wattune.plans.schedule import Pass, passes, replay


def orders_of(num_stages, num_micro_batches, num_chunks=1, **rest):
    sizes = {"num_stages": num_stages, "num_chunks": num_chunks, "num_micro_batches": num_micro_batches}
    return [passes(stage, **sizes, **rest) for stage in range(num_stages)]


def with_times(orders, forward_s, backward_s):
    """Durations from seconds of a forward and a backward pass by stage."""
    return [
        {one: np.array(backward_s[stage] if one.backward else forward_s[stage]) for one in order}
        for stage, order in enumerate(orders)
    ]


def text(order):
    return " ".join(f"{'FB'[one.backward]}{one.micro_batch}{'' if not one.chunk else '+' * one.chunk}" for one in order)


def test_the_orders_of_two_stages():
    assert [text(order) for order in orders_of(2, 3)] == ["F0 F1 B0 F2 B1 B2", "F0 B0 F1 B1 F2 B2"]
    assert [text(order) for order in orders_of(2, 2, 2)] == [
        "F0 F1 F0+ F1+ B0+ B1+ B0 B1",
        "F0 F1 F0+ B0+ F1+ B1+ B0 B1",
    ]
    assert [text(order) for order in orders_of(2, 3, trains=False)] == ["F0 F1 F2"] * 2


@given(st.integers(1, 5), st.integers(1, 3), st.integers(1, 4))
def test_every_stage_runs_every_pass_once(num_stages, num_chunks, rounds):
    every = set(itertools.product((False, True), range(rounds * num_stages), range(num_chunks)))
    for order in orders_of(num_stages, rounds * num_stages, num_chunks):
        assert set(order) == every and len(order) == len(every)


def test_rounds_of_unequal_size_do_not_exist():
    with pytest.raises(PlanError, match="7 micro-batches do not fill 3 rounds of 2 stages"):
        passes(0, num_stages=2, num_chunks=2, num_micro_batches=7)


@given(st.integers(1, 5), st.integers(1, 3), st.integers(1, 4), st.floats(0.1, 2.0), st.floats(0.1, 2.0))
def test_equal_stages_idle_for_the_ideal_bubble(num_stages, num_chunks, rounds, forward_s, backward_s):
    count = rounds * num_stages
    orders = orders_of(num_stages, count, num_chunks)
    busy_s = count * num_chunks * (forward_s + backward_s)
    ratio = bubble_ratio(num_stages, num_chunks, np.array(count))
    end_s = float(replay(orders, with_times(orders, [forward_s] * num_stages, [backward_s] * num_stages)))
    assert end_s >= busy_s * (1 + ratio) - 1e-9
    if num_chunks == 1 or forward_s == backward_s:
        assert end_s == pytest.approx(busy_s * (1 + ratio))


@given(st.floats(0.1, 1.0), st.floats(0.1, 1.0), st.floats(1.0, 3.0), st.integers(1, 8))
def test_a_slower_last_stage_works_without_pause(forward_s, backward_s, slower, count):
    orders = orders_of(2, count)
    times = with_times(orders, [forward_s, slower * forward_s], [backward_s, slower * backward_s])
    own_s = slower * (forward_s + backward_s)
    assert float(replay(orders, times)) == pytest.approx(forward_s + count * own_s + backward_s)
    # The last stage takes a result before each of its forward passes and hands one on behind its last backward pass.
    longer_s = (count + 1) * 0.01
    assert float(replay(orders, times, exchange_s=0.01)) == pytest.approx(
        forward_s + count * own_s + backward_s + longer_s
    )


def test_a_slow_inner_stage_exchanges_twice_as_often_as_a_slow_last_one():
    orders = orders_of(3, 12)
    for times_s, exchanges in (([1.0, 1.0, 3.0], 11 + 2 * 2), ([1.0, 3.0, 1.0], 2 * 11 + 2 * 2 - 1)):
        times = with_times(orders, times_s, times_s)
        assert float(replay(orders, times, exchange_s=0.01) - replay(orders, times)) == pytest.approx(0.01 * exchanges)


@given(st.lists(st.floats(0.1, 3.0), min_size=1, max_size=5), st.integers(1, 6))
def test_prompts_wait_for_the_slowest_stage(forward_s, count):
    orders = orders_of(len(forward_s), count, trains=False)
    end_s = float(replay(orders, with_times(orders, forward_s, forward_s)))
    assert end_s == pytest.approx(sum(forward_s) + (count - 1) * max(forward_s))


def longest_path_s(orders, durations):
    """End of the last pass by relaxing every constraint until nothing moves (Bellman and Ford)."""
    num_stages, last = len(orders), len(orders) * (1 + max(one.chunk for one in orders[0])) - 1
    end_s = {(stage, one): 0.0 for stage, order in enumerate(orders) for one in order}

    def at(place, backward, micro_batch):
        return place % num_stages, Pass(backward, micro_batch, place // num_stages)

    before = {}
    for stage, order in enumerate(orders):
        for index, one in enumerate(order):
            place = one.chunk * num_stages + stage
            own = [(stage, order[index - 1])] if index else []
            if one.backward:
                own.append(at(place, False, one.micro_batch) if place == last else at(place + 1, True, one.micro_batch))
            elif place:
                own.append(at(place - 1, False, one.micro_batch))
            before[stage, one] = own
    for _ in end_s:
        moved = {
            key: max((end_s[each] for each in own), default=0.0) + float(durations[key[0]][key[1]])
            for key, own in before.items()
        }
        if moved == end_s:
            return max(end_s.values())
        end_s = moved
    raise AssertionError("the passes wait for each other")


@given(st.integers(2, 4), st.integers(1, 3), st.integers(1, 2), st.integers(0, 10**6))
def test_the_replay_is_the_longest_path(num_stages, num_chunks, rounds, seed):
    rng = np.random.default_rng(seed)
    orders = orders_of(num_stages, rounds * num_stages, num_chunks)
    durations = [{one: rng.uniform(0.1, 2.0, (2, 1)) for one in order} for order in orders]
    ends_s = replay(orders, durations)
    assert ends_s.shape == (2, 1)
    for row in range(2):
        one = [{key: each[row, 0] for key, each in stage.items()} for stage in durations]
        assert ends_s[row, 0] == pytest.approx(longest_path_s(orders, one))


def test_orders_that_wait_for_each_other_are_refused():
    first, second = orders_of(2, 2)
    stuck = [second, list(reversed(first))]
    with pytest.raises(PlanError, match="wait for each other"):
        replay(stuck, with_times(stuck, [1, 1], [1, 1]))


def torch_program(own, stages, count):
    """Yields what a stage does in torch's `Schedule1F1B`: F, B, or messages and whether it waits for them."""
    warm, into, out = min(count, stages - own), own > 0, own < stages - 1
    for number in range(warm):
        yield from [([("F", own - 1, number)], True)] * into
        yield "F"
        yield from [([("F", own, number)], False)] * (out and number < warm - 1)
    for number in range(count):
        ahead = number + warm  # with the first backward passes goes what the last forward pass made
        yield from [([("F", own, ahead - 1)] * (ahead <= count) + [("B", own + 1, number)], True)] * out
        yield "B"
        if ahead < count:
            yield from [([("B", own, number), ("F", own - 1, ahead)], True)] * into
            yield "F"
        else:
            yield from [([("B", own, number)], False)] * into


def torch_end_s(forward_s, backward_s, count, exchange_s):
    """Returns when all stages end whose messages pass once both sides came to them."""
    programs = [list(torch_program(own, len(forward_s), count)) for own in range(len(forward_s))]
    now_s, at, came_s = [0.0] * len(programs), [0] * len(programs), {}
    while any(place < len(program) for place, program in zip(at, programs, strict=True)):
        before = list(at)
        for own, program in enumerate(programs):
            while at[own] < len(program):
                what = program[at[own]]
                if isinstance(what, str):
                    now_s[own] += (forward_s if what == "F" else backward_s)[own]
                else:
                    for message in what[0]:
                        came_s.setdefault(message, {}).setdefault(own, now_s[own])
                    if what[1]:
                        if any(len(came_s[message]) < 2 for message in what[0]):
                            break
                        now_s[own] = max(*came_s[what[0][0]].values(), *came_s[what[0][-1]].values()) + exchange_s
                at[own] += 1
        assert at != before, "the stages wait for each other"
    return max(now_s)


@given(st.lists(st.floats(0.5, 2.0), min_size=2, max_size=5), st.integers(1, 9), st.sampled_from([0.0, 0.01]))
@settings(deadline=None, max_examples=40)
def test_the_replay_ends_when_torch_s_schedule_does(times_s, count, exchange_s):
    orders, backward_s = orders_of(len(times_s), count), [2 * one for one in times_s]
    end_s = float(replay(orders, with_times(orders, times_s, backward_s), exchange_s=exchange_s))
    assert end_s == pytest.approx(torch_end_s(times_s, backward_s, count, exchange_s))
