"""Makes what the notebook needs: its study, and the notebook itself from `first_study.py`, executed.

    make notebook

The study is `tests/fakes/small_study.py`'s, with its Parquet files encoded smaller. Its values are not changed.
"""

import os
import shutil
import sys
from pathlib import Path
from typing import Final

import jupytext
import nbformat
import pyarrow as pa
import pyarrow.parquet as pq
from nbclient import NotebookClient

HERE: Final = Path(__file__).resolve().parent
ROOT: Final = HERE.parents[1]
SCRIPT: Final = HERE / "first_study.py"
DATA: Final = HERE / "data"


def notebook() -> nbformat.NotebookNode:
    """The notebook as the script has it, without outputs."""
    made = jupytext.read(SCRIPT)
    for number, cell in enumerate(made.cells):
        cell["id"] = f"cell-{number:02d}"  # else every conversion draws new ones
    return made


def make_data() -> None:
    """Writes the study the notebook reads."""
    sys.path.insert(0, str(ROOT / "tests" / "fakes"))
    from small_study import make_study

    shutil.rmtree(DATA, ignore_errors=True)
    study = make_study(DATA)
    for path in study.path.rglob("*.parquet"):
        _shrink(path)
    for trial in study.trials():  # with digests of the files as they are now
        if (result := trial.result()) is not None:
            trial.write_result(result)


def _shrink(path: Path) -> None:
    """Encodes a Parquet file anew: differences of counters and bytes of floats compress twice as well."""
    table = pq.read_table(path)
    encodings = {
        field.name: "DELTA_BINARY_PACKED" if pa.types.is_integer(field.type) else "BYTE_STREAM_SPLIT"
        for field in table.schema
        if pa.types.is_integer(field.type) or pa.types.is_floating(field.type)
    }
    names = [name for name in table.column_names if name not in encodings]
    pq.write_table(
        table, path, compression="zstd", compression_level=19, use_dictionary=names, column_encoding=encodings
    )


def execute() -> None:
    """Writes the notebook with its outputs; figures are plotly's JSON, drawn by whoever shows it."""
    os.environ["PLOTLY_RENDERER"] = "plotly_mimetype"
    made = notebook()
    NotebookClient(made, timeout=300, resources={"metadata": {"path": str(HERE)}}).execute()
    for cell in made.cells:
        cell.metadata.pop("execution", None)  # times of this execution
    nbformat.write(made, SCRIPT.with_suffix(".ipynb"))


if __name__ == "__main__":
    make_data()
    execute()
