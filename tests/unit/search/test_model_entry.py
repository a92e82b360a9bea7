"""Models of a space: of the catalog, like one of it, of a file, or of their own; ids follow the fields alone."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from wattune.catalog.models import MODELS, ModelSpec
from wattune.errors import PlanError, SpaceError
from wattune.search.model_entry import check_own_name
from wattune.search.prune import prune
from wattune.search.space import load_space, parse_space

SPACE: dict[str, Any] = {
    "study": "own",
    "model": "llama3_8b",
    "cluster": "1x4 h200_sxm",
    "engine": "torch",
    "workload": {"seq_len": 4096, "global_batch_size": 16},
    "space": {"tp": [1, 2]},
    "objective": "maximize tokens_per_s",
}
QWEN2_72B = {"name": "qwen2_72b", "like": "llama3_70b", "ffn_hidden_size": 29568, "vocab_size": 152064}


def model_of(entry: Any) -> ModelSpec:
    return parse_space(SPACE | {"model": entry}).models[0]


def ids(document: Any) -> list[str]:
    return [kept.trial_id for kept in prune(parse_space(document)).kept]


def test_a_model_like_another_has_its_fields_and_its_own_name() -> None:
    spec = model_of(QWEN2_72B)
    expected = replace(MODELS["llama3_70b"], name="qwen2_72b", ffn_hidden_size=29568, vocab_size=152064)
    assert replace(spec, source="") == replace(expected, source="")


def test_a_stored_study_of_an_own_model_is_a_space_with_the_same_trials() -> None:
    study = parse_space(SPACE | {"model": QWEN2_72B})
    document = yaml.safe_load(yaml.safe_dump(dict(study.document)))
    again = parse_space(document)
    assert again.document == study.document
    assert [kept.trial_id for kept in prune(again).kept] == [kept.trial_id for kept in prune(study).kept]


def test_ids_follow_the_fields_and_not_their_origin(tmp_path: Path) -> None:
    llama = MODELS["llama3_70b"]
    fields = {key: value for key, value in asdict(llama).items() if key not in ("name", "source")}
    config = {
        "model_type": "llama",
        "hidden_size": llama.hidden_size,
        "intermediate_size": llama.ffn_hidden_size,
        "num_attention_heads": llama.num_heads,
        "num_hidden_layers": llama.num_layers,
        "num_key_value_heads": llama.num_kv_heads,
        "rope_theta": llama.rope_base,
        "vocab_size": llama.vocab_size,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    origins = [
        {"name": "mine", "like": "llama3_70b"},
        {"name": "mine", **fields},
        {"name": "mine", "from_config": str(tmp_path / "config.json")},
    ]
    found = [ids(SPACE | {"model": one}) for one in origins]
    assert found[0] == found[1] == found[2]
    assert found[0] != ids(SPACE | {"model": "llama3_70b"})  # a name is a part of a trial's identity


def test_a_configuration_is_looked_for_beside_the_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = {"model_type": "llama", "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4}
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 2, "vocab_size": 512}))
    path = tmp_path / "space.yaml"
    path.write_text(yaml.safe_dump(SPACE | {"model": {"name": "small", "from_config": "config.json"}}))
    monkeypatch.chdir("/")
    assert load_space(path).models[0].hidden_size == 256


def test_fields_of_a_file_may_be_overridden(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    entry = {"name": "gpt2", "from_config": str(tmp_path / "config.json"), "num_layers": 3}
    assert model_of(entry).num_layers == 3


LIKE = {"name": "mine", "like": "llama3_8b"}


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ({"name": "mine", "like": "llama4"}, 'model.like: unknown model "llama4"'),
        ({**LIKE, "layer_kinds": "SF"}, "model.sliding_window: got 0, allowed: 1 or more, as layer_kinds has S"),
        (
            {**LIKE, "layer_kinds": "f", "sliding_window": 9},
            "model.sliding_window: got 9, allowed: 0, as layer_kinds has no S",
        ),
        ({**LIKE, "shared_expert_gate": True}, "model.shared_expert_gate: weighs shared experts; give shared_ffn"),
        ({**LIKE, "layer_kinds": "de"}, "model.num_experts: got 0, and layer_kinds has layers of a mixture"),
        ({**LIKE, "kv_lora_rank": 512}, "model.rope_head_dim: got 0, allowed: below head_dim in latent attention"),
        ({**LIKE, "biased_parts": "qkv all"}, 'model.biased_parts: got "qkv all", allowed: words of qkv o'),
        ({"name": "mine", "like": "llama3_8b", "leave_out": ["qkv_bias"]}, "model.leave_out: names features"),
        ({"name": "my model", "like": "llama3_8b"}, 'model.name: "my model" is no name'),
        ("Qwen/Qwen3-8B", 'a name on a hub, and nothing is downloaded; did you mean "qwen3_8b_like"?'),
    ],
    ids=str,
)
def test_a_model_that_cannot_be_told_is_one_line(entry: Any, words: str) -> None:
    with pytest.raises(SpaceError) as caught:
        model_of(entry)
    assert "\n" not in str(caught.value) and words in str(caught.value)


@pytest.mark.parametrize("name", [*MODELS, "a", "A.b_c-1", "x" * 80])
def test_names_of_columns_and_labels_are_taken(name: str) -> None:
    assert check_own_name(name) == name


@pytest.mark.parametrize("name", ["", "a b", "-a", "x" * 81, "a/b/c", "é"])
def test_other_names_are_refused(name: str) -> None:
    with pytest.raises(PlanError, match="is no name"):
        check_own_name(name)
