"""Views as Arrow: every kind of column, as Arrow itself reads plain values, and without pandas."""

import subprocess
import sys

import numpy as np
import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from wattune.view.arrow import TYPES, arrow
from wattune.view.table import Column

ROWS = st.lists(
    st.fixed_dictionaries(
        {
            "text": st.none() | st.text(max_size=5),
            "count": st.none() | st.integers(-(2**31), 2**31 - 1),
            "size": st.none() | st.integers(-(2**63), 2**63 - 1),
            "number": st.none() | st.floats(allow_nan=False),
            "flag": st.none() | st.booleans(),
            "layout": st.lists(st.integers(0, 100), max_size=3),
        }
    ),
    max_size=12,
)


@given(rows=ROWS)
def test_every_kind_of_column_is_what_arrow_makes_of_the_values(rows: list[dict[str, object]]) -> None:
    table = arrow([Column(kind, lambda row, kind=kind: row[kind], kind=kind) for kind in TYPES], rows)
    for kind, of in TYPES.items():
        assert table[kind].combine_chunks().equals(pa.array([row[kind] for row in rows], of))
    figures = np.array([np.nan if row["number"] is None else row["number"] for row in rows], np.float64)
    every = arrow([Column("all", lambda row: None, every=lambda _: figures, kind="number")], rows)
    assert every["all"].to_pylist() == table["number"].to_pylist()


def test_a_table_loads_no_pandas() -> None:
    code = (
        "import sys; from wattune.view.arrow import TYPES, arrow; from wattune.view.table import Column; "
        "arrow([Column(kind, lambda row: None if row else (), kind=kind) for kind in ('text', 'count', 'flag')], [1]); "
        "sys.exit('pandas' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
