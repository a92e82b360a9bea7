"""`rank`, `compare`, `report`, `analyze` and `sync`: from results to a decision, and on to others."""

from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from wattune import api
from wattune.cli.shell import (
    JsonOption,
    StorageOption,
    StudyArgument,
    TensorboardOption,
    TrackingOption,
    WandbOption,
    answer,
    complete_stored,
    feasible_code,
    out,
    print_json,
    print_line,
)
from wattune.cli.verbs import app
from wattune.errors import PlanError
from wattune.objective import RISK
from wattune.ranking.answer import answer_of
from wattune.ranking.order import pareto_front
from wattune.ranking.sources import Asked
from wattune.recording.recording import run_of
from wattune.report.write import write_comparison
from wattune.storage.files import write_asked
from wattune.view.comparison import beside_view, comparison_view
from wattune.view.console import show
from wattune.view.files import ranking_csv
from wattune.view.machine import metrics_table
from wattune.view.ranking import MOST_ROWS, front_table, ranking_view
from wattune.view.table import Note
from wattune.view.times import times_json, times_view


class FrontOf(StrEnum):
    """Trials that a Pareto front is of."""

    FEASIBLE = "feasible"
    ALL = "all"


@app.command()
def rank(
    study: Annotated[
        list[str],
        typer.Argument(
            help="Names or folders of one or several studies, or of recordings.",
            autocompletion=complete_stored,
        ),
    ],
    storage: StorageOption = None,
    tracking_uri: Annotated[str | None, typer.Option(help="Read results from this MLflow store instead.")] = None,
    objective: Annotated[
        str | None, typer.Option(help='Instead of the study\'s own, e.g. "minimize energy_per_token_j".')
    ] = None,
    constraint: Annotated[list[str] | None, typer.Option(help="Instead of the study's own; may be repeated.")] = None,
    no_constraints: Annotated[bool, typer.Option("--no-constraints", help="Rank as if there were no bounds.")] = False,
    where: Annotated[
        list[str] | None,
        typer.Option(
            help='Rank only trials that hold this: "tp <= 2", "engine == torch", "mfu_frac > 0.3". May be repeated.'
        ),
    ] = None,
    quality: Annotated[
        str, typer.Option(help="Rank only trials of this quality or better: indicative, publishable.")
    ] = "",
    risk: Annotated[
        float,
        typer.Option(
            help="Accepted probability of a wrong verdict, above 0 and below 0.5: a bound holds where the next run "
            "keeps it with at least 1 minus that."
        ),
    ] = RISK,
    pareto: Annotated[str | None, typer.Option(help="Two metrics, as a,b: the trials no other beats in both.")] = None,
    pareto_of: Annotated[
        FrontOf, typer.Option(help="Trials the front is of: the feasible ones, or all measured ones.")
    ] = FrontOf.FEASIBLE,
    top: Annotated[int | None, typer.Option(min=1, help=f"Rows of each kind at most; else {MOST_ROWS}.")] = None,
    time: Annotated[
        bool, typer.Option("--time", help="Show the seconds of each run by part too: start, build, warm-up and so on.")
    ] = False,
    csv: Annotated[
        Path | None, typer.Option(help="Write every trial to this file too, a line each; - is standard output.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Ranks trials: feasible by objective with P(best), undecided, infeasible with what fails, unknown.

    Recordings are ranked too, by energy of a token, else of a step, else of the command, unless --objective is given.

    For example:

      wattune rank moe_h200 --where "tp <= 2" --where "sharding != none"

      wattune rank moe_h200 --constraint "node_device_power_peak_1s_w <= 2600" --risk 0.01

      wattune rank moe_h200 --no-constraints --pareto tokens_per_s,energy_per_token_j

      wattune rank before after --objective "minimize step_time_s"
    """
    if constraint and no_constraints:
        raise typer.BadParameter("--constraint and --no-constraints: give one of the two")
    metrics, to_screen = _front_metrics(pareto, pareto_of), csv is not None and str(csv) == "-"
    _require_one_output(as_json=as_json, csv_to_screen=to_screen, top=top, front=bool(metrics))
    question: Asked = {
        "objective": objective,
        "constraints": () if no_constraints else constraint,
        "where": where or (),
        "least_quality": quality,
        "risk": risk,
    }
    ranking = api.rank(study, storage=storage, tracking_uri=tracking_uri, **question)
    rows = ranking.trials if pareto_of is FrontOf.ALL else ranking.feasible
    front = pareto_front(rows, *metrics) if metrics else []
    if csv is not None and not to_screen:
        write_asked(csv, ranking_csv(ranking))
    if to_screen:
        print(ranking_csv(ranking), end="")  # noqa: T201 - what was asked for
    elif as_json:
        found = {"answer": answer_of(ranking).to_json()} | ranking.to_json()
        if metrics:
            found |= {"pareto": [row.to_json() for row in front], "pareto_metrics": metrics, "pareto_of": pareto_of}
        print_json(found | ({"time": times_json(ranking)} if time else {}))
    else:
        fronts = [front_table(front, metrics, of=f"{pareto_of} trials")] if metrics else []
        show(out, *ranking_view(ranking, top=top or MOST_ROWS), *fronts, *(times_view(ranking) if time else []))
    raise typer.Exit(feasible_code(ranking))


def _front_metrics(pareto: str | None, of: FrontOf) -> list[str]:
    """Returns the two metrics of a front; none where none is asked for."""
    metrics = [name.strip() for name in pareto.split(",")] if pareto else []
    if pareto and len(metrics) != 2:
        raise typer.BadParameter(f'got "{pareto}"; name two metrics, such as tokens_per_s,energy_per_token_j')
    if of is not FrontOf.FEASIBLE and not metrics:
        raise typer.BadParameter("--pareto-of is of a front; give --pareto a,b too")
    return metrics


def _require_one_output(*, as_json: bool, csv_to_screen: bool, top: int | None, front: bool) -> None:
    """Refuses options of which one would do nothing."""
    if as_json and csv_to_screen:
        raise typer.BadParameter("--json and --csv - both want standard output; give --csv a file")
    if top is not None and (as_json or csv_to_screen):
        raise typer.BadParameter("--top shortens the table; --json and --csv have every trial, so leave it out")
    if front and csv_to_screen:
        raise typer.BadParameter("--csv - prints every trial and no front; give --csv a file, or leave --pareto out")


@app.command()
def compare(
    a: Annotated[str, typer.Argument(help="A trial: STUDY:TRIAL_ID, or its folder; or a recording.")],
    b: Annotated[str | None, typer.Argument(help="Another one, of this or another study.")] = None,
    storage: StorageOption = None,
    html: Annotated[Path | None, typer.Option(help="Write it as a page to this file.")] = None,
    estimated: Annotated[
        bool, typer.Option("--estimate", help="Lay each trial's estimate beside its result; one trial is enough.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Shows which parts of a step make one trial faster or leaner than another; compares recordings too.

    For example:

      wattune compare moe_h200:0517fb8c0ffe moe_h200:8f21

      wattune compare before after

      wattune compare moe_h200:0517fb8c0ffe baseline

      wattune compare moe_h200:0517fb8c0ffe --estimate
    """
    if estimated:
        if html is not None:
            raise typer.BadParameter(
                "--html is of two trials compared; --estimate has no page, so leave one of them out"
            )
        found = [api.beside_result(one, storage=storage) for one in (a, b) if one is not None]
        view = [part for one in found for part in beside_view(one)]
        answer(as_json, {"beside": [asdict(one) for one in found]}, view)
        return
    if b is None:
        raise typer.BadParameter("one trial is compared with nothing; name another, or use --estimate")
    comparison = api.compare(a, b, storage=storage)
    if html is not None:
        write_comparison(comparison, html)
    answer(as_json, comparison.to_json(), comparison_view(comparison))


@app.command()
def fit(
    study: Annotated[list[str] | None, typer.Argument(help="Names or folders of one or several studies.")] = None,
    links: Annotated[
        str | None,
        typer.Option(
            help="Table of `wattune calibrate --links`; else the newest in the storage. Enough without a study."
        ),
    ] = None,
    storage: StorageOption = None,
    as_json: JsonOption = False,
) -> None:
    """Fits the predictions of `plan --estimate` to measured trials; later plans of the device use them."""
    from wattune.view.plans import fit_view  # the grammar of spaces with it, which no other command here needs

    found = api.fit(study or [], links=links, storage=storage)
    if as_json:
        print_json({"fits": [{**one.model_dump(mode="json"), "path": str(path)} for path, one in found]})
        return
    for path, one in found:
        show(out, *fit_view(one))
        print_line(f"kept in {path}; `wattune plan --estimate` with this storage uses it")


@app.command()
def report(
    study: StudyArgument,
    storage: StorageOption = None,
    figures: Annotated[
        Path | None, typer.Option(help="Write figures as PNG, SVG and PDF to this folder too; needs Chrome.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Writes a study's report.html and ranking.parquet anew."""
    folder = api.load_study(study, storage=storage, whole=True)
    path = api.report(folder)
    images = api.figures(folder, figures) if figures is not None else []
    if as_json:
        print_json({"report": str(path), "figures": [str(image) for image in images]})
    else:
        for written in (path, *images):
            print_line(str(written))


@app.command()
def analyze(
    folder: Annotated[
        str, typer.Argument(help="A trial's or a recording's folder or URL, STUDY:TRIAL_ID, or a recording's name.")
    ],
    storage: StorageOption = None,
    accept: Annotated[
        bool, typer.Option("--accept", help="Take files edited on purpose as they are; the quality says so.")
    ] = False,
    estimated: Annotated[
        bool, typer.Option("--estimate", help="Lay the trial's estimate beside the figures and the parts of a step.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Recomputes metrics and quality of a trial or recording from its folder alone.

    For example:

      wattune analyze moe_h200:0517fb8c0ffe

      wattune analyze moe_h200:0517fb8c0ffe-1

      wattune analyze moe_h200:0517fb8c0ffe --estimate

      wattune analyze baseline
    """
    if estimated and "://" in folder:
        raise typer.BadParameter(f"{folder} is at a URL; --estimate needs the trial's study, so name STUDY:TRIAL_ID")
    analysis = api.analyze(folder, storage=storage, accept=accept)
    summary = analysis.summary
    found = api.beside_result(folder, storage=storage, metrics=summary.metrics) if estimated else None
    if as_json:
        print_json(analysis.to_json() | ({} if found is None else {"beside": asdict(found)}))
    else:
        verdict = f"quality: {summary.quality}" + (
            f" ({', '.join(summary.quality_reasons)})" if summary.quality_reasons else ""
        )
        beside = [] if found is None else beside_view(found)
        show(out, metrics_table(folder, summary.metrics), *map(Note, [verdict, *analysis.notes]), *beside)


@app.command()
def sync(
    study: StudyArgument,
    storage: StorageOption = None,
    tracking_uri: TrackingOption = None,
    wandb: WandbOption = None,
    tensorboard: TensorboardOption = None,
    as_json: JsonOption = False,
) -> None:
    """Sends trials, or a recording, that the tracking store or the storage's URL lacks."""
    folder = api.find_recording(study, storage=storage)
    if folder is not None:
        stored = api.send_recording(run_of(folder), storage=storage, wandb=wandb, tensorboard=tensorboard)
        places = {"stored": stored, "wandb": wandb is not None, "tensorboard": tensorboard is not None}
        if not any(places.values()):
            raise PlanError(
                f"{study}: a recording is sent to storage at a URL, by --wandb and by --tensorboard; give one"
            )
        if as_json:
            print_json(places)
        else:
            out.print(f"recording sent: {', '.join(name for name, asked in places.items() if asked)}")
        return
    sent = api.sync(
        api.load_study(study, storage=storage, whole=True),
        storage=storage,
        tracking_uri=tracking_uri,
        wandb=wandb,
        tensorboard=tensorboard,
    )
    if as_json:
        print_json(sent)
        return
    out.print(f"{sent['sent']} trial(s) sent")
    if "stored" in sent:
        out.print(f"{sent['stored']} trial(s) stored")
    for name in ("wandb", "tensorboard"):
        if name in sent:
            out.print(f"{sent[name]} trial(s) sent to {name}")
