"""The Grafana dashboard: every expression names what is exposed, and is right PromQL."""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from exposed_snapshot import NOW_NS, snapshot
from ray.util.metrics import Counter

from wattune.orchestrate.study_metrics import STUDY_METRICS
from wattune.recording.serving.families import families

DEPLOY = Path(__file__).parents[4] / "deploy" / "grafana"
NAME = r"(?:ray_)?wattune_\w+"
DASHBOARD = json.loads((DEPLOY / "dashboards" / "wattune.json").read_text())


def targets() -> Iterator[tuple[str, str, str]]:
    """Yields each target's panel, expression and legend."""
    for panel in DASHBOARD["panels"]:
        for target in panel["targets"]:
            yield panel["title"], target["expr"], target["legendFormat"]


def exposed() -> dict[str, set[str]]:
    """Returns the labels of every sample's name."""
    found: dict[str, set[str]] = {}
    for family in families([snapshot()], NOW_NS):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    for name, (kind, _, labels) in STUDY_METRICS.items():
        found[f"ray_{name}_total" if kind is Counter else f"ray_{name}"] = set(labels)
    return found


def test_every_expression_names_exposed_metrics_and_their_labels() -> None:
    known = exposed()
    seen = 0
    for panel, expression, legend in targets():
        names = re.findall(NAME, expression)
        assert names, panel
        for name, matchers in re.findall(rf"({NAME})\{{([^}}]*)\}}", expression):
            assert name in known, (panel, name)
            assert set(re.findall(r"(\w+)\s*=~?", matchers)) <= known[name], (panel, name)
            seen += 1
        # The result of a division has the labels of its left side.
        assert set(re.findall(r"\{\{(\w+)\}\}", legend)) <= known[names[0]], (panel, legend)
        assert len(names) == len(re.findall(rf"{NAME}\{{", expression)), panel
    assert seen >= 24
    assert {name for name in known if name.startswith("ray_")} == {
        name for _, expression, _ in targets() for name in re.findall(r"ray_wattune_\w+", expression)
    }, "every metric of a study is shown"
    for variable in DASHBOARD["templating"]["list"]:
        if variable["type"] == "query":
            name, label = re.fullmatch(r"label_values\((\w+)(?:\{.*\})?, (\w+)\)", variable["query"]["query"]).groups()
            assert label in known[name]


def test_a_counter_is_never_shown_without_its_rate() -> None:
    for panel, expression, _ in targets():
        for name in re.findall(rf"{NAME}_total", expression):
            assert f"rate({name}{{" in expression, panel
        assert not re.search(rf"rate\({NAME}(?<!_total)\{{", expression), panel


def test_clock_lost_is_a_share_of_the_time_that_was_assessed() -> None:
    lost = [expression for _, expression, _ in targets() if "_clock_lost" in expression]
    assert len(lost) == 3 and all("wattune_device_assessed_seconds_total" in one.partition(" / ")[2] for one in lost)


def test_labels_that_a_panel_keeps_are_those_that_tell_its_lines_apart() -> None:
    for panel, expression, legend in targets():
        kept = re.search(r"by \((\w+)\)", expression)
        if kept:
            assert re.findall(r"\{\{(\w+)\}\}", legend) == [kept[1]], panel


def test_panels_do_not_overlap_and_variables_exist() -> None:
    cells: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        at = panel["gridPos"]
        own = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not own & cells and at["x"] + at["w"] <= 24, panel["title"]
        cells |= own
    variables = {one["name"] for one in DASHBOARD["templating"]["list"]} | {"__rate_interval", "__all"}
    used = set(re.findall(r"\$\{?(\w+)", json.dumps(DASHBOARD)))
    assert used <= variables


def test_provisioning_points_at_what_is_there() -> None:
    (source,) = read("provisioning/datasources/prometheus.yaml")["datasources"]
    assert source["type"] == "prometheus"
    (provider,) = read("provisioning/dashboards/wattune.yaml")["providers"]
    assert provider["options"]["path"] == "$WATTUNE_DASHBOARDS"
    readme = (DEPLOY / "README.md").read_text()
    assert "WATTUNE_DASHBOARDS=$PWD/deploy/grafana/dashboards" in readme
    assert DASHBOARD["uid"] in readme and source["url"].removeprefix("http://") in readme


def read(name: str) -> Any:
    return yaml.safe_load((DEPLOY / name).read_text())


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_expressions_and_configuration_are_right_for_prometheus(tmp_path: Path) -> None:
    rules = [
        {"record": f"panel:{number}", "expr": expression.replace("$__rate_interval", "1m")}
        for number, (_, expression, _) in enumerate(targets())
    ]
    file = tmp_path / "rules.yaml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": rules}]}))
    for check in (["rules", str(file)], ["config", "--syntax-only", str(DEPLOY / "prometheus.yml")]):
        done = subprocess.run(["promtool", "check", *check], capture_output=True, text=True, timeout=30)
        assert done.returncode == 0, done.stdout + done.stderr
