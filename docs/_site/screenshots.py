"""Pictures for the documentation: the report and MLflow in a real browser, and commands on terminals of two widths.

Run `python docs/_site/screenshots.py` where Chromium or Chrome is installed; name pictures (`report`, `mlflow`,
`commands`, `live`) to take only these. Report and MLflow show the study of the tests: two trials measured on four
H200s; the first screen of a report is also that of a stored study of 19 trials. Commands show the demo, a stored run of
it; the live view is that of a new run. Each picture stays below `MOST_BYTES`.
"""

import io
import os
import sys
import tarfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from PIL import Image

ROOT: Final = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests" / "fakes"), str(Path(__file__).parent)]

from first_screens import of_table  # noqa: E402
from headless import Headless, chromium  # noqa: E402
from mlflow_server import free_port, mlflow_server  # noqa: E402
from small_study import make_study, ranking_of  # noqa: E402
from terminals import draw, shown  # noqa: E402

from wattune import api  # noqa: E402
from wattune.report.write import write_report  # noqa: E402
from wattune.tracking.tracker import Tracker  # noqa: E402

PICTURES: Final = ROOT / "docs" / "pictures"
DEMO: Final = ROOT / "tests" / "golden" / "demo" / "study.tar.xz"
WIDTHS_PX: Final = (1400, 420)
WIDTHS_COLUMNS: Final = (80, 200)
MOST_BYTES: Final = 150 * 1024
COMMANDS: Final = {
    "rank": "wattune rank cpu_smoke",
    "plan": "wattune plan --estimate --top 5 search_spaces/moe_ep_h200x4.yaml",
    "frontier": 'wattune frontier cpu_smoke --vary "node_device_power_peak_1s_w <= 1100..1400 step 50"',
}
"""Commands that start nothing, by the name of their picture."""

LIVE: Final = "wattune run search_spaces/cpu_smoke.yaml"
_COLORS: Final = (256, 128, 64, 32, 16)


def main(names: list[str]) -> None:
    """Takes the named pictures, all without a name."""
    if chromium() is None:
        sys.exit("no Chromium or Chrome is installed: apt-get install chromium")
    PICTURES.mkdir(exist_ok=True)
    takes: dict[str, Callable[[Headless], None]] = {
        "report": take_report,
        "mlflow": take_mlflow,
        "commands": take_commands,
        "live": take_live,
    }
    with Headless() as browser:
        for name in names or takes:
            takes[name](browser)


def take_report(browser: Headless) -> None:
    """Takes the first screen of the report at each width and of a stored study, and the figures of its traces."""
    with TemporaryDirectory() as folder:
        study = make_study(Path(folder))
        write_report(study, ranking_of(study))
        for width, height in zip(WIDTHS_PX, (900, 1400), strict=True):
            _open_report(browser, study.report_path, width, height)
            _take(browser, f"report_{width}.png")
        _open_report(browser, study.report_path, 1100, 1240)
        browser.evaluate(
            "document.getElementById('chart-power-against-the-step-timeline').closest('section').scrollIntoView()"
        )
        _take(browser, "report_traces_h200x4.png")
        stored = Path(folder) / "stored.html"
        stored.write_text(of_table("moe_ep_h200x4")(Path(folder) / "stored"))
        _open_report(browser, stored, WIDTHS_PX[0], 900)
        _take(browser, "report_h200x4.png")


def _open_report(browser: Headless, page: Path, width: int, height: int) -> None:
    browser.resize(width, height)
    browser.open(page.as_uri())
    browser.shows("Throughput against power")
    browser.wait_for("document.querySelectorAll('.plotly-graph-div svg.main-svg').length > 0")
    browser.wait_for(f"document.documentElement.scrollWidth <= {width}")


def take_mlflow(browser: Headless) -> None:
    """Takes MLflow's page of a study as wattune arranges it, charts and table."""
    with TemporaryDirectory() as folder:
        study = make_study(Path(folder))
        with mlflow_server(f"sqlite:///{folder}/server.db", Path(folder) / "artifacts", free_port()) as url:
            api.sync(study, tracking_uri=url)
            page = Tracker(url, study.name).page()
            browser.resize(1800, 1000)
            browser.open(f"{url}/{page}")
            browser.shows("Objective and constraints", "Parallel Coordinates", within_s=60)
            browser.wait_for("document.querySelectorAll('svg.main-svg').length > 2")
            _take(browser, "mlflow_charts.png")
            browser.open("about:blank")
            browser.open(f"{url}/{page.replace('CHART', 'TABLE')}")
            browser.shows("dp4 mbs1 overlap=grad_param #0", "tokens_per_s", within_s=60)
            _take(browser, "mlflow_table.png")


def take_commands(browser: Headless) -> None:
    """Takes commands on the stored run of the demo, on terminals of each width."""
    with _demo() as home:
        for name, typed in COMMANDS.items():
            for width in WIDTHS_COLUMNS:
                answer, _, _ = shown(typed, width, cwd=home)
                _take_terminal(browser, f"{name}_{width}.png", typed, answer, width)


def take_live(browser: Headless) -> None:
    """Takes the live view of the demo while it runs: its first trials on the one width, the rest on the other."""
    with TemporaryDirectory() as folder:
        home = Path(folder)
        (home / "search_spaces").symlink_to(ROOT / "search_spaces")
        for width, more in zip(WIDTHS_COLUMNS, ("--max-trials 4", ""), strict=True):
            typed = f"{LIVE} {more}".strip()
            _, moment, _ = shown(typed, width, cwd=home, at=_shows_all)
            if not moment:
                sys.exit(f"{typed}: the live view never showed a leader and the time left; take it again")
            _take_terminal(browser, f"live_{width}.png", typed, moment, width)


def _shows_all(text: str) -> bool:
    """Tells whether a live view has each of its parts: what runs, who leads, and the time left."""
    return "running  " in text and "P(best)" in text and " left" in text


@contextmanager
def _demo() -> Iterator[Path]:
    """A folder as a reader of the tutorial has it."""
    with TemporaryDirectory() as folder:
        home = Path(folder)
        (home / "search_spaces").symlink_to(ROOT / "search_spaces")
        with tarfile.open(DEMO) as stored:
            stored.extractall(home / "wattune-studies", filter="data")
        yield home


def _take_terminal(browser: Headless, name: str, typed: str, answer: str, width: int) -> None:
    with TemporaryDirectory() as folder:
        page = Path(folder) / "terminal.svg"
        size = draw(typed, answer, width, page)
        browser.resize(*size)
        browser.open(page.as_uri())
        _take(browser, name)


def _take(browser: Headless, name: str) -> None:
    """Writes what is in view, with as many colours as fit into `MOST_BYTES`."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "whole.png"
        browser.screenshot(path)
        whole = Image.open(path).convert("RGB")
    for colors in _COLORS:
        content = io.BytesIO()
        whole.quantize(colors).save(content, "PNG", optimize=True)
        if content.tell() <= MOST_BYTES:
            (PICTURES / name).write_bytes(content.getvalue())
            print(f"{name}: {content.tell():,} bytes, {colors} colours")  # noqa: T201
            return
    sys.exit(f"{name} is larger than {MOST_BYTES:,} bytes")


if __name__ == "__main__":
    os.environ["WATTUNE_STORAGE"] = "wattune-studies"
    main(sys.argv[1:])
