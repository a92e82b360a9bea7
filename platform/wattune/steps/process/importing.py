"""Functions that run once a module of the program has been loaded, and packages that the program may lack."""

from __future__ import annotations

import os
import sys

from .events import tell_problem

TYPE_CHECKING = False  # what type checkers take for true; `typing` loads longer than all of this
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any


class AfterImport:
    """A finder that finds nothing by itself: it lets the other finders work, and then a module load as usual.

    The loader that is found gets a wrapper around its `exec_module` for this one module. So the module has its own
    loader, source and specification, as without us.
    """

    def __init__(self, calls: Mapping[str, Callable[[ModuleType], None]]) -> None:
        self._calls = dict(calls)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Finds a module that is waited for by the other finders, and wraps its loader."""
        call = self._calls.pop(name, None)  # popped first: the other finders may be asked through us again
        if call is None:
            return None
        for finder in sys.meta_path:
            find = getattr(finder, "find_spec", None)
            spec: ModuleSpec | None = None if find is None or finder is self else find(name, path, target)
            if spec is not None:
                _call_after(spec, call)
                return spec
        self._calls[name] = call
        return None

    def find_distributions(self, context: Any = None) -> Any:
        """Names Lightning's callback among the entry points, in programs that use Lightning only."""
        if not any(name in sys.modules for name in ("lightning.pytorch", "pytorch_lightning")):
            return ()
        wanted = getattr(context, "name", None)
        return () if wanted not in (None, "wattune-steps") else (_distribution(),)


def _call_after(spec: ModuleSpec, call: Callable[[ModuleType], None]) -> None:
    loader: Any = spec.loader
    try:
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            try:
                del loader.exec_module  # the loader is as it was, whatever the module does
            finally:
                execute(module)
            call(module)

        loader.exec_module = exec_module
    except Exception as error:
        tell_problem(f"the hook on {spec.name}", error)


def _distribution() -> Any:
    from importlib.metadata import Distribution

    from .lightning import ENTRY_POINTS

    texts = {
        "METADATA": "Metadata-Version: 2.1\nName: wattune-steps\nVersion: 1\n",
        "entry_points.txt": ENTRY_POINTS,
    }

    class Steps(Distribution):
        """A distribution without files: its entry points are all there is."""

        def read_text(self, filename: str) -> str | None:
            return texts.get(filename)

        def locate_file(self, path: Any) -> Any:
            from pathlib import Path

            return Path(os.devnull) / str(path)

    return Steps()


class LastResort:
    """A finder behind all others: lets `from wattune import spans` work where wattune is not installed.

    A program started by wattune may run in another environment than wattune itself. `wattune.spans` needs the standard
    library alone.
    """

    def __init__(self, package: str) -> None:
        self._package = package

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:  # noqa: ARG002
        """Finds `wattune` itself; what is inside is then found as usual."""
        if name != "wattune":
            return None
        from importlib.util import spec_from_file_location

        return spec_from_file_location(name, f"{self._package}/__init__.py", submodule_search_locations=[self._package])
