"""Pages of measured results have one form, commands that exist, and raw rows that parse."""

import csv
import re
import shlex
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
PAGES = sorted(RESULTS.glob("*.md"))
TABLES = sorted(RESULTS.glob("*.csv"))
SECTIONS = ["Claim", "Setup", "Result", "Limits", "Reproduce"]

UNITS = "_s _ms _h _w _j _k _mb _gb _kib _mib _gib _frac _ratio _per_s _per_h _nats"
"""Endings of the columns that hold numbers."""

WHOLE = (
    "analysis calibration_h200 engine_mfu fit_simulated llama_slice_h200x4 peak_agreement ranking sampler_cpu store "
    "telemetry_at_scale"
)
"""Pages that show every row of their table."""

QUOTED = {
    "docs/engines.md": {
        "activation_offload": ["0.88", "1.29"],
        "fp8": ["0.776", "0.773", "0.926"],
        "huggingface_parity": ["3.5e-4", "4.6e-4"],
        "megatron_layers": ["0.909 to 0.938", "0.921 to 0.957"],
    },
    "docs/prediction.md": {"fp8": ["0.776", "0.778", "0.926", "0.928"]},
    "docs/telemetry.md": {"peak_agreement": ["972 W", "851 W", "449 W"], "telemetry_energy": ["0.98", "0.20", "0.03"]},
    "docs/metrics/power.md": {"peak_agreement": ["972 W", "449 W"]},
    "docs/metrics/energy.md": {"nvml_check": ["2,939"]},
    "docs/tutorial.md": {"llama_slice_h200x4": ["2,781 W", "2,600 W"]},
    "docs/warm_workers.md": {"trial_overhead": ["0.64 s", "0.93 s", "1.52 s"]},
}
"""Figures of a page, by the results page they are taken from."""


def sections(page: Path) -> dict[str, str]:
    """The text of each section of a page by its heading, in order."""
    parts = re.split(r"^## (.+)\n", page.read_text(), flags=re.MULTILINE)
    return {heading: text.strip() for heading, text in zip(parts[1::2], parts[2::2], strict=True)}


def rows(table: Path) -> list[dict[str, str]]:
    with table.open(newline="") as lines:
        return list(csv.DictReader(lines, strict=True))


def is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def round_off(number: float) -> str:
    """A figure without what a change of units adds to its last digits."""
    return f"{number:.9g}"


def name_of(path: Path) -> str:
    return path.name


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_a_page_has_exactly_the_sections_a_date_versions_and_its_own_table(page: Path) -> None:
    assert page.read_text().startswith("# ")
    assert list(sections(page)) == SECTIONS
    assert all(sections(page).values())
    setup = sections(page)["Setup"]
    assert re.search(r"\b20\d\d-\d\d-\d\d\b", setup)
    assert re.search(r"\bPython\b|\bdriver \d|\bRay \d", setup)
    named = set(re.findall(r"\]\(([^)]+\.csv)\)", page.read_text()))
    own = page.with_suffix(".csv")
    assert named == ({own.name} if own.exists() else set())


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_the_commands_exist_with_their_options(page: Path) -> None:
    """Lines after `git checkout` are of an earlier commit: what a script measured that is gone is reproduced there."""
    (block,) = re.findall(r"^```\n(.*?)^```", sections(page)["Reproduce"], re.MULTILINE | re.DOTALL)
    today, _, earlier = block.partition("git checkout ")
    assert re.match(r"[0-9a-f]{7,40}\n(?:.*python benchmarks/\w+\.py.*\n)+$", earlier) or not earlier, earlier
    for command in today.splitlines():
        words = [word for word in shlex.split(command) if not re.fullmatch(r"[A-Z]\w*=\S*", word)]
        if words[0] == "wattune":  # test_docs.py parses those
            continue
        assert words[0] == "python" and words[1].startswith(("benchmarks/", "tests/fuzz/")), command
        source = "".join(path.read_text() for path in (ROOT / words[1], ROOT / "benchmarks" / "harness.py"))
        assert [word for word in words[2:] if word.startswith("--") and f'"{word}"' not in source] == [], command


@pytest.mark.parametrize("table", TABLES, ids=name_of)
def test_a_table_is_tidy_and_has_a_unit_on_every_number(table: Path) -> None:
    assert table.with_suffix(".md").exists()
    found = rows(table)
    columns = list(found[0])
    assert len(columns) == len(set(columns)) and all(re.fullmatch(r"[a-z][a-z0-9_]*", column) for column in columns)
    assert all(None not in row and None not in row.values() for row in found)  # as many cells as the heading
    numeric = [column for column in columns if all(is_number(row[column]) for row in found if row[column])]
    assert numeric
    assert [name for name in numeric if not name.endswith(tuple(UNITS.split())) and not name.startswith("num_")] == []
    mixed = [column for column in columns if column.endswith(tuple(UNITS.split())) and column not in numeric]
    assert mixed == []


@pytest.mark.parametrize("name", WHOLE.split())
def test_every_number_of_a_table_is_on_the_page_that_shows_it_whole(name: str) -> None:
    text = (RESULTS / f"{name}.md").read_text()
    shown = {round_off(float(number.replace(",", ""))) for number in re.findall(r"(?<![\w.])\d[\d,]*(?:\.\d+)?", text)}
    cells = {cell for row in rows(RESULTS / f"{name}.csv") for cell in row.values() if is_number(cell)}
    in_units = {cell: {round_off(abs(float(cell)) * factor) for factor in (1, 100, 1000)} for cell in cells}
    assert [cell for cell, values in in_units.items() if not values & shown] == []


def test_a_wrong_table_would_be_noticed(tmp_path: Path) -> None:
    assert is_number("1e-05") and is_number("-0.5") and not is_number("12 W")
    (tmp_path / "a.csv").write_text("a_s,b\n1,2\n3\n")
    assert None in rows(tmp_path / "a.csv")[1].values()


def test_rows_on_the_page_of_engine_cases_are_those_of_its_table() -> None:
    text, table = (RESULTS / "engine_cases.md").read_text(), rows(RESULTS / "engine_cases.csv")
    groups = {group: {row["case"] for row in table if row["group"] == group} for group in ("cases", "speed", "overlap")}
    assert {group: len(cases) for group, cases in groups.items()} == {"cases": 62, "speed": 11, "overlap": 23}
    shown = re.findall(
        r"^\| (\w+/\S+) \| ([\d.]+) \(([\d.]+) to ([\d.]+)\) \| ([\d.]+) % \| ([\d.]+)", text, re.MULTILINE
    )
    measured = {
        row["case"]: [1000 * float(row[f"step_time_{name}_s"]) for name in ("median", "least", "most")]
        + [100 * float(row["mfu_frac"]), float(row["memory_peak_gib"])]
        for row in table
    }
    assert len(shown) == 23
    for case, *figures in shown:
        assert [float(figure) for figure in figures] == pytest.approx(measured[case]), case


def test_the_largest_deviations_are_those_of_the_table() -> None:
    text, table = (RESULTS / "torch_engine_on_gpus.md").read_text(), rows(RESULTS / "torch_engine_on_gpus.csv")
    largest = {
        dtype: max(
            float(row["largest_deviation_frac"]) for row in table if ("bf16" in row["case"]) == (dtype == "bf16")
        )
        for dtype in ("fp32", "bf16")
    }
    claim = re.search(r"All (\d+) .* is (\S+) in fp32 .*and (\S+) in bf16", " ".join(text.split()))
    assert claim is not None
    assert int(claim[1]) == len(table)
    assert float(claim[2]) == pytest.approx(largest["fp32"], rel=0.03)
    assert float(claim[3]) == pytest.approx(largest["bf16"], rel=0.03)
    groups = [int(number) for number in re.findall(r"^\| [a-z].* \| (\d+) \| \d", text, re.MULTILINE)]
    assert sum(groups) == len(table)


@pytest.mark.parametrize("page", QUOTED)
def test_quoted_figures_stand_on_the_page_they_are_from(page: str) -> None:
    text = (ROOT / page).read_text()
    for result, figures in QUOTED[page].items():
        source = (RESULTS / f"{result}.md").read_text()
        assert f"{result}.md" in text, result
        assert [figure for figure in figures if figure not in text or figure not in source] == [], result
