"""Engines by name, loaded on first use, and the libraries they need, looked for without loading them."""

import importlib
import importlib.util
import os
import shutil
from pathlib import Path
from typing import Final, cast

from wattune.errors import EngineError, NodeError, closest
from wattune.plans.program import RUN_TIME, filled, is_command, values_of
from wattune.trial import TrialSpec
from wattune.workers.command.environment import search_path
from wattune.workers.engine import Engine

ENGINES: Final[dict[str, str]] = {
    "torch": "wattune.engines.torch.engine:TorchEngine",
    "deepspeed": "wattune.engines.deepspeed.engine:DeepSpeedEngine",
    "megatron": "wattune.engines.megatron.engine:MegatronEngine",
}
"""Engine name to `module:Class`; loaded on first use, so that naming an engine imports no vendor library."""

OPTIONAL: Final = ("deepspeed", "megatron")
"""Engines whose library is an extra of the same name."""


def load_engine(name: str) -> Engine:
    """A new engine of that name.

    It is one of `ENGINES`, or `module:Class` of an engine of one's own. Raises `EngineError` where there is none.
    Raises `NodeError` where its library is not installed.
    """
    if name not in ENGINES and ":" not in name:
        raise EngineError(f'unknown engine "{name}"; {closest(name, ENGINES)}')
    module_name, _, class_name = ENGINES.get(name, name).partition(":")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise NodeError(not_installed(name, error.name)) from error
    return cast(Engine, getattr(module, class_name)())


def check_libraries(spec: TrialSpec) -> None:
    """Looks for what a specification needs to be installed on this node, without loading any of it.

    Raises `NodeError` where its engine's library, torchao for FP8, or its command's program is not there, or the
    cluster is said to have TransformerEngine and has not.
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
