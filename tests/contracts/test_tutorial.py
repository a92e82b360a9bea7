"""docs/tutorial.md on a stored run of its demo: every command but those that start workers, and what it says of them.

The sentences are looked up on the page: one that is changed there fails here until it is held again. The commands that
train are run by `tests/e2e/test_tutorial.py`.
"""

import contextlib
import io
import json
import re
import shutil
import sys
import tarfile
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pyarrow.csv
import pytest
from tutorial import PROSE, ROOT, Command, commands, edit_as_told

from wattune import cli

DEMO = ROOT / "tests" / "golden" / "demo" / "study.tar.xz"
COMMANDS = commands()
STARTS_MORE = ("make", "export", "mlflow", "--figures", "--tracking-uri")
"""In commands that start workers, a server or a browser, or set the environment."""

HERE = [one for one in COMMANDS if not any(word in one.text for word in STARTS_MORE)]


class Reader:
    """Somebody who types what the page says in a folder of their own, where the demo has run."""

    def __init__(self, home: Path, patch: pytest.MonkeyPatch) -> None:
        """Prepares the folder."""
        self.home, self._patch = home, patch
        with tarfile.open(DEMO) as stored:
            stored.extractall(home / "wattune-studies", filter="data")
        shutil.copytree(ROOT / "search_spaces", home / "search_spaces")
        shutil.copytree(self.study, home / "wattune-studies" / "again")
        self.types = cache(self._types)
        """Runs a command, each once; returns its exit code and all it said."""

    @property
    def study(self) -> Path:
        return self.home / "wattune-studies" / "cpu_smoke"

    def _types(self, *words: str) -> tuple[int, str]:
        self._patch.setattr(sys, "argv", list(words))
        said = io.StringIO()
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said), pytest.raises(SystemExit) as leaving:
            cli.main()
        return int(leaving.value.code or 0), said.getvalue()

    def asks(self, begin: str, *more: str) -> str:
        """Returns what the page's command with this beginning said."""
        (command,) = {one.text: one for one in HERE if one.text.startswith(begin)}.values()
        return self.types(*command.words, *more)[1]

    def json(self, *words: str) -> Any:
        return json.JSONDecoder().raw_decode(self.types("wattune", *words, "--json")[1])[0]  # notes follow

    def files(self) -> dict[str, int]:
        """Every file below the storage with its time."""
        return {str(path): path.stat().st_mtime_ns for path in (self.home / "wattune-studies").rglob("*")}


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reader]:
    with pytest.MonkeyPatch.context() as patch:
        home = tmp_path_factory.mktemp("tutorial")
        patch.chdir(home)
        for one in COMMANDS:
            if one.text.startswith("export "):
                name, _, value = one.text.split()[1].partition("=")
                patch.setenv(name, value)
        yield Reader(home, patch)


def test_the_page_has_a_command_for_every_step() -> None:
    assert {one.section for one in COMMANDS} == {1, 2, 3, 4, 5, 6, 7} - {7}
    assert len(HERE) >= 14 and len(COMMANDS) - len(HERE) >= 5


@pytest.mark.parametrize("command", HERE, ids=lambda one: one.text[:60])
def test_every_command_ends_as_the_page_says(reader: Reader, command: Command) -> None:
    changed = "--dry-run" in command.text
    if changed:
        edit_as_told(reader.home / "search_spaces" / "cpu_smoke.yaml")
    before = reader.files()
    code, said = reader.types(*command.words)
    assert "Ask other questions of the same results. Nothing runs again" in PROSE
    assert "Where nothing is feasible, the exit code is 3" in PROSE
    none = "nothing is feasible" in said or "nothing is surely feasible" in said
    assert code == (3 if none else 0), said
    assert "in the demo nothing" not in command.remark or code == 3
    assert "Traceback" not in said and "error:" not in said
    if command.section == 2 or changed:
        assert reader.files() == before, "nothing was written"


def _plan(reader: Reader) -> None:
    said = reader.asks("wattune plan")
    assert said.startswith("10 kept") or re.search(r"^10 kept", said, re.MULTILINE), said[:300]
    assert "rejected by rule" in said and "does not divide world_size=2" in said


def _kinds(reader: Reader) -> None:
    part = (ROOT / "docs" / "tutorial.md").read_text().split("in this order:", 1)[1]
    told = re.findall(r"^- \*\*(\w+)\*\*", part, re.MULTILINE)
    assert len(told) == 7
    shown = re.findall(
        r" (feasible|undecided|in any case|infeasible|unknown|interrupted|failed) +indicative", _rank(reader)
    )
    shown = ["behind" if one == "in any case" else one for one in shown]
    assert shown == sorted(shown, key=told.index) and len(shown) == 10 and len(set(shown)) >= 2


def _rank(reader: Reader) -> str:
    return reader.types("wattune", "rank", "cpu_smoke")[1]


def _price(reader: Reader) -> None:
    first = next(line for line in _rank(reader).splitlines() if " infeasible " in line)
    assert re.search(r" dp2 mbs8", first), first


def _two_notes(reader: Reader) -> None:
    said = _rank(reader)
    assert said.count("\nnote: ") + said.count("\nPower, clocks and temperatures are SIMULATED") == 2
    assert "note: tokens_per_s of different work" in said
    assert len(re.findall(r"^best of ", said, re.MULTILINE)) >= 1


def _wide(reader: Reader) -> None:
    lines = _rank(reader).splitlines()
    assert 100 < max(len(line) for line in lines if "│" in line or "──" in line) <= 200
    assert any("node_device_power_peak_1s_w <= 1150   " in line and "verdict" in line for line in lines), "a column"


def _csv(reader: Reader) -> None:
    table = pyarrow.csv.read_csv(reader.home / "ranking.csv")
    assert table.num_rows == 10
    assert {"tokens_per_s", "energy_per_token_j", "device_temp_max_c"} <= {
        name.split(".")[-1] for name in table.column_names
    }


def _left_out(reader: Reader) -> None:
    assert re.search(
        r"[1-9]\d* left out by tp == 1 and sharding != none", reader.asks('wattune rank cpu_smoke --where "tp')
    )


def _json(reader: Reader) -> None:
    found = reader.json("rank", "cpu_smoke")
    assert found["unreadable"] == [] and [one["num_measured"] for one in found["space"]] == [10]
    assert any("different work" in one for one in found["warnings"])


def _damaged(reader: Reader) -> None:
    broken = next((reader.study.parent / "again" / "trials").glob("*-*"))
    (broken / "run.json").write_text("{")
    (lost,) = reader.json("rank", "again")["unreadable"]
    assert broken.name in json.dumps(lost)
    shutil.copy(reader.study / "trials" / broken.name / "run.json", broken)


def _together(reader: Reader) -> None:
    found = reader.asks("wattune rank scale_up")
    assert "cpu_smoke" in found and "again" in found
    assert len(re.findall(r"d49804a1954d", found)) >= 2, "equal specifications stay two trials"


def _report(reader: Reader) -> None:
    reader.asks("wattune report cpu_smoke")
    page = (reader.study / "report.html").read_text()
    assert "default-src 'none'" in page, "the page asks nobody for anything"
    titles = re.findall(r"<h2>([^<]*)</h2>", page)
    assert titles[0] == "Throughput against power"
    assert titles.index("Where a step goes") < titles.index("Power against the step timeline")
    assert titles.index("Power against the step timeline") < titles.index("Temperature by slot")
    assert titles.index("Method and quality") > titles.index("Temperature by slot")
    for told in ("Throughput by step", "Predicted against measured"):
        assert told in titles, titles
    assert "Price of the bound" in titles


def _ids(reader: Reader) -> None:
    named = re.findall(r"cpu_smoke:(\w+)", PROSE + " ".join(one.text for one in COMMANDS))
    assert len(named) >= 2
    assert all(re.search(rf" {one}\w+ ", _rank(reader)) for one in named)


def _compare(reader: Reader) -> None:
    said = reader.asks("wattune compare")
    assert "What differs" in said and "plan.pp" in said
    for whole in ("Time of a step", "Energy of a step"):
        assert whole in said
    assert "told apart" in said and re.search(r"device_temp_max_c.* K ", said)
    assert "not tested: no repeat shows its scatter" in said
    assert (reader.home / "compare.html").stat().st_size > 10_000
    found = reader.json("compare", "cpu_smoke:d49804", "cpu_smoke:bb117a")
    assert {one["metric"] for one in found["tested"]} >= {"tokens_per_s", "energy_per_token_j"}
    fall = found["time"]
    assert sum(part["b"] - part["a"] for part in fall["parts"]) == pytest.approx(fall["b"] - fall["a"], rel=1e-9)


def _dry_run(reader: Reader) -> None:
    said = reader.asks("wattune run --dry-run")
    assert "space 2: space.micro_batch_size: adds 4" in said and "measure.repeats: 1 -> 2" in said
    assert "adds node_device_power_peak_1s_w <= 1300" in said
    assert re.search(r"[1-9]\d* trial\(s\) to run: about .* \(by the trials that finished\)", said)
    assert "done before: 10 completed" in said and "nothing was started, nothing was written" in said


SENTENCES: dict[str, Callable[[Reader], None]] = {
    "Ten combinations are kept. The others are rejected by a named rule, with the numbers in the reason": _plan,
    "It has seven kinds of rows, in this order": _kinds,
    "In the demo data-parallel plans come first there": _price,
    "Notes in yellow come before conclusions. In the demo there are two. Its two models differ in size": _two_notes,
    "Where there is room it is a column. Output to a file or a pipe has 200 columns": _wide,
    "every figure, for a spreadsheet": _csv,
    "What is left out is counted": _left_out,
    "(`space` in `--json`)": _json,
    "The ranking names its folder, why, and what to do (`unreadable` in `--json`)": _damaged,
    "Equal specifications in two studies stay two trials": _together,
    "It is one file that opens offline": _report,
    "names two trials by their ids in the table (the first digits are enough)": _ids,
    "The parts add up exactly": _compare,
    "Without `--dry-run` the study goes on": _dry_run,
}
"""Sentences of the page, and the check of each."""


@pytest.mark.parametrize("sentence", SENTENCES)
def test_what_the_page_says_is_so(reader: Reader, sentence: str) -> None:
    told = PROSE + " ".join(one.remark for one in COMMANDS)
    assert sentence in told, "the page says something else now"
    SENTENCES[sentence](reader)
