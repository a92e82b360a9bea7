"""Language of the project: openings of docstrings, words of messages, and semicolons of pages."""

import ast
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("platform", "benchmarks", "experiments", "tests", "docs")

CLAUSE = re.compile(r"\s*(What|Whether|How|Where|Who|When|Why|Which)\b")
"""Openings that make a docstring a clause. It should open with a verb or a noun phrase."""

PRIVATE = re.compile(
    r"\b(mend(s|ed|ing)?|judge[sd]?|ledgers?|agendas?|tickets?|seats?|anchor(s|ed)?|witness(es)?|halt(s|ed)?|folded|"
    r"mark(s|ed)?)\b",
    re.IGNORECASE,
)
"""Words that only the authors understand, in the sense they once had here."""

ALLOWED = {
    "end mark": "the last bytes of a stream of telemetry, as the manifest's documentation calls them",
    "✕ marks the bounds": "an ordinary verb: the report shows a symbol",
    "text-anchor=": "an attribute of SVG",
    "only the last token is judged": "the loss of a prompt, in the words of its rule",
}
"""Texts that may hold such a word, and the reason."""

MOST_SEMICOLONS = 3
TERSE_PAGES = {
    "docs/amd.md": 12,
    "docs/dependencies.md": 26,
    "docs/engines.md": 36,
    "docs/security.md": 10,
    "docs/space_reference.md": 20,
    "docs/telemetry.md": 12,
}
"""Pages of reference with more semicolons than others may have, and the most of each."""


def wrong(folder: str, words: re.Pattern[str], problems: Callable[[ast.Module], list[str]]) -> dict[str, list[str]]:
    """Returns the problems of a folder's modules by path. Only modules that hold one of the words are parsed."""
    found = {}
    for path in sorted((ROOT / folder).rglob("*.py")):
        if words.search(text := path.read_text()):
            found[path.relative_to(ROOT).as_posix()] = problems(ast.parse(text))
    return {path: lines for path, lines in found.items() if lines}


def docstrings(tree: ast.Module) -> Iterator[ast.Constant]:
    """Every string that stands alone: docstrings of modules, classes and functions, and those of attributes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.value


def clauses(tree: ast.Module) -> list[str]:
    """The docstrings that open as a clause: their line and first words."""
    return [f"{each.lineno}: {str(each.value)[:60]}" for each in docstrings(tree) if CLAUSE.match(str(each.value))]


def texts(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Texts that users may read: strings of more than a word, and docstrings of commands, which are their help."""
    alone = {id(each) for each in docstrings(tree)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in alone:
            if " " in node.value.strip():
                yield node.lineno, node.value
        elif isinstance(node, ast.FunctionDef) and any("app." in ast.unparse(one) for one in node.decorator_list):
            yield node.lineno, ast.get_docstring(node) or ""


def private_words(tree: ast.Module) -> list[str]:
    """The texts that hold a private word, with their line."""
    return [f"{line}: {word} in {text[:60]}" for line, text in texts(tree) for word in private_in(text)]


def private_in(text: str) -> list[str]:
    """The private words of a text."""
    for allowed in ALLOWED:
        text = text.replace(allowed, "")
    return [word.group() for word in PRIVATE.finditer(text)]


def tables() -> dict[str, str]:
    """The tables beside the code, whose texts users may read, without their comments."""
    comment = re.compile(r"(^| +)# .*", re.MULTILINE)
    paths = [path for kind in ("csv", "toml") for path in sorted((ROOT / "platform/wattune").rglob(f"*.{kind}"))]
    return {path.relative_to(ROOT).as_posix(): comment.sub("", path.read_text()) for path in paths}


def semicolons(page: str) -> int:
    """The number of semicolons in a page's prose: code is left out."""
    prose = re.sub(r"^```.*?^```", "", page, flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"`[^`\n]*`", "", prose).count(";")


@pytest.mark.parametrize("folder", FOLDERS)
def test_docstrings_open_with_a_verb_or_a_noun(folder: str) -> None:
    quoted = re.compile(rf"[\"'](\\n)*{CLAUSE.pattern}")
    assert wrong(folder, quoted, clauses) == {}


def test_messages_and_help_use_words_that_users_know() -> None:
    assert wrong("platform", PRIVATE, private_words) == {}
    assert {name: found for name, text in tables().items() if (found := private_in(text))} == {}


def test_every_allowed_text_is_still_said() -> None:
    said = "\n".join([*(path.read_text() for path in (ROOT / "platform").rglob("*.py")), *tables().values()])
    assert [text for text in ALLOWED if text not in said] == []


def test_sentences_of_pages_are_short() -> None:
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    names = {path.relative_to(ROOT).as_posix(): semicolons(path.read_text()) for path in pages}
    assert {name: count for name, count in names.items() if count > TERSE_PAGES.get(name, MOST_SEMICOLONS)} == {}
    assert TERSE_PAGES.keys() <= names.keys()


PLANTED = '''
"""Whether this is noticed."""

LIMIT = 3
"""How much is allowed."""

class Lane:
    """What runs."""

    def close(self) -> None:
        """Whatever runs is closed; how, the worker decides."""
        self.left = 0
        """Which are left."""

@app.command()
def plan(space: Annotated[str, typer.Option(help="The seat to take.")]) -> None:
    """Writes the agenda."""
    raise PlanError(f"{space} is folded; mend that place")

def fine() -> None:
    """Returns what an anchor was."""
    raise PlanError(f"{space} has no end mark; the market is benchmarked and folder")
'''


def test_planted_docstrings_and_messages_are_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "platform").mkdir()
    (tmp_path / "platform" / "planted.py").write_text(PLANTED)
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    with pytest.raises(AssertionError, match="Whether this is noticed"):
        test_docstrings_open_with_a_verb_or_a_noun("platform")
    with pytest.raises(AssertionError, match="seat in The seat to take"):
        test_messages_and_help_use_words_that_users_know()
    tree = ast.parse(PLANTED)
    assert [line.split(": ")[1] for line in clauses(tree)] == [
        "Whether this is noticed.",
        "How much is allowed.",
        "What runs.",
        "Which are left.",
    ]
    assert sorted(line.split(" ")[1] for line in private_words(tree)) == ["agenda", "folded", "mend", "seat"]


def test_only_semicolons_of_prose_count() -> None:
    assert semicolons("One; two; `a; b` three;\n\n```\nx; y\n```\n") == 3
