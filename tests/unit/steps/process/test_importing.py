"""Hooks on modules: called once a module is loaded, which is then as it would have been."""

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from wattune.steps.process.importing import AfterImport, LastResort


@pytest.fixture(autouse=True)
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "waited_for.py").write_text("value = 7\n")
    (tmp_path / "broken_one.py").write_text("1 / 0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    before = list(sys.meta_path)
    yield
    sys.meta_path[:] = before
    for name in ("waited_for", "broken_one"):
        sys.modules.pop(name, None)


def test_the_call_comes_once_after_the_module(tmp_path: Path) -> None:
    seen: list[ModuleType] = []
    sys.meta_path.insert(0, AfterImport({"waited_for": seen.append}))  # type: ignore[arg-type]
    module = importlib.import_module("waited_for")
    assert seen == [module] and module.value == 7
    assert module.__file__ == str(tmp_path / "waited_for.py")
    assert module.__spec__ is not None and module.__spec__.loader is not None
    assert "exec_module" not in vars(module.__spec__.loader)
    assert module.__spec__.loader.get_source("waited_for") == "value = 7\n"  # type: ignore[attr-defined]
    importlib.reload(module)
    assert len(seen) == 1


def test_a_module_that_fails_fails_as_ever() -> None:
    seen: list[ModuleType] = []
    sys.meta_path.insert(0, AfterImport({"broken_one": seen.append}))  # type: ignore[arg-type]
    with pytest.raises(ZeroDivisionError):
        importlib.import_module("broken_one")
    assert not seen


def test_a_module_that_does_not_exist_may_come_later(tmp_path: Path) -> None:
    seen: list[ModuleType] = []
    sys.meta_path.insert(0, AfterImport({"waited_for_2": seen.append}))  # type: ignore[arg-type]
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("waited_for_2")
    (tmp_path / "waited_for_2.py").write_text("")
    importlib.invalidate_caches()
    assert seen == [importlib.import_module("waited_for_2")]


def test_a_loader_that_cannot_be_wrapped_loads() -> None:
    class Loader:
        __slots__ = ()

        def create_module(self, spec: Any) -> None:
            return None

        def exec_module(self, module: Any) -> None:
            module.value = 1

    finder = SimpleNamespace(
        find_spec=lambda name, *_: importlib.machinery.ModuleSpec(name, Loader()) if name == "slotted" else None  # type: ignore[arg-type]
    )
    seen: list[ModuleType] = []
    sys.meta_path[:0] = [AfterImport({"slotted": seen.append}), finder]  # type: ignore[list-item]
    assert importlib.import_module("slotted").value == 1 and not seen
    del sys.modules["slotted"]


def test_entry_points_are_lightnings_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    from importlib.metadata import entry_points, version

    sys.meta_path.insert(0, AfterImport({}))  # type: ignore[arg-type]
    for name in ("lightning.pytorch", "pytorch_lightning"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    group = "lightning.pytorch.callbacks_factory"
    assert "wattune" not in entry_points(group=group).names
    monkeypatch.setitem(sys.modules, "lightning.pytorch", ModuleType("lightning.pytorch"))
    (found,) = entry_points(group=group).select(name="wattune")
    assert found.value == "_wattune_steps.lightning:of_lightning"
    assert version("pytest") and version("wattune-steps") == "1"


def test_the_last_resort_finds_wattune_alone(tmp_path: Path) -> None:
    finder = LastResort(str(tmp_path))
    assert finder.find_spec("torch") is None and finder.find_spec("wattune.spans") is None
    spec = finder.find_spec("wattune")
    assert spec is not None and list(spec.submodule_search_locations or ()) == [str(tmp_path)]
