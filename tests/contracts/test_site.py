"""The documentation's site: it builds strictly, from every page, and loads nothing from elsewhere."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LOADED = re.compile(r'<(?:script|link|img|iframe)[^>]*(?:src|href)="?(?:https?:)?//', re.IGNORECASE)


pytestmark = pytest.mark.slow  # `make docs` builds it anyway


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", folder],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=110,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_every_page_is_there_and_every_link_leads_somewhere(site: Path) -> None:
    pages = {path.relative_to(site).as_posix(): path.read_text() for path in site.rglob("*.html")}
    written = [path.relative_to(ROOT / "docs").with_suffix(".html") for path in (ROOT / "docs").rglob("*.md")]
    expected = {path.as_posix().replace("README", "index") for path in written}
    assert expected | {"index.html", "notebooks/first_study.html", "results/store.html"} <= pages.keys()
    for name, text in pages.items():
        assert not LOADED.search(text), name
        if name == "404.html":  # its links are from the site's root, wherever that is
            continue
        for target in re.findall(r'(?:href|src)="?([^"\s>#?]+)', text):
            if not re.match(r"[a-z]+:", target):
                assert (site / name).parent.joinpath(target).exists(), f"{name}: {target}"


def test_the_reference_has_every_public_function_with_its_types(site: Path) -> None:
    text = re.sub(r"<[^>]+>", "", (site / "api.html").read_text())
    for name in ("plan", "run_study", "record", "load_study", "rank", "compare"):
        assert f"wattune.{name}" in text and f"{name}(" in text
    assert re.search(r"metrics\(\)\s*-&gt;\s*(pa\.)?Table", text)
    assert "least_quality: str" in text


def test_a_link_that_leaves_the_site_is_the_file_s_path(site: Path) -> None:
    text = (site / "cluster.html").read_text()
    assert "ray_cluster.yaml</code>" in text and 'href="../ray_cluster.yaml' not in text
    assert 'href="results/trial_overhead.html"' in (site / "guarantees.html").read_text()
