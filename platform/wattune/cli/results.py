"""`rank`, `compare`, `report`, `analyze` and `sync`: from results to a decision, and on to others."""

from pathlib import Path
from typing import Annotated, Final

import typer

from wattune import api
from wattune.cli.shell import (
    JsonOption,
    StorageOption,
    StudyArgument,
    TrackingOption,
    app,
    feasible_code,
    out,
    print_json,
    print_line,
)
from wattune.ranking.bounds import RISK
from wattune.ranking.order import pareto_front
from wattune.ranking.table import to_csv, write_csv
from wattune.report.write import write_comparison
from wattune.terminal.beside import print_beside
from wattune.terminal.forecast import print_fit
from wattune.terminal.ranking import print_comparison, print_front, print_ranking
from wattune.terminal.tables import print_metrics

_PANEL: Final = "Decide"


@app.command(rich_help_panel=_PANEL)
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
    risk: Annotated[
        float, typer.Option(help="Accepted probability of a wrong verdict on a bound, above 0 and below 0.5.")
    ] = RISK,
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
    """Ranks trials: feasible by objective with P(best), undecided, infeasible with what fails, unknown."""
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
        risk=risk,
    )
    front = pareto_front(ranking.feasible, *metrics) if metrics else []
    if csv is not None and not to_screen:
        write_csv(ranking, csv)
    if to_screen:
        print(to_csv(ranking), end="")  # noqa: T201 - what was asked for
    elif as_json:
        print_json(ranking.to_json() | ({"pareto": [row.to_json() for row in front]} if metrics else {}))
    else:
        print_ranking(out, ranking, top=top)
        if metrics:
            print_front(out, front, metrics)
    raise typer.Exit(feasible_code(ranking))


@app.command(rich_help_panel=_PANEL)
def compare(
    a: Annotated[str, typer.Argument(help="A trial: STUDY:TRIAL_ID, or its folder.", show_default=False)],
    b: Annotated[str | None, typer.Argument(help="Another one, of this or another study.", show_default=False)] = None,
    storage: StorageOption = None,
    html: Annotated[Path | None, typer.Option(help="Write it as a page to this file.", show_default=False)] = None,
    estimated: Annotated[
        bool, typer.Option("--estimate", help="Lay each trial's estimate beside its result; one trial is enough.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Shows which parts of a step make one trial faster or leaner than another."""
    if estimated:
        found = [api.beside_result(one, storage=storage) for one in (a, b) if one is not None]
        if as_json:
            print_json({"beside": [one.to_json() for one in found]})
        else:
            for one in found:
                print_beside(out, one)
        return
    if b is None:
        raise typer.BadParameter("one trial is compared with nothing; name another, or use --estimate")
    comparison = api.compare(a, b, storage=storage)
    if html is not None:
        write_comparison(comparison, html)
    if as_json:
        print_json(comparison.to_json())
    else:
        print_comparison(out, comparison)


@app.command(rich_help_panel=_PANEL)
def fit(
    study: Annotated[
        list[str] | None, typer.Argument(help="Names or folders of one or several studies.", show_default=False)
    ] = None,
    links: Annotated[
        str | None,
        typer.Option(
            help="Table of `wattune calibrate --links`; else the newest in the storage. Enough without a study.",
            show_default=False,
        ),
    ] = None,
    storage: StorageOption = None,
    as_json: JsonOption = False,
) -> None:
    """Fits the predictions of `plan --estimate` to measured trials; later plans of the device use them."""
    found = api.fit(study or [], links=links, storage=storage)
    if as_json:
        print_json({"fits": [{**one.model_dump(mode="json"), "path": str(path)} for path, one in found]})
        return
    for path, one in found:
        print_fit(out, one)
        print_line(f"kept in {path}; `wattune plan --estimate` with this storage uses it")


@app.command(rich_help_panel=_PANEL)
def report(
    study: StudyArgument,
    storage: StorageOption = None,
    figures: Annotated[
        Path | None,
        typer.Option(help="Write figures as PNG, SVG and PDF to this folder too; needs Chrome.", show_default=False),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Writes a study's report.html anew."""
    folder = api.load_study(study, storage=storage, whole=True)
    path = api.report(folder)
    images = api.figures(folder, figures) if figures is not None else []
    if as_json:
        print_json({"report": str(path), "figures": [str(image) for image in images]})
    else:
        for written in (path, *images):
            print_line(str(written))


@app.command(rich_help_panel=_PANEL)
def analyze(
    folder: Annotated[str, typer.Argument(help="A trial's or a recording's folder or URL.", show_default=False)],
    accept: Annotated[
        bool, typer.Option("--accept", help="Take files edited on purpose as they are; the quality says so.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Recomputes metrics and quality of a trial or recording from its folder alone."""
    analysis = api.analyze(folder, accept=accept)
    summary = analysis.summary
    if as_json:
        print_json(analysis.to_json())
    else:
        verdict = f"quality: {summary.quality}" + (
            f" ({', '.join(summary.quality_reasons)})" if summary.quality_reasons else ""
        )
        print_metrics(out, folder, summary.metrics, "\n".join([verdict, *analysis.notes]))


@app.command(rich_help_panel=_PANEL)
def sync(
    study: StudyArgument,
    storage: StorageOption = None,
    tracking_uri: TrackingOption = None,
    as_json: JsonOption = False,
) -> None:
    """Sends every finished trial the tracking store, and the storage's URL, do not have yet."""
    sent = api.sync(api.load_study(study, storage=storage, whole=True), storage=storage, tracking_uri=tracking_uri)
    if as_json:
        print_json(sent)
        return
    out.print(f"{sent['sent']} trial(s) sent")
    if "stored" in sent:
        out.print(f"{sent['stored']} trial(s) stored")
