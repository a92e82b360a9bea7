"""Engines by name, loaded on first use."""

import importlib
from typing import Final, cast

from wattune.engines.libraries import not_installed
from wattune.errors import EngineError, NodeError, closest
from wattune.workers.engine import Engine

ENGINES: Final[dict[str, str]] = {
    "torch": "wattune.engines.torch.engine:TorchEngine",
    "deepspeed": "wattune.engines.deepspeed.engine:DeepSpeedEngine",
    "megatron": "wattune.engines.megatron.engine:MegatronEngine",
}
"""Engine name to `module:Class`; loaded on first use, so that naming an engine imports no vendor library."""


def load_engine(name: str) -> Engine:
    """A new engine of that name.

    Args:
        name: A name of `ENGINES`, or `module:Class` of an engine of one's own.

    Raises:
        EngineError: There is none.
        NodeError: Its library is not installed.
    """
    if name not in ENGINES and ":" not in name:
        raise EngineError(f'unknown engine "{name}"; {closest(name, ENGINES)}')
    module_name, _, class_name = ENGINES.get(name, name).partition(":")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise NodeError(not_installed(name, error.name)) from error
    return cast(Engine, getattr(module, class_name)())
