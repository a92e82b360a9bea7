"""Shipped spaces: all of the repository's, with the schema's place where they are written."""

from pathlib import Path

import pytest
import yaml

from wattune.cli.author import example_names, example_text
from wattune.errors import PlanError

SPACES = Path(__file__).parents[3] / "search_spaces"


def test_the_package_carries_every_space_of_the_repository() -> None:
    assert example_names() == sorted(str(path.relative_to(SPACES).with_suffix("")) for path in SPACES.rglob("*.yaml"))


@pytest.mark.parametrize("name", example_names())
def test_an_example_is_the_repositorys_with_another_first_line(name: str) -> None:
    text = example_text(name, "# yaml-language-server: $schema=here.json")
    own = (SPACES / f"{name}.yaml").read_text()
    assert text.splitlines()[0].endswith("=here.json") and text.count("yaml-language-server") == 1
    assert text.splitlines()[1:] == own.splitlines()[1:]
    assert yaml.safe_load(text)["study"] == name.replace("/", "_")


@pytest.mark.parametrize("name", ["cpu_smok", "../pyproject", ""])
def test_an_unknown_example_is_named_with_the_closest(name: str) -> None:
    with pytest.raises(PlanError, match=r"unknown example"):
        example_text(name, "")
