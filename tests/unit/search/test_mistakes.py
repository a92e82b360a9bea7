"""Fifty mistakes that people make in a search space, each answered in one round: every problem in one run, code 2."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from wattune.search.reference import json_schema
from wattune.search.space import parse_space

Wattune = Callable[..., tuple[int, str, str]]
FOLDER = Path(__file__).parents[2] / "fixtures" / "mistakes"
MISTAKES = sorted(FOLDER.glob("*.yaml"))

SOUND: dict[str, Any] = {
    "study": "sound",
    "model": {"name": "llama3_8b", "num_layers": 4},
    "cluster": {"device": "h200_sxm", "devices_per_node": 4},
    "engine": "torch",
    "workload": {"seq_len": 4096, "global_batch_size": 16},
    "space": {"tp": [1, 2]},
    "objective": "maximize tokens_per_s",
}
"""Sections that are right: they stand in for those that wattune names."""


def expected(path: Path) -> list[str]:
    return re.findall(r"^# expect: (.+)$", path.read_text(), re.MULTILINE)


def section(problem: str) -> str:
    """The section of the file that a problem is in."""
    return re.split(r"[.\[:]", problem, maxsplit=1)[0]


def test_there_are_fifty_and_no_two_are_answered_alike() -> None:
    answers = [tuple(expected(path)) for path in MISTAKES]
    assert len(MISTAKES) == 50 and all(answers) and len(set(answers)) == 50


@pytest.mark.parametrize("path", MISTAKES, ids=lambda path: path.stem)
def test_no_problem_hides_behind_another(path: Path) -> None:
    """With the sections that were named put right, the rest of the file is right: there is no second round."""
    document = yaml.safe_load(path.read_text())
    for name in {section(line) for line in expected(path)}:
        document.pop(name, None)
        if name in SOUND:
            document[name] = SOUND[name]
    parse_space(document)


@pytest.mark.parametrize("path", MISTAKES, ids=lambda path: path.stem)
def test_every_problem_of_a_mistake_is_shown_in_one_run_with_code_2(path: Path, wattune: Wattune) -> None:
    code, out, err = wattune("plan", path)
    assert (code, out) == (2, "")
    head, *lines = err.removeprefix(f"error: {path}: ").splitlines()
    assert not lines or head == f"{len(lines)} problems"
    assert [line.strip().replace(f"{path.parent}/", "") for line in lines or [head]] == expected(path)


@pytest.fixture(scope="module")
def wrong_in_schema() -> Callable[[Any], set[str]]:
    validator = jsonschema.Draft7Validator(json_schema())

    def sections(document: Any) -> set[str]:
        errors = list(validator.iter_errors(document))
        named = {str(error.path[0]) for error in errors if error.path}
        for error in errors:
            if not error.path:  # an unknown or a missing key of the file itself
                named |= set(re.findall(r"'(\w+)'", error.message.partition(" unexpected")[0].partition(" is a")[0]))
        return named

    return sections


@pytest.mark.parametrize("path", MISTAKES, ids=lambda path: path.stem)
def test_the_schema_finds_fault_only_where_wattune_does(path: Path, wrong_in_schema: Callable[[Any], set[str]]) -> None:
    document = json.loads(json.dumps(yaml.safe_load(path.read_text()), default=str))
    assert wrong_in_schema(document) <= {section(line) for line in expected(path)}


def test_an_editor_sees_every_mistake_of_a_single_value(wrong_in_schema: Callable[[Any], set[str]]) -> None:
    """The schema says what one value cannot be. It does not say what values cannot be together."""
    seen = {path.stem[3:] for path in MISTAKES if wrong_in_schema(yaml.safe_load(path.read_text()))}
    assert {
        "watts_with_a_unit",
        "equals",
        "metric_only",
        "typos_everywhere",
        "hub_name",
        "fields_of_transformers",
        "gpu_type",
        "gpus_per_node",
        "strings_for_numbers",
        "sizes_with_k",
        "yaml_booleans",
        "scalar_axis",
        "workload_in_space",
        "missing_sections",
        "everything_at_once",
    } <= seen
    assert {"kilowatts", "contradiction", "heads_that_do_not_divide"} & seen == {"heads_that_do_not_divide"}
