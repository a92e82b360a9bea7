"""Experiments: what their files declare, their verdicts, their page and picture, and one that needs no machine."""

import json
import math
import random
import re
import shutil
import xml.etree.ElementTree as ET
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

import wattune
from wattune.api import experiments as room
from wattune.errors import PlanError
from wattune.metrics import METRICS
from wattune.run import RunStatus
from wattune.view.effects import effect_text, effects_picture, repeat_text

FOLDER = Path(__file__).parents[3] / "experiments"
KNOWN = room.find_experiments(FOLDER)
RESULTS = room.results_of(FOLDER)


@pytest.mark.parametrize("name", KNOWN)
def test_an_experiment_is_a_short_declaration_whose_arms_can_run(name: str):
    declared = KNOWN[name]
    text = (FOLDER / f"{name}.py").read_text()
    assert len(text.splitlines()) <= 60
    assert "Hypothesis:" in declared["__doc__"] and "before" in declared["__doc__"], (
        "written before the run, with a size"
    )
    assert len(declared["ARMS"]) == 2 and set(declared["CLAIMS"].values()) <= {"higher", "lower", "same"}
    assert set(declared["CLAIMS"]) <= METRICS.keys()
    devices = ["1x2 h200_sxm", "1x2 h100_sxm", "1x4 h100_sxm"] if "EVIDENCE" not in declared else ["1x2 h200_sxm"]
    devices = [one for one in devices if int(one[2]) <= declared.get("DEVICES", 4)]
    for cluster in devices:
        for arm in declared["ARMS"].values():
            space = room._space(declared, arm, cluster)
            (kept,) = wattune.plan(space).kept
            assert "EVIDENCE" in declared or wattune.plan(room._shortened(space)).kept, kept


def test_a_verdict_is_that_of_the_interval():
    """Properties, against plain comparisons on random intervals."""
    draw = random.Random(0)
    for _ in range(2000):
        middle, reach = draw.gauss(0, 0.05), abs(draw.gauss(0, 0.05))
        low, high, repeats = middle - reach, middle + reach, draw.choice([2, 3, 10])
        effect = {"effect": middle, "low": low, "high": high, "repeats": repeats}
        higher, lower, same = (room.judged(side, effect) for side in ("higher", "lower", "same"))
        assert (higher["verdict"] == "agrees") == (low > 0) == (lower["verdict"] == "contests")
        assert (higher["verdict"] == "contests") == (high < 0) == (lower["verdict"] == "agrees")
        assert (same["verdict"] == "agrees") == (low > -room.SAME and high < room.SAME)
        assert (same["verdict"] == "contests") == (low > room.SAME or high < -room.SAME)
        if (wanted := higher["would_tell"]) is not None:
            assert higher["verdict"] == "cannot tell" and wanted > repeats
            narrower = reach * math.sqrt(repeats / wanted)
            assert narrower <= abs(middle) or wanted == repeats + 1, "so many repeats would tell"
            fewer = reach * math.sqrt(repeats / (wanted - 1))
            assert fewer >= abs(middle) or wanted == repeats + 1, "and fewer would not"
    untested = {"effect": 0.1, "low": None, "high": None, "repeats": 1}
    assert room.judged("higher", untested) == {"verdict": "cannot tell", "would_tell": None}
    for high, verdict in ((-2.2, "agrees"), (0.1, "cannot tell")):
        fall = {"effect": -3.7, "low": None, "high": high, "repeats": 2}
        assert room.judged("lower", fall) == {"verdict": verdict, "would_tell": None}, "it may fall to nothing"
        text = effect_text({"metric": "nvlink_bytes_per_s"} | fall | room.judged("lower", fall))
        assert text == f"nvlink_bytes_per_s -97.5 % (-100.0 to {100 * math.expm1(high):+.1f}): {verdict}"


def test_each_line_of_the_page_has_its_result_and_each_result_is_computed():
    text = (FOLDER / "README.md").read_text()
    assert text == room.written_page(FOLDER), "wattune experiments page"
    table = text.partition("<!-- results -->")[2].partition("<!-- end of results -->")[0]
    assert {line.split("]")[0].removeprefix("| [") for line in table.splitlines() if line.startswith("| [")} == {
        *RESULTS
    }
    for stem, result in RESULTS.items():
        name = stem.partition("@")[0]
        assert name in KNOWN and name in RESULTS, stem
        for claim in result["claims"]:
            assert judged_again(claim) == claim, name
        assert result["verdict"] == result["claims"][0]["verdict"]
        assert {one["metric"]: one["expected"] for one in result["claims"]}.items() <= KNOWN[name]["CLAIMS"].items()
        figure = FOLDER / "results" / f"{stem}.svg"
        assert figure.stat().st_size < 200_000 and effects_picture(result) == figure.read_text()
        if result["evidence"] == "measured":
            assert (FOLDER / "results" / f"{stem}.parquet").stat().st_size < 1_000_000
        assert result["evidence"] != "simulated", "simulated sensors prove nothing about hardware"


def test_the_page_of_findings_names_each_verdict():
    page = (FOLDER.parent / "docs" / "paper.md").read_text()
    told = re.findall(r"\[(\w+)\]\(\.\./experiments/\1\.py\)(?:: \*\*([a-z ]+)\*\*)?", page)
    assert {name: verdict for name, verdict in told if verdict} == {
        name: result["verdict"] for name, result in RESULTS.items() if name in dict(told)
    }
    assert {name for name, _ in told} <= KNOWN.keys() and len(told) >= 12
    for name in ("recomputation", "prefill", "fsdp_micro_batch"):
        claim = next(one for one in RESULTS[name]["claims"] if one["metric"] == "tokens_per_s")
        both = " % and ".join(f"{100 * math.expm1(claim[key]):+.0f}" for key in ("predicted", "effect"))
        assert f"{both} %" in page, name


def judged_again(claim):
    return claim | room.judged(claim["expected"], claim)


def test_an_estimated_experiment_runs_anywhere_and_its_picture_needs_no_colour(tmp_path: Path):
    storage = str(tmp_path / "storage")
    (result,) = room.run_experiments(["scale_out"], folder=FOLDER, results=tmp_path, storage=storage).values()
    assert json.loads((tmp_path / "scale_out.json").read_text()) == json.loads(json.dumps(result))
    assert result["evidence"] == "estimated" and not (tmp_path / "scale_out.parquet").exists()
    claim = result["claims"][0]
    assert claim["predicted"] == claim["effect"] and claim["low"] < claim["effect"] < claim["high"]
    assert math.isclose(math.exp(claim["effect"]), ratio(), rel_tol=1e-6)
    picture = (tmp_path / "scale_out.svg").read_text()
    assert ET.fromstring(picture) is not None and "ESTIMATED, NOT MEASURED" in picture
    assert {part.split('"')[0] for part in picture.split("#")[1:]} <= {"111", "fff"}, "black on white"
    assert all(word in picture for word in (claim["verdict"], claim["metric"], "95 % interval"))


def ratio():
    kept = {"seq_len": 8192, "global_batch_size": 128, "sharding": "zero1", "recompute": "full", "tp": 4}
    speeds = [
        wattune.estimate(model="llama3_70b", cluster=cluster, pp=pp, **kept).figures["tokens_per_s"]["value"]
        for cluster, pp in zip(KNOWN["scale_out"]["SPACE"]["cluster"], (4, 8), strict=True)
    ]
    return speeds[1] / speeds[0]


TURNS = [(f"experiment_skewed_experts_{end}", number, 1) for end, number in (("a", 1), ("b", 2), ("a", 3), ("b", 3))]
"""A, B B, A A, B: workers start four times for six runs."""


@pytest.mark.parametrize(
    ("names", "turns"),
    [
        (["recomputation"], [("experiment_recomputation", 3, 2)]),
        (["recomputation", "traffic", "parallelism"], [("experiment_recomputation", 3, 5)]),  # one arm is of two
        (["lora", "prefill"], [("experiment_lora", 3, 4)]),
        (["slice_of_a_model", "uneven_pipeline", "traffic"], [("experiment_slice_of_a_model", 3, 5)]),
        (["micro_batch", "micro_batch_heat"], None),  # windows of other lengths
        (["two_jobs", "traffic"], None),
        (["skewed_experts"], TURNS),
    ],
)
def test_arms_that_can_be_plans_of_one_study_are_and_others_take_turns(monkeypatch: pytest.MonkeyPatch, names, turns):
    ran = []

    def run_study(planned, **_):
        ran.append((planned.name, planned.spec.measure.repeats, len(planned.kept)))
        return SimpleNamespace(study=planned.name, ending="finished", ranking=SimpleNamespace(trials=()))

    monkeypatch.setattr(room, "run_study", run_study)
    spaces = [room._space(KNOWN[one], arm, "1x2 h200_sxm") for one in names for arm in KNOWN[one]["ARMS"].values()]
    if turns is None:
        assert room._joined(spaces) is None
        return
    if names == ["skewed_experts"]:
        shorter = room._space(KNOWN[names[0]], {}, "1x2 h200_sxm", {"min_seconds": 2, "repeats": 2})["measure"]
        assert shorter == spaces[0]["measure"] | {"min_seconds": 2, "repeats": 2} != spaces[0]["measure"]
    studies = room._run(spaces, names[0], None, None, None)
    assert ran == turns and {wattune.plan(arm).kept[0].trial_id for arm in spaces} == studies.keys()


def test_a_run_that_crashed_or_hung_is_tried_once_more(monkeypatch: pytest.MonkeyPatch):
    space = [room._space(KNOWN["traffic"], arm, "1x2 h200_sxm") for arm in KNOWN["traffic"]["ARMS"].values()]
    for ends, calls in (
        (["completed", "completed"], 1),
        (["timed_out", "completed"], 2),
        (["crashed", "crashed"], 2),
        (["out_of_memory"], 1),
    ):
        ran = []

        def run_study(_, *, retry, ends=ends, ran=ran, **__):
            rows = [SimpleNamespace(repeats=[SimpleNamespace(status=RunStatus(ends[len(ran)]))])]
            ran.append(retry)
            return SimpleNamespace(study="x", ending="finished", ranking=SimpleNamespace(trials=rows))

        monkeypatch.setattr(room, "run_study", run_study)
        room._run(space, "traffic", None, None, None)
        assert len(ran) == calls and not ran[0] and all(RunStatus.TIMED_OUT in retry for retry in ran[1:])


def test_a_repeat_stands_beside_the_first_result_and_says_whether_it_reproduces_it(tmp_path: Path):
    """A study that goes on replaces its result; other runs, on any machine and day, never do."""
    for name in ("recomputation.json", "recomputation.parquet"):
        shutil.copy(FOLDER / "results" / name, tmp_path)
    runs = pq.read_table(tmp_path / "recomputation.parquet")
    names = runs.column_names
    longer, other = (
        pa.concat_tables([runs, runs]),
        runs.set_column(names.index("energy_per_step_j"), "energy_per_step_j", pc.add(runs["energy_per_step_j"], 1.0)),
    )
    assert [room._free_name("recomputation", tmp_path, one) for one in (runs, longer, other, runs.slice(1))] == [
        "recomputation",
        "recomputation",
        "recomputation@2",
        "recomputation@2",
    ]
    pq.write_table(other, tmp_path / "recomputation@2.parquet")
    assert room._free_name("recomputation", tmp_path, other) == "recomputation@2"
    assert room._free_name("recomputation", tmp_path, runs.slice(1)) == "recomputation@3"
    assert room._free_name("traffic", tmp_path, runs) == "traffic"
    first = RESULTS["recomputation"]
    again = json.loads(json.dumps(first)) | {"hardware": "1x2 h100_sxm"}
    assert repeat_text(first, again) == (
        f"reproduces agrees; other are hardware 1x2 h100_sxm, before 1x2 h200_sxm ({first['date']})"
    )
    claim = again["claims"][0]
    claim |= {"low": -0.26, "high": 0.01, "verdict": "cannot tell"}
    assert "tokens_per_s cannot tell, before agrees: the intervals overlap" in repeat_text(first, again)
    claim |= {"low": 0.1, "high": 0.2, "verdict": "contests"}
    told = repeat_text(first, again | {"verdict": "contests", "hardware": first["hardware"]})
    unmeasured = {**again, "claims": [claim | {"verdict": "cannot tell", "effect": None, "low": None, "high": None}]}
    assert "contests, before cannot tell: one of them did not measure it" in repeat_text(unmeasured, again)
    assert "intervals lie apart" in told and "versions are the same" in told and "reproduces" not in told


def test_mistakes_are_told(tmp_path: Path):
    with pytest.raises(PlanError, match='unknown experiment "scale_outt"; did you mean "scale_out"'):
        room.run_experiments(["scale_outt"], folder=FOLDER)
    with pytest.raises(PlanError, match="no experiment in"):
        room.find_experiments(tmp_path)
    with pytest.raises(PlanError, match="no two GPUs"):
        room.run_experiments(["recomputation"], folder=FOLDER, results=tmp_path)
    shutil.copy(FOLDER / "recomputation.py", tmp_path / "too_large.py")
    text = (tmp_path / "too_large.py").read_text().replace('"num_layers": 4, ', "")
    (tmp_path / "too_large.py").write_text(text.replace('"llama3_8b"', '"gpt3_175b"').replace("4096", "2048"))
    with pytest.raises(PlanError, match="tp2 mbs2 does not fit"):
        room.run_experiments(["too_large"], folder=tmp_path, short=True)


@pytest.mark.parametrize(
    ("products", "shown", "cluster"),
    [
        (["NVIDIA H200"] * 4, None, "1x4 h200_sxm"),
        (["NVIDIA H200"] * 4, "2,3", "1x2 h200_sxm"),
        (["NVIDIA H100 80GB HBM3"] * 8, None, "1x4 h100_sxm"),
        (["NVIDIA H100 80GB HBM3"] * 2, "0,1,2,3", "1x2 h100_sxm"),
        (["NVIDIA H200"] * 4, "3", ""),
        (["NVIDIA H200"], None, ""),
        (["A card"] * 2, None, ""),
    ],
)
def test_the_devices_that_a_program_sees_are_counted(monkeypatch: pytest.MonkeyPatch, products, shown, cluster):
    monkeypatch.setattr(room, "nvidia_products", lambda: products)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if shown is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", shown)
    if cluster:
        assert room._devices_here() == cluster and room._devices_here(2) == cluster.replace("1x4", "1x2")
    else:
        with pytest.raises(PlanError, match="no two GPUs"):
            room._devices_here()


def test_effects_are_worded():
    nothing = {"metric": "tokens_per_s", "effect": None, "low": None, "high": None, "repeats": 0}
    assert effect_text(nothing | room.judged("same", nothing)) == "tokens_per_s not measured: cannot tell"
    claim = {"metric": "tokens_per_s", "effect": math.log(1.1), "low": math.log(1.05), "high": math.log(1.2)}
    claim |= {"verdict": "agrees", "would_tell": None}
    assert effect_text(claim) == "tokens_per_s +10.0 % (+5.0 to +20.0): agrees"
    warm = {"metric": "device_temp_max_c", "effect": 1.0, "low": -1.0, "high": 3.0}
    warm |= {"verdict": "cannot tell", "would_tell": 12}
    assert effect_text(warm) == "device_temp_max_c +1.0 K (-1.0 to +3.0): cannot tell; 12 repeats would tell"


def test_an_effect_is_a_log_ratio_also_of_what_can_be_0(monkeypatch: pytest.MonkeyPatch):
    """Traffic has no share of its own, as it can be 0: the ratio is that to the first arm's."""

    def effect(metric, a, change, low, high):
        found = SimpleNamespace(metric=metric, change=change, low=low, high=high, a=SimpleNamespace(value=a))
        monkeypatch.setattr(room, "difference", lambda asked, *_: found if asked == metric else None)
        runs = SimpleNamespace(runs=(1, 2))
        return room.measured_effects(runs, runs).get(metric)

    found = effect("nvlink_bytes_per_s", 40e9, -38e9, -38.4e9, -37.6e9)
    assert math.isclose(math.exp(found["effect"]), 0.05) and found["low"] < found["effect"] < found["high"]
    assert room.judged("lower", found)["verdict"] == "agrees"
    wide = effect("nvlink_bytes_per_s", 40e9, -38e9, -41e9, 1e9)
    assert wide["low"] is None and room.judged("lower", wide)["verdict"] == "cannot tell"
    assert effect("nvlink_bytes_per_s", 0.0, 1e9, None, None) is None
    assert effect("device_temp_max_c", 50.0, 1.0, -1.0, 3.0)["effect"] == 1.0
