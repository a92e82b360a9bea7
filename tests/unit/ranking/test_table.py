"""A ranking as Parquet and as CSV."""

import csv
import io
import json

from made_trials import FASTEST, POWER, speed, trial

from wattune.ranking.assessment import Verdict
from wattune.ranking.order import rank
from wattune.ranking.table import to_csv, to_table
from wattune.trial import TrialStatus


def test_json_and_table_hold_every_row():
    pairs = [speed(1, 1.0), speed(1, 2.0, repeat=1), speed(2, 2.0, power_w=3e3), trial(3, status=TrialStatus.CRASHED)]
    ranking = rank(pairs, FASTEST, [POWER], where=[])
    data = json.loads(json.dumps(ranking.to_json(), allow_nan=False))
    assert [len(data[verdict]) for verdict in Verdict] == [1, 1, 0, 0, 1]
    assert data["feasible"][0]["repeats"][1]["metrics"]["tokens_per_s"] == 2.0
    table = to_table(ranking)
    assert table.column("verdict").to_pylist() == ["feasible", "infeasible", "failed"]
    first = table.slice(0, 1).to_pylist()[0]
    assert (first["objective"]["value"], first["objective"]["method"]) == (1.5, "repeats")
    assert (first["plan"]["layout"], first["plan"]["rank_order"]) == ([8, 8], "(1, 0)")
    assert dict(first["repeats"][1]["metrics"])["tokens_per_s"] == 2.0
    assert table.schema.metadata[b"wattune.objective"] == b"maximize tokens_per_s"


def test_csv_has_a_line_for_every_trial_and_one_figure_a_cell():
    awkward = trial(3, status=TrialStatus.CRASHED, reason='died, saying "=1+1"\nand more')
    pairs = [speed(1, 1.0), speed(1, 2.0, repeat=1), speed(2, 2.0, power_w=3e3), awkward]
    ranking = rank(pairs, FASTEST, [POWER])
    lines = list(csv.DictReader(io.StringIO(to_csv(ranking))))
    assert [line["verdict"] for line in lines] == ["feasible", "infeasible", "failed"]
    assert (lines[0]["tokens_per_s"], lines[0]["num_repeats"], lines[0]["tp"]) == ("1.5", "2", "1")
    assert float(lines[0]["tokens_per_s high"]) == ranking.best.objective.high
    assert (lines[1][f"{POWER}: slack"], lines[1]["rank"]) == ("-250.0", "")
    assert lines[2]["reason"] == ranking.failed[0].reason
