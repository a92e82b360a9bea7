"""Commands, options, expressions and spaces that the pages tell people to type exist; `test_links.py` has the links."""

import re
import shlex
from pathlib import Path

import pytest
import yaml
from small_study import make_study

from wattune.cli import verbs
from wattune.metrics import METRICS
from wattune.objective import Field, parse_constraint, parse_objective
from wattune.ranking.conditions import parse_where
from wattune.search.space import parse_space

ROOT = Path(__file__).parents[2]
FOLDERS = ("docs", "benchmarks", "experiments", "tests")
PAGES = sorted({*ROOT.glob("*.md"), *(path for name in FOLDERS for path in (ROOT / name).rglob("*.md"))})
VERBS = {name: verbs.load(name) for name in verbs.VERBS}
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
_MISSING = "Missing parameter"


def commands(path: Path) -> list[tuple[str, bool]]:
    """Every `wattune` command of a page, and whether it stands there whole: on a line of its own."""
    text = path.read_text()
    blocks = "\n".join(block for _, block in _FENCE.findall(text)).replace("\\\n", " ")
    prose = _FENCE.sub("", text)
    lines = [*blocks.splitlines(), *(line[4:] for line in prose.splitlines() if line.startswith("    wattune "))]
    whole = re.compile(r"(?:\.venv/bin/|srun .* )?wattune (\w+.*?)(?:\s+#.*|\s*&)?")
    found = [(match[1], True) for line in lines if (match := whole.fullmatch(line.strip()))]
    return found + [(" ".join(inline.split()), False) for inline in re.findall(r"`wattune\s+([a-z][^`]*)`", prose)]


FLAGS = {"lr": Field(kind=float), "nccl_algo": Field(kind=str)}
"""Flags of the study that pages ask about: `docs/own_code.md`."""


def problem(command: str) -> str:
    """Returns the reason the command line would refuse this command; empty where it would not."""
    verb, *arguments = shlex.split(command)
    if verb not in VERBS:
        return f"no command {verb}"
    try:
        context = VERBS[verb].make_context(verb, list(arguments))
        for text in context.params.get("constraint") or ():
            parse_constraint(text)
        for text in context.params.get("where") or ():
            parse_where(text, FLAGS)
        if context.params.get("objective"):
            parse_objective(context.params["objective"])
        unknown = {name for name in (context.params.get("pareto") or "").split(",") if name} - METRICS.keys()
        return f"no metric {unknown}" if unknown else ""
    except Exception as error:  # whatever it is, it is what somebody who typed this would get
        return f"{type(error).__name__}: {error}"


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_commands_are_taken(page: Path) -> None:
    wrong = {
        command: why
        for command, whole in commands(page)
        if (why := problem(command)) and (whole or _MISSING not in why)
    }
    assert wrong == {}


def test_commands_are_found_and_wrong_ones_are_refused() -> None:
    found = [command for page in PAGES for command, _ in commands(page)]
    assert {command.split()[0] for command in found} == VERBS.keys()
    assert all(
        map(problem, ["dance", "rank x --tpo 3", "rank x --where 'old_frac > 0.1'", "rank", "rank x --pareto a,b"])
    )


def test_the_readme_lists_every_command_and_its_spaces_are_spaces() -> None:
    text = (ROOT / "README.md").read_text()
    assert set(re.findall(r"^\| `wattune (\w+)", text, re.MULTILINE)) == VERBS.keys()
    spaces = [parse_space(yaml.safe_load(block)) for kind, block in _FENCE.findall(text) if kind == "yaml"]
    assert [space.name for space in spaces] == ["moe_ep_h200x4", "own_hf_trainer"]


def test_the_readme_s_python_runs_on_a_study(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (code,) = [block for kind, block in _FENCE.findall((ROOT / "README.md").read_text()) if kind == "python"]
    assert len(code.strip().splitlines()) <= 12
    make_study(tmp_path / "wattune-studies", "cpu_smoke")
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    exec(compile(code, "README.md", "exec"), names)
    said = capsys.readouterr().out
    assert said.startswith("tp2 pp2 mbs1 ") and "more tokens a second" in said
    assert len(names["runs"]) == 3 and {"power_w", "device"} <= set(names["power"].columns)
