"""The contract of engines, `tests/contracts/test_engines.py`, for tests that run its cases in other ways."""

import importlib.util
import sys
from pathlib import Path
from typing import Any


def contract_cases() -> Any:
    """The module with its models and its way of running cases, loaded once."""
    name = "wattune_contract_cases"
    if name not in sys.modules:
        path = Path(__file__).parents[1] / "contracts" / "test_engines.py"
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


contract = contract_cases()
