"""Pages of the site that do not lie in docs/, and links that leave it.

The README is the site's first page. The results of benchmarks, and pages at the root of the repository, get a place in
the site. A link to one of them leads there. A link to any other file of the repository becomes that file's path: a site
that is opened offline has nothing else to offer. So pages are written for the repository alone.
"""

import json
import os.path
import re
from pathlib import Path
from typing import Any, Final

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page
from plotly.offline import get_plotlyjs

ROOT: Final = Path(__file__).resolve().parents[2]
DOCS: Final = "docs"
NOTEBOOK: Final = "docs/notebooks/first_study.ipynb"
PLOTLY: Final = "assets/plotly.min.js"

AT_ROOT: Final = {
    "README.md": "index.md",
    "ARCHITECTURE.md": "architecture.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "experiments/README.md": "experiments.md",
    NOTEBOOK: "notebooks/first_study.md",
}
"""Places in the site of pages outside docs/, by their path in the repository."""

_FENCE: Final = re.compile(r"^(```|~~~).*?^\1", re.MULTILINE | re.DOTALL)
_LINK: Final = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\[\]]*\])*)\]\(([^()\s]+)\)")
_ELSEWHERE: Final = re.compile(r"[a-z]+:|#")


def _places() -> dict[str, str]:
    results = sorted((ROOT / "benchmarks" / "results").glob("*.md"))
    return AT_ROOT | {path.relative_to(ROOT).as_posix(): f"results/{path.name}" for path in results}


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Adds the pages that lie outside docs/."""
    for source, place in _places().items():
        text = (ROOT / source).read_text(encoding="utf-8")
        content = _notebook(json.loads(text)) if source.endswith(".ipynb") else text
        # Pages that the navigation does not name are reached by links.
        named = place in str(config.nav)
        level = InclusionLevel.INCLUDED if named else InclusionLevel.NOT_IN_NAV
        files.append(File.generated(config, place, content=content, inclusion=level))
    files.append(File.generated(config, PLOTLY, content=get_plotlyjs()))
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:  # noqa: ARG001
    """Turns links from a page's place in the repository to its place in the site."""
    at = page.file.src_uri
    source = next((source for source, place in _places().items() if place == at), f"{DOCS}/{at}")

    def turned(match: re.Match[str]) -> str:
        picture, text, target = match.groups()
        if _ELSEWHERE.match(target):
            return match[0]
        path, _, anchor = target.partition("#")
        wanted = os.path.normpath(os.path.join(os.path.dirname(source), path))  # noqa: PTH118, PTH120 - URLs
        if not (ROOT / wanted).exists():
            raise PluginError(f"{source}: link to {target}: there is no {wanted}")
        place = _places().get(wanted, wanted.removeprefix(f"{DOCS}/") if wanted.startswith(f"{DOCS}/") else "")
        if not place or files.get_file_from_path(place) is None:
            return f"{text} (`{wanted}`)" if wanted not in text else text
        relative = os.path.relpath(place, os.path.dirname(at) or ".")  # noqa: PTH120
        return f"{picture}[{text}]({relative}{'#' + anchor if anchor else ''})"

    parts, end = [], 0
    for fence in _FENCE.finditer(markdown):
        parts += [_LINK.sub(turned, markdown[end : fence.start()]), fence[0]]
        end = fence.end()
    return "".join([*parts, _LINK.sub(turned, markdown[end:])])


def _notebook(notebook: dict[str, Any]) -> str:
    """An executed notebook as a page: its text, its code, and what the code gave."""
    parts = [f'<script src="../{PLOTLY}"></script>']
    for number, cell in enumerate(notebook["cells"]):
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
            continue
        parts.append(f"```python\n{source}\n```")
        parts += [_output(output, f"figure-{number}") for output in cell["outputs"]]
    return "\n\n".join(parts) + "\n"


def _output(output: dict[str, Any], name: str) -> str:
    data = output.get("data", {})
    if "application/vnd.plotly.v1+json" in data:
        figure = data["application/vnd.plotly.v1+json"]
        shown = [name, figure["data"], figure["layout"], {"responsive": True, "displayModeBar": False}]
        arguments = json.dumps(shown)[1:-1].replace("</", "<\\/")
        return f'<div id="{name}" class="figure"></div>\n<script>Plotly.newPlot({arguments})</script>'
    if "text/html" in data:
        html = re.sub(r"<style.*?</style>", "", "".join(data["text/html"]), flags=re.DOTALL)
        return re.sub(r"\n\s*", "", html)
    text = "".join(output.get("text") or data.get("text/plain", ""))
    return f"```text\n{text.rstrip()}\n```"
