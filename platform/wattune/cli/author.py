"""`init`, `scale`, `schema`, `metrics` and `catalog`: what a person needs who writes a search space."""

import re
import sys
from collections.abc import Callable, Iterable
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from wattune import api
from wattune.catalog.huggingface import read_config
from wattune.catalog.models import model
from wattune.cli.shell import JsonOption, LeaveOutOption, SpaceArgument, answer, err, out, print_json, print_line
from wattune.cli.verbs import app
from wattune.doctor import own_devices
from wattune.errors import PlanError, WattuneError, closest
from wattune.metrics import METRICS
from wattune.objective import parse_objective
from wattune.plans.engines import CAPABILITIES, capabilities
from wattune.scale_down.invariants import invariants
from wattune.search.draft import MOST_TRIALS, check_bound, draft, planned
from wattune.search.model_entry import own_name_of
from wattune.search.reference import SCHEMA_NAME, reference_page, schema_line, schema_text
from wattune.storage.study import check_study_name
from wattune.view.console import show
from wattune.view.machine import catalog_view, metric_list
from wattune.view.plans import rejections
from wattune.view.scale_down import scaled_view

_SPACE_NAME: Final = "space.yaml"
_OBJECTIVE: Final = "maximize tokens_per_s"
_MARK: Final = "# yaml-language-server:"


def example_names() -> list[str]:
    """Lists by name the search spaces that travel with the package; those of the paper's sweeps begin with `paper/`."""
    folder = files("wattune").joinpath("examples")
    found = {"": folder, "paper/": folder.joinpath("paper")}
    listed = [f"{place}{one.name}" for place, within in found.items() for one in within.iterdir()]
    return sorted(name.removesuffix(".yaml") for name in listed if name.endswith(".yaml"))


def example_text(name: str, first_line: str) -> str:
    """Returns a shipped space, with the line that names the schema from where it will be.

    Raises `PlanError` where there is no such space.
    """
    names = example_names()
    if name not in names:
        raise PlanError(f'unknown example "{name[:60]}"; {closest(name, names)}')
    text = files("wattune").joinpath("examples", f"{name}.yaml").read_text(encoding="utf-8")
    rest = [line for line in text.splitlines() if not line.startswith(_MARK)]
    return "\n".join([first_line, *rest]) + "\n"


@app.command()
def init(
    path: Annotated[Path, typer.Argument(help="The file to write.", show_default=False)] = Path(_SPACE_NAME),
    model_name: Annotated[
        str | None, typer.Option("--model", "--from", help="Catalog model, or a config.json of Hugging Face.")
    ] = None,
    leave_out: LeaveOutOption = None,
    cluster: Annotated[
        str | None, typer.Option(help='NODESxDEVICES and a device, e.g. "1x4 h200_sxm"; else this machine.')
    ] = None,
    engine: Annotated[str | None, typer.Option(help=f"{', '.join(CAPABILITIES)}.")] = None,
    objective: Annotated[str, typer.Option(help='E.g. "minimize energy_per_token_j".')] = _OBJECTIVE,
    bound: Annotated[
        list[str] | None,
        typer.Option(help='Bound on a metric, e.g. "node_device_power_peak_1s_w <= 2600"; may be repeated.'),
    ] = None,
    study: Annotated[str | None, typer.Option(help="The study's name; else the file's.")] = None,
    example: Annotated[
        str | None, typer.Option(metavar="NAME", help=f"Write a shipped space instead: {', '.join(example_names())}.")
    ] = None,
) -> None:
    """Writes a search space with comments, that plans. Asks for what no flag says, if a person is there to ask."""
    if example is not None:
        given = {"--model": model_name, "--cluster": cluster, "--engine": engine, "--bound": bound, "--study": study}
        given |= {"--leave-out": leave_out, "--objective": None if objective == _OBJECTIVE else objective}
        if named := [flag for flag, value in given.items() if value]:
            raise typer.BadParameter(f"--example writes a space as it is; leave {', '.join(named)} out")
        path = Path(f"{Path(example).name}.yaml") if path == Path(_SPACE_NAME) else path
        _refuse_existing(path)
        _write(path, example_text(example, schema_line(SCHEMA_NAME)))
        return
    _refuse_existing(path)
    asks = _person_is_there()
    chosen = _answer(asks, "Model (wattune catalog lists them)", model_name, "llama3_8b", _check_model)
    own_place, fits = "1x{} {}".format(*own_devices()), partial(check_bound, "step_time_s >= 0")
    place = _answer(asks, "Cluster, as NODESxDEVICES device", cluster, own_place, fits)
    trains = _answer(asks, f"Engine ({', '.join(CAPABILITIES)})", engine, "torch", capabilities)
    bounds = [check_bound(one, place) for one in bound or ()]
    if asks and bound is None:
        wanted = "Bound, such as node_device_power_peak_1s_w <= 2600 (empty: none)"
        text = _answer(True, wanted, None, "", lambda text: check_bound(text, place) if text else None)
        bounds = [text] if text else []
    parse_objective(objective)
    name = check_study_name(study or re.sub(r"[^A-Za-z0-9._-]+", "_", path.stem))
    from_config = chosen if _is_config(chosen) else None
    if from_config is not None:
        own = own_name_of(Path(chosen))
        full = read_config(Path(chosen), own, leave_out or ())
        from_config = _relative(Path(chosen), path.parent)
    else:
        if leave_out:
            raise typer.BadParameter("--leave-out names features of a config.json; give its path as --model")
        own, full = chosen, model(chosen)
    text = draft(
        full,
        study=name,
        model=own,
        cluster=place,
        engine=trains,
        objective=objective,
        bounds=bounds,
        from_config=from_config,
        leave_out=leave_out or (),
        schema=SCHEMA_NAME,
    )
    candidates = planned(text, path.parent)
    _write(path, text)
    kept, rejected = len(candidates.kept), len(candidates.rejected)
    print_line(
        f"{kept} trials to choose from, {rejected} combinations rejected; a search tries {min(kept, MOST_TRIALS)}"
    )


def _answer(asks: bool, question: str, given: str | None, default: str, check: Callable[[str], object]) -> str:
    """Returns what a flag says, else what a person answers, else the default.

    A person is asked until it is right. Raises `WattuneError` where the flag, or the default, cannot be used.
    """
    if given is not None or not asks:
        text = default if given is None else given
        check(text)
        return text
    while True:
        text = str(typer.prompt(question, default=default, show_default=bool(default))).strip()
        try:
            check(text)
        except WattuneError as error:
            err.print(str(error), style="yellow", highlight=False, soft_wrap=True)
            continue
        return text


def _person_is_there() -> bool:
    """Tells whether questions are seen and answered: both ends are a terminal."""
    return sys.stdin.isatty() and out.is_terminal


def _is_config(text: str) -> bool:
    return text.endswith(".json") or "/" in text


def _check_model(text: str) -> None:
    if not _is_config(text):
        model(text)
    elif not Path(text).is_file():
        raise PlanError(f"{text}: no such file; give a catalog model or the path of a config.json")


def _relative(path: Path, folder: Path) -> str:
    """Returns a path as a space in a folder names it."""
    own, start = path.resolve(), folder.resolve()
    return str(own.relative_to(start)) if own.is_relative_to(start) else str(own)


def _refuse_existing(path: Path) -> None:
    if path.exists():
        raise PlanError(f"{path}: exists and is kept; give another path, or remove it")
    if not path.parent.is_dir():
        raise PlanError(f"{path.parent}: is no folder; make it, or give another path")


def _write(path: Path, text: str) -> None:
    """Writes a space and the schema beside it; a file that came in between is kept."""
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise PlanError(f"{path}: exists and is kept; give another path, or remove it") from None
    schema, content = path.parent / SCHEMA_NAME, schema_text()
    if not schema.exists() or (schema.is_file() and '"title": "wattune search space"' in schema.read_text("utf-8")):
        schema.write_text(content, encoding="utf-8")
    print_line(f"wrote {path}; next: wattune plan {path}")


@app.command()
def scale(
    space: SpaceArgument,
    to: Annotated[str, typer.Option(metavar="CLUSTER", help="Cluster to run on, e.g. 1x2:h100_sxm.")],
    allow: Annotated[
        float | None, typer.Option(metavar="PERCENT", help="Largest distance, in percent of a step; else 5.")
    ] = None,
    out_file: Annotated[
        Path | None, typer.Option("--out", help="File to write; else SPACE_on_CLUSTER.yaml beside it.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Writes the space of small runs that stand for the plans of a large one, and shows what they keep."""
    path = out_file or space.with_name(f"{space.stem}_on_{re.sub(r'[^A-Za-z0-9]+', '_', to)}.yaml")
    _refuse_existing(path)
    text, planned, found = api.scale(space, to, allow_percent=allow)
    with path.open("x", encoding="utf-8") as file:
        file.write(text)
    if as_json:
        plans = [
            {"plan": one.large.label, "runs_as": one.text, "distance_percent": one.percent}
            | {"invariants": [row._asdict() for row in invariants(one)]}
            for one in found
        ]
        print_json({"path": str(path), "plans": plans, "rejected": planned.candidates.to_json()["rejected"]})
        return
    show(out, *scaled_view(found), rejections(planned.rejected))
    print_line(f"wrote {path}; next: wattune run {path}")


@app.command()
def schema(
    page: Annotated[bool, typer.Option("--page", help="Print the reference page in Markdown instead.")] = False,
) -> None:
    """Prints the JSON Schema of search spaces, by which editors complete and check them."""
    print(reference_page() if page else schema_text(), end="")  # noqa: T201


SearchOption = Annotated[str | None, typer.Option("--search", metavar="WORDS", help="Only what has these words.")]


@app.command()
def metrics(search: SearchOption = None, as_json: JsonOption = False) -> None:
    """Lists every metric: its unit, what it means, which direction is better, and the tables it comes from."""
    told = ("name", "group", "unit", "better", "meaning")
    found = [{name: getattr(one, name) for name in told} | {"tables": list(one.tables)} for one in METRICS.values()]
    found = _having(found, search, METRICS)
    answer(as_json, {"metrics": found}, metric_list(found))


@app.command()
def catalog(search: SearchOption = None, as_json: JsonOption = False) -> None:
    """Lists the devices, networks and models search spaces can name, with sources."""
    lists = api.catalog()
    everything = [one for rows in lists.values() for one in rows]
    chosen = _having(everything, search, [one["name"] for one in everything])
    view = catalog_view(None if search is None else {str(one["name"]) for one in chosen})
    answer(as_json, {kind: [one for one in rows if one in chosen] for kind, rows in lists.items()}, view)


def _having(rows: list[dict[str, Any]], search: str | None, names: Iterable[str]) -> list[dict[str, Any]]:
    """Returns the rows that have every word in a text of theirs. Raises `PlanError` where none has."""
    words = (search or "").lower().split()

    def text(row: dict[str, Any]) -> str:
        said = " ".join(str(value) for value in row.values() if isinstance(value, str | list | tuple))
        return said.lower() + " " + re.sub(r"[_\W]+", " ", said.lower())

    found = [row for row in rows if all(word in text(row) for word in words)]
    if not found:
        raise PlanError(f'nothing has "{search}"; {closest(str(search), names)}')
    return found
