"""A running study on Ray's metrics page, as Prometheus scrapes it."""

import subprocess
import sys

import pytest
from script_results import results as said_by

from wattune.orchestrate.study_metrics import STUDY_METRICS

pytestmark = [pytest.mark.ray, pytest.mark.timeout(700), pytest.mark.usefixtures("on_standing_cluster")]

SCRAPER = """
import json, ray, sys, time, urllib.request
ray.init(log_to_driver=False)
pages = [f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics" for node in ray.nodes()]
wanted, seen, end_s = set(sys.argv[1:]), {}, time.monotonic() + 450
while wanted - {name for name, _ in seen} and time.monotonic() < end_s:
    time.sleep(0.5)
    for page in pages:
        for line in urllib.request.urlopen(page, timeout=10).read().decode().splitlines():
            name, _, rest = line.partition("{")
            if name.startswith("ray_wattune_study") and 'study="watched"' in rest:
                labels, _, value = rest.rpartition("} ")
                seen[name, labels] = float(value)
kept = [[name, [one for one in labels.split(",") if one.split("=")[0] in ("state", "cause", "part")], value]
        for (name, labels), value in seen.items()]
print("RESULT " + json.dumps(kept))
"""


@pytest.mark.slow
def test_a_study_is_scraped_while_it_runs(start_wattune, write_space, tiny_model, environment) -> None:
    broken = tiny_model | {"rope_base": 1e-300}  # its loss is no number
    measure = {"warmup_steps": 2, "min_steps": 4, "min_seconds": 8}
    space = write_space("watched", model=[broken, tiny_model], measure=measure)
    running = start_wattune("run", space)
    names = [
        f"ray_{name}_total" if kind.__name__ == "Counter" else f"ray_{name}"
        for name, (kind, _, _) in STUDY_METRICS.items()
    ]
    scraped = subprocess.run(
        [sys.executable, "-c", SCRAPER, *names], env=environment, capture_output=True, text=True, timeout=500
    )
    running.process.wait(200)
    assert scraped.returncode == 0, scraped.stderr[-2000:]
    (found,) = said_by(scraped.stdout)
    assert {name for name, _, _ in found} == set(names)
    labelled = {(name, *labels): value for name, labels, value in found}
    assert labelled["ray_wattune_study_failures_total", 'cause="crashed"'] == 1
    assert labelled["ray_wattune_study_seconds_total", 'part="window"'] > 0
