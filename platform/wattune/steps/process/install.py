"""Installs every hook in a process that has just started."""

from __future__ import annotations

import os
import sys

from . import huggingface, optimizer
from .events import guarded, watch_errors
from .importing import AfterImport, LastResort


@guarded("the hooks that find steps")
def install() -> None:
    """Waits for the libraries that train; loads none of them."""
    after = AfterImport({"torch.optim.optimizer": optimizer.attach, "transformers.trainer": huggingface.attach})
    sys.meta_path.insert(0, after)
    package = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    sys.meta_path.append(LastResort(package))
    watch_errors()
