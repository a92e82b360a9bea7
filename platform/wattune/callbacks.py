"""Callbacks by which Trainers of Hugging Face and Lightning tell wattune their steps and tokens, in one line.

    from wattune.callbacks import HuggingFaceCallback, LightningCallback

    transformers.Trainer(..., callbacks=[HuggingFaceCallback()])
    lightning.Trainer(..., callbacks=[LightningCallback()])

They need the standard library and the Trainer's own library alone, which loads when a name is first used. Where wattune
does not listen they do nothing. Where its hooks are in the program too, these steps are the ones that count.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from wattune.spans import WRITER

if TYPE_CHECKING:
    HuggingFaceCallback: Any
    """Subclass of `transformers.TrainerCallback`; give an instance to `Trainer(callbacks=[...])`."""
    LightningCallback: Any
    """Subclass of the `Callback` of `lightning.pytorch`, or of `pytorch_lightning` where the program loaded that."""


def _huggingface() -> Any:
    from transformers import Trainer, TrainerCallback

    from wattune.steps.process.huggingface import telling

    return TrainerCallback if WRITER is None else telling(TrainerCallback, Trainer, WRITER)


def _lightning() -> Any:
    older = "pytorch_lightning" in sys.modules and "lightning.pytorch" not in sys.modules
    base = import_module("pytorch_lightning" if older else "lightning.pytorch").Callback

    from wattune.steps.process.huggingface import TrainerSteps
    from wattune.steps.process.lightning import telling

    return base if WRITER is None else telling(base, TrainerSteps(WRITER))


_BASES = {"HuggingFaceCallback": _huggingface, "LightningCallback": _lightning}


def __getattr__(name: str) -> Any:
    if name not in _BASES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(_BASES)}")
    # Named and kept here, so that a Trainer that spawns its ranks can send it to them.
    made = type(name, (_BASES[name](),), {"__module__": __name__, "__doc__": "Tells wattune the steps of a Trainer."})
    return globals().setdefault(name, made)
