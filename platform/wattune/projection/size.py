"""Sizes that projections are asked for, such as `1024x8`, and the parts of a step there by its estimates."""

import re
from collections.abc import Sequence
from dataclasses import replace

from wattune.arrays import Floats
from wattune.cost.estimate import LIMITS, Estimates, Find, estimate
from wattune.errors import PlanError
from wattune.field_types import LARGEST_WORLD
from wattune.trial import TrialSpec


def nodes_and_devices(text: str) -> tuple[int, int]:
    """Reads a size: nodes, and devices of each. Raises `PlanError` for what is none."""
    found = re.fullmatch(r"([1-9]\d{0,6})x([1-9]\d{0,3})", text.strip(), re.ASCII)
    if found is None or int(found[1]) * int(found[2]) > LARGEST_WORLD:
        raise PlanError(f'--to: got "{text}", allowed: nodes x devices of one kind, as 1024x8, up to {LARGEST_WORLD:,}')
    return int(found[1]), int(found[2])


def step_shares(specs: Sequence[TrialSpec], find: Find) -> tuple[Estimates, Floats, Floats]:
    """Estimates specifications, and at twice their batch: that tells what does not grow with it.

    Returns the estimates, seconds that grow with the batch, bubble included, and seconds once a step, [specifications].
    Raises `PlanError` where a device cannot be predicted.
    """
    works = [replace(one.workload, global_batch_size=2 * one.workload.global_batch_size) for one in specs]
    both = estimate([*specs, *(replace(one, workload=work) for one, work in zip(specs, works, strict=True))], find)
    step_s, twice_s = both.columns["step_time_s"].value.reshape(2, -1)
    once_s = (2 * step_s - twice_s - both.step_parts_s["bubble"][: len(specs)]).clip(1e-4 * step_s, 0.9 * step_s)
    return both, step_s - once_s, once_s


def limits_of(found: Estimates, before: int, after: int) -> tuple[str, str]:
    """Returns the part whose share of a step grows most between two estimates, and the largest use there."""
    step_s = found.columns["step_time_s"].value
    more = {
        name: part[after] / step_s[after] - part[before] / step_s[before] for name, part in found.step_parts_s.items()
    }
    return max(more, key=lambda name: more[name]), LIMITS[found.limited_by[after]]
