"""Problems of a file in words: each finding of pydantic as a line with its path inside the file and what to do."""

import math
import re
from collections.abc import Sequence
from decimal import Decimal
from typing import Any, Final

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails, PydanticCustomError

from wattune.errors import closest

Path = tuple[str | int, ...]
"""Keys and list indices from the top of the file, or from the value being validated, down."""

_LONGEST_SHOWN: Final = 60

_KILO: Final = re.compile(r"\s*([0-9]{1,6})\s*[kK]\s*")

ELSEWHERE: Final = {
    "num_hidden_layers": "num_layers",
    "n_layer": "num_layers",
    "num_attention_heads": "num_heads",
    "n_head": "num_heads",
    "num_key_value_heads": "num_kv_heads",
    "num_query_groups": "num_kv_heads",
    "intermediate_size": "ffn_hidden_size",
    "n_embd": "hidden_size",
    "num_local_experts": "num_experts",
    "num_experts_per_tok": "num_experts_per_token",
    "moe_router_topk": "num_experts_per_token",
    "rope_theta": "rope_base",
    "rotary_base": "rope_base",
    "tie_word_embeddings": "tied_embeddings",
    "max_position_embeddings": "max_positions",
    "hidden_act": "activation",
    "nodes": "num_nodes",
    "nnodes": "num_nodes",
    "gpus": "devices_per_node",
    "gpus_per_node": "devices_per_node",
    "nproc_per_node": "devices_per_node",
    "gpu": "device",
    "gpu_type": "device",
    "seq_length": "seq_len",
    "sequence_length": "seq_len",
    "batch_size": "global_batch_size",
    "models": "model",
    "clusters": "cluster",
    "engines": "engine",
    "axes": "space",
    "parameters": "space",
    "bounds": "constraints",
    "name": "study",
    "steps": "min_steps",
    "timeout": "timeout_s",
    "trials": "num_trials",
    "max_trials": "num_trials",
}
"""Keys by the names that Hugging Face, Megatron, torchrun and other tools give them."""

_ALLOWED: Final = {
    "int_type": "an integer",
    "float_type": "a number",
    "finite_number": "a finite number",
    "string_type": "text",
    "bool_type": "true or false",
    "list_type": "a list",
    "dict_type": "a mapping",
    "model_type": "a mapping",
    "greater_than": "more than {gt:g}",
    "greater_than_equal": "at least {ge:g}",
    "less_than": "less than {lt:g}",
    "less_than_equal": "at most {le:g}",
    "too_short": "at least {min_length} entry",
}
"""Error types of pydantic that a space file can give, and the values that are allowed."""


def refuse(found: Sequence[tuple[Path, str]]) -> PydanticCustomError:
    """Makes the error that a validator raises, of texts with their paths below the value that is validated."""
    return PydanticCustomError("refused", "see context", {"found": list(found)})


def got(value: Any, allowed: str) -> str:
    """Says what was written and what is allowed, with a remedy where YAML may have read it otherwise than meant."""
    text, wants_number = f"got {_shown(value)}, allowed: {allowed}", "integer" in allowed or "number" in allowed
    if isinstance(value, bool) and not wants_number:
        return f"{text}; YAML reads yes, no, on and off as true and false, so quote a text"
    if isinstance(value, float) and value.is_integer() and "integer" in allowed:
        return f"{text}; write {value:.0f}"
    if isinstance(value, str) and "integer" in allowed and (kilo := _KILO.fullmatch(value)):
        thousands = int(kilo[1])
        return f"{text}; YAML knows no k, write {1024 * thousands} or {1000 * thousands}"
    number = _number_in(value) if isinstance(value, str) and wants_number else None
    return f"{text}; this is text to YAML, write {number}" if number else text


def problems_of(error: ValidationError, document: Any, entry: type[BaseModel]) -> list[str]:
    """Puts every problem that pydantic found in a line, with its path in the file.

    `entry` is the model of the whole file, for the keys that are allowed where one is unknown.
    """
    lines = []
    for detail in error.errors(include_url=False):
        path = tuple(detail["loc"])
        if detail["type"] == "refused":
            lines += [f"{_path_text((*path, *below), document)}: {text}" for below, text in detail["ctx"]["found"]]
        else:
            lines.append(f"{_path_text(path, document)}: {_text(detail, entry)}")
    return lines


def _text(detail: ErrorDetails, entry: type[BaseModel]) -> str:
    kind, value = detail["type"], detail["input"]
    if kind == "extra_forbidden":
        name, known = str(detail["loc"][-1]), _keys_at(entry, detail["loc"][:-1])
        if ELSEWHERE.get(name) in known:
            return f'unknown key; here it is "{ELSEWHERE[name]}"'
        return f"unknown key; {closest(name, known)}"
    if kind == "missing":
        return "missing; add it"
    if kind == "invalid_key" or detail["loc"][-1:] == ("[key]",):
        return f"the key {_shown(value)} is not a text; quote it if it is meant"
    if kind in _ALLOWED:
        return got(value, _ALLOWED[kind].format(**detail.get("ctx", {})))
    return got(value, detail["msg"])


def _keys_at(entry: type[BaseModel], path: Sequence[str | int]) -> list[str]:
    """Finds the keys that a file may have at a path, from the models' annotations."""
    for part in path:
        if isinstance(part, str) and not _is_tag(part):
            entry = _models_in(entry.model_fields[part].annotation)[0]
    return list(entry.model_fields)


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [found for argument in getattr(annotation, "__args__", ()) for found in _models_in(argument)]


def _path_text(path: Path, document: Any) -> str:
    """Writes a path as `space.tp[1]`, without indices that the file does not have."""
    text, here = "", document
    for part in path:
        if isinstance(part, int) and not isinstance(here, list):
            continue  # one entry written without a list around it
        if _is_tag(part) or isinstance(here, str):  # a text that stands for a mapping has no keys
            continue
        text += f"[{part}]" if isinstance(part, int) else f".{part}"
        try:
            here = here[part]
        except (KeyError, IndexError, TypeError):
            here = None
    return text.lstrip(".") or "file"


def _is_tag(part: str | int) -> bool:
    """Tells whether a part of pydantic's path names a choice of its own and no key of the file."""
    return isinstance(part, str) and part.startswith("[")


def _shown(value: Any) -> str:
    """Writes a value of a file in one short phrase."""
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return f"the boolean {str(value).lower()}"
    if isinstance(value, list):
        return "a list" if value else "an empty list"
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, int) and value.bit_length() > 64:
        return f"an integer of {value.bit_length()} bits"
    text = str(value)
    text = text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}..."
    return f'the text "{text}"' if isinstance(value, str) else text


def _number_in(text: str) -> str | None:
    """Writes the number that a text means so that YAML reads a number; None where it means none.

    PyYAML follows YAML 1.1, where `1e3` is a text: an exponent needs a point before it and a sign inside it.
    """
    try:
        number = float(text)
    except ValueError:
        return None
    if not math.isfinite(number) or not (number == 0 or 1e-9 <= abs(number) < 1e15):
        return None
    return format(Decimal(text.replace("_", "").strip()).normalize(), "f")
