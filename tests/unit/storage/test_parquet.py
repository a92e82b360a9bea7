"""Tables in Parquet: what is written is read back, a device at a time, whatever the layout of the file."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from wattune.errors import TelemetryError
from wattune.schema import TELEMETRY, table_schema
from wattune.storage import parquet
from wattune.storage.measured import MeasuredFolder
from wattune.storage.parquet import ParquetTier, encoded


def slow(node="n0", devices=("gpu0", "gpu1", "gpu2"), rows=7, *, interleaved=False, simulated=False):
    names = (
        [name for _ in range(rows) for name in devices] if interleaved else [n for n in devices for _ in range(rows)]
    )
    count = len(names)
    columns = {
        "node": [node] * count,
        "device": names,
        "mono_ns": np.arange(count),
        "wall_ns": np.arange(count) + 10**18,
        "energy_j": np.arange(count) * 1.5,
    }
    schema = table_schema("slow", backend="nvml", simulated=simulated)
    arrays = [
        pa.array(columns[field.name]).cast(field.type) if field.name in columns else pa.nulls(count, field.type)
        for field in schema
    ]
    return pa.Table.from_arrays(arrays, schema=schema)


def written(path, table):
    path.write_bytes(encoded(table).to_pybytes())
    return path


def read(tier, device, columns):
    return pa.concat_tables(tier.parts(device, columns))


def of_device(table, name):
    return table.filter(pa.array([each == name for each in table["device"].to_pylist()]))["energy_j"].to_pylist()


@pytest.mark.parametrize("small_rows", [10**6, 5])
@pytest.mark.parametrize("interleaved", [False, True])
def test_a_device_is_read_back_whole(tmp_path, monkeypatch, small_rows, interleaved):
    monkeypatch.setattr(parquet, "SMALL_ROWS", small_rows)
    table = slow(interleaved=interleaved)
    tier = ParquetTier([written(tmp_path / "slow.parquet", table)])
    assert list(tier.devices) == [("n0", "gpu0"), ("n0", "gpu1"), ("n0", "gpu2")]
    assert tier.num_rows == table.num_rows
    assert tier.table().equals(table)
    for _, name in tier.devices:
        rows = read(tier, ("n0", name), ["energy_j", "mono_ns"])
        assert rows.column_names == ["energy_j", "mono_ns"]
        assert rows["energy_j"].to_pylist() == of_device(table, name)


def test_a_large_table_has_a_row_group_for_every_device(tmp_path, monkeypatch):
    monkeypatch.setattr(parquet, "SMALL_ROWS", 100)
    path = written(tmp_path / "slow.parquet", slow(rows=4096))
    assert pq.ParquetFile(path).num_row_groups == 3
    mixed = written(tmp_path / "mixed.parquet", slow(rows=4096, interleaved=True))
    assert pq.ParquetFile(mixed).num_row_groups == 1


def test_several_nodes_are_one_tier_and_a_column_one_of_them_lacks_is_null(tmp_path):
    paths = [
        written(tmp_path / "a.parquet", slow("n0")),
        written(tmp_path / "b.parquet", slow("n1", simulated=True).drop_columns(["energy_j"])),
    ]
    tier = ParquetTier(paths)
    assert len(tier.devices) == 6
    assert read(tier, ("n1", "gpu1"), ["energy_j"])["energy_j"].null_count == 7
    assert read(tier, ("n0", "gpu1"), ["energy_j"])["energy_j"].null_count == 0
    # If one node's values were computed, the tier is simulated.
    assert tier.schema.metadata[b"wattune.simulated"] == b"true"


def test_a_device_reads_its_own_files_alone(tmp_path, monkeypatch):
    paths = [written(tmp_path / f"slow-{number}.parquet", slow(f"n{number}")) for number in range(12)]
    looks, own = [], ParquetTier._shared
    monkeypatch.setattr(ParquetTier, "_shared", lambda self, *given: looks.append(given) or own(self, *given))
    tier = ParquetTier(paths)
    for device in tier.devices:
        assert read(tier, device, ["energy_j"]).num_rows == 7
    assert len(tier.devices) == 36 and len(looks) == 12 + 36


def test_what_a_study_folder_writes_is_stored(tmp_path):
    folder = MeasuredFolder(tmp_path)
    folder.write_telemetry("n0", {"slow": slow(interleaved=True)}, {"node": "n0"})
    stored = folder.stored()
    assert stored.keys() == {"slow"}
    assert stored["slow"].schema.names == TELEMETRY["slow"].names
    assert read(stored["slow"], ("n0", "gpu1"), ["energy_j"])["energy_j"].to_pylist() == of_device(
        slow(interleaved=True), "gpu1"
    )


def test_a_file_that_is_no_table_or_contradicts_another_is_named(tmp_path):
    (tmp_path / "slow.parquet").write_bytes(b"PAR1 and nothing else")
    with pytest.raises(TelemetryError, match=r"slow\.parquet"):
        ParquetTier([tmp_path / "slow.parquet"])
    texts = slow().set_column(4, "energy_j", pa.array(["much"] * 21))
    paths = [written(tmp_path / "a.parquet", slow()), written(tmp_path / "b.parquet", texts)]
    with pytest.raises(TelemetryError, match=r"a\.parquet"):
        ParquetTier(paths)


def test_damaged_pages_are_an_error_and_no_value(tmp_path):
    path = written(tmp_path / "slow.parquet", slow(rows=400))
    content = bytearray(path.read_bytes())
    content[len(content) // 3 : len(content) // 2] = bytes(len(content) // 2 - len(content) // 3)
    path.write_bytes(content)
    with pytest.raises(TelemetryError, match=r"slow\.parquet"):
        ParquetTier([path]).table()


def test_a_table_without_rows_or_keys_has_no_devices(tmp_path):
    assert list(ParquetTier([written(tmp_path / "a.parquet", slow(rows=0))]).devices) == []
    keyless = slow().drop_columns(["node"])
    assert list(ParquetTier([written(tmp_path / "b.parquet", keyless)]).devices) == []
