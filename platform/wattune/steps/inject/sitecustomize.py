"""Runs at the start of every Python process of a command whose steps are read; nothing of it stops the program.

The hooks are loaded by path, as `_wattune_steps`: the program may have no wattune, or another one.
"""

from __future__ import annotations

import importlib.util
import os
import sys

_HERE = os.path.dirname(os.path.abspath(__file__))


def _install() -> None:
    """Loads the hooks and installs them."""
    folder = os.path.join(os.path.dirname(_HERE), "process")
    spec = importlib.util.spec_from_file_location(
        "_wattune_steps", os.path.join(folder, "__init__.py"), submodule_search_locations=[folder]
    )
    if spec is None or spec.loader is None:
        return
    package = importlib.util.module_from_spec(spec)
    sys.modules["_wattune_steps"] = package
    spec.loader.exec_module(package)
    importlib.import_module("_wattune_steps.install").install()


def _run_existing() -> None:
    """Runs the `sitecustomize` that the program would have had, as if this one were not there."""
    from importlib.machinery import PathFinder

    others = [path for path in sys.path if os.path.abspath(path or ".") != _HERE]
    spec = PathFinder.find_spec("sitecustomize", others)
    if spec is None or spec.loader is None:
        return
    module = importlib.util.module_from_spec(spec)
    sys.modules["sitecustomize"] = module
    spec.loader.exec_module(module)


if os.environ.get("WATTUNE_STEPS"):
    try:
        _install()
    except Exception as error:  # a program that is measured must start
        sys.stderr.write(f"wattune: its steps are not found by hooks: {type(error).__name__}: {error}\n")
_run_existing()
