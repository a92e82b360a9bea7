"""`import`: a recording of logs that other tools wrote."""

from itertools import groupby
from pathlib import Path
from typing import Annotated

import typer

from wattune import api
from wattune.cli.machine import recording_json
from wattune.cli.shell import JsonOption, StorageOption, out, print_json, print_line
from wattune.cli.verbs import app
from wattune.recording.window import STEADY
from wattune.terminal.recording import print_recording
from wattune.units import format_quantity


@app.command("import")
def import_logs(
    file: Annotated[
        list[Path],
        typer.Argument(
            help="Logs of one run: of several tools, several nodes, or one after another; or an MLflow run's folder."
        ),
    ],
    name: Annotated[str | None, typer.Option(help="The recording's name; else that of the first file.")] = None,
    node: Annotated[
        list[str] | None, typer.Option(help="Node of the logs that name none: one, or one a file; else node0.")
    ] = None,
    timezone: Annotated[
        str | None, typer.Option(help="Zone of times that name none, such as Europe/Berlin; else UTC.")
    ] = None,
    interval: Annotated[
        float | None,
        typer.Option(metavar="SECONDS", min=1e-3, max=1e6, help="Time between readings, for a log without times."),
    ] = None,
    steps: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Log of the training run with times on its lines, or a CSV of step and time: its steps count.",
        ),
    ] = None,
    window: Annotated[
        str, typer.Option(help="With --steps: what the figures are of, as for record: steady, command, steps:20:100.")
    ] = STEADY,
    tokens_per_step: Annotated[
        float | None, typer.Option(help="With --steps: tokens of a step over all ranks, where the log does not tell.")
    ] = None,
    storage: StorageOption = None,
    as_json: JsonOption = False,
) -> None:
    """Makes a recording of other tools' logs: power, energy, temperatures, clocks.

    For example:

      wattune import gpus.csv

      wattune import node0.csv node1.csv --name baseline --steps train.log
    """
    if steps is None and (window != STEADY or tokens_per_step is not None):
        raise typer.BadParameter("--window and --tokens-per-step are of steps; give --steps FILE too")
    run, imported = api.import_logs(
        file,
        storage=storage,
        name=name,
        nodes=node or (),
        timezone=timezone,
        interval_s=interval,
        steps=steps,
        window=window,
        tokens_per_step=tokens_per_step,
    )
    if as_json:
        print_json(recording_json(run) | imported)
        return
    print_recording(out, run)
    for column, windows in groupby(sorted(imported["energies"].items(), key=_column), _column):
        finest_s = max((one.get("finest_window_s", 0.0) for _, one in windows), default=0.0)
        if finest_s:
            print_line(f"{column}: its readings show no peak over less than {format_quantity('window_s', finest_s)}")
    for one in imported["imported"]:
        said = ", ".join(one["columns"]) or "left out, since a recording has none of its columns"
        print_line(f"{one['file']}: {one['format']}, {one['num_rows']} rows: {said}")
        for note in one["notes"]:
            print_line(f"  {note}")


def _column(one: tuple[str, object]) -> str:
    return one[0].rpartition("/")[2]
