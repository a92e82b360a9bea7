"""The program of an experiment that runs one study: its arguments, its live view, its table, its exit code."""

import argparse
import ast
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "platform"))  # a job's nodes need the dependencies, not an installed wattune

import wattune  # noqa: E402 - the path comes first
from wattune.cli.shell import exit_code_of  # noqa: E402
from wattune.cli.study import in_order, show, view_of  # noqa: E402


def ask(path: str) -> int:
    """Runs the experiment of a file as `wattune experiments run` does; what follows the file are its options."""
    from wattune.cli.verbs import app

    place, options = Path(path).resolve(), sys.argv[1:]
    if {"-h", "--help"} & {*options}:
        print(ast.get_docstring(ast.parse(place.read_text())))
    arguments = ["experiments", "run", place.stem, "--folder", str(place.parent), *options]
    return exit_code_of(lambda: app(arguments))


def main(question: str, space: str) -> int:
    """Runs a study and returns the exit code of `wattune run`.

    Args:
        question: The experiment's docstring, which its help shows.
        space: The search space that it runs unless another is named, from the root of the repository.
    """
    parser = argparse.ArgumentParser(description=question, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("space", nargs="?", default=space, help="search space file")
    parser.add_argument("--storage", help="folder or URL that results go to")
    arguments = parser.parse_args()

    def run() -> int:
        with in_order():
            planned = wattune.plan(ROOT / arguments.space)
            with view_of(planned) as view:
                outcome = wattune.run_study(planned, storage=arguments.storage, listener=view)
        return show(outcome)

    return exit_code_of(run)
