"""JSON Schema and reference page of search spaces, made of the grammar: keys, defaults, units, examples, meanings.

Editors check and complete a space by the schema. It says what a single value may be. What values may be together, such
as heads that divide a width, only `wattune plan` checks.
"""

import json
import re
from collections.abc import Iterator
from typing import Any, Final

from wattune.catalog.hardware import DEVICES
from wattune.catalog.models import MODELS
from wattune.catalog.networks import NETWORKS
from wattune.search.fields import JsonSchema
from wattune.search.grammar import SpaceFile
from wattune.storage.documents import yaml_line
from wattune.units import unit_of

SCHEMA_NAME: Final = "space.schema.json"
"""Name of the schema's file, beside the spaces that `wattune init` writes."""

DIALECT: Final = "http://json-schema.org/draft-07/schema#"
"""The version of JSON Schema that the YAML language server reads."""

_UNITS: Final = {"min_seconds": "s", "soak_seconds": "s", "seq_len": "tokens", "global_batch_size": "sequences"}
"""Units of keys whose names have no suffix of one."""

_MOST_NAMES: Final = 8
"""Most names of a choice that the page lists in a cell."""


def schema_line(path: str) -> str:
    """Returns the comment by which editors find the schema at a path relative to the space."""
    return f"# yaml-language-server: $schema={path}"


def json_schema() -> JsonSchema:
    """Makes the JSON Schema of a search space."""
    made = SpaceFile.model_json_schema()
    axes, plan = made["properties"]["space"]["properties"], made["properties"]["plans"]["items"]["properties"]
    plan |= {name: {"$ref": f"#/properties/space/properties/{name}/items"} for name in axes}
    whole = {"$schema": DIALECT, "title": "wattune search space", **{k: v for k, v in made.items() if k != "title"}}
    return {key: _without_titles(value) if key != "title" else value for key, value in whole.items()}


def schema_text(*, names_metrics: bool = True) -> str:
    """Returns the JSON Schema as text.

    `names_metrics` False leaves out the objectives that editors complete, as the file of this repository does: then a
    new metric changes the table of metrics alone.
    """
    schema = json_schema()
    if not names_metrics:
        objective = schema["properties"]["objective"]
        objective["anyOf"] = [one for one in objective["anyOf"] if "enum" not in one]
    return json.dumps(schema, indent=1, ensure_ascii=False) + "\n"


def _without_titles(value: Any, *, names: bool = False) -> Any:
    """Drops the titles that pydantic makes of names. `names` says that the keys are names of properties."""
    if isinstance(value, list):
        return [_without_titles(one) for one in value]
    if not isinstance(value, dict):
        return value
    return {
        key: _without_titles(one, names=key in ("properties", "$defs") and not names)
        for key, one in value.items()
        if names or key != "title" or not isinstance(one, str)
    }


def reference_page() -> str:
    """Makes the reference page in Markdown."""
    schema = json_schema()
    return "\n".join(_page(schema)) + "\n"


def sections(schema: JsonSchema) -> dict[str, str]:
    """Returns the place in the file of each mapping, by its definition's name, in the order of the keys."""
    found: dict[str, str] = {}

    def walk(own: JsonSchema, place: str) -> None:
        for key, spec in own.get("properties", {}).items():
            for name in re.findall(r"\$defs/(\w+)", json.dumps(spec)):
                if name not in found:
                    found[name] = f"{place}{key}"
                    walk(schema["$defs"][name], f"{place}{key}.")

    walk(schema, "")
    return found


def _page(schema: JsonSchema) -> Iterator[str]:
    yield "# Keys of a search space"
    yield ""
    yield "<!-- Made by `wattune schema --page` of wattune/search/grammar.py. A test holds it to the code. -->"
    yield ""
    yield "Every key, its default, its unit and an example. [Search spaces](spaces.md) shows how to write one."
    yield ""
    yield "## The file"
    yield ""
    yield from _table(schema, schema)
    yield "## `space`"
    yield ""
    yield "Axes to vary. Each takes a list of values, and one that is left out has its neutral value."
    yield ""
    yield "| axis | values | meaning |"
    yield "|---|---|---|"
    for name, axis in schema["properties"]["space"]["properties"].items():
        yield f"| `{name}` | {_type(axis['items'], schema)} | {axis['description']} |"
    yield ""
    for definition, place in sections(schema).items():
        own = schema["$defs"][definition]
        yield f"## `{place}`"
        yield ""
        yield own["description"]
        yield ""
        yield from _table(own, schema, _EXAMPLES.get(definition))


def _table(own: JsonSchema, schema: JsonSchema, example: Any = None) -> Iterator[str]:
    yield "| key | type | default | unit | example | meaning |"
    yield "|---|---|---|---|---|---|"
    for name, spec in own["properties"].items():
        default = "required" if name in own.get("required", ()) else _default(spec)
        unit = _UNITS.get(name) or unit_of(name) or ""
        shown = getattr(example, name, None)
        value = _first_example(spec, schema) if shown is None or name == "name" else shown
        text = "" if value is None else f"`{name}: {yaml_line(value)}`"
        cells = (f"`{name}`", _type(spec, schema), default, "" if unit == "1" else unit, text)
        meaning = spec.get("description") or _resolved(spec, schema).get("description", "")
        yield f"| {' | '.join(cells)} | {meaning.replace('|', '/')} |"
    yield ""


def _default(spec: JsonSchema) -> str:
    value = spec.get("default")
    if value is None:
        return "none"
    return "see below" if isinstance(value, dict) and value else f"`{json.dumps(value, ensure_ascii=False)}`"


def _resolved(spec: JsonSchema, schema: JsonSchema) -> JsonSchema:
    reference = spec.get("$ref")
    return schema["$defs"][reference.rpartition("/")[2]] if reference else spec


def _options(spec: JsonSchema) -> list[JsonSchema]:
    options: list[JsonSchema] = spec.get("anyOf") or spec.get("oneOf") or []
    return [one for one in options if one.get("type") != "null"]


def _type(spec: JsonSchema, schema: JsonSchema) -> str:
    """Describes the values of a key in a cell of a table."""
    if "$ref" in spec:
        place = sections(schema)[spec["$ref"].rpartition("/")[2]]
        return f"[mapping](#{place.replace('.', '')})"
    if "enum" in spec:
        names = [f"`{one}`" for one in spec["enum"]]
        return " ".join(names) if len(names) <= _MOST_NAMES else "a known name"
    options = _options(spec)
    if len(options) == 2 and options[1].get("type") == "array" and options[1]["items"] == options[0]:
        return f"{_type(options[0], schema)}, or a list"
    if options:
        return " or ".join(dict.fromkeys(_type(one, schema) for one in _options(spec)))
    kind = spec.get("type")
    if kind == "array":
        return f"list of {_type(spec['items'], schema)}"
    if kind in ("integer", "number"):
        return f"{kind}{_bounds(spec)}"
    return {"string": "text", "object": "mapping", "boolean": "true or false"}.get(str(kind), "text")


def _bounds(spec: JsonSchema) -> str:
    low = f"≥ {spec['minimum']:,g}" if spec.get("minimum") is not None else ""
    low = f"> {spec['exclusiveMinimum']:g}" if "exclusiveMinimum" in spec else low
    high = f"≤ {spec['maximum']:,g}" if "maximum" in spec and spec["maximum"] < 10**6 else ""
    high = f"< {spec['exclusiveMaximum']:g}" if "exclusiveMaximum" in spec else high
    return f" {', '.join(filter(None, (low, high)))}".rstrip()


def _first_example(spec: JsonSchema, schema: JsonSchema) -> Any:
    """Finds an example: one that the grammar gives, the default, or the least value that is allowed."""
    own = _resolved(spec, schema)
    if own.get("examples"):
        return own["examples"][0]
    default = spec.get("default")
    if default is not None and default not in ({}, []):
        return default if not isinstance(default, dict) else None
    if "enum" in own:
        return own["enum"][0]
    for one in _options(own):
        found = _first_example(one, schema)
        if found is not None:
            return found
    if own.get("type") == "array":
        inner = _first_example(own["items"], schema)
        return None if inner is None else [inner]
    if own.get("type") == "boolean":
        return True
    if own.get("type") in ("integer", "number"):
        return max(own.get("minimum", 1), 1)
    return None


_EXAMPLES: Final = {
    "ModelEntry": MODELS["mixtral_8x7b"],
    "DeviceEntry": DEVICES["h200_sxm"],
    "NetworkEntry": NETWORKS["hdr"],
}
"""Catalog entries whose figures are the examples of a section."""
