"""`wattune scale` from the command line: the space it writes, and what it refuses before it writes one."""

import json
from pathlib import Path

import pytest
import yaml

from wattune import api

SPACE = {
    "study": "large",
    "model": {"name": "llama3_8b"},
    "cluster": "8x8 h100_sxm",
    "engine": "torch",
    "workload": {"seq_len": 4096, "global_batch_size": 256},
    "space": {"tp": [1, 2], "pp": [4], "sharding": ["zero1"]},
    "objective": "maximize tokens_per_s",
}


def written(folder: Path, **changed: object) -> Path:
    path = folder / "large.yaml"
    path.write_text(yaml.safe_dump({key: value for key, value in (SPACE | changed).items() if value is not None}))
    return path


def test_the_small_space_plans_and_says_where_it_comes_from(tmp_path, wattune):
    path = written(tmp_path)
    code, out, _ = wattune("scale", path, "--to", "1x8:h100_sxm")
    assert code == 0 and "pipeline bubble to compute" in out and "wrote" in out
    small = tmp_path / "large_on_1x8_h100_sxm.yaml"
    assert "stand for the plans of large.yaml" in small.read_text()
    assert "figures are the large plans'" in wattune("plan", small, "--estimate")[1]
    planned = api.plan(small)
    assert planned.name == "large_on_1x8_h100_sxm"
    assert {one.spec.stands_for for one in planned.kept} <= {one.spec for one in api.plan(path).kept}
    assert all(one.spec.cluster.world_size <= 8 for one in planned.kept)
    assert api.plan(dict(planned.spec.document)).candidates.specs == planned.candidates.specs


def test_json_has_each_invariant_and_out_names_the_file(tmp_path, wattune):
    chosen = tmp_path / "mine.yaml"
    code, out, _ = wattune("scale", written(tmp_path), "--to", "1x8", "--allow", "30", "--out", chosen, "--json")
    found = json.loads(out)
    assert code == 0 and found["path"] == str(chosen) and "allow_percent: 30" in chosen.read_text()
    for plan in found["plans"]:
        assert sum(row["percent"] or 0 for row in plan["invariants"]) == pytest.approx(plan["distance_percent"])
        assert {"layers a stage", "arithmetic intensity in FLOP/byte", "share of the memory"} < {
            r["name"] for r in plan["invariants"]
        }


COMMAND = {
    "engine": "command",
    "cluster": "1x8 h100_sxm",
    "model": None,
    "workload": None,
    "command": "python train.py --tp {tp}",
    "space": {"tp": [1, 2]},
}
TE = {"device": "h100_sxm", "num_nodes": 8, "devices_per_node": 8, "transformer_engine": True}
WRONG = [
    ({}, ["--to", "1x2:h100_sxm"], "it cannot keep"),
    ({"space": {"tp": [8]}}, ["--to", "1x2"], "needs tp*cp=8 devices or more, and 1x2 has 2"),
    ({"engine": "megatron", "cluster": TE, "space": {"tp": [8], "cp": [2]}}, ["--to", "1x8"], "needs tp*cp=16 devices"),
    ({}, ["--to", "1x8:mi300x"], "mi300x is of amd"),
    ({}, ["--to", "16x8"], "a cut needs as many or fewer"),
    ({}, ["--to", "1x8:h101"], 'unknown device "h101"'),
    ({}, ["--to", "1x8:cpu"], "cpu is of cpu and h100_sxm of nvidia"),
    ({}, ["--to", "1x8", "--allow", "-1"], "--allow: got -1"),
    ({}, ["--to", "1x8", "--allow", "nan"], "--allow: got nan"),
    ({}, ["--to", "1x8", "--out", "/nowhere/at/all.yaml"], "is no folder"),
    ({"model": {"name": "llama3_8b", "scale_to": "1x8"}}, ["--to", "1x4"], "is scaled already"),
    (COMMAND, ["--to", "1x2"], "has no model"),
    ({**COMMAND, "model": "llama3_8b"}, ["--to", "1x2"], "needs a built-in engine"),
    ({"limits": {"node_device_power_w": 5000}}, ["--to", "1x8"], "stops small runs"),
    ({"space": {"tp": [3]}}, ["--to", "1x8"], "has no plan that can run, of 1; world_size"),
    ({"cluster": {"device": "cpu", "devices_per_node": 8}}, ["--to", "1x4"], "has no estimates"),
    ({"model": {"name": "llama3_9b"}}, ["--to", "1x8"], 'unknown model "llama3_9b"'),
]


@pytest.mark.parametrize(("changed", "arguments", "words"), WRONG, ids=[one[2][:30] for one in WRONG])
def test_what_cannot_be_scaled_is_refused_and_nothing_is_written(changed, arguments, words, tmp_path, wattune):
    path = written(tmp_path, **changed)
    code, out, err = wattune("scale", path, *arguments)
    assert code == 2 and words in err and "Traceback" not in err, err
    assert len(err.strip().splitlines()) == 1 or "unknown model" in err, "one line"
    assert [*tmp_path.iterdir()] == [path] and "wrote" not in out


def test_a_file_that_is_there_stays(tmp_path, wattune):
    path = written(tmp_path)
    (tmp_path / "there.yaml").write_text("mine")
    code, _, err = wattune("scale", path, "--to", "1x8", "--out", tmp_path / "there.yaml")
    assert code == 2 and "exists and is kept" in err and (tmp_path / "there.yaml").read_text() == "mine"
