"""`doctor`, `record` and `calibrate`: this machine, its sensors, and any command on it."""

import signal
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from wattune import api
from wattune.cli.shell import (
    JsonOption,
    StorageOption,
    TensorboardOption,
    WandbOption,
    answer,
    end_in_order,
    err,
    out,
    print_error,
    print_json,
    print_line,
    print_note,
)
from wattune.cli.verbs import app
from wattune.doctor import examine
from wattune.errors import PlanError, TrackingError
from wattune.ranking.assessment import is_simulated
from wattune.recording.recorder import ASSIGNMENT, OutputPlace, Watcher
from wattune.recording.serving.server import MetricsServer
from wattune.run import Recorded, Run
from wattune.steps.source import PRESETS
from wattune.storage.files import storage_path
from wattune.terminal.recording import LiveView, print_line_of, print_recording
from wattune.tracking.destinations import out_of_reach, trackers_of
from wattune.view.console import show
from wattune.view.machine import calibration_view, findings_table, links_view
from wattune.view.placement import map_view

_MINUTES: Final = 5.0

LONGEST_S: Final = 1e9
"""Longest recording: thirty years, which nanoseconds in 64 bits still count."""


@app.command()
def doctor(
    study: Annotated[str | None, typer.Argument(help="With --map its study; else the latest.")] = None,
    of_slots: Annotated[bool, typer.Option("--map", help="Print the map of device slots by a study's runs.")] = False,
    storage: StorageOption = None,
    as_json: JsonOption = False,
) -> None:
    """Says what this machine has, what it lacks, and what follows."""
    if of_slots:
        found = api.slot_map(study, storage=storage)
        answer(as_json, {"slots": found.rows, "notes": found.notes}, map_view(found))
        return
    if study is not None:
        raise PlanError(f"doctor looks at this machine and needs no {study}; give --map for the slots of that study")
    findings = examine()
    answer(as_json, {"findings": [asdict(finding) for finding in findings]}, [findings_table(findings)])


@app.command(context_settings={"allow_interspersed_args": False})
def record(
    command: Annotated[list[str] | None, typer.Argument(help="The command to record, after --.")] = None,
    backend: Annotated[
        list[str] | None,
        typer.Option(
            help="host, nvml, amd_smi, replay:FOLDER or simulated[:DEVICE]; may be repeated. Else all that is here."
        ),
    ] = None,
    seconds: Annotated[
        float | None,
        typer.Option(
            min=0.1,
            max=LONGEST_S,
            help="Longest to record; the command is sent SIGTERM then. Without a command: the machine.",
        ),
    ] = None,
    name: Annotated[str | None, typer.Option(help="The recording's name; else time and program.")] = None,
    storage: StorageOption = None,
    steps: Annotated[
        str,
        typer.Option(
            help="How the command's steps are found: auto, spans, transformers, lightning, optimizer, none, lines of "
            f'output as of {", ".join(PRESETS)}, or "pattern/ms:step time: ([0-9.]+)".'
        ),
    ] = "auto",
    window: Annotated[
        str,
        typer.Option(
            help="What the figures are of: steady (the steps without start-up, else all), command, 10s:50s, "
            "steps:20:100."
        ),
    ] = "steady",
    tokens_per_step: Annotated[
        float | None, typer.Option(help="Tokens of a step over all ranks, where the command does not tell.")
    ] = None,
    devices: Annotated[
        str | None,
        typer.Option(
            metavar="0,1|UUID,...",
            help="Devices that count, as nvidia-smi counts them, or all or none; else those of CUDA_VISIBLE_DEVICES or "
            "ROCm's variables, else those that the command's processes use. Others are kept and shown apart.",
        ),
    ] = None,
    env: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE",
            help="A variable of the command; may be repeated. NAME=VALUE before the program does the same.",
        ),
    ] = None,
    attach: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="PID",
            help="Record a job that runs already, with all that comes of it, until it ends or Ctrl-C.",
        ),
    ] = None,
    table: Annotated[bool, typer.Option("--table", help="Print the figures of every device, not one line.")] = False,
    live: Annotated[bool, typer.Option("--live", help="Show every device while it runs.")] = False,
    serve: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            help="Serve readings to Prometheus meanwhile, such as at 127.0.0.1:9400. Without a command: until Ctrl-C.",
        ),
    ] = None,
    wandb: WandbOption = None,
    tensorboard: TensorboardOption = None,
    serve_remote: Annotated[
        bool, typer.Option("--serve-remote", help="Let --serve take an address that other machines can reach.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Records any command's energy, peaks and throttling, without Ray; ends with the command's exit code.

    Finds the steps of a program that trains, so that start-up counts in no figure.

    For example:

      wattune record -- torchrun --nproc-per-node 4 train.py

      wattune record --window steps:20:100 -- torchrun --nproc-per-node 4 train.py
    """
    # What wattune says goes where the command does not write: a pipe behind it gets the command's output alone.
    console = err if command or attach else out
    trackers_of("recordings", storage_path(storage), wandb, tensorboard)  # what is missing is said before the command
    for problem in out_of_reach(None, wandb):
        print_note(problem)
    view = LiveView(err) if live else None
    output: OutputPlace = "log" if live and err.is_terminal else "stderr" if as_json else "own"
    server = _metrics_server(serve, remote=serve_remote)
    if (attach or (server is not None and not command)) and seconds is None:
        seconds = LONGEST_S
    with server or nullcontext(), view or nullcontext():
        recording = api.record(
            [*_variables(env or ()), *(command or ())],
            storage=storage,
            seconds=seconds,
            name=name,
            backends=backend or (),
            output=output,
            watcher=_together(*(one for one in (server, view) if one is not None)),
            steps=steps,
            window=window,
            tokens_per_step=tokens_per_step,
            devices=devices,
            attach=attach,
        )
    if as_json:
        print_json(recording_json(recording))
    elif table or live or not (command or attach):
        print_recording(console, recording)
    else:
        print_line_of(console, recording)
    try:
        api.send_recording(recording, storage=storage, wandb=wandb, tensorboard=tensorboard)
    except TrackingError as error:  # the exit code is the command's
        print_error(str(error))
    raise typer.Exit((recording.recorded and recording.recorded.exit_code) or 0)


def _variables(texts: Sequence[str]) -> Sequence[str]:
    """Returns `NAME=VALUE` of options. Raises `PlanError` where one is not of that form. All that are not are named."""
    if wrong := [text for text in texts if not ASSIGNMENT.match(text)]:
        named = ", ".join(f'"{text}"' for text in wrong)
        raise PlanError(f"--env: got {named}, allowed: NAME=VALUE; give for example --env NCCL_DEBUG=INFO")
    return texts


def recording_json(run: Run) -> dict[str, Any]:
    """Returns a recording as plain data; what was not measured is not in it."""
    facts = asdict(run.recorded or Recorded())
    return {
        "folder": facts.pop("place"),
        **{name: value for name, value in facts.items() if value is not None},
        "simulated": is_simulated(run),
        "metrics": dict(run.metrics),
        "quality": run.quality,
        "quality_reasons": list(run.quality_reasons),
    }


def _metrics_server(address: str | None, *, remote: bool) -> MetricsServer | None:
    """Opens the port that metrics are served at, and says where; None without an address.

    Raises `PlanError` where the address cannot be used, or only a permission was given and no address.
    """
    if address is None:
        if remote:
            raise PlanError("--serve-remote allows an address that --serve names; give --serve HOST:PORT too")
        return None
    server = MetricsServer(address, remote=remote)
    err.print(f"metrics at {server.url}", highlight=False, soft_wrap=True)
    if not server.loopback:
        err.print(
            "warning: other machines can reach this address; there is no password and no encryption", style="yellow"
        )
    return server


def _together(*watchers: Watcher) -> Watcher | None:
    """Makes one watcher of several; None of none."""

    def watch(sampler_folder: Path, start_mono_ns: int) -> None:
        for watcher in watchers:
            watcher(sampler_folder, start_mono_ns)

    return watch if watchers else None


@app.command()
def calibrate(
    backend: Annotated[
        str, typer.Option(help="Sensors to calibrate: nvml, or simulated on any machine; with --links nvml or cpu.")
    ] = "nvml",
    links: Annotated[
        bool, typer.Option("--links", help="Measure collectives and kernels instead, for `wattune fit`.")
    ] = False,
    minutes: Annotated[
        float, typer.Option(min=0.2, max=600, help="With --links: longest time. Ctrl-C keeps what it has.")
    ] = _MINUTES,
    out_folder: Annotated[
        str | None, typer.Option("--out", help="With --links: folder of the table; else in the storage.")
    ] = None,
    storage: StorageOption = None,
    as_json: JsonOption = False,
) -> None:
    """Measures what this machine's power sensors can resolve and what reading them costs; two minutes a GPU."""
    if not links and (out_folder is not None or minutes != _MINUTES):
        raise typer.BadParameter("--minutes and --out are of a sweep of links; give --links too")
    end_in_order()
    if links:
        _calibrate_links(backend, storage, out_folder, minutes, as_json=as_json)
        return
    with err.status("starting") as status:
        found = api.calibrate(
            backend,
            storage=storage,
            listener=lambda what, done_frac: status.update(f"{what}, {done_frac:.0%} done"),
        )
    if as_json:
        print_json({"calibrations": [{**one, "path": str(path)} for path, one in found]})
        return
    for path, one in found:
        show(out, *calibration_view(one))
        print_line(f"kept in {path}; studies in this storage use it")


def _calibrate_links(
    backend: str, storage: str | None, out_folder: str | None, minutes: float, *, as_json: bool
) -> None:
    with err.status("starting") as status:
        found = api.calibrate_links(
            backend,
            storage=storage,
            out=out_folder,
            minutes=minutes,
            listener=lambda what, used_frac: status.update(f"{what}, {used_frac:.0%} of the time used"),
        )
    if as_json:
        print_json({"path": str(found.path), "num_rows": found.table.num_rows, "ended": found.ended})
    else:
        show(out, *links_view(found.table))
        if found.ended:
            print_line(f"it ended before all was measured: {found.ended}")
        given = f" --links {found.path}" if out_folder else ""
        print_line(f"kept in {found.path}; use it with: wattune fit{given}")
    if found.interrupted:
        raise typer.Exit(128 + signal.SIGINT)
