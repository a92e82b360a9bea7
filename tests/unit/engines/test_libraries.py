"""Libraries of an engine are looked for without loading them; a missing one is named with a remedy."""

import importlib.util
from dataclasses import replace
from importlib.machinery import ModuleSpec

import pytest
from specs import trial_spec

from wattune.engines.registry import check_libraries, not_installed
from wattune.errors import EngineError
from wattune.plans.axes import Plan
from wattune.trial import TrialSpec


def spec(engine: str, *, transformer_engine: bool = False) -> TrialSpec:
    return trial_spec(on="1x1 h200_sxm", transformer_engine=transformer_engine, engine=engine, seq_len=8, batch=4)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    names: set[str] = set()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: ModuleSpec(name, None) if name in names else None)
    return names


@pytest.mark.parametrize("engine", ["deepspeed", "megatron"])
def test_an_engine_without_its_library_names_the_extra(installed: set[str], engine: str) -> None:
    with pytest.raises(EngineError) as error:
        check_libraries(spec(engine))
    assert str(error.value) == (
        f'engine "{engine}" needs {engine}, which is not installed; install it (wattune[{engine}]) on every node'
    )
    installed.add(engine)
    check_libraries(spec(engine))


def test_the_torch_engine_needs_no_extra(installed: set[str]) -> None:
    check_libraries(spec("torch"))
    assert (
        not_installed("torch", "numpy")
        == 'engine "torch" needs numpy, which is not installed; install it on every node'
    )


def test_fp8_without_torchao_names_the_extra_and_the_other_type(installed: set[str]) -> None:
    fp8 = replace(spec("torch"), plan=Plan(dtype="fp8"))
    with pytest.raises(EngineError) as error:
        check_libraries(fp8)
    assert str(error.value) == (
        "dtype: fp8 needs torchao, which is not installed; pip install wattune[fp8] on every node, or use bf16"
    )
    installed.add("torchao")
    check_libraries(fp8)


def test_fp8_in_megatron_is_transformer_engines_and_needs_no_torchao(installed: set[str]) -> None:
    installed |= {"megatron", "transformer_engine"}
    check_libraries(replace(spec("megatron", transformer_engine=True), plan=Plan(dtype="fp8")))


def test_transformer_engine_is_looked_for_where_a_cluster_claims_it(installed: set[str]) -> None:
    installed.add("megatron")
    with pytest.raises(EngineError, match="transformer_engine is not installed here; install it on every node, or set"):
        check_libraries(spec("megatron", transformer_engine=True))
    installed.add("transformer_engine")
    check_libraries(spec("megatron", transformer_engine=True))
    check_libraries(spec("torch", transformer_engine=True))
