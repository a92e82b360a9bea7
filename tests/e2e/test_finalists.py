"""The race of finalists as a user runs it: the leaders are repeated, it ends, and a second call runs nothing."""

import json
import re
from pathlib import Path

import pytest

pytestmark = [pytest.mark.ray, pytest.mark.timeout(900)]


def test_the_leaders_are_repeated_until_the_race_ends_and_not_again(
    wattune, write_space, results, storage: Path
) -> None:
    # Micro-batches of 2 and 4 are near each other on a CPU; one of 1 is far behind or as near.
    space = write_space(
        "raced",
        space={"micro_batch_size": [1, 2], "recompute": ["none", "full"]},
        measure={"warmup_steps": 2, "min_steps": 4, "min_seconds": 3, "reference_every": 0},
        search={"finalists": {"until": 0.999, "max_share": 0.75}},
    )
    done = wattune("run", space)
    assert done.returncode == 0, done.stderr
    found = results(storage / "raced")
    repeats = {name: one for name, one in found.items() if one["tags"].get("race")}
    assert all(name.split("-")[1] != "0" and one["tags"]["race"] == "0.999" for name, one in repeats.items())
    assert len(found) - len(repeats) == 4 and len(repeats) <= 3

    steps = re.findall(r"^racing: P\(best\) .*?(\d+) of at most (\d+) repeats(.*)$", done.stdout, re.MULTILINE)
    assert [(int(count), int(most)) for count, most, _ in steps] == [(count, 3) for count in range(len(repeats) + 1)]
    assert [ending for *_, ending in steps[:-1]] == [""] * len(repeats)
    reasons = {"; the best is told apart"} | ({"; its share of repeats is used"} if len(repeats) == 3 else set())
    assert steps[-1][2] in reasons
    ranking = json.loads(wattune("rank", "raced", "--json").stdout)
    counts = {row["trial_id"]: len(row["repeats"]) for row in ranking["feasible"]}
    first_two = list(counts.values())[:2]
    assert sum(counts.values()) == len(found) and sum(first_two) - 2 >= len(repeats) - 1, "the leaders, not the last"
    drawn = 'id="chart-race-of-finalists"' in (storage / "raced" / "report.html").read_text()
    assert drawn is bool(repeats)

    before = {path: path.stat().st_mtime_ns for path in (storage / "raced").glob("trials/*/result.json")}
    again = wattune("run", space)
    assert again.returncode == 0, again.stderr
    assert {path: path.stat().st_mtime_ns for path in (storage / "raced").glob("trials/*/result.json")} == before
