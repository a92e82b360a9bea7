"""Runs at the start of every Python process of a command whose steps are read; nothing of it stops the program.

The hooks are loaded by path, as `_wattune_steps`: the program may have no wattune, or another one.
"""

from __future__ import annotations

import os
import sys

_HERE = os.path.dirname(os.path.abspath(__file__))


def _install() -> None:
    package = type(sys)("_wattune_steps")  # by hand: importlib.util takes longer to load than all the hooks
    package.__path__ = [os.path.join(os.path.dirname(_HERE), "process")]
    sys.modules["_wattune_steps"] = package
    from _wattune_steps.install import install  # type: ignore[import-not-found]

    install()


def _run_existing() -> None:
    """Runs the `sitecustomize` that the program would have had, as if this one were not there."""
    others = [path for path in sys.path if os.path.abspath(path or ".") != _HERE]
    # What `importlib.machinery.PathFinder` is; loading that module takes longer.
    spec = next(each for each in sys.meta_path if getattr(each, "__name__", "") == "PathFinder").find_spec(
        "sitecustomize", others
    )
    if spec is None or spec.loader is None:
        return
    from importlib.util import module_from_spec

    module = module_from_spec(spec)
    sys.modules["sitecustomize"] = module
    spec.loader.exec_module(module)


if os.environ.get("WATTUNE_STEPS"):
    try:
        _install()
    except Exception as error:  # a program that is measured must start
        sys.stderr.write(f"wattune: its steps are not found by hooks: {type(error).__name__}: {error}\n")
_run_existing()
