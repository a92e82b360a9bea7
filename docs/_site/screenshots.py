"""Pictures of the report and of MLflow for the documentation, taken in a real browser.

Run `python docs/_site/screenshots.py` where Chromium or Chrome is installed. The study is the one of the tests: two
trials measured on four H200s. Each picture stays below `MOST_BYTES`.
"""

import io
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from PIL import Image

ROOT: Final = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "fakes"))

from headless import Headless, chromium  # noqa: E402
from mlflow_server import free_port, mlflow_server  # noqa: E402
from small_study import make_study, ranking_of  # noqa: E402

from wattune import api  # noqa: E402
from wattune.report.write import write_report  # noqa: E402
from wattune.tracking.tracker import Tracker  # noqa: E402

DOCS: Final = ROOT / "docs"
WIDTHS_PX: Final = (1400, 420)
MOST_BYTES: Final = 200_000
_COLORS: Final = (256, 128, 64, 32)


def main() -> None:
    """Writes every picture."""
    if chromium() is None:
        sys.exit("no Chromium or Chrome is installed: apt-get install chromium")
    with TemporaryDirectory() as folder, Headless() as browser:
        study = make_study(Path(folder))
        write_report(study, ranking_of(study))
        for width in WIDTHS_PX:
            browser.resize(width, 1600)
            browser.open(study.report_path.as_uri())
            browser.shows("Throughput against power")
            browser.wait_for("document.querySelectorAll('.plotly-graph-div svg.main-svg').length > 0")
            _take(browser, f"report_{width}.png")
        with mlflow_server(f"sqlite:///{folder}/server.db", Path(folder) / "artifacts", free_port()) as url:
            api.sync(study, tracking_uri=url)
            browser.resize(1400, 900)
            browser.open(f"{url}/{Tracker(url, study.name).page()}")
            browser.shows("Objective and constraints", "Parallel Coordinates", within_s=60)
            _take(browser, "mlflow_charts.png")


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
            (DOCS / name).write_bytes(content.getvalue())
            print(f"{name}: {content.tell():,} bytes, {colors} colours")  # noqa: T201
            return
    sys.exit(f"{name} is larger than {MOST_BYTES:,} bytes")


if __name__ == "__main__":
    main()
