"""Names of a package that are loaded at their first use, so that importing the package is light."""

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any


def lazy_names(package: str, homes: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Makes `__getattr__` and `__dir__` of a package; `homes` has its names, parted by spaces, by their module."""
    home_of = {name: home for home, names in homes.items() for name in names.split()}
    module = sys.modules[package]

    def load(name: str) -> Any:
        if name not in home_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(home_of[name]), name)
        setattr(module, name, value)
        return value

    return load, lambda: sorted({*vars(module), *home_of})
