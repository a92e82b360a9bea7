"""The table of docs/dependencies.md: private names of libraries that wattune uses, each held by a test.

Fails when a file of `platform/` uses a private name that no row names, when a row has no test or a test no row, and
when a row says something that is no longer so. The tests of the rows are in `private_apis/`, one file a library.
"""

import ast
import importlib.util
import re
from pathlib import Path
from typing import Final, NamedTuple

import pytest

ROOT: Final = Path(__file__).parents[2]
PACKAGE: Final = ROOT / "platform" / "wattune"
PAGE: Final = ROOT / "docs" / "dependencies.md"

LIBRARIES: Final = (
    "ray",
    "torch",
    "deepspeed",
    "megatron",
    "mlflow",
    "pynvml",
    "amdsmi",
    "transformer_engine",
    "torchao",
    "wandb",
    "tensorboardX",
)


class Row(NamedTuple):
    """One row of the page."""

    names: tuple[str, ...]
    files: frozenset[str]
    versions: str

    def covers(self, used: str, file: str) -> bool:
        """Says whether it names a use, whole or a part of it. A use on an object is `?.name`."""
        if file not in self.files:
            return False
        if used.startswith("?."):
            return any(used[2:] in name.split(".") for name in self.names)
        return any(f"{used}.".startswith(f"{name}.") or f"{name}.".startswith(f"{used}.") for name in self.names)


def rows() -> list[Row]:
    found = []
    for line in PAGE.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("| `") and len(cells) == 5:
            names, files = (tuple(re.findall(r"`([^`]+)`", cell)) for cell in cells[:2])
            found.append(Row(names, frozenset(files), cells[3]))
    return found


ROWS: Final = rows()


# ---- what platform/ uses


def is_private(name: str) -> bool:
    """One underscore in front; ctypes documents `_fields_` and `_type_`."""
    return name.startswith("_") and not name.startswith("__") and not name.endswith("_")


def dotted(node: ast.expr) -> list[str] | None:
    """The names of `a.b.c`; None where it does not begin with a name."""
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    return [node.id, *reversed(names)] if isinstance(node, ast.Name) else None


def imported(tree: ast.Module) -> dict[str, str]:
    """Full name by the name it has in the file."""
    names: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                names[alias.asname or alias.name.split(".")[0]] = (
                    alias.name if alias.asname else alias.name.split(".")[0]
                )
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    return names


def of_library(full_name: str) -> bool:
    return full_name.split(".")[0] in LIBRARIES


def private_uses(text: str) -> set[str]:
    """Private names of the libraries that a file uses: with their full name, or `?.name` where an object has them."""
    tree = ast.parse(text)
    names = imported(tree)
    if not any(map(of_library, names.values())):
        return set()
    nodes = list(ast.walk(tree))
    inner = {id(node.value) for node in nodes if isinstance(node, ast.Attribute)}
    own = _defined(nodes)
    used = {full for full in names.values() if of_library(full) and any(map(is_private, full.split(".")))}
    for node in nodes:
        if isinstance(node, ast.Import):
            used |= {a.name for a in node.names if of_library(a.name) and any(map(is_private, a.name.split(".")))}
        elif isinstance(node, ast.Attribute) and id(node) not in inner:
            used |= _used_by(node, names, own)
        elif isinstance(node, ast.Call) and dotted(node.func) in (["getattr"], ["hasattr"], ["setattr"]):
            used |= _asked_for(node, names)
        elif isinstance(node, ast.ClassDef) and any(of_library(_full(base, names) or "") for base in node.bases):
            used |= _inherited(node)
    return used


def _full(node: ast.expr, names: dict[str, str]) -> str | None:
    chain = dotted(node)
    return ".".join([names.get(chain[0], chain[0]), *chain[1:]]) if chain else None


def _defined(nodes: list[ast.AST]) -> set[str]:
    """Names a file gives to its own functions and attributes."""
    functions = {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)}
    attributes = {
        node.attr
        for node in nodes
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and dotted(node.value) == ["self"]
    }
    fields = {node.target.id for node in nodes if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)}
    return functions | attributes | fields


def _used_by(node: ast.Attribute, names: dict[str, str], own: set[str]) -> set[str]:
    chain = dotted(node)
    if chain and chain[0] in names:
        full = ".".join([names[chain[0]], *chain[1:]])
        return {full} if of_library(full) and any(map(is_private, full.split("."))) else set()
    attributes, base = [], node
    while isinstance(base, ast.Attribute):
        attributes.append(base.attr)
        base = base.value
    if isinstance(base, ast.Name) and base.id in ("self", "cls"):
        attributes = attributes[:-1]  # what a class has of its own; `_inherited` looks at what it has not
    return {f"?.{name}" for name in attributes if is_private(name) and name not in own}


def _asked_for(call: ast.Call, names: dict[str, str]) -> set[str]:
    name = call.args[1].value if len(call.args) > 1 and isinstance(call.args[1], ast.Constant) else None
    if not isinstance(name, str) or not is_private(name):
        return set()
    full = _full(call.args[0], names)
    return {f"{full}.{name}" if full and of_library(full) else f"?.{name}"}


def _inherited(node: ast.ClassDef) -> set[str]:
    """Private names a class takes from its library's base: read and never set, or defined and never called."""
    own = [part for part in ast.walk(node) if isinstance(part, ast.Attribute) and dotted(part.value) == ["self"]]
    stored = {part.attr for part in own if isinstance(part.ctx, ast.Store)}
    loaded = {part.attr for part in own if isinstance(part.ctx, ast.Load)}
    methods = {part.name for part in node.body if isinstance(part, ast.FunctionDef)}
    return {f"?.{name}" for name in (loaded - stored - methods) | (methods - loaded) if is_private(name)}


def uses() -> set[tuple[str, str]]:
    """The files of the package, each with a private name it uses."""
    return {
        (path.relative_to(PACKAGE).as_posix(), used)
        for path in sorted(PACKAGE.rglob("*.py"))
        for used in private_uses(path.read_text())
    }


def test_every_private_name_that_is_used_is_in_the_table() -> None:
    missing = {use for use in uses() if not any(each.covers(use[1], use[0]) for each in ROWS)}
    assert not missing, f"add a row with this file to {PAGE.name} and a test of it here: {sorted(missing)}"


def test_the_scan_sees_every_way_to_use_a_private_name() -> None:
    text = """
import os
import ray._private.worker
from ray._raylet import Config
from torch.distributed import distributed_c10d as c10d
from deepspeed.pipe import PipelineModule
os._exit(1)
c10d._world.pg_map
group._get_backend(c10d.default)._name
getattr(c10d, "_clear", None)
class Own:
    def _mine(self): return self._fields_, other._mine
class Part(PipelineModule):
    def _partition(self): self._kept = self._topo
"""
    assert private_uses(text) == {
        "ray._private.worker",
        "ray._raylet.Config",
        "torch.distributed.distributed_c10d._world.pg_map",
        "torch.distributed.distributed_c10d._clear",
        "?._get_backend",
        "?._name",
        "?._partition",
        "?._topo",
    }


def rows_with_a_test() -> list[str]:
    """The rows that tests are marked with, and those of the table of what is written."""
    paths = [Path(__file__), *(Path(__file__).parent / "private_apis").glob("test_*.py")]
    nodes = [node for path in paths for node in ast.walk(ast.parse(path.read_text()))]
    calls = (
        one for one in nodes if isinstance(one, ast.Call) and dotted(one.func) == ["pytest", "mark", "private_api"]
    )
    tables = (one.value for one in nodes if isinstance(one, ast.AnnAssign) and dotted(one.target) == ["ROWS"])
    names = [name for call in calls for name in call.args]
    names += [name for table in tables if isinstance(table, ast.Dict) for name in table.keys]
    return [name.value for name in names if isinstance(name, ast.Constant)]


def test_every_row_has_a_test_and_every_test_a_row() -> None:
    assert sorted(rows_with_a_test()) == sorted(each.names[0] for each in ROWS)
    assert len(set(rows_with_a_test())) == len(ROWS)


@pytest.mark.parametrize("each", ROWS, ids=lambda each: each.names[0])
def test_no_row_is_stale(each: Row) -> None:
    """Every name is used in one of the row's files, and every file uses one of the names."""
    texts = {file: (PACKAGE / file).read_text() for file in each.files}
    words = {name: name if "/" in name else re.split(r"[.\s]", name)[-1] for name in each.names}
    assert each.versions and texts
    assert [name for name, word in words.items() if not any(word in text for text in texts.values())] == []
    assert [file for file, text in texts.items() if not any(word in text for word in words.values())] == []


@pytest.mark.private_api("comm/torch.py")
def test_files_that_the_code_names_as_sources_are_there() -> None:
    (paths,) = (each.names for each in ROWS if each.names[0] == "comm/torch.py")
    places = []
    for library in ("deepspeed", "megatron", "mlflow"):
        spec = importlib.util.find_spec(library)
        if spec is None:
            pytest.skip(f"{library} is not installed")
        places += [Path(place) for place in spec.submodule_search_locations or ()]
    places += [place / "core" for place in places] + [place.parent for place in places]
    assert [path for path in paths if not any((place / path).exists() for place in places)] == []
