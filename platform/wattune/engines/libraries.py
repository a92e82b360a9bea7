"""The libraries an engine needs, looked for without loading them."""

import importlib.util
import os
import shutil
from pathlib import Path
from typing import Final

from wattune.errors import NodeError
from wattune.plans.program import RUN_TIME, filled, is_command, values_of
from wattune.trial import TrialSpec
from wattune.workers.command.environment import search_path

OPTIONAL: Final = ("deepspeed", "megatron")
"""Engines whose library is an extra of the same name."""


def check_libraries(spec: TrialSpec) -> None:
    """Looks for what a specification needs to be installed on this node, without loading any of it.

    Raises:
        NodeError: Its engine's library, torchao for FP8, or its command's program is not there, or the cluster is said
            to have TransformerEngine and has not.
    """
    if spec.program is not None and is_command(spec):
        program = filled(spec.program.command[0], values_of(spec, spec.program.flags) | dict.fromkeys(RUN_TIME, ""))
        if shutil.which(program, path=search_path(os.environ.get("PATH"))) is None:
            raise NodeError(
                f'the command\'s program "{program}" is not here: neither on PATH nor at that path from {Path.cwd()}; '
                "install it on every node, or give its path"
            )
        return
    if spec.engine in OPTIONAL and importlib.util.find_spec(spec.engine) is None:
        raise NodeError(not_installed(spec.engine, spec.engine))
    if spec.plan.dtype == "fp8" and spec.engine == "torch" and importlib.util.find_spec("torchao") is None:
        raise NodeError(
            "dtype: fp8 needs torchao, which is not installed; pip install wattune[fp8] on every node, or use bf16"
        )
    if not spec.cluster.transformer_engine or spec.engine != "megatron":
        return
    if importlib.util.find_spec("transformer_engine") is None:
        raise NodeError(
            f"{spec.cluster.label} says transformer_engine: true and transformer_engine is not installed here; "
            "install it on every node, or set transformer_engine: false"
        )


def not_installed(engine: str, library: str | None) -> str:
    """Says which library an engine lacks, and how to get it."""
    extra = f" (wattune[{engine}])" if engine in OPTIONAL else ""
    return f'engine "{engine}" needs {library}, which is not installed; install it{extra} on every node'
