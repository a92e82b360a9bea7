"""Pages in a real browser: the report, two trials side by side, and MLflow's own pages of a study."""

import json
import re
import urllib.parse
from collections.abc import Iterator
from pathlib import Path

import pytest
from first_screens import FIRST_SCREENS
from headless import Headless, chromium
from mlflow_server import free_port, mlflow_server
from small_study import make_study, ranking_of
from wide_report import write_wide_report

from wattune import api
from wattune.report.write import write_comparison, write_figures, write_report
from wattune.storage.study import StudyFolder
from wattune.tracking.tracker import Tracker

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(chromium() is None, reason="no Chromium or Chrome is installed: apt-get install chromium"),
]

OFFLINE = {"offline": True, "latency": 0, "downloadThroughput": 0, "uploadThroughput": 0}
LOUD = "addEventListener('securitypolicyviolation', e => (window.refused ??= []).push(e.blockedURI))"


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> StudyFolder:
    study = make_study(tmp_path_factory.mktemp("storage"))
    write_report(study, ranking_of(study))
    return study


@pytest.fixture
def browser() -> Iterator[Headless]:
    with Headless() as found:
        yield found


def test_the_report_draws_every_chart_offline_and_answers(browser: Headless, study: StudyFolder) -> None:
    browser.call("Network.enable")
    browser.call("Network.emulateNetworkConditions", **OFFLINE)
    browser.call("Page.addScriptToEvaluateOnNewDocument", source=LOUD)
    browser.open(study.report_path.as_uri())
    browser.shows("dense_h200x4", "Throughput against power", "rank 3 at 140.2 GiB", "Method and quality")
    charts = browser.evaluate("[...document.querySelectorAll('.plotly-graph-div')].map(c => c.id)")
    assert charts == [
        "chart-throughput-against-power",
        "chart-what-makes-the-difference",
        "chart-where-a-step-goes",
        "chart-throughput-by-step",
        "chart-power-against-the-step-timeline",
        "chart-temperature-by-slot",
    ]
    browser.wait_for(
        "[...document.querySelectorAll('.plotly-graph-div')].every(c => !!c.querySelector('svg.main-svg'))"
    )
    assert browser.evaluate("window.refused ?? []") == []
    assert (
        browser.evaluate("performance.getEntriesByType('resource').filter(e => e.name.startsWith('http')).length") == 0
    )

    # Hovering a point says what it is; clicking it finds its row.
    place = browser.evaluate(
        """(() => {
          const chart = document.getElementById('chart-throughput-against-power');
          chart.scrollIntoView({ block: 'center' });
          const box = chart.querySelector('.trace.scatter path.point').getBoundingClientRect();
          return [box.x + box.width / 2, box.y + box.height / 2];
        })()"""
    )
    browser.hover(place[0] - 30, place[1])
    browser.hover(*place)
    browser.wait_for("!!document.querySelector('#chart-throughput-against-power .hoverlayer .hovertext')")
    label = browser.evaluate("document.querySelector('#chart-throughput-against-power .hoverlayer').textContent")
    assert "tokens_per_s" in label
    browser.click(*place)
    found = browser.wait_for("document.querySelector('tr.found')?.id")
    assert found.removeprefix("trial-") in {row.trial_id for row in ranking_of(study).trials}


def test_the_report_prints_on_paper_in_its_width(browser: Headless, study: StudyFolder, tmp_path: Path) -> None:
    browser.open(study.report_path.as_uri())
    browser.shows("Throughput against power")
    browser.evaluate("dispatchEvent(new Event('beforeprint'))")
    widest = "Math.max(...[...document.querySelectorAll('.plotly-graph-div .main-svg')].map(c => c.clientWidth))"
    browser.wait_for(f"{widest} <= 680")
    browser.pdf(tmp_path / "report.pdf")
    assert (tmp_path / "report.pdf").read_bytes().startswith(b"%PDF")
    browser.evaluate("dispatchEvent(new Event('afterprint'))")
    browser.wait_for(f"{widest} > 680")


WIDER_THAN_THEIR_PLACE = """[...document.querySelectorAll('main, section, .scroll, table, .plotly-graph-div')]
  .filter(one => one.scrollWidth > one.clientWidth + 1 && one.clientWidth > 0)
  .map(one => one.tagName + '.' + one.className + ' ' + one.scrollWidth + ' > ' + one.clientWidth)"""
CUT_OFF = """[...document.querySelectorAll('.main-svg text')]
  .filter(one => one.textContent && !one.closest('.hoverlayer'))
  .filter(one => {
    const box = one.getBoundingClientRect(), place = one.closest('.plotly-graph-div').getBoundingClientRect();
    return box.width && (box.left < place.left - 1 || box.right > place.right + 1);
  }).map(one => one.textContent)"""
BEYOND_THE_WINDOW = """[...document.querySelectorAll('main *')]
  .filter(one => !one.closest('.main-svg, thead') && one.getBoundingClientRect().right > innerWidth + 1)
  .map(one => one.tagName + '.' + one.className)"""
SMALLEST_PX = """Math.min(...[...document.querySelectorAll('.headline *')]
  .filter(one => !one.closest('.plotly-graph-div') && one.innerText)
  .map(one => parseFloat(getComputedStyle(one).fontSize)))"""
PARTS = (".banner", ".figure", ".next", ".picture", ".meters")
NAMES_THAT_MEET = """(() => {
  const boxes = [...document.querySelectorAll('#chart-throughput-against-power .textpoint text')]
    .filter(one => one.textContent).map(one => [one.textContent, one.getBoundingClientRect()]);
  const meet = (a, b) => a.left < b.right - 1 && b.left < a.right - 1 && a.top < b.bottom - 1 && b.top < a.bottom - 1;
  return boxes.flatMap(([name, box], number) =>
    boxes.slice(0, number).filter(([, other]) => meet(box, other)).map(([other]) => name + ' / ' + other));
})()"""


@pytest.mark.parametrize("width", [1400, 420])
@pytest.mark.parametrize("num_bounds", [1, 5, 6])
def test_nothing_needs_sideways_scrolling(browser: Headless, tmp_path: Path, width: int, num_bounds: int) -> None:
    """Also with long names, settings that vary, six bounds and forty trials."""
    path = write_wide_report(tmp_path / "report.html", num_bounds)
    browser.resize(width, 900)
    browser.open(path.as_uri())
    browser.shows("Throughput against power", "Measured 40 of 681 trials of the space", "640 not reached")
    browser.wait_for("document.querySelectorAll('.plotly-graph-div svg.main-svg').length > 0")
    browser.wait_for(f"document.documentElement.scrollWidth <= {width}")
    assert browser.evaluate(WIDER_THAN_THEIR_PLACE) == []
    assert browser.evaluate(BEYOND_THE_WINDOW) == []
    browser.wait_for(f"{CUT_OFF}.length === 0", within_s=10)
    if width == 1400:
        assert browser.evaluate("document.querySelectorAll('.textpoint text').length") >= 1
        assert browser.evaluate(NAMES_THAT_MEET) == []
    else:
        browser.wait_for("document.querySelector('.plotly-graph-div').dataset.narrow === 'true'")
        assert browser.evaluate("getComputedStyle(document.querySelector('td')).display") == "grid"
        browser.shows("the next run keeps it", "rank")


@pytest.mark.parametrize("kind", FIRST_SCREENS)
def test_the_first_screen_is_the_answer(browser: Headless, tmp_path: Path, kind: str) -> None:
    """Plan, gain, ties, bounds, what to do and the picture on 1,400 pixels; plan, figure and gain on a phone."""
    (write, parts), path = FIRST_SCREENS[kind], tmp_path / "report.html"
    path.write_text(write(tmp_path))
    for width in (1400, 420):
        browser.resize(width, 900)
        browser.open(path.as_uri())
        if ".picture" in parts:
            browser.wait_for("document.querySelectorAll('.picture svg.main-svg').length > 0")
        browser.wait_for(f"document.documentElement.scrollWidth <= {width}")
        browser.wait_for(f"{CUT_OFF}.length === 0", within_s=10)
        assert browser.evaluate(WIDER_THAN_THEIR_PLACE) == browser.evaluate(BEYOND_THE_WINDOW) == []
        there = browser.evaluate(f"{json.dumps(PARTS)}.filter(part => document.querySelector(part))")
        assert there == [part for part in PARTS if part in parts]
        first = (".label", ".answer", ".picture .plotly-graph-div", ".meters") if width == 1400 else (".label", ".lead")
        ends = f"{json.dumps(first)}.map(one => document.querySelector(one)?.getBoundingClientRect().bottom ?? 0)"
        assert max(browser.evaluate(ends)) <= 900, browser.evaluate(ends)
        assert browser.evaluate(SMALLEST_PX) >= 12


def test_two_trials_side_by_side(browser: Headless, study: StudyFolder, tmp_path: Path) -> None:
    ranking = ranking_of(study)
    pair = (f"{study.path}:{row.trial_id}" for row in (ranking.feasible[0], ranking.infeasible[0]))
    path = write_comparison(api.compare(*pair), tmp_path / "compare.html")
    browser.open(path.as_uri())
    browser.shows("more tokens a second", "What differs", "plan.pp", "node_device_power_peak_1s_w")
    browser.wait_for("document.querySelectorAll('#chart-what-makes-the-difference .waterfalllayer .trace').length == 2")


def test_every_figure_is_written_as_an_image(study: StudyFolder, tmp_path: Path) -> None:
    paths = write_figures(study, ranking_of(study), tmp_path)
    begins = {".png": b"\x89PNG", ".svg": b"<svg", ".pdf": b"%PDF"}
    assert sorted(path.suffix for path in paths) == sorted(6 * list(begins))
    for path in paths:
        content = path.read_bytes()
        assert content.startswith(begins[path.suffix])
        assert len(content) > 5000


def test_mlflow_shows_our_metrics_and_parameters_side_by_side(
    browser: Headless, study: StudyFolder, tmp_path: Path
) -> None:
    from mlflow import MlflowClient

    with mlflow_server(f"sqlite:///{tmp_path}/server.db", tmp_path / "artifacts", free_port()) as url:
        api.sync(study, tracking_uri=url)
        client = MlflowClient(url)
        experiment_id = client.get_experiment_by_name(study.name).experiment_id
        runs = [run for run in client.search_runs([experiment_id]) if "wattune.trial" in run.data.tags]
        assert len(runs) == 3

        # MLflow's compare page of the three.
        wanted = urllib.parse.quote(json.dumps([run.info.run_id for run in runs]))
        browser.resize(1600, 1000)
        browser.open(
            f"{url}/#/compare-runs?runs={wanted}&experiments={urllib.parse.quote(json.dumps([experiment_id]))}"
        )
        browser.shows("Comparing 3 Runs", "Parallel Coordinates Plot", within_s=60)
        browser.shows("micro_batch_size", "sharding", "overlap", "grad_param", "model.num_layers")
        browser.shows("tokens_per_s", "node_device_power_peak_1s_w", "energy_per_token_j")

        # The link on the study's page leads there, and every run has a picture of its own telemetry or none.
        note = client.get_experiment(experiment_id).tags["mlflow.note.content"]
        (link,) = re.findall(r"\[Compare the best \d\]\((.*)\)", note)
        browser.open("about:blank")
        browser.open(f"{url}/{link}")
        browser.shows("Comparing 2 Runs", "tp2 pp2 mbs1 #0", "dp4 mbs1 overlap=grad_param #0", within_s=60)
        pictures = ["picture.svg" in {one.path for one in client.list_artifacts(run.info.run_id)} for run in runs]
        assert sorted(pictures) == [False, True, True], "the third ran out of memory before a step"

        # The page wattune arranges: its charts first, the columns a study is decided by.
        tracker = Tracker(url, study.name)
        assert tracker.delivered()
        page = tracker.page
        browser.open("about:blank")
        browser.open(f"{url}/{page}")
        browser.shows("Objective and constraints", "Parallel Coordinates", "tp2 pp2 mbs1 #0", within_s=60)
        browser.open("about:blank")
        browser.open(f"{url}/{page.replace('CHART', 'TABLE')}")
        browser.shows("dp4 mbs1 overlap=grad_param #0", "tokens_per_s", within_s=60)
        browser.wait_for("!document.body.innerText.includes('clock_deficit_frac')")
