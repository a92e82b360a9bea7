"""`frontier` and `suggest`: the price of a bound, and the next trials to measure. Both only read the study's folder."""

from typing import Annotated

import typer

from wattune import api
from wattune.cli.shell import JsonOption, StorageOption, StudyArgument, out, print_json
from wattune.cli.verbs import app
from wattune.view.console import show
from wattune.view.decisions import frontier_view, suggestions_view


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
    storage: StorageOption = None,
    as_json: JsonOption = False,
) -> None:
    """Shows what loosening a bound buys: the best measured plan at each value, and what is only predicted."""
    found = api.frontier(study, vary=vary, storage=storage)
    if as_json:
        print_json(found.to_json())
    else:
        show(out, *frontier_view(found))


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
