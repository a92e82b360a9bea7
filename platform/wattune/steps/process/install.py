"""Installs every hook in a process that has just started."""

from __future__ import annotations

import os
import sys

from .events import guarded, watch_errors
from .importing import AfterImport, LastResort

TYPE_CHECKING = False  # what type checkers take for true; `typing` loads longer than all of this
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

HOOKS = {"torch.optim.optimizer": "optimizer", "transformers.trainer": "huggingface"}
"""The module of a library that trains, and the module here that attaches to it."""

TIMED = ("lightning.pytorch", "pytorch_lightning")
"""Libraries that train beside those of `HOOKS`: only the time at which they are loaded is noted."""


@guarded("the hooks that find steps")
def install() -> None:
    """Waits for the libraries that train; loads none of them."""
    after = AfterImport({library: _attaching(HOOKS.get(library, "")) for library in (*HOOKS, *TIMED)})
    sys.meta_path.insert(0, after)
    package = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    sys.meta_path.append(LastResort(package))
    if path := os.environ.pop("WATTUNE_WARM", ""):
        from .warm import ImportNotes

        sys.meta_path.insert(0, ImportNotes(path))
    watch_errors()


def _attaching(name: str) -> Callable[[ModuleType], None]:
    @guarded(f"the hook of {name}")
    def attach(library: ModuleType) -> None:
        from importlib import import_module  # hooks load with their library, not at the start of every Python program

        import_module(f"{__package__}.writer").note_loaded()
        if name:
            import_module(f"{__package__}.{name}").attach(library)

    return attach
