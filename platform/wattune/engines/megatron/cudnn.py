"""One cuDNN for torch and TransformerEngine in a process.

TransformerEngine looks for cuDNN in the machine's CUDA toolkit first, torch brings its own. Both load parts of it by
the same names, so whoever comes second gets the parts of the other. With another version torch refuses them: "cuDNN
version incompatibility" (seen on an H200 with 9.14 beside torch's 9.19).
"""

import os
from collections.abc import MutableMapping
from pathlib import Path
from typing import Final

import torch

HOMES: Final = ("CUDNN_HOME", "CUDNN_PATH")
"""Variables by which TransformerEngine looks for cuDNN first (`transformer_engine/common/__init__.py`)."""


def share_cudnn(environment: MutableMapping[str, str], maps: str) -> None:
    """Names the folder of the cuDNN that this process has for TransformerEngine, unless the user named one.

    It is found in `maps`, the mapped files as Linux lists them after torch was imported, and written into the
    environment. Without a cuDNN there, as on processors, nothing is named.
    """
    if any(environment.get(name) for name in HOMES):
        return
    paths = [Path(line.split(maxsplit=5)[5]) for line in maps.splitlines() if "/libcudnn.so" in line]
    if paths:
        environment[HOMES[0]] = str(paths[0].parent)


def share_torchs_cudnn() -> None:
    """Does so for this process. It comes before the first import of Megatron-Core, which imports TransformerEngine."""
    if torch.version.cuda is not None:
        share_cudnn(os.environ, Path("/proc/self/maps").read_text())
