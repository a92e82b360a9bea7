"""`export`: a study's results as one file for other tools."""

import sys
from pathlib import Path
from typing import Annotated, cast

import typer

from wattune import api
from wattune.api.bundles import packed
from wattune.api.exports import FORMATS, ROWS, Format, Rows
from wattune.cli.shell import JsonOption, StorageOption, StudyArgument, err, print_json, print_line
from wattune.cli.verbs import app
from wattune.masking import printable
from wattune.storage.files import write_asked


@app.command()
def export(
    study: StudyArgument,
    storage: StorageOption = None,
    to: Annotated[str, typer.Option(help=f"Format: {', '.join(FORMATS)}.")] = "csv",
    out: Annotated[
        Path | None, typer.Option(help="File to write; - is standard output. Else STUDY.FORMAT here.")
    ] = None,
    rows: Annotated[
        str, typer.Option(help=f"{ROWS[0]}: what each run measured; {ROWS[1]}: ranked, with verdict and margins.")
    ] = "repeats",
    bundle: Annotated[
        Path | None, typer.Option(help="Zip file of all to hand on, in place of a table; also of experiments/.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Writes a study's results as one table: a column for each setting and metric, with units."""
    to_screen = str(out) == "-"
    if bundle is not None:
        if out is not None or (to, rows) != ("csv", ROWS[0]):
            raise typer.BadParameter("--bundle holds every table; leave --out, --to and --rows out")
        write_asked(bundle, packed(study, storage=storage))
        print_json({"path": str(bundle)}) if as_json else print_line(str(bundle))
        return
    if to_screen and as_json:
        raise typer.BadParameter("--json and --out - both want standard output; give --out a file")
    if to_screen and to == "parquet" and sys.stdout.isatty():
        raise typer.BadParameter("Parquet is no text for a terminal; give --out a file")
    found = api.load_study(study, storage=storage)
    content = api.export(found, cast(Format, to), rows=cast(Rows, rows))
    for reason in found.folder.finished()[1].values():
        err.print(f"left out: {printable(reason)}", style="yellow", highlight=False, soft_wrap=True)
    if to_screen:
        sys.stdout.buffer.write(content)
        sys.stdout.buffer.flush()
        return
    path = out or Path(f"{found.name}.{to}")
    write_asked(path, content)
    if as_json:
        print_json({"path": str(path), "format": to, "rows": rows, "bytes": len(content)})
    else:
        print_line(str(path))
