"""`wattune record --serve` as an operator uses it: scraped by hand, and by a real Prometheus."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.openmetrics.parser import text_string_to_metric_families

pytestmark = [pytest.mark.timeout(110), pytest.mark.slow]

ROOT = Path(__file__).parents[2]
REPLAY = f"replay:{ROOT / 'tests/golden/h200x4/dp4'}?start_s=18&loop"
DASHBOARD = ROOT / "deploy" / "grafana" / "dashboards" / "wattune.json"


@pytest.fixture
def environment(environment: dict[str, str], tmp_path: Path) -> dict[str, str]:
    # Locks of its own: whoever else samples this machine is none of this test's business.
    return environment | {"WATTUNE_RUNTIME": str(tmp_path / "runtime"), "PYTHONPATH": os.pathsep.join(sys.path)}


def read(url: str, accept: str = "") -> str:
    request = urllib.request.Request(url, headers={"Accept": accept} if accept else {})
    with urllib.request.urlopen(request, timeout=10) as answer:
        return answer.read().decode()


def until(condition: Any, longest_s: float = 40.0) -> Any:
    """Returns the first true answer."""
    end_s = time.monotonic() + longest_s
    while time.monotonic() < end_s:
        if found := condition():
            return found
        time.sleep(0.2)
    raise AssertionError(f"not within {longest_s} s")


@contextmanager
def serving(
    environment: dict[str, str], folder: Path, *arguments: str
) -> Iterator[tuple["subprocess.Popen[str]", str]]:
    """Records this machine and a replayed node without a command; yields the process and the address it names."""
    command = [sys.executable, "-m", "wattune", "record", "--name", "mine", "--serve", "127.0.0.1:0"]
    command += ["--backend", "host", "--backend", REPLAY, *arguments]
    with open(folder / "said", "w") as said:
        process = subprocess.Popen(command, cwd=folder, env=environment, stdout=said, stderr=said, text=True)
    try:
        found = until(lambda: re.search(r"metrics at (\S+)", (folder / "said").read_text()))
        yield process, found[1]
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(30)


@pytest.mark.usefixtures("in_foreground")
def test_a_machine_is_served_until_it_is_interrupted(environment: dict[str, str], tmp_path: Path) -> None:
    with serving(environment, tmp_path) as (process, url):
        text = until(lambda: page if "wattune_device_power_peak_watts{" in (page := read(url)) else None)
        samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
        watts = {one.labels["device"]: one.value for one in samples if one.name == "wattune_device_power_watts"}
        assert set(watts) == {"gpu0", "gpu1", "gpu2", "gpu3"} and all(50 < power < 1000 for power in watts.values())
        assert {one.labels["backend"] for one in samples if one.name == "wattune_device_info"} == {"replay"}
        assert any(one.name == "wattune_node_cpu_busy_ratio" for one in samples)
    assert process.returncode == 128 + signal.SIGINT
    with pytest.raises(OSError, match="refused"):
        read(url)
    facts = json.loads((tmp_path / "storage" / "recordings" / "mine" / "manifest.json").read_text())
    assert facts["closed"] is True and facts["exit_code"] == 130


@pytest.mark.skipif(shutil.which("prometheus") is None, reason="prometheus is not installed")
@pytest.mark.usefixtures("in_foreground")
def test_prometheus_scrapes_it_and_every_panel_of_the_dashboard_has_data(
    environment: dict[str, str], tmp_path: Path
) -> None:
    with serving(environment, tmp_path) as (_, url):
        until(lambda: "wattune_device_assessed_seconds_total{" in read(url))
        plain = read(url, "text/plain;version=0.0.4")
        checked = subprocess.run(
            ["promtool", "check", "metrics"], input=plain, capture_output=True, text=True, timeout=30
        )
        assert checked.returncode == 0 and checked.stderr == "", checked.stderr
        with prometheus(tmp_path, url) as api:
            until(lambda: [one for one in targets(api) if one["health"] == "up"])  # a busy machine misses a scrape
            panels = json.loads(DASHBOARD.read_text())["panels"]
            expressions = [target["expr"] for panel in panels for target in panel["targets"]]
            missing = until_all(api, [plain_promql(one) for one in expressions], 60)
            assert missing == []
            (power,) = ask(api, 'wattune_device_power_watts{device="gpu2"}')
            assert 50 < float(power["value"][1]) < 1000
            # Typed as it was exposed, through OpenMetrics.
            kinds = json.loads(read(f"{api}/metadata?metric=wattune_device_energy_joules"))["data"]
            assert not kinds or kinds["wattune_device_energy_joules"][0]["type"] == "counter"


def plain_promql(expression: str) -> str:
    """Puts a value in for every variable of the dashboard."""
    return expression.replace("$__rate_interval", "20s").replace("$node", ".*").replace("$device", ".*")


@contextmanager
def prometheus(folder: Path, url: str) -> Iterator[str]:
    """Starts a server of its own that scrapes an address each second; yields its API's address."""
    where = urllib.parse.urlsplit(url).netloc
    job = {"job_name": "wattune", "scrape_interval": "2s", "scrape_timeout": "2s"}
    config = {"scrape_configs": [{**job, "static_configs": [{"targets": [where]}]}]}
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    port = free_port()
    command = ["prometheus", f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={folder / 'tsdb'}"]
    with open(folder / "prometheus.log", "w") as log:
        process = subprocess.Popen([*command, f"--web.listen-address=127.0.0.1:{port}"], stdout=log, stderr=log)
    try:
        api = f"http://127.0.0.1:{port}/api/v1"
        until(lambda: answers(f"http://127.0.0.1:{port}/-/ready"))
        yield api
    finally:
        process.terminate()
        process.wait(30)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def answers(url: str) -> bool:
    try:
        return bool(read(url))
    except OSError:
        return False


def targets(api: str) -> list[dict[str, Any]]:
    return json.loads(read(f"{api}/targets"))["data"]["activeTargets"]


def ask(api: str, query: str) -> list[dict[str, Any]]:
    """Returns the series of a query at this moment."""
    return json.loads(read(f"{api}/query?{urllib.parse.urlencode({'query': query})}"))["data"]["result"]


def until_all(api: str, queries: list[str], longest_s: float) -> list[str]:
    """Waits until every query has data; returns those that never had."""
    end_s = time.monotonic() + longest_s
    missing = queries
    while missing and time.monotonic() < end_s:
        time.sleep(1)
        missing = [query for query in missing if not ask(api, query)]
    return missing
