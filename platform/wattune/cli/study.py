"""`plan` and `run`: from a search space to a study."""

import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich.console import Console

from wattune import api
from wattune.cli.shell import (
    NOTHING_FEASIBLE,
    STOP,
    JsonOption,
    LeaveOutOption,
    SpaceArgument,
    StorageOption,
    TensorboardOption,
    TrackingOption,
    WandbOption,
    answer,
    end_in_order,
    err,
    failed,
    feasible_code,
    out,
    print_error,
    print_json,
    print_line,
    print_note,
)
from wattune.cli.verbs import app
from wattune.cost.step_time.facts import SOFTWARE
from wattune.errors import SpaceError, TrackingError
from wattune.forced_exit import ended_in_time
from wattune.masking import without_secrets
from wattune.orchestrate import lost_cluster
from wattune.orchestrate.events import Preview
from wattune.plans.axes import AXES
from wattune.plans.engines import CAPABILITIES
from wattune.ranking.answer import answer_of
from wattune.storage.documents import yaml_tree
from wattune.storage.files import write_asked
from wattune.storage.parquet import encoded
from wattune.terminal.progress import StudyProgress
from wattune.tracking.destinations import out_of_reach
from wattune.tracking.store import ui_command, ui_url
from wattune.view import console as screen
from wattune.view.plans import candidates_view, estimate_view, forecast_view, rejections
from wattune.view.ranking import ranking_view

_STOPPED: Final = "stopped before the end; the same command continues"
"""The last line of `run` after a Ctrl-C, whenever it came."""

_STOPPING: Final = (
    "stopping: running trials end and run again later, then ranking and report are written; about 15 s, longer on a "
    "busy machine. Ctrl-C again ends at once"
)
"""Answer to a Ctrl-C, printed at once."""

_BY_FORCE: Final = "what did not end in time was ended by force"
"""The line after it where a part of it hung."""


@app.command()
def plan(
    space: SpaceArgument,
    estimate: Annotated[
        bool, typer.Option("--estimate", help="Predict memory, step time, power and temperature; needs no GPU.")
    ] = False,
    top: Annotated[int | None, typer.Option(min=1, help="With --estimate: the most promising plans only.")] = None,
    out_file: Annotated[
        Path | None, typer.Option("--out", help="With --estimate: write every plan to this Parquet file too.")
    ] = None,
    storage: StorageOption = None,
    as_json: JsonOption = False,
) -> None:
    """Lists what a search space would try, what a rule rejects, and which combinations are equivalent."""
    planned = api.plan(space)
    candidates = planned.candidates
    if estimate:
        candidates.require_kept()
        _print_estimates(planned, top, out_file, storage, as_json=as_json)
        return
    if top is not None or out_file is not None:
        raise typer.BadParameter("--top and --out are of estimates; give --estimate too")
    if as_json:
        print_json(candidates.to_json() | {"num_trials": planned.num_trials, "warnings": list(planned.warnings)})
    else:
        screen.show(out, *candidates_view(candidates))
        if planned.num_trials < len(planned.kept):
            print_line(f"{planned.num_trials} of {len(planned.kept)} kept are tried (search.num_trials)")
        _print_warnings(out, planned)
    candidates.require_kept()


def _print_estimates(
    planned: api.StudyPlan, top: int | None, out_file: Path | None, storage: str | None, *, as_json: bool
) -> None:
    found = api.forecast(planned, storage=storage)
    if out_file is not None:
        write_asked(out_file, encoded(found.table()).to_pybytes())
    if as_json:
        by_rules, estimated = planned.candidates.to_json(), found.to_json(top)
        rejected = [*by_rules["rejected"], *estimated["rejected"]]
        print_json({**by_rules, **estimated, "rejected": rejected})
    else:
        screen.show(out, *forecast_view(found, **({} if top is None else {"top": top})), rejections(planned.rejected))
        if out_file is not None:
            print_line(f"all {len(found.kept)} are in {out_file}")
    if not found.kept:
        err.print("nothing fits; use more devices, or add tp, pp, sharding or recompute to the space", style="yellow")
        raise typer.Exit(NOTHING_FEASIBLE)


@app.command()
def estimate(
    model: Annotated[str, typer.Argument(help="Catalog model, or a config.json of Hugging Face.")],
    cluster: Annotated[str, typer.Argument(help='Such as "4x8 h200_sxm", or as `wattune doctor` writes it.')],
    settings: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[NAME=VALUE]...",
            help="Axes of the plan, such as tp=8 pp=2, and the workload's seq_len, global_batch_size, mode.",
        ),
    ] = None,
    engine: Annotated[
        str, typer.Option(help=f"{', '.join(CAPABILITIES)}; only to estimate: {', '.join(SOFTWARE)}.")
    ] = "torch",
    leave_out: LeaveOutOption = None,
    storage: StorageOption = None,
    as_json: JsonOption = False,
) -> None:
    """Predicts one plan's step, memory, power and temperature, with intervals and parts; needs no GPU."""
    found = api.estimate(
        model=model,
        cluster=_setting("cluster", cluster) if cluster.startswith("{") else cluster,
        engine=engine,
        leave_out=leave_out or (),
        storage=storage,
        **settings_of(settings or ()),
    )
    answer(as_json, found.to_json(), estimate_view(found))
    if found.rule:
        raise typer.Exit(NOTHING_FEASIBLE)


_OWN: Final = {
    "model": "it first",
    "cluster": "it second",
    "engine": "--engine NAME",
    "leave_out": "--leave-out FEATURE",
    "storage": "--storage FOLDER",
}
"""Arguments of `estimate` that are no settings, and how to write them."""


def settings_of(texts: Sequence[str]) -> dict[str, Any]:
    """Reads `NAME=VALUE` arguments as a space has them: a number, a list, a mapping, or a name.

    Raises `SpaceError`: one has another form, a name comes twice, or it is an argument of its own.
    """
    pairs = [text.partition("=") for text in texts]
    counts = Counter(name for name, _, _ in pairs if name not in _OWN)
    wrong = [f"{''.join(one)}: write NAME=VALUE, such as tp=8" for one in pairs if one[0] in counts and not all(one)]
    wrong += [f"{name}: given {count} times; keep one" for name, count in counts.items() if count > 1]
    wrong += [f"{name}: an argument of its own; write {_OWN[name]}" for name, _, _ in pairs if name in _OWN]
    if wrong:
        raise SpaceError.from_problems("estimate", wrong)
    return {name: _setting(name, value) for name, _, value in pairs}


def _setting(name: str, text: str) -> Any:
    if name in AXES and AXES[name].kind == "choice":  # YAML reads some names as truth values
        return text
    try:
        return yaml_tree(text)[1]
    except ValueError:
        return text


@app.command()
def run(
    space: SpaceArgument,
    storage: StorageOption = None,
    address: Annotated[
        str | None, typer.Option(help="Ray cluster; else $RAY_ADDRESS, else one on this machine.")
    ] = None,
    tracking_uri: TrackingOption = None,
    wandb: WandbOption = None,
    tensorboard: TensorboardOption = None,
    max_hours: Annotated[
        float | None,
        typer.Option(min=0.0, help="Hours on the clock for this call; no trial starts that is expected to end later."),
    ] = None,
    max_trials: Annotated[int | None, typer.Option(help="Trials this call starts at most, repeats counted.")] = None,
    gpu_hours: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            help="Device-hours that the trials of this call may take together; none starts that would take more.",
        ),
    ] = None,
    deadline: Annotated[
        str | None,
        typer.Option(
            metavar="TIME",
            help="Time of day such as 07:00, or a date with time; no trial starts that is expected to end later.",
        ),
    ] = None,
    retry: Annotated[
        list[str] | None,
        typer.Option(
            metavar="STATUS",
            help=f"Run failed trials of this status again: {', '.join(api.RETRIABLE)}. May be given several times.",
        ),
    ] = None,
    until_decided: Annotated[
        bool,
        typer.Option(
            "--until-decided",
            help="After the search, repeat the most likely plans until the best is known, within the budget.",
        ),
    ] = False,
    try_all: Annotated[
        bool,
        typer.Option("--try-all", help="Run also the plans that are estimated to run out of memory (rule memory)."),
    ] = False,
    set_power_limits: Annotated[
        bool,
        typer.Option(
            "--set-power-limits", help="Set power limits, clocks and profiles that the space asks for; as root."
        ),
    ] = False,
    wait_nodes: Annotated[
        str | None,
        typer.Option(
            metavar="TIME",
            help="Longest wait for nodes, such as 30m; else as long as an autoscaler or another job may give them.",
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would be done; start nothing and write nothing.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Runs a study: real steps of every candidate, measured and ranked. Run again, it continues, also with more."""
    # Ray prints to standard output when a node dies; there the one object of `--json` stands alone.
    stray = redirect_stdout(sys.stderr) if as_json else nullcontext()
    asked: dict[str, Any] = {
        "storage": storage,
        "max_hours": max_hours,
        "max_trials": max_trials,
        "max_gpu_hours": gpu_hours,
        "deadline": deadline,
        "retry": retry or (),
        "until_decided": until_decided,
        "try_all": try_all,
    }
    with in_order():
        planned = api.plan(space)
        view = view_of(planned, err if as_json else out)
        _print_warnings(err if as_json else out, planned)
        if dry_run:
            view(found := api.preview(planned, **asked))
            (err if as_json else out).print("dry run: nothing was started, nothing was written")
            if as_json:
                print_json({"dry_run": True, "study": planned.name, **_as_json(found)})
            return
        for problem in out_of_reach(tracking_uri, wandb):
            print_note(problem)
        with stray, view:
            outcome = api.run_study(
                planned,
                address=address,
                tracking_uri=tracking_uri,
                wandb=wandb,
                tensorboard=tensorboard,
                set_power_limits=set_power_limits,
                wait_nodes=wait_nodes,
                listener=view,
                if_forced=partial(_show_forced, as_json=as_json),
                **asked,
            )
    raise typer.Exit(show(outcome, as_json=as_json))


def _print_warnings(console: Console, planned: api.StudyPlan) -> None:
    for warning in planned.warnings:
        console.print(f"note: {warning}", style="yellow", highlight=False, soft_wrap=True)


@contextmanager
def in_order() -> Iterator[None]:
    """Ends the process on Ctrl-C, a job's stop or a closed terminal with two lines instead of a traceback."""
    end_in_order(_STOPPING)
    try:
        with ended_in_time(_last_word, _heard, to_the_end=True):
            yield
    except KeyboardInterrupt:  # before a trial could run, while the report was made, or the second one
        err.print(_STOPPED)
        sys.exit(STOP.exit_code)


def _heard(number: int) -> None:
    """Says that the end has begun, where no lost cluster of Ray's began it."""
    if not lost_cluster.found():
        STOP.announce(number)


def _last_word(number: int) -> int:
    """Says why the process ends by force; returns its exit code, that of the signal unless Ray was lost."""
    lost = lost_cluster.error()
    if lost is None:
        err.print(_BY_FORCE)
        return 128 + number
    with redirect_stdout(sys.__stdout__):
        return failed(lost)


def _show_forced(outcome: api.StudyOutcome, *, as_json: bool) -> None:
    """Prints what a study has whose end is forced; of a lost cluster there is an error to tell instead."""
    if lost_cluster.error() is None:
        with redirect_stdout(sys.__stdout__):
            show(outcome, as_json=as_json)


def view_of(planned: api.StudyPlan, console: Console = out) -> StudyProgress:
    """Returns a view of a study for `wattune.run_study` to report to; enter it to see it live."""
    view = StudyProgress(console, planned.spec.question)
    STOP.say = view.stopping
    return view


_TOLD: Final = (
    "num_now num_references num_race num_finalists num_again device_s device_now_s measured estimated num_timeouts "
    "num_kept num_drawn"
)
"""Figures of a preview that are in its JSON by their own names."""


def _as_json(preview: Preview) -> dict[str, Any]:
    first = [{"trial_id": one.spec.trial_id, "role": one.role, "expected_s": one.expected_s} for one in preview.first]
    return {
        "num_trials": preview.num_left,
        **{name: getattr(preview, name) for name in _TOLD.split()},
        "done": {str(status): count for status, count in preview.done.items()},
        "space": preview.space_number,
        "changes": list(preview.changes),
        "first": first,
    }


def show(outcome: api.StudyOutcome, *, as_json: bool = False) -> int:
    """Prints the ranking, the places of report and tracking store, and how the study ended; returns the exit code.

    It is 0, 1 where the study did not end by itself, 128 and the signal's number where one stopped it (130 for Ctrl-C),
    or 3 where nothing is feasible. Raises `TrackingError`: results could not be sent to the tracking store or the
    storage's URL. Of a study that was stopped it is only printed: a moment's time may not have sufficed.
    """
    ranking, uri, problem = outcome.ranking, outcome.tracking_uri, _problem(outcome)
    stopped = outcome.ending == "interrupted"
    # Whoever serves the store knows its password; the line on the screen does not show it.
    uri = without_secrets(uri)
    ui = {"uri": uri, "command": ui_command(uri), "url": ui_url(uri, outcome.tracking_page)}
    if as_json:
        ended: dict[str, Any] = {"finished": outcome.finished, "ending": outcome.ending, "num_left": outcome.num_left}
        ended |= {"missing": list(outcome.missing), "stopped": list(outcome.stopped), "mlflow": ui}
        ended |= {"search_ended": outcome.search_ended, "report_problem": outcome.report_problem}
        if problem is not None:
            ended["error"] = {
                "what": without_secrets(str(problem)),
                "kind": type(problem).__name__,
                "exit_code": STOP.exit_code if stopped else problem.exit_code,
            }
        print_json(
            {"study": str(outcome.study.path), "answer": answer_of(ranking).to_json(), **ended, **ranking.to_json()}
        )
    else:
        screen.show(out, *ranking_view(ranking), rejections(outcome.candidates.rejected))
        if not outcome.report_problem:
            print_line(f"Report    {outcome.report_path}")
        for line in filter(None, (ui["command"], ui["url"])):
            print_line(f"MLflow UI {line}")
    _say_why(outcome)
    if problem is not None and not stopped:
        raise problem
    if stopped:
        if problem is not None:
            print_error(str(problem))
        return STOP.exit_code
    if outcome.ending in ("nodes", "failures"):
        return 1
    return feasible_code(ranking) if outcome.finished or ranking.trials else 0


def _problem(outcome: api.StudyOutcome) -> TrackingError | None:
    problems = list(filter(None, (outcome.tracking_problem, outcome.storage_problem)))
    if not problems:
        return None
    return TrackingError("\n".join([*problems, f"results are safe in {outcome.study.path}; run `wattune sync`"]))


def _say_why(outcome: api.StudyOutcome) -> None:
    """Prints why there is no report, and why a study ended before its end or its search before all was tried."""
    if outcome.report_problem:  # the study itself did not fail: this is no error
        print_note(f"{outcome.report_problem}; results are safe in {outcome.study.path}")
    if outcome.search_ended:
        err.print(f"search ended: {outcome.search_ended}", highlight=False, soft_wrap=True)
    if outcome.ending == "budget":
        err.print(f"the budget is used; {outcome.num_left} trial(s) are left, the same command goes on with them")
    elif outcome.ending == "nodes":
        for missing in outcome.missing:
            err.print(f"not run: {missing}", highlight=False, soft_wrap=True)
        err.print(f"{outcome.num_left} trial(s) wait for nodes; start them, the same command continues")
    elif outcome.ending == "failures":
        for stopped in outcome.stopped:
            err.print(f"stopped: {stopped}", highlight=False, soft_wrap=True)
        err.print(f"{outcome.num_left} trial(s) are left that failed, or would; the same command tries them again")
    elif not outcome.finished:
        err.print(_STOPPED)
