"""Spans and telemetry of a trial or recording, as files."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from wattune.errors import PlanError, TelemetryError
from wattune.schema import KERNELS, SPANS, TELEMETRY, table_schema
from wattune.storage.files import write_table
from wattune.storage.measured import MeasuredFolder, RecordingFolder

KEYS = {"node": ["a"], "device": ["gpu0"], "mono_ns": [1], "wall_ns": [2]}


def ring(node: str) -> pa.Table:
    schema = table_schema("ring", backend="simulated", simulated=True)
    row = {"node": node, "device": "GPU-0", "mono_ns": 1, "wall_ns": 2, "sensor_ns": 3, "power_w": 400.0}
    return pa.Table.from_pylist([row], schema=schema)


def test_telemetry_of_all_nodes_is_one_table_a_tier(tmp_path: Path) -> None:
    folder = MeasuredFolder(tmp_path)
    assert folder.telemetry() == {} and folder.spans() is None and folder.manifests() == {}
    for node in ("b", "a"):
        folder.write_telemetry(node, {"ring": ring(node)}, {"closed": True, "node": node})
    tables = folder.telemetry()
    assert tables.keys() == {"ring"}
    assert tables["ring"]["node"].to_pylist() == ["a", "b"]
    assert tables["ring"].schema.metadata[b"wattune.simulated"] == b"true"
    assert folder.nodes() == ["a", "b"]
    assert {node: manifest["node"] for node, manifest in folder.manifests().items()} == {"a": "a", "b": "b"}


def test_a_table_that_is_none_is_an_error_that_names_it(tmp_path: Path) -> None:
    folder = MeasuredFolder(tmp_path)
    folder.write_telemetry("a", {"ring": ring("a")}, {})
    (folder.path / "telemetry" / "a" / "ring.parquet").write_bytes(b"PAR1 and nothing")
    with pytest.raises(TelemetryError, match="a ring table cannot be read"):
        folder.telemetry()


def test_a_column_without_any_value_has_the_type_it_should_have(tmp_path: Path) -> None:
    """Other tools write such a column with Arrow's type `null`, which few functions take."""
    folder = MeasuredFolder(tmp_path)
    folder.write_telemetry("a", {"fast": pa.table({**KEYS, "sm_clock_mhz": [1980], "gpu_temp_c": [50]})}, {})
    folder.write_spans(SPANS.empty_table())
    for path in tmp_path.rglob("*.parquet"):
        table = pq.read_table(path)
        for name in ("gpu_temp_c", "phase", "chunk"):
            if name in table.column_names:
                table = table.set_column(table.column_names.index(name), name, pa.nulls(table.num_rows))
        write_table(path, table)
    spans = folder.spans()
    assert spans is not None and spans.schema.types == SPANS.types
    expected = TELEMETRY["fast"].field("gpu_temp_c").type
    assert folder.telemetry()["fast"]["gpu_temp_c"].type == expected
    (part,) = folder.stored()["fast"].parts(("a", "gpu0"), ["gpu_temp_c"])
    assert part["gpu_temp_c"].type == expected and part["gpu_temp_c"].null_count == 1


@given(devices=st.lists(st.sampled_from(["gpu0", "gpu1", "gpu10"]), max_size=12))
def test_rows_of_a_device_stay_in_order_and_stand_together(
    tmp_path_factory: pytest.TempPathFactory, devices: Sequence[str]
) -> None:
    folder = MeasuredFolder(tmp_path_factory.mktemp("trial"))
    rows = [{"node": "a", "device": name, "mono_ns": n, "wall_ns": n} for n, name in enumerate(devices)]
    folder.write_telemetry("a", {"ring": pa.Table.from_pylist(rows, schema=ring("a").schema)}, {})
    read = folder.telemetry()["ring"]
    pairs = list(zip(read["device"].to_pylist(), read["mono_ns"].to_pylist(), strict=True))
    assert pairs == sorted(zip(devices, range(len(devices)), strict=True))
    if rows:
        assert folder.stored()["ring"].num_rows == len(rows)


def test_spans_and_kernels_are_read_back_and_a_table_that_lacks_columns_is_named(tmp_path: Path) -> None:
    folder = MeasuredFolder(tmp_path)
    folder.write_spans(SPANS.empty_table())
    folder.write_kernels(KERNELS.empty_table())
    spans, kernels = folder.spans(), folder.kernels()
    assert spans is not None and spans.column_names == SPANS.names
    assert kernels is not None and kernels.column_names == KERNELS.names
    folder.write_kernels(KERNELS.empty_table().drop_columns([KERNELS.names[0]]))
    with pytest.raises(TelemetryError, match=f"kernels.parquet has no {KERNELS.names[0]}; remove it"):
        folder.kernels()
    (tmp_path / "spans.parquet").write_bytes(b"no table")
    with pytest.raises(TelemetryError, match=r"spans\.parquet cannot be read"):
        folder.spans()


def test_a_nodes_own_manifest_outweighs_its_part_of_the_recordings(tmp_path: Path) -> None:
    folder = RecordingFolder.create(tmp_path, "r")
    folder.write_facts({"nodes": {"a": {"closed": False}, "b": {"closed": False}}})
    folder.write_telemetry("a", {}, {"closed": True})
    assert folder.manifests() == {"a": {"closed": True}, "b": {"closed": False}}
    folder.write_facts({"nodes": {"b": {"devices": 3}}})
    with pytest.raises(TelemetryError, match=r"nodes\.b: devices: got 3, allowed: an object"):
        folder.manifests()


def test_a_recording_is_never_written_over_and_knows_its_storage(tmp_path: Path) -> None:
    folder = RecordingFolder.create(tmp_path, "sleeping")
    assert folder.path == tmp_path / "recordings" / "sleeping" and folder.storage == tmp_path
    assert folder.node_folder("n0") == folder.path / "telemetry" / "n0"
    with pytest.raises(PlanError, match="sleeping is there already; give another name, or remove it"):
        RecordingFolder.create(tmp_path, "sleeping")


@pytest.mark.parametrize("name", ["", "..", "a/b", ".x", "x" * 101, "a b"])
def test_a_name_that_is_no_folder_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(PlanError, match="cannot be a folder of the storage"):
        RecordingFolder.create(tmp_path, name)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("window", [{"start_mono_ns": 1, "end_mono_ns": 2}, {"start_mono_ns": 1, "end_mono_ns": None}])
def test_facts_are_read_back_as_they_were_written(tmp_path: Path, window: dict[str, Any]) -> None:
    folder = RecordingFolder.create(tmp_path, "r")
    assert folder.facts() == {}
    folder.write_facts({"command": ["train"], "window": window})
    assert folder.facts() == {"command": ["train"], "window": window}


@pytest.mark.parametrize("window", [3, [1, 2], {"start_mono_ns": "1"}, {"start_mono_ns": 1, "end_mono_ns": "2"}])
def test_a_window_that_is_none_is_refused_with_the_file_it_is_in(tmp_path: Path, window: Any) -> None:
    folder = RecordingFolder.create(tmp_path, "r")
    folder.write_facts({"window": window})
    with pytest.raises(TelemetryError, match=r"manifest\.json: window: got .*, allowed: an object with start_mono"):
        folder.facts()
