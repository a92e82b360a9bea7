"""`frontier` and `suggest`: the price of a bound, and the next trials to measure. Both only read the study's folder."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from wattune import api
from wattune.cli.shell import JsonOption, StorageOption, StudyArgument, out, print_json
from wattune.cli.verbs import app
from wattune.errors import PlanError
from wattune.storage.files import write_whole
from wattune.view.console import show
from wattune.view.decisions import clocks_view, frontier_view, suggestions_view


@app.command()
def frontier(
    study: StudyArgument,
    vary: Annotated[
        str | None,
        typer.Option(
            help='A bound at several values, e.g. "node_device_power_peak_1s_w <= 2000..2800 step 100"; else the '
            "study's bound on power over the measured range.",
            show_default=False,
        ),
    ] = None,
    clocks: Annotated[
        Path | None,
        typer.Option(
            help="Predict clocks by stage of the pipeline STUDY:TRIAL_ID, and write them to this .py file as Zeus "
            "reads them: as long a step as now, and beside it a file for each longer one.",
            show_default=False,
        ),
    ] = None,
    storage: StorageOption = None,
    as_json: JsonOption = False,
) -> None:
    """Shows what loosening a bound buys: the best measured plan at each value, and what is only predicted."""
    if clocks is not None:
        _clocks(study, clocks, vary, storage, as_json)
        return
    found = api.frontier(study, vary=vary, storage=storage)
    if as_json:
        print_json(found.to_json())
    else:
        show(out, *frontier_view(found))


def _clocks(trial: str, file: Path, vary: str | None, storage: str | None, as_json: bool) -> None:
    if vary is not None:
        raise PlanError("--vary is about a study, --clocks about one trial; give one of them")
    if file.suffix != ".py":
        raise PlanError(f"--clocks got {file}; Zeus reads clocks from a file that ends in .py")
    found = api.stage_clocks(trial, storage=storage)
    for place, one in enumerate(found[1:]):
        write_whole(file.with_stem(f"{file.stem}_{place}") if place else file, one.zeus.encode())
    if as_json:
        print_json([{"predicted": bool(one.clocks_mhz), **asdict(one)} for one in found])
    else:
        show(out, *clocks_view(found))


@app.command()
def suggest(
    study: StudyArgument,
    budget: Annotated[str, typer.Option(help="Time for all of it, such as 90s, 10m or 1h30m.")] = "10m",
    storage: StorageOption = None,
    as_json: JsonOption = False,
) -> None:
    """Suggests what to measure next within a time, with the expected gain and the answer it may change."""
    found = api.suggest(study, budget=budget, storage=storage)
    if as_json:
        print_json(found.to_json())
    else:
        show(out, *suggestions_view(found))
