"""Looks into libraries that are installed: what they have, and how it is written."""

import ast
import importlib
import importlib.util
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest


def load(module: str) -> Any:
    """A library's module; the test is skipped where the library is not installed."""
    library = module.split(".")[0]
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    if library == "deepspeed":  # it writes to standard output while it is imported
        importlib.import_module("wattune.engines.deepspeed.context")
    return importlib.import_module(module)


def get(path: str) -> Any:
    """What a full name stands for; the longest part that is a module is imported."""
    parts = path.split(".")
    for end in range(len(parts), 0, -1):
        try:
            found = load(".".join(parts[:end]))
        except ModuleNotFoundError:
            continue
        for name in parts[end:]:
            found = getattr(found, name)
        return found
    raise ModuleNotFoundError(path)


def parameters(function: Any) -> list[str]:
    return list(inspect.signature(function).parameters)


def source(path: str) -> str:
    return inspect.getsource(get(path))


def stub(path: str, owner: str, method: str) -> bool:
    """Whether a type stub of torch says that a class (or, where empty, the module) has a function."""
    tree = ast.parse((Path(load("torch").__file__).parent / path).read_text())
    bodies = [node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == owner]
    return any(
        isinstance(node, ast.FunctionDef) and node.name == method for body in bodies or [tree.body] for node in body
    )


@contextmanager
def group_of_one() -> Iterator[Any]:
    """A default process group of gloo with one rank."""
    dist = load("torch.distributed")
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        yield store
    finally:
        dist.destroy_process_group()
