"""Breaks functions of the platform at random, and counts how many of them the quick tests notice, at some commits.

    python tests/mutants.py HEAD b47a596 --count 40 --seed 1 --seconds 600

A mutant changes one thing of one function: a comparison, a sign, a boundary, `and` for `or`, a number, or what it
returns. Only functions that all commits have alike are taken, so that each mutant is the same everywhere. Its own
tests run first, `tests/unit/<room>/test_<module>.py`; where they pass, all quick ones of its room. Tests of a commit
that fail without a mutant are left out.
"""

import argparse
import ast
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from copy import deepcopy
from functools import cache
from pathlib import Path
from textwrap import indent

ROOMS = ("analysis", "cost", "fitting", "orchestrate/scheduling", "plans", "ranking", "search", "steps", "storage")
OLD_ROOMS = {"plans": "plan"}
"""Names that rooms had at earlier commits."""

COMPARED = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq}
COMPUTED = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult}
QUICK = ("-q", "-x", "-p", "no:cacheprovider", "-m", "not slow and not gpu and not ray")
TIMEOUT_S = 300
Functions = dict[str, tuple[Path, ast.FunctionDef]]
"""Functions by room and name, each with its file."""


def functions(tree: Path) -> Functions:
    """Finds the functions of the rooms that decide; a name that a room has twice is left out."""
    found: Functions = {}
    twice = set()
    for room in ROOMS:
        folder = tree / "platform" / "wattune" / room
        if not folder.exists():
            folder = folder.parent / OLD_ROOMS[room]
        for path in sorted(folder.rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.FunctionDef):
                    key = f"{room}:{node.name}"
                    twice |= {key} & found.keys()
                    found[key] = (path, node)
    return {key: one for key, one in found.items() if key not in twice}


def body_of(node: ast.FunctionDef) -> str:
    """Returns what a function does, without its docstring and its types."""
    plain = deepcopy(node)
    if ast.get_docstring(plain) is not None:
        plain.body = plain.body[1:] or [ast.Pass()]
    return "\n".join(map(ast.unparse, plain.body))


def changes(node: ast.FunctionDef) -> Iterator[ast.FunctionDef]:
    """Makes every mutant of a function."""
    start = 1 if ast.get_docstring(node) is not None else 0
    for number in range(sum(1 for each in node.body[start:] for _ in ast.walk(each))):
        mutant = deepcopy(node)
        one = [each for statement in mutant.body[start:] for each in ast.walk(statement)][number]
        if changed(one):
            yield ast.fix_missing_locations(mutant)


def changed(one: ast.AST) -> bool:
    """Changes a node where it is of a kind that decides; tells whether it did."""
    if isinstance(one, ast.Compare) and type(one.ops[0]) in COMPARED:
        one.ops[0] = COMPARED[type(one.ops[0])]()
    elif isinstance(one, ast.BinOp) and type(one.op) in COMPUTED and not isinstance(one.left, ast.Constant):
        one.op = COMPUTED[type(one.op)]()
    elif isinstance(one, ast.BoolOp):
        one.op = ast.And() if isinstance(one.op, ast.Or) else ast.Or()
    elif isinstance(one, ast.Constant) and type(one.value) in (int, float):
        one.value += 1
    elif isinstance(one, ast.Return) and one.value is not None and not isinstance(one.value, ast.Constant):
        one.value = ast.Constant(None)
    else:
        return False
    return True


@cache
def passes_unbroken(tree: Path, tests: Path) -> bool:
    """Tells whether tests pass without a mutant: of others that they fail with one says nothing."""
    return run(tree, tests) == 0


def run(tree: Path, tests: Path) -> int:
    """Runs quick tests of a tree; returns pytest's exit code."""
    command = ["timeout", str(TIMEOUT_S), sys.executable, "-m", "pytest", *QUICK, str(tests)]
    # With bytecode: each run would compile all modules anew.
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    environment = kept | {"PYTHONPATH": str(tree / "platform")}
    return subprocess.run(command, cwd=tree, env=environment, capture_output=True, check=False).returncode


def caught(tree: Path, path: Path, node: ast.FunctionDef, mutant: ast.FunctionDef) -> bool:
    """Runs a function's own tests with a mutant, and those of its room where they pass."""
    room = tree / "tests" / "unit" / path.parent.relative_to(tree / "platform" / "wattune")
    own = room / f"test_{path.stem}.py"
    return any(
        tests.exists() and passes_unbroken(tree, tests) and fails(tree, tests, path, node, mutant)
        for tests in (own, room)
    )


def fails(tree: Path, tests: Path, path: Path, node: ast.FunctionDef, mutant: ast.FunctionDef) -> bool:
    """Tells whether tests fail with a mutant, and takes it back."""
    text = path.read_text()
    lines = text.splitlines(keepends=True)
    first = min([node.lineno, *(each.lineno for each in node.decorator_list)]) - 1
    lines[first : node.end_lineno] = [indent(ast.unparse(mutant), " " * node.col_offset) + "\n"]
    path.write_text("".join(lines))
    try:
        return run(tree, tests) != 0
    finally:
        path.write_text(text)


def main() -> None:
    """Breaks the same functions at every commit; prints a line for each mutant and the counts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commits", nargs="+")
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=600, help="CPU time for each commit; the rest is left out")
    given = parser.parse_args()
    root = Path(__file__).parents[1]
    with tempfile.TemporaryDirectory() as folder:
        trees = {commit: Path(folder) / str(number) for number, commit in enumerate(given.commits)}
        for commit, tree in trees.items():
            subprocess.run(["git", "clone", "-q", "--shared", root, tree], check=True)
            subprocess.run(["git", "checkout", "-q", "--detach", commit], cwd=tree, check=True)
        by_tree = {commit: functions(tree) for commit, tree in trees.items()}
        first = by_tree[given.commits[0]]
        alike = [
            key
            for key, (_, node) in sorted(first.items())
            if all(key in other and body_of(other[key][1]) == body_of(node) for other in by_tree.values())
        ]
        dice = random.Random(given.seed)
        found: dict[str, list[bool]] = {commit: [] for commit in trees}
        spent_s = dict.fromkeys(trees, 0.0)
        for key in dice.sample(alike, len(alike)):
            mutants = {commit: list(changes(by_tree[commit][key][1])) for commit in trees}
            if not all(mutants.values()):
                continue
            number = dice.randrange(len(mutants[given.commits[0]]))
            for commit, tree in trees.items():
                before_s = cpu_s()
                path, node = by_tree[commit][key]
                found[commit].append(caught(tree, path, node, mutants[commit][number]))
                spent_s[commit] += cpu_s() - before_s
            said = {commit: "caught" if one[-1] else "survived" for commit, one in found.items()}
            sys.stdout.write(f"{time.strftime('%H:%M:%S')} {key} {number}: {json.dumps(said)}\n")
            sys.stdout.flush()
            if len(found[given.commits[0]]) >= given.count or max(spent_s.values()) >= given.seconds:
                break
    for commit, one in found.items():
        sys.stdout.write(f"{commit}: {sum(one)} of {len(one)} caught, {spent_s[commit]:.0f} CPU seconds\n")


def cpu_s() -> float:
    """Returns the CPU time of all processes that were started and have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    main()
