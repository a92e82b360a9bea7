"""`wattune.estimate` and `wattune estimate`: one plan without a space, and every mistake in one round."""

import json

import pytest
from tests.fakes.pace import least_cpu_s

import wattune

ASKED = {"model": "llama3_8b", "cluster": "1x8 h200_sxm", "engine": "megatron"}


@pytest.fixture(autouse=True)
def storage(tmp_path, monkeypatch):
    monkeypatch.setenv("WATTUNE_STORAGE", str(tmp_path))


def test_parts_add_up_to_the_figures_and_lie_in_their_intervals():
    found = wattune.estimate(**ASKED, tp=2, pp=2, sharding="zero1")
    step, memory = found.figures["step_time_s"], found.figures["memory_peak_bytes"]
    assert sum(found.step_parts_s.values()) == pytest.approx(step["value"], rel=1e-5)
    assert sum(found.memory_parts_bytes.values()) == pytest.approx(memory["value"], rel=1e-5)
    assert {"compute", "exposed_comm_tp", "bubble"} <= found.step_parts_s.keys()
    assert all(one["low"] <= one["value"] <= one["high"] for one in found.figures.values())
    assert not found.rule and found.limited_by and "h200_sxm" in found.source
    assert found.spec.workload.seq_len == 4096 and found.spec.workload.global_batch_size == 16


def test_it_is_the_estimate_of_a_space_with_that_plan():
    sizes = {"seq_len": 2048, "global_batch_size": 64}
    space = {
        "study": "one",
        "model": "llama3_8b",
        "cluster": "1x8 h200_sxm",
        "engine": "megatron",
        "workload": sizes,
        "space": {"tp": [4], "micro_batch_size": [2]},
        "objective": "maximize tokens_per_s",
    }
    (listed,) = wattune.api.forecast(space).to_json()["kept"]
    found = wattune.estimate(**ASKED, tp=4, micro_batch_size=2, **sizes).to_json()
    assert {name: found[name] for name in ("estimate", "step_parts_s", "memory_parts_bytes", "limited_by")} == {
        name: listed[name] for name in ("estimate", "step_parts_s", "memory_parts_bytes", "limited_by")
    }


def test_a_rule_that_rejects_is_named_and_memory_still_has_figures():
    unfit = wattune.estimate(model="llama3_70b", cluster="1x1 h200_sxm")
    assert unfit.rule == "memory" and "GB" in unfit.reason and unfit.figures["memory_peak_bytes"]["value"] > 1e12
    invalid = wattune.estimate(**ASKED, tp=16)
    assert invalid.rule and invalid.reason and invalid.figures == {} and invalid.step_parts_s == {}
    assert invalid.spec.plan.tp == 16


def test_every_mistake_is_told_at_once_by_the_argument_that_has_it():
    with pytest.raises(wattune.WattuneError) as told:
        wattune.estimate(model="llama3_9b", cluster="1x8 h20", tp=0, ppp=2, seq_len="4k", recompute="most")
    text = str(told.value)
    for name in ("model: ", "cluster: ", "tp: got 0", "ppp: unknown axis", "seq_len: got", "recompute: unknown value"):
        assert f"\n  {name}" in text
    with pytest.raises(wattune.WattuneError, match="allowed: one plan"):
        wattune.estimate(**ASKED, seq_len=[1024, 2048])
    with pytest.raises(wattune.WattuneError, match="nobody knows what the command computes"):
        wattune.estimate(**ASKED | {"engine": "command"})


def test_a_call_is_far_below_what_a_loop_over_plans_would_notice():
    wattune.estimate(**ASKED, tp=2)
    assert least_cpu_s(lambda: wattune.estimate(**ASKED, tp=2)) < 0.05


def test_the_verb_prints_figures_parts_and_json(wattune):
    asked = ("estimate", "llama3_8b", "1x8 h200_sxm", "tp=2", "sharding=zero1", "seq_len=2048", "layout=even")
    code, out, _ = wattune(*asked)
    assert code == 0 and "step_time_s" in out and "Parts of a step" in out and "limited by" in out
    code, out, _ = wattune(*asked, "--json")
    found = json.loads(out)
    assert code == 0 and found["seq_len"] == 2048 and found["step_parts_s"]["compute"] > 0 and found["rule"] == ""
    warm = "{device: h200_sxm, slots: 8, host: {speed: 1, inlet_c: 38}}"  # as `wattune doctor` writes it
    code, out, _ = wattune(*("estimate", "llama3_8b", warm), *asked[3:], "--json")
    usual, warmer = (one["estimate"]["device_temp_max_c"] for one in (found, json.loads(out)))
    assert code == 0 and 7 <= warmer["value"] - usual["value"] < 8.5, "7 K above 31, and leakage"
    assert (usual["high"] - usual["low"]) / (warmer["high"] - warmer["low"]) == pytest.approx(2, rel=0.03)
    code, _, error = wattune("estimate", "llama3_8b", warm.replace("38", "380"))
    assert code == 2 and "cluster.host.inlet_c: got 380, allowed: at most 70" in error
    code, out, _ = wattune("estimate", "llama3_8b", "1x8 h200_sxm", "tp=16", "--json")
    assert code == 3 and json.loads(out)["rule"]
    code, _, error = wattune("estimate", "llama3_8b", "1x8 h200_sxm", "tp8", "pp=1", "pp=2", "=3", "engine")
    assert code == 2 and "tp8: write NAME=VALUE" in error and "pp: given 2 times" in error
    assert "=3: write NAME=VALUE" in error and "engine: write" not in error and "write --engine NAME" in error
    code, _, error = wattune("estimate", "nope.json", "8 h200", "tpp=8", "--engine", "nemoo")
    assert code == 2 and 'engine: unknown engine "nemoo"; did you mean "nemo"' in error and "4 problems" in error
    assert (
        "nope.json: cannot be read" in error
        and "cluster: " in error
        and 'tpp: unknown axis; did you mean "tp"' in error
    )
    code, _, error = wattune("estimate", "llama3_8b", "1x8 h200_sxm", "engine=megatron", "model=gpt")
    assert code == 2 and "engine: an argument of its own; write --engine NAME" in error and "model: an arg" in error


def test_a_config_json_is_a_model(wattune, tmp_path):
    path = tmp_path / "llama" / "config.json"
    path.parent.mkdir()
    config = {"model_type": "llama", "hidden_size": 2048, "num_hidden_layers": 4, "num_attention_heads": 16}
    config |= {"num_key_value_heads": 8, "intermediate_size": 8192, "vocab_size": 32000, "rms_norm_eps": 1e-5}
    path.write_text(json.dumps(config | {"tie_word_embeddings": False, "max_position_embeddings": 8192}))
    code, out, error = wattune("estimate", str(path), "1x8 h200_sxm", "tp=2", "--json")
    assert code == 0, error
    assert json.loads(out)["model"] == "llama"
    code, out, error = wattune("estimate", str(path.rename(path.with_name("llama-2b.json"))), "1x8 h200_sxm", "--json")
    assert code == 0 and json.loads(out)["model"] == "llama-2b", error
    code, _, error = wattune("estimate", str(tmp_path / "no.json"), "1x8 h200_sxm")
    assert code == 2 and "from_config" in error


def test_software_that_wattune_does_not_run_is_estimated_with_its_own_habits():
    """A published row: DGXC benchmarking v25.04.01 (MIT), Llama 3.1 8B on 8 H100 in bf16, 12.27 s a step."""
    cluster = {"device": "h100_sxm", "devices_per_node": 8, "transformer_engine": True}
    row = {"model": "llama3_8b", "cluster": cluster, "cp": 2, "sharding": "zero1", "overlap": "grad_param"}
    sizes = {"seq_len": 8192, "global_batch_size": 128}

    def step_s(engine, dtype):
        found = wattune.estimate(**row, **sizes, engine=engine, dtype=dtype)
        return found.figures["step_time_s"]["value"], found

    bf16_s, found = step_s("nemo", "bf16")
    assert bf16_s == pytest.approx(12.27, rel=0.1) and "as nemo runs it" in found.source
    assert found.to_json()["engine"] == "nemo"
    own_s, own = step_s("megatron", "bf16")
    assert own_s > 1.02 * bf16_s and "runs it" not in own.source and own.to_json()["engine"] == "megatron"
    assert step_s("nemo", "fp8")[0] < 0.8 * bf16_s
    with pytest.raises(wattune.WattuneError, match='unknown engine "nemoo"'):
        step_s("nemoo", "bf16")


def test_software_is_not_held_to_what_our_engine_lacks():
    adapters = {"mode": "lora", "lora": {"rank": 16, "targets": ["q", "v"]}, "tp": 2}
    asked = {"model": "llama3_8b", "cluster": {"device": "h200_sxm", "devices_per_node": 8, "transformer_engine": True}}
    assert wattune.estimate(**asked, engine="megatron", **adapters).rule == "engine_combination"
    assert wattune.estimate(**asked, engine="nemo", **adapters).figures
    assert wattune.estimate(**asked, engine="nemo", tp=16).rule, "its plans are still plans"
