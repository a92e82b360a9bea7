"""`frontier`, `suggest`, `place` and `project`: prices of bounds, what to measure, where parts run, more nodes."""

import sys
from contextlib import nullcontext, redirect_stdout
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from wattune import api
from wattune.cli.shell import JsonOption, StorageOption, StudyArgument, answer, err, out
from wattune.cli.verbs import app
from wattune.errors import PlanError
from wattune.projection.projected import TRANSFERRED
from wattune.projection.scaling import CONFIDENCE_FRAC
from wattune.report.write import write_projections
from wattune.storage.files import write_whole
from wattune.view.decisions import clocks_view, frontier_view, suggestions_view
from wattune.view.placement import placement_view
from wattune.view.projection import projection_view


@app.command()
def frontier(
    study: StudyArgument,
    vary: Annotated[
        str | None,
        typer.Option(
            help='A bound at several values, e.g. "node_device_power_peak_1s_w <= 2000..2800 step 100"; else the '
            "study's bound on power over the measured range. power_limit_w: every 50 W that a device may draw."
        ),
    ] = None,
    clocks: Annotated[
        Path | None,
        typer.Option(
            help="Predict clocks by stage of the pipeline STUDY:TRIAL_ID, and write them to this .py file as Zeus "
            "reads them: as long a step as now, and beside it a file for each longer one."
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
    answer(as_json, found.to_json(), frontier_view(found))


def _clocks(trial: str, file: Path, vary: str | None, storage: str | None, as_json: bool) -> None:
    if vary is not None:
        raise PlanError("--vary is about a study, --clocks about one trial; give one of them")
    if file.suffix != ".py":
        raise PlanError(f"--clocks got {file}; Zeus reads clocks from a file that ends in .py")
    with err.status("starting") as status:
        found = api.stage_clocks(
            trial, storage=storage, listener=lambda what, done_frac: status.update(f"{what}, {done_frac:.0%} done")
        )
    for place, one in enumerate(found[1:]):
        write_whole(file.with_stem(f"{file.stem}_{place}") if place else file, one.zeus.encode())
    answer(as_json, [{"predicted": bool(one.clocks_mhz), **asdict(one)} for one in found], clocks_view(found))


@app.command()
def suggest(
    study: StudyArgument,
    budget: Annotated[str, typer.Option(help="Time for all of it, such as 90s, 10m or 1h30m.")] = "10m",
    storage: StorageOption = None,
    as_json: JsonOption = False,
) -> None:
    """Suggests what to measure next within a time, with the expected gain and the answer it may change."""
    found = api.suggest(study, budget=budget, storage=storage)
    answer(as_json, found.to_json(), suggestions_view(found))


@app.command()
def place(
    study: StudyArgument,
    horizon: Annotated[str, typer.Option(help="Time that the plan still has to run, such as 90m or 24h.")] = "24h",
    map_of: Annotated[str | None, typer.Option("--map", metavar="STUDY", help="Study whose map counts.")] = None,
    verify: Annotated[
        bool, typer.Option("--verify", help="Measure the best move and the present one in turn.")
    ] = False,
    storage: StorageOption = None,
    as_json: JsonOption = False,
) -> None:
    """Finds which ranks and layers should move between devices, the gain, and whether it pays for a restart.

    STUDY:TRIAL takes a trial instead of the study's best plan.
    """
    found, told = api.place(study, horizon=horizon, map_of=map_of, storage=storage), None
    if verify:
        from wattune.cli.study import in_order, view_of

        console = err if as_json else out
        with in_order(), redirect_stdout(sys.stderr) if as_json else nullcontext():
            told = api.verify(found, storage=storage, watch=lambda planned: view_of(planned, console))
    measured = {} if told is None else {"verified": {"what": told[0].what, **told[1].to_json()}}
    answer(as_json, asdict(found) | measured, placement_view(found, told))


@app.command()
def project(
    source: Annotated[str, typer.Argument(help="A study, a recording, or a CSV table of runs.")],
    to: Annotated[str | None, typer.Option(help="Nodes x devices, as 1024x8.")] = None,
    network: Annotated[str | None, typer.Option(help="Network there; else the same.")] = None,
    limit: Annotated[float | None, typer.Option(help="Watts of a device there.")] = None,
    inlet: Annotated[float | None, typer.Option(help="Coolant there, in degrees Celsius.")] = None,
    global_batch_size: Annotated[int | None, typer.Option(help="Batch; else it grows.")] = None,
    include: Annotated[str | None, typer.Option(help="transferred: order these too.")] = None,
    against: Annotated[str | None, typer.Option(help="CSV table measured there.")] = None,
    bound: Annotated[
        list[str] | None, typer.Option(help='Bound there, e.g. "cluster_swing_rms_w <= 2e5"; may be repeated.')
    ] = None,
    mtbf: Annotated[float | None, typer.Option(help="Hours between failures there.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Write a page with charts.")] = None,
    storage: StorageOption = None,
    as_json: JsonOption = False,
) -> None:
    """Projects measured plans to more nodes: step, speed, energy and power, with intervals that widen by distance."""
    if include not in (None, TRANSFERRED):
        raise typer.BadParameter(f'--include: got "{include}", allowed: {TRANSFERRED}')
    found = api.project(
        source,
        to=to,
        against=against,
        network=network,
        limit_w=limit,
        inlet_c=inlet,
        global_batch_size=global_batch_size,
        include_transferred=include is not None,
        mtbf_h=mtbf,
        bounds=bound or (),
        storage=storage,
    )
    if plot is not None:
        write_projections(found, plot)
    told = {"confidence_frac": CONFIDENCE_FRAC, "projections": [one.to_json() for one in found]}
    answer(as_json, told, projection_view(found))
