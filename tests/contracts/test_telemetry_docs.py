"""docs/telemetry.md says of columns, units, rates and bounds what the code does."""

import re
from pathlib import Path

import pytest

from wattune.analysis.quality import THRESHOLDS
from wattune.schema import TELEMETRY
from wattune.telemetry.files.segments import CONSOLIDATE_S, SEGMENT_S, SYNC_S
from wattune.telemetry.sampler.lease import LEASE_S
from wattune.telemetry.sampler.loop import DEFAULT_RATES_HZ, HAND_OVER_S, SPREAD_TIERS

TEXT = (Path(__file__).parents[2] / "docs" / "telemetry.md").read_text()
KEYS = ["node", "device", "mono_ns", "wall_ns"]


def rows_after(heading: str) -> list[list[str]]:
    """The cells of the first table below a heading, its own heading left out."""
    below = TEXT.split(f"\n{heading}\n", 1)[1]
    table = re.search(r"(?:^\|.*\n)+", below, re.MULTILINE)
    assert table is not None, heading
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table[0].splitlines()[2:]]


@pytest.mark.parametrize("tier", TELEMETRY)
def test_columns_and_units_are_those_of_the_schema(tier: str) -> None:
    fields = [field for field in TELEMETRY[tier] if field.name not in KEYS]
    documented = {cells[0].strip("`"): cells for cells in rows_after(f"### {tier}")}
    assert list(documented) == [field.name for field in fields]
    for field in fields:
        _, unit, source, window = documented[field.name]
        kind = field.metadata[b"kind"].decode()
        assert unit == field.metadata.get(b"unit", kind.encode()).decode()
        assert source and window.startswith("cumulative") == (kind == "cumulative"), field.name


def test_tiers_and_rates_are_the_samplers() -> None:
    found = {cells[0].strip("`"): cells for cells in rows_after("## Tiers")}
    assert {tier: cells[1] for tier, cells in found.items()} == {
        tier: f"{rate_hz:g} Hz" for tier, rate_hz in DEFAULT_RATES_HZ.items()
    }
    assert {tier for tier, cells in found.items() if cells[3].startswith("one device")} == SPREAD_TIERS


def test_bounds_are_those_that_judge() -> None:
    expected = []
    for threshold in THRESHOLDS:
        sign = "≥" if threshold.at_least else "≤"
        indicative = "–" if threshold.indicative is None else f"{sign} {threshold.indicative:g}"
        bounds = [f"{sign} {threshold.publishable:g}", indicative]
        expected.append([f"`{threshold.code}`", *bounds, threshold.scope])
    assert [[code, *rest] for code, _, *rest in rows_after("## Quality")] == expected


def test_every_reason_is_explained_in_order() -> None:
    explained = re.findall(r"^- `(\w+)`: \S", TEXT.split("What each means, and what to do:")[1], re.MULTILINE)
    assert explained == [threshold.code for threshold in THRESHOLDS]


def test_what_a_kill_and_a_power_cut_cost_is_what_the_code_does() -> None:
    assert f"batches of {CONSOLIDATE_S:g} s, compressed, a new file every {SEGMENT_S / 60:g} minutes" in TEXT
    assert f"batches of {HAND_OVER_S:g} s" in TEXT and HAND_OVER_S < 1
    assert f"at most the last {SYNC_S:g} s" in TEXT
    assert f"lease that its owner renews: {LEASE_S:g} s without" in TEXT


def test_links_lead_somewhere() -> None:
    folder = Path(__file__).parents[2] / "docs"
    assert all((folder / target).exists() for target in re.findall(r"\]\(([^)#]+)\)", TEXT))
