"""Folders without digests that are damaged or hostile: each has a clear answer within seconds, and no traceback."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from lying_traces import healthy
from rich.text import Text
from small_study import make_study

from wattune.cli import shell
from wattune.errors import PlanError, TelemetryError
from wattune.inspection import inspect
from wattune.run import INVALID

FAST = "telemetry/node0/fast.parquet"
MANIFEST = "telemetry/node0/manifest.json"
FAR = 3 * 10**18


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return healthy(np.random.default_rng(1), work="steps", gpus=2, counter=True).write(tmp_path / "made")


def changed(column: str, change: Callable[[pa.ChunkedArray], pa.Array]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        table = pq.read_table(folder / FAST)
        place = table.column_names.index(column)
        pq.write_table(table.set_column(place, column, change(table[column])), folder / FAST)

    return damage


def said(path: str, **facts: object) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        content = json.loads((folder / path).read_text()) | facts
        (folder / path).write_text(json.dumps(content))

    return damage


def added(values: list[object]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        table = pq.read_table(folder / FAST)
        pq.write_table(table.append_column("foo", pa.array(values * table.num_rows)), folder / FAST)

    return damage


def spans(folder: Path) -> None:
    one = {"node": "node0", "device": "gpu0", "rank": 0, "phase": "step"}
    starts, ends = [0, 1, 2, FAR // 3], [1, 2, 3, FAR]
    rows = [
        {**one, "step": step, **dict.fromkeys(("start_mono_ns", "start_wall_ns"), start), "end_mono_ns": end}
        for step, (start, end) in enumerate(zip(starts, ends, strict=True))
    ]
    pq.write_table(pa.Table.from_pylist(rows), folder / "spans.parquet")


JUDGED: dict[str, tuple[Callable[[Path], None], str]] = {
    "float16": (changed("power_instant_w", lambda c: pa.array(c.to_numpy().astype(np.float16))), "schema_columns"),
    "a list": (changed("power_instant_w", lambda c: pa.array([[x] for x in c.to_pylist()])), "schema_columns"),
    "a struct": (changed("power_instant_w", lambda c: pa.array([{"w": x} for x in c.to_pylist()])), "schema_columns"),
    "text": (changed("power_instant_w", lambda c: pa.array(list(map(str, c.to_pylist())))), "schema_columns"),
    "truth": (changed("power_instant_w", lambda c: pa.array([True] * len(c))), "schema_columns"),
    "decimal": (changed("power_instant_w", lambda c: c.cast(pa.decimal128(38, 3), safe=False)), "schema_columns"),
    "dates": (changed("mono_ns", lambda c: c.cast(pa.timestamp("ns"))), "schema_columns"),
    "node of lists": (changed("node", lambda c: pa.array([["n"]] * len(c))), "schema_columns"),
    "no columns": (lambda folder: pq.write_table(pa.table({}), folder / FAST), "schema_columns"),
    "rows far away": (changed("mono_ns", lambda c: pa.array([*c.to_pylist()[:-1], FAR])), "impossible_value"),
    "window of a century": (
        said("manifest.json", window={"start_mono_ns": 0, "end_mono_ns": FAR}),
        "impossible_value",
    ),
    "window of years": (said("manifest.json", window={"start_mono_ns": 1e3, "end_mono_ns": 1e17}), "impossible_value"),
    "steps far away": (spans, "impossible_value"),
    "zero rows": (lambda folder: pq.write_table(pq.read_table(folder / FAST).slice(0, 0), folder / FAST), ""),
    "another column": (added([["a"]]), ""),
    "another struct": (added([{"a": 1}]), ""),
    "dictionary": (changed("power_instant_w", lambda c: c.combine_chunks().dictionary_encode()), ""),
}


@pytest.mark.parametrize("name", JUDGED)
def test_damage_is_judged(folder: Path, name: str) -> None:
    damage, reason = JUDGED[name]
    damage(folder)
    found = inspect(folder)
    assert (reason in found.summary.quality_reasons and found.summary.quality == INVALID) or not reason
    assert not (reason and found.summary.metrics)
    json.dumps(found.to_json(), allow_nan=False)


REFUSED: dict[str, tuple[Callable[[Path], None], str]] = {
    "offset of 1e30": (said(MANIFEST, clock_offset_ns=10**30), "clock_offset_ns: got 1e\\+30, allowed"),
    "offset of infinity": (said(MANIFEST, clock_offset_ns=float("inf")), "clock_offset_ns: got Infinity, allowed"),
    "offset that is none": (said(MANIFEST, clock_offset_ns=float("nan")), "clock_offset_ns: got NaN, allowed"),
    "negative limit": (said(MANIFEST, devices={"gpu0": {"power_limit_w": -1}}), "gpu0.power_limit_w: got -1, allowed"),
    "deep": (lambda folder: (folder / MANIFEST).write_text("[" * 10**5 + "]" * 10**5), "more than 32 levels"),
    "long number": (lambda folder: (folder / MANIFEST).write_text('{"a": ' + "9" * 6000 + "}"), "out of range"),
    "endless": (lambda folder: _instead(folder / MANIFEST, "/dev/zero"), "larger than 67,108,864 bytes"),
    "endless table": (lambda folder: _instead(folder / FAST, "/dev/zero"), "it is no file"),
    "pipe": (lambda folder: ((folder / FAST).unlink(), os.mkfifo(folder / FAST)), "it is no file"),
    "half of its facts": (lambda folder: (folder / "manifest.json").write_text("{"), r"manifest\.json"),
    "half a manifest": (lambda folder: (folder / MANIFEST).write_text("[1, 2"), r"node0/manifest\.json"),
    "empty spans": (lambda folder: (folder / "spans.parquet").write_bytes(b""), r"spans\.parquet"),
    "no table": (lambda folder: (folder / FAST).write_bytes(b"PAR1" + bytes(100) + b"PAR1"), "no tables that can be"),
}


def _instead(path: Path, target: str) -> None:
    path.unlink()
    path.symlink_to(target)


@pytest.mark.parametrize("name", REFUSED)
def test_damage_is_refused_in_a_line(folder: Path, name: str) -> None:
    damage, text = REFUSED[name]
    damage(folder)
    with pytest.raises(TelemetryError, match=text) as caught:
        inspect(folder)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 1000


def test_a_list_as_trial_id_of_combinations_is_told(tmp_path: Path) -> None:
    study = make_study(tmp_path)
    content = yaml.safe_load((study.path / "study.yaml").read_text())
    content["record"] = {name: value for name, value in content.get("record", {}).items() if name != "files"}
    (study.path / "study.yaml").write_text(yaml.safe_dump(content))
    path = study.path / "candidates.parquet"
    table = pq.read_table(path)
    lists = pa.array([[one] for one in table["trial_id"].to_pylist()])
    pq.write_table(table.set_column(table.column_names.index("trial_id"), "trial_id", lists), path)
    with pytest.raises(PlanError, match=r"trial_id is list<.*>, allowed: text"):
        study.candidates()


def test_no_terminal_obeys_a_name() -> None:
    hostile = "gpu\x1b[31m\x07\x9b2J\rend\tof\nline"
    for console in (shell.out, shell.err):
        for shown in (hostile, Text(hostile)):
            with console.capture() as told:
                console.print(shown)
            assert not {"\x1b", "\x07", "\x9b", "\r"} & set(told.get())
            assert "\\x1b" in told.get() and "line" in told.get()
