"""docs/data_dictionary.md is what the code writes, and knows every file and column of real study folders."""

import json
import re
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from small_study import make_study, ranking_of

import wattune
from wattune import api
from wattune.metrics import METRICS
from wattune.report.write import write_report
from wattune.view.files import ranking_table

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "data_dictionary.md"


def sections() -> dict[str, list[list[str]]]:
    """The cells of the tables below each heading, without the tables' own headings."""
    found: dict[str, list[list[str]]] = {}
    for part in re.split(r"^##+ ", PAGE.read_text(), flags=re.MULTILINE)[1:]:
        title, _, below = part.partition("\n")
        rows = [line for line in below.splitlines() if line.startswith("|")]
        found[title] = [[cell.strip().strip("`") for cell in line.strip("|").split(" | ")] for line in rows[2:]]
    return found


SECTIONS = sections()
METRIC_UNITS = dict(
    re.findall(
        r"^\| `(\w+)` \| (\S+) \| \S",
        "".join((ROOT / "docs" / link).read_text() for link in re.findall(r"\((metrics/\w+\.md)\)", PAGE.read_text())),
        re.MULTILINE,
    )
)
"""Units by metric, as the pages of the groups have them."""


def pattern(name: str) -> re.Pattern[str]:
    """A file's name on the page as an expression: `<n>` is any name, `...` anything below."""
    text = re.escape(name).replace(r"\.\.\.", ".+")
    return re.compile(re.sub(r"<[^>]+>", "[^/]+", text))


def files_of(study: Path) -> Iterator[tuple[str, Path]]:
    for path in study.rglob("*"):
        name = path.relative_to(study).as_posix()
        if path.is_file() and not any(part.startswith(".") for part in name.split("/")):
            yield name, path


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A study as this version leaves it."""
    study = make_study(tmp_path_factory.mktemp("storage"))
    study.write_ranking(ranking_table(ranking_of(study)))
    write_report(study, ranking_of(study))
    return study.path


def test_the_page_is_what_the_script_writes() -> None:
    code = "import sys; sys.path.insert(0, 'docs/_site'); import dictionary; sys.stdout.write(dictionary.page())"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == PAGE.read_text(), "run `python docs/_site/dictionary.py`"


def test_every_file_of_a_study_is_on_the_page_once(made: Path) -> None:
    known = [row[0] for row in SECTIONS["Files of a study"]]
    for name, _ in files_of(made):
        assert len([one for one in known if pattern(one).fullmatch(name)]) == 1, name


def test_every_column_is_on_the_page_with_its_type_and_unit(made: Path) -> None:
    seen = set()
    for _, path in files_of(made):
        if path.suffix != ".parquet":
            continue
        listed = {row[0]: row for row in [*SECTIONS[f"{path.stem}.parquet"], *SECTIONS["Axes of a plan"]]}
        for field in pq.read_schema(path):
            unit = (field.metadata or {}).get(b"unit", b"").decode() or "–"
            if path.stem == "ranking" and field.name in METRICS:
                assert METRIC_UNITS[field.name] == unit
            elif path.stem == "ranking" and (bound := re.fullmatch(r"(.+ <= \S+): (\w+)", field.name)):
                alike = f"node_device_power_peak_1s_w <= 2600: {bound[2]}"
                assert alike in listed, field.name
            elif not field.name.endswith("_error"):
                assert field.name in listed, f"{path.stem}: {field.name}"
                # The recordings were taken before the files had units.
                assert unit == "–" or listed[field.name][2] == unit, f"{path.stem}: {field.name}"
        seen.add(path.stem)
    assert {"candidates", "ranking", "spans", "ring", "fast", "slow", "counter"} <= seen


def test_the_columns_of_a_real_run_have_the_units_of_the_page(tmp_path: Path) -> None:
    with tarfile.open(ROOT / "tests" / "golden" / "demo" / "study.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    checked = 0
    for name, path in files_of(tmp_path / "cpu_smoke"):
        if path.suffix == ".parquet" and "/telemetry/" in name:
            listed = {row[0]: row[2] for row in SECTIONS[f"{path.stem}.parquet"]}
            for field in pq.read_schema(path):
                if unit := (field.metadata or {}).get(b"unit", b"").decode():
                    assert listed[field.name] == unit, f"{name}: {field.name}"
                    checked += 1
    assert checked > 20


def test_every_fact_of_every_json_file_is_on_the_page(made: Path) -> None:
    seen = set()
    for name, path in files_of(made):
        if path.suffix == ".json":
            known = {row[0] for row in SECTIONS[path.name]}
            assert set(json.loads(path.read_text())) - {"format"} <= known, name
            seen.add(path.name)
    assert {"spec.json", "run.json", "manifest.json"} <= seen


def test_what_is_exported_is_on_the_page(made: Path) -> None:
    own = {row[0] for title in ("One row a repeat", "Axes of a plan") for row in SECTIONS[title]} | set(METRIC_UNITS)
    exported = json.loads(api.export(wattune.load_study(made), "json"))
    assert {one["name"] for one in exported["columns"]} == own
    assert set(METRIC_UNITS) == set(METRICS)


def test_every_row_says_what_it_is() -> None:
    for title, rows in SECTIONS.items():
        for row in rows:
            assert all(row), f"{title}: {row}"
