"""The house: which files stand where, what they may load, and that the standard library is not shadowed."""

import ast
import importlib.util
import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Collection
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "platform" / "wattune"

NAMES_OF_NOTHING = {"util", "utils", "helper", "helpers", "common", "misc", "tools", "base", "shared", "stuff"}
"""Names of a file that do not say what is in it."""

LONGEST_FILE_LINES = 500

PURE = (
    "units errors clock field_types schema metrics intervals objective trial run workload fidelity storage "
    "steps steps.process spans callbacks catalog plans cost cost.memory cost.step_time fitting analysis "
    "analysis.metrics analysis.signals search search.strategies ranking projection placement telemetry telemetry.files "
    "telemetry.sampler telemetry.nvml telemetry.amd_smi simulation foreign recording recording.serving "
    "workers.command terminal.recording"
)
VENDORS = (
    "ray",
    "torch",
    "mlflow",
    "plotly",
    "pynvml",
    "amdsmi",
    "optuna",
    "deepspeed",
    "megatron",
    "torchao",
    "wandb",
    "tensorboardX",
)


@pytest.fixture(scope="module")
def trees() -> dict[Path, ast.Module]:
    """Every file of the package, parsed once; not kept beyond this module."""
    return {path: ast.parse(path.read_text()) for path in PACKAGE.rglob("*.py")}


def test_every_folder_is_a_package_and_every_file_says_what_it_is(trees: dict[Path, ast.Module]) -> None:
    folders = {path.parent for path in trees}
    assert [folder for folder in folders if not (folder / "__init__.py").exists()] == []
    assert [path for path in trees if path.stem in NAMES_OF_NOTHING] == []
    assert [path for path, tree in trees.items() if not (ast.get_docstring(tree) or "").strip()] == []


def test_every_unit_test_lies_where_its_subject_does() -> None:
    """`tests/unit/a` tests the room `wattune/a`: so `make test ROOM=a` finds the tests of a room."""
    unit = ROOT / "tests" / "unit"
    rooms = {path.parent.relative_to(unit) for path in unit.rglob("test_*.py")} - {Path("benchmarks")}
    assert [room for room in rooms if not (PACKAGE / room).is_dir()] == []


def test_no_file_is_two_things() -> None:
    lengths = {path.relative_to(ROOT).as_posix(): len(path.read_text().splitlines()) for path in PACKAGE.rglob("*.py")}
    assert {path: lines for path, lines in lengths.items() if lines > LONGEST_FILE_LINES} == {}


def public_types(tree: ast.Module) -> set[str]:
    """Lists the classes and the aliases of types that a module defines, without private ones."""
    names = set()
    for one in tree.body:
        if isinstance(one, ast.ClassDef):
            names.add(one.name)
        elif isinstance(one, ast.AnnAssign) and ast.unparse(one.annotation) == "TypeAlias":
            names.add(ast.unparse(one.target))
        elif isinstance(one, ast.Assign) and isinstance(
            one.value, ast.Subscript | ast.BinOp | ast.Name | ast.Attribute
        ):
            names |= {ast.unparse(target) for target in one.targets}
    return {name for name in names if name[:1].isupper() and not name.isupper()}


def test_a_name_of_a_type_means_one_thing(trees: dict[Path, ast.Module]) -> None:
    count = Counter(name for tree in trees.values() for name in public_types(tree))
    assert {name for name, times in count.items() if times > 1} == set()


CELL = re.compile(r"`(\w+)`")


def rooms_of_the_map() -> dict[str, set[str]]:
    """Imports that each room on the map may have beside what all may, by room."""
    text = (ROOT / "ARCHITECTURE.md").read_text().partition("## The way of data")[2]
    rows = [line.split("|") for line in text.splitlines() if re.match(r"\| \d+ \|", line)]
    return {room: set(CELL.findall(row[5])) for row in rows for room in CELL.findall(row[2])}


def rooms_imported_by(room: str, trees: dict[Path, ast.Module]) -> set[str]:
    inside = [tree for path, tree in trees.items() if path.is_relative_to(PACKAGE / room)]
    modules = [node.module or "" for tree in inside for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    return {module.split(".")[1] for module in modules if module.startswith("wattune.")} - {room}


def test_rooms_import_what_the_map_says(trees: dict[Path, ast.Module]) -> None:
    layers = (ROOT / ".importlinter").read_text().partition("    fidelity\n")[2].partition("[importlinter")[0]
    below = {"fidelity", *re.findall(r"\w+", layers)}
    rooms = rooms_of_the_map()
    assert len(rooms) == 14 and "ray" not in below
    for room in set(rooms) - {"report", "terminal", "tracking"}:  # those may import all that stands below them
        assert rooms_imported_by(room, trees) - below <= rooms[room], room


UNSAFE_MODULES = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "pty"}
UNSAFE_CALLS = {
    "eval", "exec", "os.system", "os.popen", "subprocess.getoutput", "subprocess.getstatusoutput", "yaml.load",
    "yaml.unsafe_load", "yaml.full_load", "yaml.load_all", "torch.load", "pd.read_pickle", "pandas.read_pickle",
}  # fmt: skip
UNSAFE_OPTIONS = {"shell", "allow_pickle"}


def unsafe(tree: ast.Module) -> list[str]:
    """Lists what runs data as a program: pickles, evaluation, shells, YAML's objects."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [one.name for one in node.names if one.name.split(".")[0] in UNSAFE_MODULES]
        elif isinstance(node, ast.ImportFrom):
            found += [node.module] if (node.module or "").split(".")[0] in UNSAFE_MODULES else []
        elif isinstance(node, ast.Call):
            called = ast.unparse(node.func) if isinstance(node.func, ast.Name | ast.Attribute) else ""
            found += [called] if called in UNSAFE_CALLS else []
            options = [one for one in node.keywords if one.arg in UNSAFE_OPTIONS]
            found += [
                str(one.arg) for one in options if not (isinstance(one.value, ast.Constant) and not one.value.value)
            ]
    return found


def test_nothing_of_ours_unpickles_evaluates_or_asks_a_shell(trees: dict[Path, ast.Module]) -> None:
    found = {path.relative_to(ROOT).as_posix(): unsafe(tree) for path, tree in trees.items()}
    assert {path: names for path, names in found.items() if names} == {}
    written = (
        "import pickle\nfrom shelve import open\neval(a)\nrun(b, shell=c)\nyaml.load(d)\nnp.load(e, allow_pickle=True)"
    )
    assert len(unsafe(ast.parse(written))) == 6
    assert unsafe(ast.parse("run(b, shell=False)\nyaml.safe_load(d)\nmodel.eval()")) == []


def test_the_standard_library_platform_is_not_shadowed() -> None:
    assert not (ROOT / "platform" / "__init__.py").exists()
    code = "import platform, uuid, sys; print(platform.__file__)"
    seen = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True, timeout=30
    ).stdout.strip()
    assert not Path(seen).is_relative_to(ROOT / "platform"), seen


def loaded_by(parts: dict[str, list[str]], libraries: Collection[str]) -> dict[str, list[str]]:
    """Returns the parts that load libraries beyond those of the parts before them, with these; all in one process."""
    code = (
        "import importlib, json, sys\nfound, before = {}, set()\n"
        f"for part, modules in {parts!r}.items():\n"
        "    for name in modules: importlib.import_module(name)\n"
        f"    loaded = {{name for name in {sorted(libraries)!r} if name in sys.modules}}\n"
        "    found[part], before = sorted(loaded - before), before | loaded\n"
        "print(json.dumps(found))"
    )
    seen = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=100)
    return {part: loaded for part, loaded in json.loads(seen.stdout).items() if loaded}


def test_pure_rooms_load_no_vendor_library() -> None:
    rooms = {}
    for name in PURE.split():
        folder = PACKAGE / name
        inside = [f"wattune.{name}.{path.stem}" for path in folder.glob("[!_]*.py")]
        rooms[name] = inside if folder.is_dir() else [f"wattune.{name}"]
    assert loaded_by(rooms, VENDORS) == {}


def modules_after(code: str) -> set[str]:
    """Returns the modules that are loaded after a program of one's own."""
    whole = f"import atexit, sys\natexit.register(lambda: print(*sys.modules, file=sys.stderr))\n{code}"
    seen = subprocess.run([sys.executable, "-c", whole], capture_output=True, text=True, check=True, timeout=60)
    return set(seen.stderr.split())


def test_a_command_waits_for_no_heavy_library_before_it_needs_one() -> None:
    from wattune.cli.verbs import VERBS

    verbs = ("rank", "compare", "report", "analyze", "plan", "suggest", "export", "record")
    heavy = {"ray", "torch", "mlflow", "pandas", "plotly", "optuna", "scipy"}
    modules = {verb: [f"wattune.cli.{VERBS[verb][0]}"] for verb in verbs}
    assert loaded_by(modules, heavy) == {}
    assert loaded_by({"a room that does": ["scipy"]}, heavy) == {"a room that does": ["scipy"]}


@pytest.mark.parametrize("arguments", [["--help"], ["--version"]])
def test_what_names_no_verb_loads_none(arguments: list[str]) -> None:
    """`--help` is read while one types: it loads the list of verbs and what prints it."""
    code = f"sys.argv = ['wattune', *{arguments!r}]\nfrom wattune.cli.verbs import app\nimport wattune.cli.shell\n"
    loaded = modules_after(f"{code}try: app()\nexcept SystemExit: pass")
    rooms = {name.split(".")[1] for name in loaded if name.startswith("wattune.")}
    assert rooms == {"cli", "deadline", "errors", "forced_exit", "lazy_names", "masking", "version"}
    assert {name for name in loaded if name.startswith("wattune.cli.")} == {"wattune.cli.shell", "wattune.cli.verbs"}
    assert loaded & {"numpy", "pyarrow", "pydantic", "yaml", "asyncio"} == set()


def test_a_shell_completes_words_of_a_verb_without_the_others() -> None:
    code = (
        "import os\nos.environ |= {'_WATTUNE_COMPLETE': 'complete_bash', 'COMP_WORDS': 'wattune export --t', "
        "'COMP_CWORD': '2'}\nfrom wattune.cli.verbs import app\nimport wattune.cli.shell\n"
        "try: app(prog_name='wattune')\nexcept SystemExit: pass"
    )
    loaded = modules_after(code)
    assert {name for name in loaded if name.startswith("wattune.cli.")} == {
        "wattune.cli.shell",
        "wattune.cli.verbs",
        "wattune.cli.export",
    }


def test_name_to_class_tables_name_classes_that_exist_and_stay_in_their_room() -> None:
    from wattune.engines.registry import ENGINES
    from wattune.telemetry.registry import BACKENDS

    for table, room in ((ENGINES, "wattune.engines."), (BACKENDS, "wattune.telemetry.")):
        for target in table.values():
            module_name, _, class_name = target.partition(":")
            assert module_name.startswith(room)
            spec = importlib.util.find_spec(module_name)
            assert spec is not None and spec.origin is not None
            assert f"class {class_name}" in Path(spec.origin).read_text()
