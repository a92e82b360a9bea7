"""The command line: one verb a function, each a thin skin over `wattune.api`.

Tables and progress are for people; `--json` prints one object on standard output and nothing else. Exit codes: 0 done,
1 failed, 2 wrong usage or input, 3 nothing feasible. Ctrl-C ends `run` with 1, its study not being finished, and the
others with 130.
"""

import errno
import json
import signal
import sys
from contextlib import nullcontext, redirect_stdout
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, Final

import typer
from rich.console import Console

from wattune import __version__, api
from wattune.doctor import examine
from wattune.errors import TrackingError, WattuneError
from wattune.ranking.order import Ranking, pareto_front
from wattune.ranking.table import to_csv, write_csv
from wattune.record.recorder import Output
from wattune.report.write import write_comparison
from wattune.terminal.progress import StudyProgress
from wattune.terminal.ranking import print_comparison, print_front, print_ranking
from wattune.terminal.recording import LiveView, print_recording
from wattune.terminal.tables import (
    print_calibration,
    print_candidates,
    print_catalog,
    print_findings,
    print_metrics,
    print_rejections,
)
from wattune.tracking.store import ui_command, ui_url

WRONG_INPUT: Final = 2
NOTHING_FEASIBLE: Final = 3

_STOPPED: Final = "stopped before the end; the same command continues"
"""What `run` says last after a Ctrl-C, whenever it came."""

_OF_THE_USER: Final = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.ENAMETOOLONG)
"""Errors of files that were named wrong: nothing may be written, or nothing can be."""

_OF_THE_MACHINE: Final = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE)
"""Errors a disk or a mount has at any moment; like those of the user no fault of the program, so no traceback."""

_UNSEEN_WIDTH: Final = 160
"""Columns of tables that go to a file or a pipe."""

# Reasons, names and paths are printed as they are: a bracket in them is no markup.
_out = Console(markup=False, width=None if sys.stdout.isatty() else _UNSEEN_WIDTH)
_err = Console(markup=False, stderr=True, width=None if sys.stderr.isatty() else _UNSEEN_WIDTH)

app = typer.Typer(
    name="wattune",
    help="Finds the fastest, or cheapest in energy, training configuration a power and cooling budget allows.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

SpaceArgument = Annotated[Path, typer.Argument(help="Search space file.", show_default=False)]
StudyArgument = Annotated[str, typer.Argument(help="A study's name, folder or URL.", show_default=False)]
StorageOption = Annotated[
    str | None,
    typer.Option(
        help="Folder or URL studies are kept in; else $WATTUNE_STORAGE, else ~/wattune-studies.", show_default=False
    ),
]
TrackingOption = Annotated[
    str | None, typer.Option(help="MLflow store; else mlflow.db in the storage folder.", show_default=False)
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]


def main() -> None:
    """Runs a command; every failure wattune can explain is one message and an exit code."""
    try:
        app()
    except WattuneError as error:
        _err.print(f"error: {error}", style="red", highlight=False, soft_wrap=True)
        sys.exit(error.exit_code)
    except OSError as error:
        if error.errno not in (*_OF_THE_USER, *_OF_THE_MACHINE):
            raise
        where = error.filename or "a file"
        _err.print(
            f"error: {where}: {error.strerror}; mend that place, or give --storage another folder",
            style="red",
            highlight=False,
            soft_wrap=True,
        )
        sys.exit(WRONG_INPUT if error.errno in _OF_THE_USER else 1)


def _print_json(data: Any) -> None:
    print(json.dumps(data, allow_nan=False))  # noqa: T201 - the one object `--json` promises


def _version(wanted: bool) -> None:
    if wanted:
        print(f"wattune {__version__}")  # noqa: T201
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    del version


@app.command()
def doctor(as_json: JsonOption = False) -> None:
    """Says what this machine has, what it lacks, and what follows."""
    findings = examine()
    if as_json:
        _print_json({"findings": [finding.to_json() for finding in findings]})
    else:
        print_findings(_out, findings)


@app.command()
def catalog(as_json: JsonOption = False) -> None:
    """Lists the devices and models search spaces can name, with sources."""
    if as_json:
        _print_json(api.catalog_json())
    else:
        print_catalog(_out)


@app.command()
def plan(space: SpaceArgument, as_json: JsonOption = False) -> None:
    """Lists what a search space would try, what a rule rejects, and which combinations are equivalent."""
    _, candidates = api.plan(space)
    if as_json:
        _print_json(candidates.to_json())
    else:
        print_candidates(_out, candidates)
    candidates.require_kept()


@app.command()
def run(
    space: SpaceArgument,
    storage: StorageOption = None,
    address: Annotated[
        str | None,
        typer.Option(help="Ray cluster; else $RAY_ADDRESS, else one on this machine.", show_default=False),
    ] = None,
    tracking_uri: TrackingOption = None,
    max_hours: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            help="Hours on the clock for this call; no trial starts that is expected to end later.",
            show_default=False,
        ),
    ] = None,
    max_trials: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Trials this call starts at most, repeats counted; 0 only says what would run.",
            show_default=False,
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Runs a study: real steps of every candidate, measured and ranked. Run again, it continues."""
    _end_in_order()
    console = _err if as_json else _out
    # Ray prints to standard output when a node dies; there the one object of `--json` stands alone.
    stray = redirect_stdout(sys.stderr) if as_json else nullcontext()
    try:
        study_spec, candidates = api.plan(space)
        with stray, StudyProgress(console, study_spec.objective, study_spec.constraints) as progress:
            outcome = api.run_study(
                space,
                storage=storage,
                address=address,
                tracking_uri=tracking_uri,
                max_hours=max_hours,
                max_trials=max_trials,
                listener=progress,
            )
    except KeyboardInterrupt:  # before a trial could run, while the report was made, or the second one
        _err.print(_STOPPED)
        raise typer.Exit(1) from None
    ranking = outcome.ranking
    uri = outcome.tracking_uri
    ui = {"uri": uri, "command": ui_command(uri), "url": ui_url(uri, outcome.tracking_page)}
    if as_json:
        ended: dict[str, Any] = {"finished": outcome.finished, "ending": outcome.ending, "num_left": outcome.num_left}
        ended |= {"missing": list(outcome.missing), "mlflow": ui}
        _print_json({"study": str(outcome.study.path), **ended, **ranking.to_json()})
    else:
        print_ranking(_out, ranking)
        if candidates.rejected:
            print_rejections(_out, [{"rule": one.rule, "reason": one.reason} for one in candidates.rejected])
        _out.print(f"Report    {outcome.report_path}", highlight=False, soft_wrap=True)
        for line in filter(None, (ui["command"], ui["url"])):
            _out.print(f"MLflow UI {line}", highlight=False, soft_wrap=True)
    if outcome.ending == "budget":
        _err.print(f"the budget is used; {outcome.num_left} trial(s) are left, the same command goes on with them")
    elif outcome.ending == "nodes":
        for missing in outcome.missing:
            _err.print(f"not run: {missing}", highlight=False, soft_wrap=True)
        _err.print(f"{outcome.num_left} trial(s) wait for nodes; start them, the same command continues")
    elif not outcome.finished:
        _err.print(_STOPPED)
    problems = list(filter(None, (outcome.tracking_problem, outcome.storage_problem)))
    if problems:
        raise TrackingError("\n".join([*problems, f"results are safe in {outcome.study.path}; run `wattune sync`"]))
    if outcome.ending in ("nodes", "interrupted"):
        raise typer.Exit(1)
    if outcome.finished or ranking.trials:
        _end(ranking)


@app.command()
def rank(
    study: Annotated[list[str], typer.Argument(help="Names or folders of one or several studies.", show_default=False)],
    storage: StorageOption = None,
    tracking_uri: Annotated[
        str | None, typer.Option(help="Read results from this MLflow store instead.", show_default=False)
    ] = None,
    objective: Annotated[
        str | None,
        typer.Option(help='Instead of the study\'s own, e.g. "minimize energy_per_token_j".', show_default=False),
    ] = None,
    constraint: Annotated[
        list[str] | None, typer.Option(help="Instead of the study's own; may be repeated.", show_default=False)
    ] = None,
    where: Annotated[
        list[str] | None,
        typer.Option(help='Rank only trials that hold this, e.g. "mfu_frac > 0.3".', show_default=False),
    ] = None,
    quality: Annotated[
        str,
        typer.Option(help="Rank only trials of this quality or better: indicative, publishable.", show_default=False),
    ] = "",
    pareto: Annotated[
        str | None,
        typer.Option(help="Two metrics, as a,b: the feasible trials no other beats in both.", show_default=False),
    ] = None,
    top: Annotated[int | None, typer.Option(min=1, help="Rows of each kind at most.", show_default=False)] = None,
    csv: Annotated[
        Path | None,
        typer.Option(help="Write every trial to this file too, a line each; - is standard output.", show_default=False),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Ranks trials: feasible in order, infeasible with what fails, unknown with what is missing."""
    metrics = [name.strip() for name in pareto.split(",")] if pareto else []
    if pareto and len(metrics) != 2:
        raise typer.BadParameter(f'got "{pareto}"; name two metrics, such as tokens_per_s,energy_per_token_j')
    to_screen = csv is not None and str(csv) == "-"
    if as_json and to_screen:
        raise typer.BadParameter("--json and --csv - both want standard output; give --csv a file")
    ranking = api.rank(
        study,
        storage=storage,
        tracking_uri=tracking_uri,
        objective=objective,
        constraints=constraint,
        where=where or (),
        least_quality=quality,
    )
    front = pareto_front(ranking.feasible, *metrics) if metrics else []
    if csv is not None and not to_screen:
        write_csv(ranking, csv)
    if to_screen:
        print(to_csv(ranking), end="")  # noqa: T201 - what was asked for
    elif as_json:
        _print_json(ranking.to_json() | ({"pareto": [row.to_json() for row in front]} if metrics else {}))
    else:
        print_ranking(_out, ranking, top=top)
        if metrics:
            print_front(_out, front, metrics)
    _end(ranking)


@app.command()
def compare(
    a: Annotated[str, typer.Argument(help="A trial: STUDY:TRIAL_ID, or its folder.", show_default=False)],
    b: Annotated[str, typer.Argument(help="Another one, of this or another study.", show_default=False)],
    storage: StorageOption = None,
    html: Annotated[Path | None, typer.Option(help="Write it as a page to this file.", show_default=False)] = None,
    as_json: JsonOption = False,
) -> None:
    """Shows which parts of a step make one trial faster or leaner than another."""
    comparison = api.compare(a, b, storage=storage)
    if html is not None:
        write_comparison(comparison, html)
    if as_json:
        _print_json(comparison.to_json())
    else:
        print_comparison(_out, comparison)


@app.command()
def report(
    study: StudyArgument,
    storage: StorageOption = None,
    figures: Annotated[
        Path | None,
        typer.Option(help="Write every figure as PNG and SVG to this folder too; needs Chrome.", show_default=False),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Writes a study's report.html anew."""
    folder = api.load_study(study, storage=storage, whole=True)
    path = api.report(folder)
    images = api.figures(folder, figures) if figures is not None else []
    if as_json:
        _print_json({"report": str(path), "figures": [str(image) for image in images]})
    else:
        for written in (path, *images):
            _out.print(str(written), highlight=False, soft_wrap=True)


@app.command()
def analyze(
    folder: Annotated[str, typer.Argument(help="A trial's or a recording's folder or URL.", show_default=False)],
    as_json: JsonOption = False,
) -> None:
    """Recomputes metrics and quality of a trial or recording from its folder alone."""
    analysis = api.analyze(folder)
    summary = analysis.summary
    if as_json:
        _print_json(analysis.to_json())
    else:
        verdict = f"quality: {summary.quality}" + (
            f" ({', '.join(summary.quality_reasons)})" if summary.quality_reasons else ""
        )
        print_metrics(_out, folder, summary.metrics, "\n".join([verdict, *analysis.notes]))


@app.command(context_settings={"allow_interspersed_args": False})
def record(
    command: Annotated[list[str] | None, typer.Argument(help="What to run, after --.", show_default=False)] = None,
    backend: Annotated[
        list[str] | None,
        typer.Option(
            help="host, nvml, amd_smi, replay:FOLDER or simulated[:DEVICE]; may be repeated. Else what is here.",
            show_default=False,
        ),
    ] = None,
    seconds: Annotated[
        float | None,
        typer.Option(
            min=0.1,
            max=1e9,  # thirty years, which nanoseconds in 64 bits still count
            help="Longest to record; the command is sent SIGTERM then. Without one: the machine.",
            show_default=False,
        ),
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="The recording's name; else time and program.", show_default=False)
    ] = None,
    storage: StorageOption = None,
    live: Annotated[bool, typer.Option("--live", help="Show every device while it runs.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Records any command's energy, peaks and throttling, without Ray; ends with the command's exit code."""
    # What wattune says goes where the command does not write: a pipe behind it gets the command's output alone.
    console = _err if command else _out
    view = LiveView(_err) if live else None
    output: Output = "log" if live and _err.is_terminal else "stderr" if as_json else "own"
    with view or nullcontext():
        recording = api.record(
            command or (),
            storage=storage,
            seconds=seconds,
            name=name,
            backends=backend or (),
            output=output,
            watcher=view,
        )
    if as_json:
        _print_json(recording.to_json())
    else:
        print_recording(console, recording)
    try:
        api.send_recording(recording, storage=storage)
    except TrackingError as error:  # the exit code is the command's
        _err.print(f"error: {error}", style="red", highlight=False, soft_wrap=True)
    raise typer.Exit(recording.exit_code or 0)


@app.command()
def calibrate(
    backend: Annotated[str, typer.Option(help="What to calibrate: nvml, or simulated on any machine.")] = "nvml",
    storage: StorageOption = None,
    as_json: JsonOption = False,
) -> None:
    """Measures what this machine's power sensors can tell and what reading them costs; some two minutes a GPU."""
    _end_in_order()
    with _err.status("starting") as status:
        found = api.calibrate(
            backend,
            storage=storage,
            listener=lambda what, done_frac: status.update(f"{what}, {done_frac:.0%} done"),
        )
    if as_json:
        _print_json({"calibrations": [{**one, "path": str(path)} for path, one in found]})
        return
    for path, one in found:
        print_calibration(_out, one)
        _out.print(f"kept in {path}; studies in this storage use it", markup=False, highlight=False, soft_wrap=True)


@app.command()
def sync(
    study: StudyArgument,
    storage: StorageOption = None,
    tracking_uri: TrackingOption = None,
    as_json: JsonOption = False,
) -> None:
    """Sends every finished trial the tracking store, and the storage's URL, do not have yet."""
    sent = api.sync(api.load_study(study, storage=storage, whole=True), storage=storage, tracking_uri=tracking_uri)
    if as_json:
        _print_json(sent)
        return
    _out.print(f"{sent['sent']} trial(s) sent")
    if "stored" in sent:
        _out.print(f"{sent['stored']} trial(s) stored")


def _end(ranking: Ranking) -> None:
    if ranking.best is None:
        _err.print("nothing is feasible; loosen a constraint or widen the space", style="yellow")
        raise typer.Exit(NOTHING_FEASIBLE)


def _end_in_order() -> None:
    """Ends on a job's stop and on a closed terminal as on Ctrl-C; `nohup` still keeps a terminal's end away."""
    signal.signal(signal.SIGTERM, _as_interrupt)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        signal.signal(signal.SIGHUP, _as_interrupt)


def _as_interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt
