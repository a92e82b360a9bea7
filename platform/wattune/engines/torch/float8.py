"""Runs the linear layers of a decoder in FP8, by torchao: one scale a tensor, found anew for every product.

Inputs and weights are rounded to e4m3 and gradients of outputs to e5m2 (Micikevicius et al. 2022, arXiv 2209.05433),
each scaled so that its largest value is the type's. All else stays as it is in bf16: weights that are held and
gathered, activations, norms, attention's own products, routers, embedding and head.

torchao is loaded where a plan asks for it: that takes seconds. Of its releases the one in `pyproject.toml` is tested.
"""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch

from wattune.engines.model.decoder import Decoder, Layer
from wattune.engines.model.experts import FeedForward
from wattune.errors import EngineError

LEAST_CAPABILITY: Final = (8, 9)
"""Compute capability of NVIDIA's first devices with products in FP8 (Ada; Hopper is 9.0): `torch._scaled_mm`."""

AMD_ARCHITECTURES: Final = ("gfx94", "gfx95", "gfx12")
"""Beginnings of the names of AMD's devices with products in FP8: MI300, MI350 and RDNA 4."""

_KERNELS: Final = "TORCHAO_FORCE_SKIP_LOADING_SO_FILES"
"""Keeps torchao from loading its compiled kernels: they are of one version of torch, and this conversion has none."""


def convert_layers(decoder: Decoder, device: torch.device) -> None:
    """Makes every linear layer of the decoder's layers one in FP8, before anything cuts, fills or shards them.

    Parameters stay the same objects under the same names. Processors emulate the products: operands are rounded to FP8
    and multiplied in fp32. Raises EngineError where the device has no products in FP8.
    """
    _require_products(device)
    with _quiet_import():
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        config = Float8LinearConfig(emulate=device.type == "cpu")
    for layer in decoder.layers.values():
        assert isinstance(layer, Layer)
        convert_to_float8_training(layer.attention, config=config)
        if isinstance(layer.ffn, FeedForward):
            convert_to_float8_training(layer.ffn, config=config)


def _require_products(device: torch.device) -> None:
    """Refuses a device that another one of the space's own was taken for, before its first step fails."""
    if device.type != "cuda":
        return
    properties: Any = torch.cuda.get_device_properties(device)
    if torch.version.hip is not None:
        able, kind = properties.gcnArchName.startswith(AMD_ARCHITECTURES), properties.gcnArchName
        needed = f"one of {', '.join(AMD_ARCHITECTURES)}"
    else:
        able, kind = (properties.major, properties.minor) >= LEAST_CAPABILITY, f"{properties.major}.{properties.minor}"
        needed = f"compute capability {LEAST_CAPABILITY[0]}.{LEAST_CAPABILITY[1]} or more"
    if not able:
        raise EngineError(f"dtype=fp8: {properties.name} ({kind}) has no products in FP8, {needed} has; use dtype=bf16")


@contextmanager
def _quiet_import() -> Iterator[None]:
    """Loads torchao without its compiled kernels, and without warnings of them and of its own age."""
    before = os.environ.get(_KERNELS)
    loggers = [logging.getLogger(name) for name in ("torchao", "torch.utils._pytree")]
    levels = [logger.level for logger in loggers]
    os.environ[_KERNELS] = "1"
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
        if before is None:
            del os.environ[_KERNELS]
        else:
            os.environ[_KERNELS] = before
