"""The placement whose slowest stage is fastest, exactly: stages to slots, and whole layers to stages."""

import numpy as np

from wattune.arrays import Floats, Ints


def min_max(
    slowness: Floats, unit_s: float, fixed_s: Floats, total: int, *, blocks: Ints, counts: Ints | None = None
) -> tuple[Ints, Ints, float]:
    """Finds T* = min over orders and integer counts of max_i (unit_s n_i + fixed_s_i) * slowness of i's place.

    T can be reached if an assignment of stages to places gives room for all units, at least one a stage: bisected among
    the times that stages can take, it is exact. A stage may take places of its own block; i is in place i now. `counts`
    are units that stay. Returns places and units of the stages, of least total time where T* is reached, and T*.
    """
    from scipy.optimize import linear_sum_assignment  # takes 0.3 s; `wattune record` does not wait for it

    size = len(slowness)
    allowed = np.arange(1, total - size + 2)[None, :].repeat(size, 0) if counts is None else counts[:, None]
    times_s = (unit_s * allowed + fixed_s[:, None])[:, None, :] * slowness[None, :, None]
    inside = blocks[:, None] == blocks[None, :]
    units = np.insert(allowed, 0, 0, axis=1)

    def best(limit_s: float) -> tuple[Ints, Ints] | None:
        room = np.take_along_axis(units, (times_s <= limit_s).sum(axis=2), axis=1) * inside
        _, places = linear_sum_assignment(np.where(room > 0, room, -size * total), maximize=True)
        most = room[np.arange(size), places]
        return (places, most) if most.min() > 0 and most.sum() >= total else None

    limits_s = np.unique(times_s[inside])
    low, high = 0, len(limits_s) - 1
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if best(limits_s[middle]) is not None else (middle + 1, high)
    found = best(limits_s[low])
    assert found is not None, "the longest of all times has room for all units"
    places, most = found
    for stage in np.argsort(-slowness[places], kind="stable"):  # units beyond the total leave the slowest places
        most[stage] -= min(most[stage] - 1, most.sum() - total) if counts is None else 0
    return places, most, float(limits_s[low])


def grouped(slowness: Floats, size: int, domain: int, node: int) -> tuple[Ints, Ints] | None:
    """Groups slots of like speed into stages, which wait for their slowest: no grouping is faster at any rank of speed.

    Groups stay inside a domain of the fast fabric and a node, as ranks do (`wattune.plans.rules.rank_order`). Returns
    the slots of each group, (groups, size), and its node; None where stages do not fit into domains.
    """
    if domain % size or node % domain or len(slowness) % node:
        return None
    by_domain = slowness.reshape(-1, domain)
    order = np.argsort(by_domain, axis=1, kind="stable") + domain * np.arange(len(by_domain))[:, None]
    groups: Ints = order.reshape(-1, size)
    return groups, groups[:, 0] // node
