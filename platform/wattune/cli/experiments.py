"""`experiments`: what the files of `experiments/` ask, what came out, and running one of them."""

from pathlib import Path
from typing import Annotated

import typer

from wattune.api.bundles import check_bundle
from wattune.api.experiments import FOLDER, find_experiments, results_of, run_experiments, written_page
from wattune.cli.shell import JsonOption, StorageOption, out, print_json, print_line
from wattune.cli.study import in_order, view_of
from wattune.cli.verbs import app
from wattune.masking import printable
from wattune.storage.files import write_asked
from wattune.view.console import show
from wattune.view.effects import effect_text, experiments_view, repeat_text


@app.command()
def experiments(
    action: Annotated[
        str, typer.Argument(help="list, run NAME..., check ZIP, or page: write README.md anew.")
    ] = "list",
    names: Annotated[list[str] | None, typer.Argument(help="What to run or check.")] = None,
    folder: Annotated[Path, typer.Option(help="Folder of the experiments.")] = Path(FOLDER),
    results: Annotated[Path | None, typer.Option(help="Folder to write results to; else results in --folder.")] = None,
    short: Annotated[
        bool, typer.Option("--short", help="A tiny model on two processors, with simulated sensors; needs --results.")
    ] = False,
    storage: StorageOption = None,
    as_json: JsonOption = False,
) -> None:
    """Lists experiments with hardware, date, quality, answer and verdict; `run NAME` runs one, or several."""
    num = len(names or ())
    if not {"list": num == 0, "page": num == 0, "run": num > 0, "check": num == 1}.get(action, False):
        raise typer.BadParameter("write `experiments`, `experiments run NAME`, `experiments page`, or `... check ZIP`")
    if short and results is None:
        raise typer.BadParameter("--short says nothing of hardware, and does not stand among results; give --results")
    if action == "page":
        write_asked(folder / "README.md", written_page(folder))
    elif not names:
        questions = {one: declared["QUESTION"] for one, declared in find_experiments(folder).items()}
        found = results_of(folder)
        if as_json:
            print_json({one: {"question": text, "result": found.get(one)} for one, text in questions.items()})
        else:
            show(out, *experiments_view(questions, found))
    elif action == "check":
        told = check_bundle(Path(names[0]))
        differ = [f"{one}: {text}" for one, text in told["differences"].items()]
        derived = ", ".join(f"{number} {verdict}" for verdict, number in told["verdicts"].items()) or "no verdict"
        line = f"{told['name']}, wattune {told['version']}: {len(differ)} of {told['files']} files differ; {derived}"
        print_json(told) if as_json else print_line(printable("\n".join([*differ, line])))
        if differ:
            raise typer.Exit(2)
    else:
        watch = None if as_json else view_of
        with in_order():
            found = run_experiments(names, folder=folder, results=results, storage=storage, short=short, watch=watch)
        if as_json:
            print_json(found)
        for name, result in ({} if as_json else found).items():
            for claim in result["claims"]:
                print_line(f"{name}: {effect_text(claim)}, expected {claim['expected']}")
            if "@" in name:
                print_line(f"{name}: {repeat_text(results_of(folder, results)[name.partition('@')[0]], result)}")
            print_line(f"{name}: {result['evidence']}; {(results or folder / 'results') / name}.svg")
