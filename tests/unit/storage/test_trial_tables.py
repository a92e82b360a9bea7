"""One table of all trials: what is damaged is named and left out."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from wattune.errors import TelemetryError
from wattune.schema import table_schema
from wattune.storage.study import StudyFolder
from wattune.storage.trial_tables import left_out, open_tables


@pytest.fixture
def study(tmp_path: Path) -> StudyFolder:
    """Three trials that run: they have no digests yet that would show damage to their files."""
    study = StudyFolder.create(tmp_path, "s", {"study": "s", "objective": "maximize tokens_per_s", "constraints": []})
    for number in range(3):
        schema = table_schema("ring", backend="nvml", simulated=number == 2)
        rows = [{"node": "n", "device": "gpu0", "mono_ns": n, "sensor_ns": n, "power_w": 100.0} for n in range(4000)]
        table = pa.Table.from_pylist(rows, schema=schema)
        study.trial(f"{number}", 0).write_telemetry("n", {"ring": table}, {"node": "n"})
    return study


def ring_of(study: StudyFolder, number: int) -> Path:
    return study.path / "trials" / f"{number}-0" / "telemetry" / "n" / "ring.parquet"


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def without_time(path: Path) -> None:
    pq.write_table(pq.read_table(path).drop_columns(["mono_ns"]), path)


def of_another_type(path: Path) -> None:
    table = pq.read_table(path)
    column = table.schema.get_field_index("power_w")
    pq.write_table(table.set_column(column, "power_w", pa.array(["100"] * table.num_rows)), path)


def extra_of_another_type(path: Path) -> None:
    table = pq.read_table(path)
    pq.write_table(table.append_column("power_w_error", pa.nulls(table.num_rows, pa.list_(pa.int32()))), path)


@pytest.mark.parametrize("damage", [cut, without_time, of_another_type])
@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_file_that_cannot_be_read_costs_its_own_trial(study: StudyFolder, damage, number: int) -> None:
    damage(ring_of(study, number))
    dataset = open_tables(study.path, "ring")
    (reason,) = left_out(dataset.schema)
    assert reason.startswith(f"{number}-0: ")
    table = dataset.to_table(columns=["trial", "simulated", "power_w"])
    expected = [f"{n}-0" for n in range(3) if n != number]
    assert table["trial"].unique().to_pylist() == expected and table.num_rows == 8000
    assert ("2-0" in expected) == (True in table["simulated"].unique().to_pylist())


def test_columns_that_contradict_other_trials_cost_the_one_that_has_them(study: StudyFolder) -> None:
    table = pq.read_table(ring_of(study, 0))
    error = pa.nulls(table.num_rows, pa.dictionary(pa.int32(), pa.string()))
    pq.write_table(table.append_column("power_w_error", error), ring_of(study, 0))
    extra_of_another_type(ring_of(study, 1))
    dataset = open_tables(study.path, "ring")
    assert [reason[:4] for reason in left_out(dataset.schema)] == ["1-0:"]
    assert dataset.count_rows() == 8000


def test_not_one_that_can_be_read_is_an_error(study: StudyFolder) -> None:
    for number in range(3):
        cut(ring_of(study, number))
    with pytest.raises(TelemetryError, match="a ring table cannot be read: 0-0: "):
        open_tables(study.path, "ring")
