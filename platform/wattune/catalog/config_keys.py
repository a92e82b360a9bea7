"""Keys of a `config.json`: values of the file, or the defaults of its model type, each checked where it is read."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import resources
from typing import Any, Final

from wattune.field_types import LARGEST_COUNT

ConfigJson = Mapping[str, Any]

TYPES: Final[dict[str, dict[str, dict[str, Any]]]] = json.loads(
    resources.files(__package__).joinpath("model_types.json").read_text(encoding="utf-8")
)
"""Of each model type the defaults of the keys that are read, and other names of keys."""


@dataclass(slots=True)
class Keys:
    """Keys of a file, with the problems and features met while they are read."""

    kind: str
    given: ConfigJson
    """Keys that the file has."""
    where: str = ""
    """Begin of the names of its keys, where they lie in a part of the file."""
    problems: list[str] = field(default_factory=list)
    features: dict[str, str] = field(default_factory=dict)
    """Features that are not counted and can be left out, each with a phrase for people."""
    uncounted: set[str] = field(default_factory=set)
    """Keys whose counts cannot be used: nothing is checked against them."""
    config: dict[str, Any] = field(init=False)
    """Keys of the file, and the type's defaults of all others."""

    def __post_init__(self) -> None:
        aliases = {name: key for name, key in TYPES[self.kind].get("aliases", {}).items() if name in self.given}
        named = {key: self.given[name] for name, key in aliases.items()}
        self.config = {**TYPES[self.kind]["defaults"], **named, **self.given}

    def problem(self, key: str, text: str) -> None:
        """Notes why a key cannot be used."""
        self.problems.append(f"{self.where}{key}: {text}")

    def count(self, key: str, default: int | None = None, *, least: int = 1, most: int = LARGEST_COUNT) -> int:
        """Returns an integer; the least one where the file has none, which is then a problem."""
        value = self.config.get(key)
        value = default if value is None else value
        if type(value) is int and least <= value <= most:
            return value
        said = "missing" if value is None else f"got {str(value)[:40]}"
        self.problem(key, f"{said}, allowed: an integer from {least} to {most:,}")
        self.uncounted.add(key)
        return least

    def flag(self, key: str) -> bool:
        """Returns true or false; false where the file has neither, which is then a problem unless it is null."""
        value = self.config.get(key)
        if value is not None and type(value) is not bool:
            self.problem(key, f"got {str(value)[:40]}, allowed: true or false")
        return value is True

    def number(self, key: str, default: float) -> float:
        """Returns a positive number; the default where the file has none that can be used."""
        value = self.config.get(key)
        value = default if value is None else value
        if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf:
            return float(value)
        self.problem(key, f"got {str(value)[:40]}, allowed: a number above 0")
        return default

    def activation(self, gated: bool) -> str:
        """Returns the activation as `ModelSpec` names it, of a block with or without a gate."""
        known_keys = {*TYPES[self.kind]["defaults"], "hidden_act"}
        keys = [key for key in _ACTIVATION_KEYS if self.config.get(key) is not None and key in known_keys]
        key = keys[0] if keys else "hidden_act"
        value = self.config.get(key)
        for names, known in ((_SILU, ("swiglu", "")), (_GELU, ("geglu", "gelu")), (("relu2",), ("", "relu2"))):
            if value in names and known[not gated]:
                return known[not gated]
        allowed = " or ".join((*_SILU, *_GELU) if gated else (*_GELU, "relu2"))
        self.problem(key, f"got {str(value)[:40]}, allowed: {allowed}")
        return "swiglu" if gated else "gelu"


_ACTIVATION_KEYS: Final = ("hidden_activation", "mlp_hidden_act", "activation_function", "activation", "hidden_act")
_SILU: Final = ("silu", "swish")
_GELU: Final = ("gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh", "gelu_python")
"""Forms of GELU. The decoder computes the exact one; the tanh forms differ by less than 1e-3 and do the same work."""
