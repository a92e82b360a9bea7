"""Search space files: what they give, and every way in which they can be wrong."""

import copy
from collections import Counter
from dataclasses import fields
from pathlib import Path

import pytest
import yaml

from wattune.catalog.hardware import ClusterSpec
from wattune.errors import SpaceError
from wattune.search.grammar import SpaceFile
from wattune.search.prune import prune
from wattune.search.space import MAX_COMBINATIONS, load_space, parse_space
from wattune.storage.study import StudyFolder
from wattune.trial import Measure
from wattune.workload import Lora, Routing, TokenFile, Workload

SPACES = Path(__file__).parents[3] / "search_spaces"

SMALL = {
    "study": "small",
    "model": {"name": "mixtral_8x7b", "num_layers": 4},
    "cluster": {"device": "cpu", "devices_per_node": 4},
    "engine": "torch",
    "workload": {"seq_len": 128, "global_batch_size": 8},
    "space": {"tp": [1, 2]},
    "objective": "maximize tokens_per_s",
}

OF_COMMANDS = ("command", "env", "flags", "plans", "requires", "steps")
"""Keys that a study has only where its space does: `tests/unit/search/test_command_entry.py`."""


def changed(path, value):
    """The small space with one place set to something else; None removes it."""
    document = copy.deepcopy(SMALL)
    *parents, last = path.split(".")
    here = document
    for part in parents:
        here = here.setdefault(part, {})
    here[last] = value
    return document


def problems(document):
    with pytest.raises(SpaceError) as caught:
        parse_space(document, "x.yaml")
    assert str(caught.value).startswith("x.yaml: ")
    return [line.strip() for line in caught.value.problems]


OWN_CODE = sorted((SPACES.parent / "experiments" / "own_code").glob("*.yaml"))


@pytest.mark.parametrize("path", OWN_CODE, ids=lambda path: path.stem)
def test_spaces_of_own_code_keep_plans(path: Path) -> None:
    candidates = prune(load_space(path))
    assert candidates.kept and all(one.spec.program is not None for one in candidates.kept)


def test_the_experiment_on_ones_own_loop_compares_equal_samples_a_step():
    (path,) = (one for one in OWN_CODE if one.stem == "plain_loop")
    splits = Counter()
    for one in prune(load_space(path)).kept:
        flags = dict(one.spec.program.flags)
        splits[one.spec.plan.micro_batch_size, flags["accumulation"]] += 1
    assert splits == {(2, 4): 2, (4, 2): 2, (8, 1): 2}, "each with both sizes of buckets"


def test_defaults_are_those_of_the_types():
    study = parse_space(SMALL)
    assert study.measure == Measure()
    assert (study.search.strategy, study.search.num_trials, study.search.seed) == ("grid", None, 0)
    assert study.axes == {"tp": (1, 2)}
    assert study.constraints == () and study.limits == {}
    assert study.clusters[0].num_nodes == 1 and study.workloads[0].mode == "pretrain"


def test_model_cluster_and_engine_may_be_one_or_a_list():
    many = SMALL | {
        "model": [SMALL["model"], {"name": "llama3_8b"}],
        "cluster": [SMALL["cluster"], {"device": "h200_sxm", "devices_per_node": 4}],
        "engine": ["torch"],
    }
    study = parse_space(many)
    assert [model.name for model in study.models] == ["mixtral_8x7b", "llama3_8b"]
    assert [cluster.device for cluster in study.clusters] == ["cpu", "h200_sxm"]
    assert study.num_combinations == 8
    listed = {name: [SMALL[name]] for name in ("model", "cluster", "engine")}
    assert parse_space(SMALL | listed).document == parse_space(SMALL).document


def test_a_model_stays_the_large_one_where_small_runs_stand_for_it():
    entry = {"name": "mixtral_8x7b", "num_layers": 8, "scale_to": "1x2"}
    cluster = {"device": "h200_sxm", "devices_per_node": 4}
    study = parse_space(SMALL | {"model": entry, "cluster": cluster})
    assert study.models[0].num_layers == 8 and study.targets[study.models[0]].text == "1x2"
    assert parse_space(dict(study.document)).targets == study.targets


@pytest.mark.parametrize(("key", "type_"), [("measure", Measure), ("workload", Workload), ("cluster", ClusterSpec)])
def test_a_file_can_say_whatever_wattune_asks_of_it(key, type_):
    spelled = parse_space(SMALL).document[key]
    # A device of its own is a mapping in the place of its name, and what is known of a host is `host`.
    own = {field.name for field in fields(type_)} - {"own_device", "host_speed", "inlet_c"}
    assert (spelled[0] if isinstance(spelled, list) else spelled).keys() == own
    faster = SMALL | {"cluster": SMALL["cluster"] | {"host": {"speed": 2.0}}}
    assert parse_space(dict(parse_space(faster).document)).clusters[0].host_speed == 2.0
    assert parse_space(SMALL).document.keys() == SpaceFile.model_fields.keys() - {"format", "record", *OF_COMMANDS}


def test_layouts_and_orders_become_what_plans_hold():
    study = parse_space(changed("space", {"layout": ["even", [3, 1]], "rank_order": ["topology", [1, 0]]}))
    assert study.axes == {"layout": ((), (3, 1)), "rank_order": ("topology", (1, 0))}
    assert study.document["space"]["layout"] == ["even", [3, 1]]
    study = parse_space(SMALL | {"cluster": "1x4 h200_sxm", "space": {"power_limit_w": ["found", 500]}})
    assert study.axes == {"power_limit_w": (None, 500)}
    assert study.document["space"]["power_limit_w"] == ["found", 500] and study.document["space"]["tp"] == [1]


def test_a_setting_that_no_cluster_can_have_is_bad_input_and_one_that_some_can_have_is_not():
    asked = {"space": {"power_limit_w": [650, 701, 900]}, "plans": [{"clock_mhz": 1501}]}
    with pytest.raises(SpaceError) as caught:
        parse_space(SMALL | {"cluster": "1x4 h200_sxm"} | asked)
    said = str(caught.value)
    assert "space.power_limit_w[1]: power_limit_w=701, 900 is outside what h200_sxm takes; use 200 to 700 W" in said
    assert "power_limit_w[2]" not in said and "power_limit_w[0]" not in said
    assert "plans[0].clock_mhz: clock_mhz=1501 is no clock of h200_sxm" in said and "use 1500 or 1515" in said
    assert parse_space(SMALL | {"cluster": ["1x4 h200_sxm", "1x4 gb200"], "space": {"power_limit_w": [900]}})
    with pytest.raises(SpaceError, match="none of cpu, whose driver sets nothing"):
        parse_space(SMALL | {"cluster": "1x4 cpu", "space": {"power_limit_w": [900]}})


def test_a_ladder_is_climbed_only_if_the_file_asks_for_it_and_its_lengths_have_defaults():
    assert parse_space(SMALL).search.ladder is None
    ladder = parse_space(changed("search.ladder", {"promote": 0.5})).search.ladder
    assert (ladder.burst.min_steps, ladder.burst.min_seconds, ladder.promote) == (3, 1.5, 0.5)
    assert parse_space(parse_space(changed("search.ladder", {})).document).search.ladder.promote == 0.25


def test_losers_stop_early_only_where_step_time_decides():
    wanted = changed("search.early_stop", True)
    assert parse_space({**wanted, "objective": "maximize tokens_per_s"}).search.early_stop
    with pytest.raises(SpaceError, match=r"search\.early_stop: ranks know step times alone"):
        parse_space({**wanted, "objective": "minimize energy_per_token_j"})


def test_a_study_yaml_is_itself_a_space(tmp_path):
    study = StudyFolder.create(tmp_path, "small", parse_space(SMALL).document)
    for path in (study.path / "study.yaml", study.path / "space.1.yaml"):
        assert load_space(path).document == parse_space(SMALL).document


WRONG = [
    # Beside the fifty of `tests/fixtures/mistakes`, which are asked of the command line. Unknown key
    ("model.num_layer", 3, 'model.num_layer: unknown key; did you mean "num_layers"?'),
    ("limits.device_temp_max_c", 80, "limits.device_temp_max_c: unknown key; use one of: node_device_power_w"),
    # wrong type
    ("workload.seq_len", True, "workload.seq_len: got the boolean true, allowed: an integer"),
    ("model", 3, "model: got 3, allowed: a mapping"),
    ("objective", ["a"], "objective: got a list, allowed: text"),
    ("space", ["tp"], "space: got a list, allowed: a mapping"),
    ("space.tp", [1, True], "space.tp[1]: got the boolean true, allowed: an integer"),
    ("constraints", [3], "constraints[0]: got 3, allowed: text"),
    ("workload.3", 4, "workload.3: unknown key"),
    # impossible value
    ("study", "../elsewhere", 'study: study name "../elsewhere" cannot be a folder'),
    ("study", "recordings", "cannot be a folder of the storage"),
    ("model.hidden_size", 32, "makes head_size=1; rotary positions need an even one"),
    ("model.num_experts", 1, "model.num_experts_per_token: got 2, allowed: 1 to num_experts=1"),
    ("model.num_experts", 0, "model.num_experts_per_token: got 2, allowed: 0, as num_experts=0"),
    ("model.max_positions", 9, "model.max_positions: got 9, allowed: 0, as positions=rope"),
    ("model.norm", "rms", 'model.norm: unknown value "rms"; did you mean "rmsnorm"?'),
    ("model.scale_to", "1x8", "model.scale_to: 1x8 has 8 devices and 1x4 cpu has 4; a cut needs as many or fewer"),
    ("model.allow_percent", 8.0, "model.allow_percent: is of scale_to; add it, or leave this out"),
    ("model.scale_to", "four", 'model.scale_to: "four" does not name a cluster; write NODESxDEVICES'),
    ("cluster.devices_per_node", 0, "cluster.devices_per_node: got 0, allowed: at least 1"),
    ("cluster.devices_per_node", 2**70, "got an integer of 71 bits, allowed: at most 1e+06"),
    ("cluster.simulate_sensors_of", "cpu", "cluster.simulate_sensors_of: got cpu, which has no sensors of its own"),
    ("workload.mode", "pretain", 'workload.mode: unknown value "pretain"; did you mean "pretrain"?'),
    ("space.pp", [1, 0], "space.pp[1]: got 0, allowed: an integer from 1"),
    ("space.dtype", ["fp9"], 'space.dtype[0]: unknown value "fp9"; use one of: bf16, fp32, fp8'),
    ("space.sharding", [3], "space.sharding[0]: got 3, allowed: none | zero1 | zero2 | zero3"),
    ("space.layout", [[2, 0]], "space.layout[0]: got a list, allowed: even, or a list of layers per stage"),
    (
        "space.power_limit_w",
        [True],
        "space.power_limit_w[0]: got the boolean true, allowed: found, or an integer from 1 to 10,000",
    ),
    ("space.power_profile", ["maxq"], 'space.power_profile[0]: unknown value "maxq"; did you mean "max_q"?'),
    ("space.rank_order", ["fast"], 'space.rank_order[0]: got the text "fast", allowed: topology, or a list'),
    ("measure.min_seconds", float("inf"), "measure.min_seconds: got inf, allowed: a finite number"),
    ("measure", {"soak_finalists": 1, "timeout_s": 60}, "measure.timeout_s: 60 leaves no time for soak_seconds=600"),
    ("limits.node_device_power_w", 0, "limits.node_device_power_w: got 0, allowed: more than 0"),
    ("search.strategy", "gird", 'search.strategy: unknown strategy "gird"; did you mean "grid"?'),
    ("search.order", "random", 'search.order: unknown value "random"; use one of: listed, shuffled'),
    ("search.reference", "tp2", 'search.reference: "tp2" is no trial id: 12 hexadecimal digits'),
    ("search.ladder", {"promote": 0}, "search.ladder.promote: got 0, allowed: more than 0"),
    ("search.ladder", {"burst": {"min_steps": 1}}, "search.ladder.burst.min_steps: got 1, allowed: at least 2"),
    ("search.ladder", {"burst": {"min_steps": 50, "min_seconds": 90}}, "search.ladder.burst: as long as a full"),
    ("search.ladder", {"promoted": 0.5}, "search.ladder.promoted: unknown key"),
    ("search.early_stop", "yes", "search.early_stop: got the text"),
    ("search.finalists", {"until": 0.5, "max_share": 0.3}, "search.finalists.until: got 0.5, allowed: more than 0.5"),
    ("search.finalists", {"until": 0.9, "max_share": 0.0}, "search.finalists.max_share: got 0.0, allowed: more than 0"),
    ("search.finalists", {"until": 0.9}, "search.finalists.max_share: missing"),
    (
        "search.finalists",
        {"until": 0.9, "max_share": 1, "untill": 1},
        'search.finalists.untill: unknown key; did you mean "until"?',
    ),
    ("search.finalists", 3, "search.finalists: got 3, allowed: a mapping"),
    ("isolation", "cold", 'isolation: unknown value "cold"; use one of: fresh, warm'),
    ("measure.repeats", 999, "measure.repeats: got 999, allowed: at most 998"),
    ("measure.reference_every", -1, "measure.reference_every: got -1, allowed: at least 0"),
    ("workload.lora", {"rank": 8}, "workload.lora: does nothing with mode: pretrain; leave it out"),
    ("workload.tokens", {"path": "t.bin", "dtype": "int8"}, 'workload.tokens.dtype: unknown value "int8"; use one of'),
    ("workload.tokens", {"dtype": "int32"}, "workload.tokens.path: missing; add it"),
    ("measure.profile_steps", -1, "measure.profile_steps: got -1, allowed: at least 0"),
    # adapters and routing
    *(
        ("workload", SMALL["workload"] | {"mode": "lora", "lora": lora}, words)
        for lora, words in (
            ({"rank": 0}, "workload.lora.rank: got 0, allowed: at least 1"),
            ({"rank": 4, "targets": []}, "workload.lora.targets: got an empty list, allowed: at least 1 entry"),
            (
                {"rank": 4, "targets": ["q", "qq"]},
                'workload.lora.targets[1]: unknown value "qq"; use one of: down, gate',
            ),
            ({"rank": 4, "targets": ["q", "q"]}, "workload.lora.targets[1]: the same as entry 0; remove one"),
            ({"rank": 4, "alpha": 8}, "workload.lora.alpha: unknown key"),
        )
    ),
    ("workload.routing", "balancd", 'workload.routing: unknown value "balancd"; did you mean "balanced"?'),
    ("workload.routing", "uncontrolled", 'unknown value "uncontrolled"; use one of: balanced, learned'),
    ("workload.routing", True, "got the boolean true, allowed: balanced | learned, or a mapping such as {skew: 1}"),
    ("workload.routing", {}, "workload.routing.skew: got nothing, allowed: a number of at least 0"),
    ("workload.routing", {"skew": -1}, "got -1, allowed: a number of at least 0, the exponent of Zipf's law"),
    ("workload.routing", {"skew": "1"}, 'workload.routing.skew: got the text "1", allowed: a number'),
    ("workload.routing", {"skew": float("inf")}, "workload.routing.skew: got inf, allowed: a number"),
    ("workload.routing", {"zipf": 1}, "workload.routing.zipf: unknown key; use skew"),
    # one entry against another
    (
        "model",
        [{"name": "llama3_8b"}, {"name": "llama3_8b", "num_layers": 32}],
        "model[1]: the same as entry 0; remove",
    ),
    (
        "model",
        {"name": "mixtral_8x7b", "scale_to": "1x2 cpu"},
        'model.scale_to: "cpu" has no estimates: its peaks and power limit are not in the catalog',
    ),
    # empty
    ("space", {}, "space: empty; name at least one axis"),
    ("engine", [], "engine: got an empty list, allowed: at least 1 entry"),
]


@pytest.mark.parametrize(("place", "value", "words"), WRONG, ids=[f"{place}={value}"[:40] for place, value, _ in WRONG])
def test_each_mistake_is_one_clear_message_at_its_place(place, value, words):
    found = problems(changed(place, value))
    assert len(found) == 1
    assert words in found[0]


@pytest.mark.parametrize("key", ["study", "model"])
def test_keys_without_a_default_must_be_given(key):
    assert problems({name: value for name, value in SMALL.items() if name != key}) == [f"{key}: missing; add it"]


@pytest.mark.parametrize(
    ("size_bytes", "words"),
    [
        (129 * 2 + 1, "workload.tokens: {path} has 259 bytes, no multiple of the 2 of uint16"),
        (128 * 2, "workload.tokens: {path} has 128 tokens of uint16; a sequence of seq_len=128 needs 129"),
        (129 * 2, ""),
        (None, ""),  # it may be on the nodes only
    ],
)
def test_a_token_file_that_can_be_seen_is_looked_at(tmp_path, size_bytes, words):
    path = tmp_path / "tokens.bin"
    if size_bytes is not None:
        path.write_bytes(bytes(size_bytes))
    space = SMALL | {"workload": SMALL["workload"] | {"tokens": {"path": str(path)}}}
    if words:
        (found,) = problems(space)
        assert words.format(path=path) in found
    else:
        assert parse_space(space).workloads[0].tokens == TokenFile(path=str(path))


@pytest.mark.parametrize(
    ("written", "routing"),
    [
        (None, Routing(by="balanced")),
        ("balanced", Routing(by="balanced")),
        ("learned", Routing(by="learned")),
        ({"skew": 1}, Routing(by="skew", skew=1.0)),
        ({"skew": 0}, Routing(by="balanced")),
    ],
)
def test_routing_is_balanced_unless_a_space_says_otherwise(written, routing):
    study = parse_space(SMALL | {"workload": SMALL["workload"] | {"routing": written}})
    assert study.workloads[0].routing == routing
    again = parse_space(dict(study.document))
    assert again.workloads == study.workloads and again.document == study.document


def test_adapters_and_token_files_are_read_and_spelled_out():
    workload = {"mode": "lora", "lora": {"rank": 4}, "tokens": {"path": "corpus.bin"}}
    study = parse_space(SMALL | {"workload": SMALL["workload"] | workload})
    assert study.workloads[0].lora == Lora(rank=4, targets=("q", "v"))
    assert study.workloads[0].tokens == TokenFile(path="corpus.bin", dtype="uint16")
    again = parse_space(dict(study.document))
    assert again.workloads == study.workloads and again.document == study.document


def test_too_many_combinations_are_refused_before_they_are_made():
    space = {"tp": list(range(1, 1002)), "pp": list(range(1, 1001))}
    assert problems(SMALL | {"space": space}) == [
        f"space: 1,001,000 combinations, allowed: {MAX_COMBINATIONS:,}; list fewer values"
    ]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is empty; a search space is a mapping"),
        (b"- a\n- b\n", "is a list; a search space is a mapping"),
        (b"a: [1, 2", "is not YAML: while parsing"),
        (b"a: 1\n---\nb: 2\n", "is not YAML: expected a single document"),
        (b"a: !!python/object:os.system {}\n", "is not YAML: could not determine a constructor"),
        (b"a: 2024-13-45\n", "is YAML that cannot be read: month must be in 1..12"),
        (b"[" * 5000, "is YAML that cannot be read"),
        (b"\xff\xfe\x00", "is not UTF-8 text"),
    ],
)
def test_a_file_that_is_no_space(tmp_path, content, words):
    path = tmp_path / "x.yaml"
    path.write_bytes(content)
    with pytest.raises(SpaceError) as caught:
        load_space(path)
    assert str(caught.value).startswith(f"{path}: {words}")


def test_a_file_that_is_not_there(tmp_path):
    for path in (tmp_path / "none.yaml", tmp_path):
        with pytest.raises(SpaceError, match=r"cannot be read .*; give the path of a search space"):
            load_space(path)


def test_duplicate_keys_are_named_with_path_and_lines_beside_the_other_problems(tmp_path):
    path = tmp_path / "x.yaml"
    path.write_text(yaml.safe_dump(SMALL) + "study: again\nsearch:\n  seed: 1\n  seed: 2\nserach: {}\n")
    with pytest.raises(SpaceError) as caught:
        load_space(path)
    lines = list(caught.value.problems)
    assert [line.split(",")[0].split(";")[0] for line in lines] == [
        "search.seed: twice",
        "study: twice",
        "serach: unknown key",
    ]
    assert "lines 19 and 20; keep one" in lines[0]


def test_anchors_and_merges_are_no_duplicates(tmp_path):
    path = tmp_path / "x.yaml"
    document = yaml.safe_dump({key: value for key, value in SMALL.items() if key != "model"})
    path.write_text(
        document + "model:\n- &tiny {name: llama3_8b, num_layers: 2}\n- {<<: *tiny, name: llama3_70b, num_layers: 4}\n"
    )
    assert [(model.name, model.num_layers) for model in load_space(path).models] == [
        ("llama3_8b", 2),
        ("llama3_70b", 4),
    ]


def test_a_file_that_contains_itself_is_a_problem_and_no_endless_loop(tmp_path):
    path = tmp_path / "x.yaml"
    path.write_text("study: &a\n  b: *a\nspace: &s {tp: [*s]}\n")
    with pytest.raises(SpaceError):
        load_space(path)
