"""Links, headings, modules, files and make targets that the pages name exist, and old words are gone."""

import ast
import re
import sysconfig
from pathlib import Path

import pytest

from wattune.cli.verbs import VERBS

ROOT = Path(__file__).parents[2]
PACKAGES = ROOT / "platform"
FOLDERS = ("docs", "benchmarks", "experiments", "tests")
PAGES = sorted(
    {*ROOT.glob("*.md"), *(path for name in FOLDERS for path in (ROOT / name).rglob("*.md"))},
    key=lambda path: path.as_posix(),
)
_FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
_CODE = re.compile(r"`([^`\n]+)`")

OLD_WORDS = {
    r"fold(ed|s)? into": "equivalent to",
    r"is folded|are folded": "equivalent",
    r"ledgers?": "study folder, controller, delivery log",
    r"anchors?('s)?": "reference trial",
    r"agenda": "trial queue",
    r"witness(es)?": "facts provider",
    r"tickets?": "running trial",
    r"seats?": "worker place",
    r"halts?": "stop order",
    r"(?<!end )(?<!question )marks?": "span",
}
"""Words the project used before, by the one that took each one's place."""


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def prose(text: str) -> str:
    """The text without fenced blocks, which hold commands and drawings."""
    return _FENCE.sub("", text)


def slug(heading: str) -> str:
    """The anchor GitHub gives a heading."""
    plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
    return re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")


def headings(page: Path) -> set[str]:
    return {slug(heading) for heading in re.findall(r"^#+ (.+)$", prose(page.read_text()), re.MULTILINE)}


def broken_links(page: Path, text: str) -> list[str]:
    wrong = []
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(text)):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        found = page.parent / path if path else page
        if not found.exists() or (anchor and anchor not in headings(found)):
            wrong.append(target)
    return wrong


def defines(body: list[ast.stmt], name: str) -> ast.stmt | None:
    """The statement of a module or class that binds a name, also below `if TYPE_CHECKING`."""
    for statement in body:
        match statement:
            case ast.If(body=inner):
                if (found := defines(inner, name)) is not None:
                    return found
                continue
            case ast.FunctionDef(name=bound) | ast.AsyncFunctionDef(name=bound) | ast.ClassDef(name=bound):
                names = {bound}
            case ast.Assign(targets=targets):
                names = {target.id for target in targets if isinstance(target, ast.Name)}
            case ast.AnnAssign(target=ast.Name(id=bound)):
                names = {bound}
            case ast.ImportFrom(names=aliases) | ast.Import(names=aliases):
                names = {alias.asname or alias.name for alias in aliases}
            case _:
                names = set()
        if name in names:
            return statement
    return None


def module_exists(dotted: str) -> bool:
    """Finds a module, or a name in one, without importing it."""
    parts = dotted.split(".")
    for length in range(len(parts), 0, -1):
        base = PACKAGES.joinpath(*parts[:length])
        file = base / "__init__.py" if base.is_dir() else base.with_suffix(".py")
        if not file.exists():
            continue
        body = ast.parse(file.read_text()).body
        for name in parts[length:]:
            statement = defines(body, name)
            if statement is None:
                return False
            body = statement.body if isinstance(statement, ast.ClassDef) else []
        return True
    return False


def unknown_modules(text: str) -> list[str]:
    named = {dotted for code in _CODE.findall(prose(text)) for dotted in re.findall(r"^wattune(?:\.\w+)+", code)}
    suffixes = ("parquet", "yaml", "sbatch", "io", "format")  # files, and the key of their format
    return sorted(name for name in named if name.split(".")[1] not in suffixes and not module_exists(name))


def unknown_names(source: str) -> list[str]:
    """Names of this package that a piece of Python imports or reads, and that are nowhere."""
    tree, homes, used = ast.parse(source), dict[str, str](), set[str]()
    for node in ast.walk(tree):
        match node:
            case ast.ImportFrom(module=str(module), names=aliases) if module.split(".")[0] == "wattune":
                homes.update({alias.asname or alias.name: f"{module}.{alias.name}" for alias in aliases})
            case ast.Import(names=aliases):
                homes.update({a.asname or a.name: a.name for a in aliases if a.name.split(".")[0] == "wattune"})
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in homes:
            used.add(f"{homes[node.value.id]}.{node.attr}")
    return sorted(name for name in used | set(homes.values()) if not module_exists(name))


LIBRARIES = [
    Path(sysconfig.get_paths()["purelib"]) / library
    for library in ("", "deepspeed", "megatron", "megatron/core", "mlflow", "ray", "torch")
]
"""Folders of libraries whose files a page may name as the source of a fact."""


def unknown_files(text: str) -> list[str]:
    """Lists Python files, and paths below the repository's folders, that are nowhere.

    A file of an earlier commit is named as git names it, `b47a596:benchmarks/fp8.py`, or after `git checkout b47a596;`.
    """
    tops = ("platform", "benchmarks", "tests", "docs", "search_spaces", "experiments", "constraints")
    wrong = []
    for code in _CODE.findall(prose(text)):
        for word in code.split():
            path = word.strip(",;:()").split("::")[0]
            if re.search(r"[<>{}*?$]|^[a-z]+://|^-|^/|^~|^[0-9a-f]{7}:", path) or code.startswith("git checkout "):
                continue
            if path.endswith(".py") and "/" not in path:
                tops_with_code = ("platform", "benchmarks", "tests", "experiments")
                found = any(True for folder in tops_with_code for _ in (ROOT / folder).rglob(path))
            elif path.endswith(".py") or ("/" in path and path.split("/")[0] in tops):
                found = any((base / path).exists() for base in (ROOT, PACKAGES, PACKAGES / "wattune", *LIBRARIES))
            else:
                continue
            # A file of somebody else's training run is no file of this tree.
            if not found and path != "train.py":
                wrong.append(path)
    return wrong


def old_words(text: str) -> list[str]:
    plain = _CODE.sub("", prose(text))
    plain = re.sub(r"\]\([^)]*\)", "]", plain)
    return [match[0] for word in OLD_WORDS for match in re.finditer(rf"\b(?:{word})\b", plain, re.IGNORECASE)]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_what_a_page_names_exists_and_it_holds_no_old_word(page: Path) -> None:
    """Links with their headings, modules, files, names in Python, and targets of make."""
    text = page.read_text()
    assert broken_links(page, text) == []
    assert unknown_modules(text) == []
    assert unknown_files(text) == []
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert [name for block in blocks for name in unknown_names(block)] == []
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = re.findall(r"`make (\w+)", text) + re.findall(r"^\s*make (\w+)", text, re.MULTILINE)
    assert set(named) <= targets
    assert old_words(text) == []


@pytest.mark.parametrize("space", sorted((ROOT / "search_spaces").glob("*.yaml")), ids=name_of)
def test_comments_of_a_space_hold_no_old_word_and_name_files_that_exist(space: Path) -> None:
    comments = "\n".join(re.findall(r"(?:^|\s)#(.*)", space.read_text()))
    assert comments
    assert old_words(comments) == []
    named = re.findall(r"[\w/]+\.(?:yaml|py)", comments)
    assert [verb for verb in re.findall(r"wattune (\w+) +search_spaces", comments) if verb not in VERBS] == []
    assert [path for path in named if not (ROOT / path).exists()] == []


def test_wrong_pages_would_be_noticed() -> None:
    page = ROOT / "README.md"
    text = "[a](nowhere.md) [b](CONTRIBUTING.md#nothing-here) [c](CONTRIBUTING.md) [d](https://example.com)"
    assert broken_links(page, text) == ["nowhere.md", "CONTRIBUTING.md#nothing-here"]
    assert slug("## What `it` is: 2.5 %".lstrip("# ")) == "what-it-is-25-"
    assert unknown_modules("`wattune.lanes` and `wattune.analysis.quality.THRESHOLDS`") == ["wattune.lanes"]
    assert unknown_modules("`wattune.storage.measured.MeasuredFolder.nothing`") != []
    assert unknown_names("from wattune import api as a\nimport wattune.units\na.record(a.nothing)") == [
        "wattune.api.nothing"
    ]
    assert unknown_files("`workers/nobody.py` `tests/golden` `benchmarks/none.md` `store.py` `none.py`") == [
        "workers/nobody.py",
        "benchmarks/none.md",
        "none.py",
    ]
    assert unknown_files("`b47a596:benchmarks/none.py` `git checkout b47a596; python benchmarks/none.py`") == []
    assert old_words("A ledger of `marks`; each mark is folded into its anchor, at the end mark.") != []
    assert old_words("The `marks.parquet` of an older folder; an end mark; a market; [x](y.md#anchors)") == []
