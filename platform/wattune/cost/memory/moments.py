"""Moments of a step: bytes by part, [candidates, stages]. The fullest one is the peak."""

from typing import Final

import numpy as np

from wattune.arrays import Floats

PartSizes = dict[str, Floats]

PARTS: Final = ("weights", "gradients", "optimizer", "activations", "logits", "gathered", "buffers", "allocator")
"""Parts of a peak, in the order they are shown."""


def moment(constant: PartSizes, **parts: Floats) -> PartSizes:
    """Adds bytes of a moment to those that are there throughout a step."""
    nothing = np.zeros(())
    return {name: constant.get(name, nothing) + parts.get(name, nothing) for name in constant.keys() | parts.keys()}
