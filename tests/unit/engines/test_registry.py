"""Engines are found by name, loaded when they are asked for, and refused with a remedy."""

import subprocess
import sys
from types import ModuleType

import pytest

from wattune.engines.registry import ENGINES, load_engine
from wattune.engines.torch.engine import TorchEngine
from wattune.errors import EngineError
from wattune.plans.engines import CAPABILITIES, runs_program


def test_every_engine_that_can_be_planned_can_be_loaded() -> None:
    assert set(ENGINES) == {name for name in CAPABILITIES if not runs_program(name)}  # those load no engine
    first, second = load_engine("torch"), load_engine("torch")
    assert isinstance(first, TorchEngine) and first is not second


def test_an_engine_of_ones_own_is_named_by_module_and_class(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("own_engine")
    module.Own = type("Own", (), {})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "own_engine", module)
    assert type(load_engine("own_engine:Own")).__name__ == "Own"


def test_an_unknown_name_is_refused_with_the_closest() -> None:
    with pytest.raises(EngineError, match=r'unknown engine "megatorn"; did you mean "megatron"\?'):
        load_engine("megatorn")


def test_a_library_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ENGINES, "deepspeed", "a_library_that_nobody_has:Engine")
    with pytest.raises(
        EngineError, match=r'engine "deepspeed" needs a_library_that_nobody_has, .* \(wattune\[deepspeed\]'
    ):
        load_engine("deepspeed")


def test_naming_engines_loads_no_training_library() -> None:
    code = (
        "import sys, wattune.engines.registry; "
        "print(sorted({'deepspeed', 'megatron'} & {name.split('.')[0] for name in sys.modules}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"
