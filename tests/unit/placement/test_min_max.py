"""The exact solver against brute force."""

import itertools

import numpy as np

from wattune.placement.min_max import grouped, min_max


def brute(slowness, unit_s, fixed_s, total, blocks, counts=None):
    """The least longest stage by trying every order and every layout."""
    size = len(slowness)
    layouts = (
        [tuple(counts)]
        if counts is not None
        else [c for c in itertools.product(range(1, total + 1), repeat=size) if sum(c) == total]
    )
    orders = [o for o in itertools.permutations(range(size)) if all(blocks[i] == blocks[o[i]] for i in range(size))]
    return min(max((unit_s * c[i] + fixed_s[i]) * slowness[o[i]] for i in range(size)) for o in orders for c in layouts)


def test_it_equals_brute_force_and_reaches_what_it_says() -> None:
    draw = np.random.default_rng(1)
    for _ in range(300):
        size = int(draw.integers(2, 5))
        total = int(draw.integers(size, 9))
        slowness, unit_s = draw.uniform(0.8, 1.5, size), float(draw.uniform(0.5, 2))
        fixed_s = draw.choice([0.0, 0.3, 1.7], size)
        blocks = draw.integers(0, 2, size)
        counts = None
        if draw.random() < 0.3:
            counts = np.bincount(draw.integers(0, size, total - size), minlength=size) + 1
        places, units, limit_s = min_max(slowness, unit_s, fixed_s, total, blocks=blocks, counts=counts)
        assert limit_s == brute(slowness, unit_s, fixed_s, total, blocks, counts)
        assert sorted(places) == list(range(size)) and units.sum() == total and units.min() >= 1
        assert max((unit_s * units + fixed_s) * slowness[places]) <= limit_s
        assert (blocks[places] == blocks).all() and (counts is None or (units == counts).all())


def test_groups_of_like_slots_beat_every_other_grouping() -> None:
    draw = np.random.default_rng(2)
    for _ in range(30):
        slowness = draw.uniform(1, 1.3, 4)
        found = grouped(slowness, 2, 4, 4)
        assert found is not None
        own = sorted(slowness[found[0]].max(axis=1))
        others = [
            sorted((slowness[list(o[:2])].max(), slowness[list(o[2:])].max())) for o in itertools.permutations(range(4))
        ]
        assert all(a <= b for other in others for a, b in zip(own, other, strict=True))


def test_groups_stay_in_domain_and_node() -> None:
    slowness = np.array([1.4, 1.0, 1.3, 1.1, 1.2, 1.0, 1.0, 1.5])
    groups, nodes = grouped(slowness, 2, 2, 4) or (None, None)
    assert [sorted(group) for group in groups] == [[0, 1], [2, 3], [4, 5], [6, 7]] and nodes.tolist() == [0, 0, 1, 1]
    assert grouped(slowness, 8, 4, 4) is None
