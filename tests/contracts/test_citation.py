"""CITATION.cff says of the software what the package says, and has what its format asks for."""

import re
import tomllib
from pathlib import Path

import yaml

from wattune.version import __version__

ROOT = Path(__file__).parents[2]
CITATION = yaml.safe_load((ROOT / "CITATION.cff").read_text())
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_it_is_this_version_under_this_license_by_these_authors() -> None:
    assert (CITATION["version"], CITATION["license"]) == (__version__, PROJECT["license"])
    assert CITATION["authors"] == PROJECT["authors"]
    assert set(CITATION["keywords"]) <= set(PROJECT["keywords"])


def test_it_has_every_key_that_the_format_requires() -> None:
    """Citation File Format 1.2.0: authors, cff-version, message, title; of a reference: authors, title, type."""
    assert {"authors", "cff-version", "message", "title", "type"} <= set(CITATION)
    assert CITATION["cff-version"] == "1.2.0" and CITATION["type"] == "software"
    (paper,) = CITATION["references"]
    assert {"authors", "title", "type"} <= set(paper) and paper["type"] == "conference-paper"
    assert all({"family-names", "given-names"} <= set(author) for author in paper["authors"])
    assert re.fullmatch(r"10\.\d{4,9}/\S+", paper["doi"])
