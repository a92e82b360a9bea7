"""The race of finalists as a user runs it: it goes on where it was stopped, it ends, and then a call runs nothing."""

import json
import re
from pathlib import Path

import pytest
from own_study import own_space

pytestmark = [pytest.mark.ray, pytest.mark.timeout(900), pytest.mark.usefixtures("on_standing_cluster")]


@pytest.mark.slow
def test_finalists_are_repeated_until_the_share_is_used_and_not_again(
    wattune, results, storage: Path, tmp_path: Path
) -> None:
    # The simulated limit is the same in every run, so no trial is ever told apart and the race takes all it may.
    space = own_space(
        tmp_path,
        "raced",
        flags={"step_s": [0.02, 0.03], "algorithm": ["Ring"]},
        objective="maximize device_power_limit_w",
        search={"strategy": "grid", "finalists": {"until": 0.95, "max_share": 1.0}},
    )

    def steps(said: str) -> list[tuple[int, int, str]]:
        found = re.findall(r"^racing: P\(best\) .* (\d+) of at most (\d+) repeats(.*)$", said, re.MULTILINE)
        return [(int(count), int(most), ending) for count, most, ending in found]

    first = wattune("run", space, "--max-trials", "3")
    assert steps(first.stdout) == [(0, 2, ""), (1, 2, "")], first.stdout + first.stderr
    # The live view counts from the announcement to the stored result, in whole seconds, on a clock of its own.
    told_s = [int(one) for one in re.findall(r"^\[\d+/\d+\] +(\d+) s .* took ", first.stdout, re.MULTILINE)]
    time = json.loads(wattune("rank", storage / "raced", "--time", "--json").stdout)["time"]
    assert len(time["runs"]) == 3 and abs(time["total_s"] - told_s[-1]) <= 0.1 * told_s[-1] + 3
    assert time["sum"]["other_time_s"] < 0.01 * time["total_s"]
    second = wattune("run", space)
    assert second.returncode == 0, second.stderr
    assert steps(second.stdout) == [(1, 2, ""), (2, 2, "; its share of repeats is used")]

    found = results(storage / "raced")
    raced = sorted(
        int(name.split("-")[1]) for name, one in found.items() if one["numbers"].get("race_until_probability") == 0.95
    )
    assert len(found) == 4 and raced == [1, 1]
    assert all(one["status"] == "completed" for one in found.values())
    assert 'id="chart-race-of-finalists"' in (storage / "raced" / "report.html").read_text()

    before = {path: path.stat().st_mtime_ns for path in (storage / "raced").glob("trials/*/run.json")}
    third = wattune("run", space)
    assert third.returncode == 0, third.stderr
    assert steps(third.stdout) == [] and "0 trial(s) to run" in third.stdout
    assert {path: path.stat().st_mtime_ns for path in (storage / "raced").glob("trials/*/run.json")} == before
