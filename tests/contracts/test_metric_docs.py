"""docs/metrics says of names, groups and units what the code does, and docs/judging_a_recording.md works as written."""

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from wattune.analysis.detail import Detail
from wattune.analysis.metrics.outlier import BROKEN_FRAC, VARIES_FRAC
from wattune.analysis.metrics.phases import PARTS
from wattune.analysis.metrics.saturation import COUNTER_FRAC, OF_MEASURED_FRAC, OF_RATED_FRAC
from wattune.analysis.metrics.waterfall import UNDIVIDED
from wattune.analysis.quality import THRESHOLDS
from wattune.inspection import inspect
from wattune.metrics import METRICS
from wattune.objective import RISK, SENSOR_ACCURACY_FRAC
from wattune.ranking.dice import NUM_DRAWS
from wattune.ranking.scatter import NODE_SET_SPREAD
from wattune.ranking.spreads import CLEAR_FRAC, PRIOR, PRIORS
from wattune.run import INDICATIVE

DOCS = Path(__file__).parents[2] / "docs"
GROUPS = list(dict.fromkeys(metric.group for metric in METRICS.values()))


def page(name: str) -> str:
    return (DOCS / "metrics" / f"{name}.md").read_text()


@pytest.mark.parametrize("group", GROUPS)
def test_every_metric_is_on_its_groups_page_with_its_unit(group: str) -> None:
    rows = re.findall(r"^\| `(\w+)` \| (\S+) \| \S", page(group), re.MULTILINE)
    assert dict(rows) == {metric.name: metric.unit for metric in METRICS.values() if metric.group == group}
    assert len(rows) == len(dict(rows))


def test_every_group_has_a_page_and_the_index_lists_them_in_order() -> None:
    assert {path.stem for path in (DOCS / "metrics").glob("*.md")} == {*GROUPS, "README"}
    assert re.findall(r"^\| \[(\w+)\]\(\1\.md\)", page("README"), re.MULTILINE) == GROUPS


def test_parts_of_the_detail_are_those_of_the_code() -> None:
    named = re.findall(r"^\| `(\w+)` \|", page("README"), re.MULTILINE)
    assert named == [name for name in Detail.__dataclass_fields__ if name != "power_w"]  # drawn, and not in the JSON
    assert all(f"`{part}`" in page("README") for part in PARTS)
    assert f"`{UNDIVIDED}`" in page("step_breakdown")


def test_bounds_on_the_pages_are_those_that_judge() -> None:
    assert f"may differ by {VARIES_FRAC:.0%}".replace("%", " %") in page("measurement_quality")
    assert f"beyond {BROKEN_FRAC:.0%} invalid".replace("%", " %") in page("measurement_quality")
    assert f"more than {CLEAR_FRAC * 100:g} %" in page("measurement_quality")
    assert f"a prior of {PRIOR.spread:.0%}".replace("%", " %") in page("measurement_quality")
    assert f"worth {PRIOR.degrees_of_freedom:g} degrees of freedom" in page("measurement_quality")
    assert f"{PRIOR.drift:.0%} for the drift".replace("%", " %") in page("measurement_quality")
    assert {f"{prior.drift:.0%}" for prior in PRIORS.values()} == {"1%"} and "(1 % where" in page("measurement_quality")
    others = {f"{100 * prior.elsewhere:g} % ({group})" for group, prior in PRIORS.items()}
    assert all(other in page("measurement_quality") for other in others)
    assert f"{NODE_SET_SPREAD:.0%} for a set of nodes".replace("%", " %") in page("measurement_quality")
    assert f"±{SENSOR_ACCURACY_FRAC:.0%}, uniform".replace("%", " %") in page("measurement_quality")
    assert f"(--risk` ({RISK:g} unless given)".lstrip("(") in page("measurement_quality")
    assert f"{NUM_DRAWS:,} joint draws" in page("measurement_quality")
    thresholds = [float(number) for number in re.findall(r"^\| .* \| (0\.\d+)", page("utilization"), re.MULTILINE)]
    assert thresholds == [OF_MEASURED_FRAC, OF_RATED_FRAC, COUNTER_FRAC]


def test_reasons_named_in_the_how_to_exist() -> None:
    text = (DOCS / "judging_a_recording.md").read_text().split("## 2.")[1].split("## 3.")[0]
    named = {code for row in re.findall(r"^\| (`.*`) \|", text, re.MULTILINE) for code in re.findall(r"`(\w+)`", row)}
    assert named <= {threshold.code for threshold in THRESHOLDS} | {
        "no_window",
        "schema_columns",
        "impossible_value",
        "times_not_nanoseconds",
        "clocks_disagree",
    }


def test_the_how_tos_script_makes_a_folder_that_is_judged(tmp_path: Path) -> None:
    (script,) = re.findall(r"```python\n(.*?)```", (DOCS / "judging_a_recording.md").read_text(), re.DOTALL)
    time_s = np.arange(0.0, 30.0, 0.05)
    rows = [
        f"{1.8e9 + t:.3f},{gpu},{500 + 100 * gpu + 50 * np.sin(t + gpu):.2f},{55 + gpu}"
        for t in time_s
        for gpu in (0, 1)
    ]
    (tmp_path / "power.csv").write_text("time,gpu,power,temp\n" + "\n".join(rows) + "\n")
    subprocess.run([sys.executable, "-c", script], cwd=tmp_path, check=True, timeout=60)
    found = inspect(tmp_path / "elsewhere")
    assert found.summary.quality == INDICATIVE
    assert found.summary.quality_reasons == ("energy_unchecked", "short_for_thermal")
    metrics = found.summary.metrics
    assert metrics["device_power_mean_w"] == pytest.approx(550, rel=0.02)
    assert metrics["node_device_power_peak_1s_w"] == pytest.approx(1100 + 100 * np.cos(0.5), rel=0.01)
    assert metrics["device_power_limit_w"] == 700.0 and metrics["excursion_count"] == 0
    assert "device_power_peak_20ms_w" not in metrics and "step_time_s" not in metrics
