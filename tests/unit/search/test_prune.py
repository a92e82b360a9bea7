"""From a space to candidates: every combination in exactly one list, equal work once, and fast."""

import itertools
import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pace import least_cpu_s

from wattune.errors import NothingToTryError
from wattune.plans.axes import AXES
from wattune.plans.effective import effective
from wattune.plans.rules import RULES, violations
from wattune.search.prune import combinations, prune
from wattune.search.space import load_space, parse_space
from wattune.storage.study import StudyFolder

SPACES = Path(__file__).parents[3] / "search_spaces"


def study(space, *, model="mixtral_8x7b", world=4, batch=8, **changes):
    return parse_space(
        {
            "study": "x",
            "model": {"name": model, "num_layers": 4} if isinstance(model, str) else model,
            "cluster": {"device": "cpu", "devices_per_node": world},
            "engine": "torch",
            "workload": {"seq_len": 128, "global_batch_size": batch},
            "space": space,
            "objective": "maximize tokens_per_s",
            **changes,
        }
    )


def values(*several):
    return st.lists(st.sampled_from(several), min_size=1, max_size=3, unique_by=repr)


SPACE = st.fixed_dictionaries(
    {},
    optional={
        **{name: values(1, 2, 3, 4) for name in ("tp", "pp", "cp", "ep", "etp", "vpp", "micro_batch_size")},
        **{name: values(*AXES[name].choices) for name in ("sharding", "overlap", "dtype")},
        "layout": values("even", [2, 2], [3, 1], [1, 1, 1, 1], [4]),
        "rank_order": values("topology", [0, 1, 2, 3], [3, 2, 1, 0], [0]),
    },
).filter(bool)


MODELS_OF_BOTH_KINDS = ("mixtral_8x7b", "llama3_8b")


def test_only_models_with_experts_have_a_routing():
    candidates = prune(study({"tp": [1, 2]}, model=[{"name": name, "num_layers": 4} for name in MODELS_OF_BOTH_KINDS]))
    by_model = {kept.spec.model.name: str(kept.spec.workload.routing) for kept in candidates.kept}
    assert by_model == {"mixtral_8x7b": "balanced", "llama3_8b": "None"}
    alone = prune(study({"tp": [1, 2]}, model="llama3_8b"))
    dense = {kept.trial_id for kept in candidates.kept if not kept.spec.model.is_moe}
    assert dense == {kept.trial_id for kept in alone.kept}, "beside a mixture a dense trial is the same one"


@settings(max_examples=40, deadline=None)
@given(space=SPACE, model=st.sampled_from(["mixtral_8x7b", "llama3_8b"]))
def test_every_combination_is_in_exactly_one_list(space, model):
    planned = study(space, model=model, batch=[8, 6])
    candidates = prune(planned)
    listed = [dict(c.config) for c in (*candidates.kept, *candidates.rejected, *candidates.equivalent)]
    plans = [dict(zip(space, chosen, strict=True)) for chosen in itertools.product(*space.values())]
    everything = [{"global_batch_size": batch} | plan for batch in (8, 6) for plan in plans]

    assert sorted(map(json.dumps, listed)) == sorted(map(json.dumps, everything))
    assert sum(candidates.rejected_by_rule().values()) == len(candidates.rejected)

    ids = [kept.trial_id for kept in candidates.kept]
    assert len(set(ids)) == len(ids)
    for equivalent in candidates.equivalent:
        assert equivalent.into in ids and "acts as" in equivalent.reason
    for rejected in candidates.rejected:
        assert rejected.rule in {rule.__name__ for rule in RULES} and ";" in rejected.reason
    told = {json.dumps(dict(one.config)): (one.rule, one.reason) for one in candidates.rejected}
    for written, config in combinations(planned):  # each by itself, as if no other had its plan
        alone = next(violations(replace(written, plan=effective(written)[0])), None)
        assert told.get(json.dumps(dict(config))) == (alone and (alone.rule, alone.reason))


def test_the_combination_that_is_written_as_it_runs_is_the_one_kept():
    candidates = prune(
        study(
            {"overlap": ["grad_param", "grad", "none"], "tp": [4], "sharding": ["zero1", "none"]},
            world=4,
            model="llama3_8b",
        )
    )
    assert [kept.config for kept in candidates.kept] == [{"overlap": "none", "tp": 4, "sharding": "none"}]
    assert len(candidates.equivalent) == 5
    by_config = {json.dumps(dict(equivalent.config)): equivalent.reason for equivalent in candidates.equivalent}
    assert by_config['{"overlap": "none", "tp": 4, "sharding": "zero1"}'] == (
        "sharding=zero1 acts as none: no replicas to share it with at dp=1"
    )


def test_axes_left_out_are_neutral_and_follow_what_they_depend_on():
    (kept,) = prune(study({"tp": [2]})).kept
    assert (kept.spec.plan.etp, kept.spec.plan.dtype, kept.spec.plan.pp) == (2, "fp32", 1)
    gpu = {"device": "h200_sxm", "devices_per_node": 4}
    (kept,) = prune(study({"tp": [2]}, cluster=gpu)).kept
    assert kept.spec.plan.dtype == "bf16"


def test_several_models_and_clusters_are_told_apart_in_configurations():
    models = [{"name": "llama3_8b", "num_layers": 2}, {"name": "llama3_8b", "num_layers": 4}]
    clusters = [{"device": "cpu", "devices_per_node": 2}, {"device": "cpu", "devices_per_node": 4}]
    candidates = prune(study({"tp": [1]}, model=models, cluster=clusters))
    assert [kept.config for kept in candidates.kept] == [
        {"model": f"llama3_8b num_layers={layers}", "cluster": f"1x{world} cpu", "tp": 1}
        for layers in (2, 4)
        for world in (2, 4)
    ]


def test_grid_order_is_the_order_of_the_file():
    candidates = prune(study({"micro_batch_size": [2, 1], "tp": [2, 1]}))
    assert [tuple(kept.config.values()) for kept in candidates.kept] == [(2, 2), (2, 1), (1, 2), (1, 1)]


def test_json_and_rows_hold_every_combination(tmp_path):
    spec = load_space(SPACES / "cpu_smoke.yaml")
    candidates = prune(spec)
    data = json.loads(json.dumps(candidates.to_json()))
    assert {key: len(rows) for key, rows in data.items()} == {
        "kept": len(candidates.kept),
        "rejected": len(candidates.rejected),
        "equivalent": len(candidates.equivalent),
    }
    assert data["kept"][0].keys() >= {"trial_id", "config"}
    assert data["rejected"][0].keys() == {"config", "rule", "reason"}
    assert data["equivalent"][0].keys() == {"config", "into", "reason"}

    folder = StudyFolder.create(tmp_path, spec.name, spec.document)
    folder.commit(folder.document(), candidates.rows())
    rows = folder.candidates()
    assert len(rows) == spec.num_combinations
    assert [row["trial_id"] for row in rows if row["status"] == "kept"] == [k["trial_id"] for k in data["kept"]]
    assert json.loads(rows[-1]["config"]) == data["equivalent"][-1]["config"]


def test_a_space_without_a_valid_combination_says_which_rules_and_remedies():
    candidates = prune(study({"tp": [3, 16], "vpp": [2]}, world=48, batch=48))
    with pytest.raises(NothingToTryError) as caught:
        candidates.require_kept()
    text = str(caught.value)
    assert "every one of 2 combinations is rejected (heads 1, kv_heads 1)" in text
    assert "use tp in {1, 2, 4, 8}" in text
    with pytest.raises(NothingToTryError, match="the only combination is rejected"):
        prune(study({"ep": [2]}, model="llama3_8b")).require_kept()


@pytest.mark.slow
def test_a_hundred_thousand_combinations_take_seconds():
    space = {
        **{name: [1, 2, 3, 4, 6, 8] for name in ("tp", "pp", "ep", "micro_batch_size")},
        "vpp": [1, 2, 3],
        "sharding": list(AXES["sharding"].choices),
        "recompute": list(AXES["recompute"].choices),
        "overlap": ["none", "grad"],
    }
    spec = study(space, world=64, batch=512)
    assert spec.num_combinations > 90_000
    found = []
    assert least_cpu_s(lambda: found.append(prune(spec))) < 3
    assert len(found[-1].kept) > 100


def test_a_padded_vocabulary_is_said_and_changes_nothing_else():
    odd = {"name": "llama3_8b", "num_layers": 4, "vocab_size": 50257}
    candidates = prune(study({"tp": [1, 2]}, model=odd))
    notes = {kept.spec.plan.tp: kept.notes for kept in candidates.kept}
    assert notes == {1: (), 2: ("tp=2 pads the vocabulary of llama3_8b from 50,257 to 50,432 tokens",)}
    assert [kept.spec.model.vocab_size for kept in candidates.kept] == [50257, 50257]
    assert [kept["notes"] for kept in candidates.to_json()["kept"]] == [list(kept.notes) for kept in candidates.kept]
