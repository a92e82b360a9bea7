"""JSON Schema and reference page: both are what the grammar says, shipped spaces pass, and every key is described."""

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from wattune.metrics import METRICS
from wattune.plans.axes import AXES
from wattune.search.grammar import SpaceFile
from wattune.search.reference import SCHEMA_NAME, json_schema, reference_page, schema_line, schema_text, sections
from wattune.search.space import parse_space

ROOT = Path(__file__).parents[3]
SPACES = sorted((ROOT / "search_spaces").glob("*.yaml"))
KEPT = ROOT / "platform" / "wattune" / "search" / SCHEMA_NAME
AGAIN = "make it again: make reference"


def test_the_schema_of_this_repository_is_the_grammars() -> None:
    assert KEPT.read_text() == schema_text(names_metrics=False), AGAIN


def test_the_page_is_the_grammars() -> None:
    assert (ROOT / "docs" / "space_reference.md").read_text() == reference_page(), AGAIN


@pytest.mark.parametrize("path", SPACES, ids=lambda path: path.stem)
def test_shipped_spaces_pass_the_schema_and_name_it(path: Path) -> None:
    first = path.read_text().splitlines()[0]
    relative = first.removeprefix(schema_line(""))
    assert (path.parent / relative).resolve() == KEPT
    for text in (KEPT.read_text(), schema_text()):
        jsonschema.validate(yaml.safe_load(path.read_text()), json.loads(text))


def test_what_wattune_writes_passes_the_schema() -> None:
    for path in SPACES:
        document = dict(parse_space(yaml.safe_load(path.read_text())).document)
        jsonschema.validate(json.loads(json.dumps(document)), json_schema())


def test_every_key_and_section_is_described_once() -> None:
    schema, page = json_schema(), reference_page()
    assert set(sections(schema)) == set(schema["$defs"])
    for own in (schema, *schema["$defs"].values()):
        for name, spec in own["properties"].items():
            described = spec.get("description") or schema["$defs"].get(spec.get("$ref", "").rpartition("/")[2])
            assert described, name
            assert f"| `{name}` |" in page
    assert all(f"| `{name}` |" in page for name in AXES)


def test_examples_of_the_schema_are_values_that_it_takes() -> None:
    schema = json_schema()
    jsonschema.Draft202012Validator.check_schema(schema)  # once: its parts are sound with it

    def check(spec: dict[str, Any]) -> None:
        for example in spec.get("examples", ()):
            within = {} if "properties" in spec else {"properties": schema["properties"]}  # what plans refer to
            jsonschema.Draft202012Validator({**within, **spec, "$defs": schema["$defs"]}).validate(example)
        for one in (*spec.get("anyOf", ()), *spec.get("properties", {}).values(), *schema_parts(spec)):
            check(one)

    def schema_parts(spec: dict[str, Any]) -> list[dict[str, Any]]:
        return [spec["items"]] if isinstance(spec.get("items"), dict) else []

    for own in (schema, *schema["$defs"].values()):
        check(own)


def test_completion_knows_names_of_metrics_engines_and_devices() -> None:
    schema = json_schema()
    objectives = schema["properties"]["objective"]["anyOf"][0]["enum"]
    assert {one.split()[1] for one in objectives} == {name for name, one in METRICS.items() if one.better != "none"}
    assert "h200_sxm" in schema["$defs"]["ClusterEntry"]["properties"]["device"]["oneOf"][0]["enum"]
    assert set(schema["properties"]["space"]["properties"]) == set(AXES)
    for plan, taken in (
        ({"tp": 8, "recompute": "full", "flags": {"a": 1}}, True),
        ({"tp": 0}, False),
        ({"x": 1}, False),
    ):
        whole = yaml.safe_load(SPACES[0].read_text()) | {"plans": [plan]}
        assert jsonschema.Draft202012Validator(schema).is_valid(whole) is taken, plan
    assert set(schema["properties"]) == set(SpaceFile.model_fields)
