"""Pipeline schedules: the order of every stage's passes, and their replay with given durations. Pure arithmetic."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from wattune.arrays import Floats
from wattune.errors import PlanError


class Pass(NamedTuple):
    """One micro-batch's forward or backward pass through one chunk of a stage."""

    backward: bool
    micro_batch: int
    chunk: int = 0


def passes(stage: int, *, num_stages: int, num_chunks: int, num_micro_batches: int, trains: bool = True) -> list[Pass]:
    """Lists a stage's passes in the order that the engines run them.

    - One chunk a stage: 1F1B (Narayanan et al. 2021, arXiv 2104.04473, section 2.2). Stage s runs
      `num_stages - s - 1` forward passes ahead, then a forward and a backward in turn. torch's `Schedule1F1B`,
      Megatron and DeepSpeed all have this order.
    - Several chunks: interleaved 1F1B, in rounds of micro-batches that pass all chunks of a stage before the next round
      begins. Stage s runs `2 (num_stages - s - 1) + (num_chunks - 1) * round` passes ahead. A round has `num_stages`
      micro-batches, or somewhat more if that does not divide them (torch's `ScheduleInterleaved1F1B`).
    - Without training: GPipe's forward passes.

    Without `trains` there are no backward passes. Raises `PlanError`: the micro-batches do not fill rounds of equal
    size.
    """
    rounds = max(1, num_micro_batches // num_stages) if num_chunks > 1 else 1
    size, rest = divmod(num_micro_batches, rounds)
    if rest:
        raise PlanError(
            f"{num_micro_batches} micro-batches do not fill {rounds} rounds of {num_stages} stages; use a multiple"
        )
    order = [
        (first * size + index, chunk) for first in range(rounds) for chunk in range(num_chunks) for index in range(size)
    ]
    forward = [Pass(False, micro_batch, chunk) for micro_batch, chunk in order]
    if not trains:
        return forward
    backward = [Pass(True, micro_batch, num_chunks - 1 - chunk) for micro_batch, chunk in order]
    ahead = num_stages - stage - 1
    if num_chunks > 1:
        ahead = 2 * ahead + (num_chunks - 1) * size
    ahead = min(ahead, len(order))
    turns = [one for pair in zip(forward[ahead:], backward, strict=False) for one in pair]
    return forward[:ahead] + turns + backward[len(order) - ahead :]


def replay(
    orders: Sequence[Sequence[Pass]],
    duration_s: Sequence[Mapping[Pass, Floats]],
    paces: Sequence[Any] = (),
    exchange_s: float = 0.0,
) -> Floats:
    """Replays a pipeline whose communication is free, but for an exchange of two stages, and finds when it ends.

    A pass starts when its stage has ended the pass before and the pass whose result it takes has ended. Virtual stage
    `chunk * stages + stage` follows the model from input to output. A forward pass takes the result of the virtual
    stage before, a backward pass that of the one behind, and the first backward that of its own forward. `orders` are
    the passes of every stage in the order it runs them, and durations, by stage, arrays of one shape that replay many
    steps at once. `paces`, if any, make of a stage's duration and the wait before it what it takes. Returns the end of
    the last pass, alike. Raises `PlanError` where passes wait for each other, or for one that no stage runs.
    """
    num_stages = len(orders)
    last = max(one.chunk for order in orders for one in order) * num_stages + num_stages - 1
    ends_s: dict[tuple[bool, int, int], Floats] = {}
    free_s: list[Floats] = [np.zeros(()) for _ in orders]
    done = [0] * num_stages
    moved = True
    while moved:
        moved = False
        for stage, order in enumerate(orders):
            while done[stage] < len(order):
                one = order[done[stage]]
                place = one.chunk * num_stages + stage
                needed = needs(one, place, last)
                if needed is not None and needed not in ends_s:
                    break
                start_s = free_s[stage] if needed is None else np.maximum(free_s[stage], ends_s[needed])
                start_s = start_s + exchange_s * (needed is not None and needed[2] != place)
                own_s = duration_s[stage][one]
                lasts_s = paces[stage](own_s, start_s - free_s[stage]) if paces else own_s
                free_s[stage] = ends_s[one.backward, one.micro_batch, place] = start_s + lasts_s
                done[stage] += 1
                moved = True
    if any(count < len(order) for count, order in zip(done, orders, strict=True)):
        raise PlanError(
            f"the passes of {num_stages} pipeline stages wait for each other; every stage needs all of them"
        )
    result: Floats = np.maximum.reduce(np.broadcast_arrays(*free_s))
    return result


def needs(one: Pass, place: int, last: int) -> tuple[bool, int, int] | None:
    """Returns the pass whose result another one takes, with its virtual stage; None for the input of the model."""
    if not one.backward:
        return (False, one.micro_batch, place - 1) if place else None
    return (False, one.micro_batch, place) if place == last else (True, one.micro_batch, place + 1)
