"""A ranking as Parquet and as CSV."""

import csv
import io
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_trials import FASTEST, POWER, asked, on_n0, reference_runs, speed, trial

from wattune.errors import PlanError
from wattune.metrics import METRICS
from wattune.ranking.assessment import Verdict
from wattune.ranking.order import rank
from wattune.run import RunStatus
from wattune.storage.files import write_asked
from wattune.view.files import flag_columns, ranking_csv, ranking_table


def test_json_has_every_repeat_and_the_table_one_flat_row_a_trial():
    failed = trial(3, status=RunStatus.CRASHED, reason="died")
    unmeasured = trial(4, {"tokens_per_s": 9.0})
    pairs = [speed(1, 1.0), speed(1, 2.0, repeat=1), speed(2, 2.0, power_w=3e3), failed, unmeasured]
    ranking = rank(pairs, asked(FASTEST, POWER), where=[])
    data = json.loads(json.dumps(ranking.to_json(), allow_nan=False))
    counts = {str(verdict): len(data[verdict]) for verdict in Verdict if data[verdict]}
    assert counts == {"feasible": 1, "infeasible": 1, "unknown": 1, "failed": 1}
    assert data["feasible"][0]["repeats"][1]["metrics"]["tokens_per_s"] == 2.0
    table = ranking_table(ranking)
    assert [name for name in table.column_names if name in METRICS] == list(METRICS)
    assert [field.name for field in table.schema if pa.types.is_nested(field.type)] == ["layout"]
    assert table["verdict"].to_pylist() == ["feasible", "infeasible", "unknown", "failed"]
    first, second, third, fourth = table.to_pylist()
    assert (first["tokens_per_s"], first["num_repeats"], first["tokens_per_s interval"]) == (1.5, 2, "repeats")
    assert first["tokens_per_s low"] < 1.5 < first["tokens_per_s high"]
    assert (first["layout"], first["rank_order"], first["dp"], first["missing"]) == ([8, 8], "1-0", 4, "")
    assert (second[f"{POWER}: slack"], second[f"{POWER}: verdict"], second["rank"]) == (-250.0, "breaks", None)
    assert (third["tokens_per_s"], third["missing"], third[POWER.metric]) == (9.0, POWER.metric, None)
    assert fourth["reason"] == "crashed: died" and fourth["tokens_per_s"] is None
    assert all(row["mfu_frac"] is None for row in table.to_pylist()), "nothing measured it"


def test_a_cell_is_the_middle_of_the_interval_that_is_shown():
    """Also where drift and repeats move it from the mean of the runs."""
    pairs = [speed(n, 100.0 + n, 2000.0 + 7 * n, repeat) for n in (1, 2, 4) for repeat in range(3)]
    pairs = [on_n0(pair, 600.0 * number) for number, pair in enumerate(pairs)]
    pairs += reference_runs([100.0, 103.0, 106.0, 109.0])
    ranking = rank(pairs, asked(FASTEST, POWER))
    for row, cells in zip(ranking.trials, ranking_table(ranking).to_pylist(), strict=True):
        for name in ("tokens_per_s", POWER.metric):
            assert cells[name] == row.interval(name).value
        assert cells["tokens_per_s"] == row.objective.value


def test_units_are_in_the_schema_also_after_parquet(tmp_path):
    ranking = rank([speed(1, 1.0)], asked(FASTEST, POWER))
    pq.write_table(ranking_table(ranking), tmp_path / "ranking.parquet")
    schema = pq.read_schema(tmp_path / "ranking.parquet")
    for name, metric in METRICS.items():
        assert schema.field(name).metadata[b"unit"].decode() == (metric.unit or ""), name
    for part in ("got", "bound", "slack"):
        assert schema.field(f"{POWER}: {part}").metadata[b"unit"] == b"W"
    assert schema.field("tokens_per_s low").metadata[b"unit"] == b"1/s"
    assert schema.metadata[b"wattune.objective"] == b"maximize tokens_per_s"


def test_csv_has_a_line_for_every_trial_and_one_figure_a_cell():
    awkward = trial(3, status=RunStatus.CRASHED, reason='died, saying "=1+1"\nand more')
    pairs = [speed(1, 1.0), speed(1, 2.0, repeat=1), speed(2, 2.0, power_w=3e3), awkward]
    ranking = rank(pairs, asked(FASTEST, POWER))
    lines = list(csv.DictReader(io.StringIO(ranking_csv(ranking))))
    assert [line["verdict"] for line in lines] == ["feasible", "infeasible", "failed"]
    assert (lines[0]["tokens_per_s"], lines[0]["num_repeats"], lines[0]["tp"]) == ("1.5", "2", "1")
    assert float(lines[0]["tokens_per_s high"]) == ranking.best.objective.high
    assert (lines[1][f"{POWER}: slack"], lines[1]["rank"]) == ("-250.0", "")
    assert lines[2]["reason"] == ranking.failed[0].reason


FIGURES = st.fixed_dictionaries(
    {"tokens_per_s": st.integers(1, 99).map(float)},
    optional={
        "mfu_frac": st.sampled_from([0.25, 0.5]),
        "node_device_power_peak_1s_w": st.sampled_from([2000.0, 3000.0]),
    },
)


@given(st.lists(FIGURES, max_size=6))
def test_a_cell_has_what_was_measured_and_nothing_where_nothing_was(measured):
    pairs = [trial(number, metrics) for number, metrics in enumerate(measured, start=1)]
    ranking = rank(pairs, asked(FASTEST, POWER))
    lines = list(csv.DictReader(io.StringIO(ranking_csv(ranking))))
    assert [line["trial_id"] for line in lines] == [row.trial_id for row in ranking.trials]
    assert ranking_table(ranking).column("trial_id").to_pylist() == [row.trial_id for row in ranking.trials]
    by_id = {spec.trial_id: result.metrics for spec, result in pairs}
    for line in lines:
        metrics = by_id[line["trial_id"]]
        for name in {name for each in measured for name in each}:
            assert line[name] == (repr(metrics[name]) if name in metrics else "")
        held = {"2000.0": "750.0", "3000.0": "-250.0", "": ""}
        assert line[f"{POWER}: slack"] == held[line.get("node_device_power_peak_1s_w", "")]


def test_a_layout_is_one_cell_and_a_file_that_cannot_be_written_is_an_error(tmp_path):
    ranking = rank([speed(1, 1.0)], asked(FASTEST))
    (line,) = csv.DictReader(io.StringIO(ranking_csv(ranking)))
    assert (line["layout"], line["rank_order"]) == ("8-8", "1-0")
    write_asked(tmp_path / "ranking.csv", ranking_csv(ranking))
    assert (tmp_path / "ranking.csv").read_text() == ranking_csv(ranking)
    with pytest.raises(PlanError, match="cannot be written"):
        write_asked(tmp_path / "none" / "ranking.csv", ranking_csv(ranking))


@pytest.mark.parametrize("write", [ranking_table, ranking_csv])
def test_the_columns_of_flags_are_found_once_not_for_every_row(monkeypatch: pytest.MonkeyPatch, write) -> None:
    looked_at = []

    def counted(specs, spec_of):
        specs = list(specs)
        looked_at.append(len(specs))
        return flag_columns(specs, spec_of)

    monkeypatch.setattr("wattune.view.files.flag_columns", counted)
    write(rank([speed(size, 100.0 + size) for size in range(1, 21)], asked(FASTEST)))
    assert looked_at == [20]
