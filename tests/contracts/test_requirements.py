"""docs/requirements.md: each command says what stands below it, and each test that it names is there."""

import ast
import re
import shlex
import tarfile
import time
from pathlib import Path

import pytest

from wattune import cli

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "requirements.md").read_text()
COMMANDS = re.findall(r"^\$ wattune (.+)\n((?:.+\n)+?)```", PAGE, flags=re.MULTILINE)
MOST_S = 5.0


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("storage")
    with tarfile.open(ROOT / "tests" / "golden" / "demo" / "study.tar.xz") as stored:
        stored.extractall(folder, filter="data")
    return folder


@pytest.mark.parametrize(("text", "said"), COMMANDS, ids=[text[:40] for text, _ in COMMANDS])
def test_a_command_says_its_line(
    text: str, said: str, demo: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("WATTUNE_STORAGE", str(demo))
    began = time.process_time()
    monkeypatch.setattr("sys.argv", ["wattune", *shlex.split(text.replace("$WATTUNE_STORAGE", str(demo)))])
    with pytest.raises(SystemExit):
        cli.main()
    assert time.process_time() - began < MOST_S
    output = " ".join("".join(capsys.readouterr()).split())
    for line in said.splitlines():
        wanted = ".*".join(re.escape(" ".join(part.split())) for part in line.split("..."))
        assert re.search(wanted, output), (line, output)


def test_all_27_are_there_once_with_what_shows_them() -> None:
    found = re.findall(r"^\*\*R(\d+), [^*]+\. (Shown|In part|Measured|Not shown)[^*]*\*\*", PAGE, flags=re.MULTILINE)
    assert sorted(int(number) for number, _ in found) == [*range(1, 28)]
    for part in re.split(r"^(?=\*\*R\d)", PAGE, flags=re.MULTILINE)[1:]:
        assert "$ wattune" in part or "::test_" in part or "Not shown" in part, part[:40]
        assert "In part" not in part[:90] or any(word in part for word in ("no ", "No ", "not ", "never", "Nothing")), (
            part[:40]
        )


def test_each_test_that_is_named_is_there() -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", PAGE)
    assert len(named) >= 15
    for path, name in named:
        assert name in {getattr(one, "name", "") for one in ast.walk(ast.parse((ROOT / path).read_text()))}, name
