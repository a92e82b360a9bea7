"""Spaces of commands: what they mean, and ten mistakes of one reading."""

import copy
from collections import Counter

import pytest

from wattune.errors import SpaceError
from wattune.search.prune import prune
from wattune.search.space import parse_space
from wattune.storage.space_changes import changes, contradictions

OWN = {
    "study": "own",
    "cluster": "1x4 h200_sxm",
    "engine": "command",
    "command": "torchrun --nproc-per-node {devices_per_node} train.py --tp {tp} --lr {lr} {flash?--flash}",
    "env": {"NCCL_ALGO": "{algo}"},
    "flags": {"lr": [0.001, 0.01], "algo": ["Ring", "Tree"], "flash": [True, False]},
    "requires": ["tp <= 2", "algo == Ring or tp == 1"],
    "space": {"tp": [1, 2, 4]},
    "objective": "minimize step_time_s",
}


def changed(**keys):
    document = copy.deepcopy(OWN) | keys
    return {key: value for key, value in document.items() if value is not None}


def problems(document):
    with pytest.raises(SpaceError) as caught:
        parse_space(document)
    return list(caught.value.problems)


def test_a_space_needs_neither_model_nor_workload():
    study = parse_space(OWN)
    assert study.num_combinations == 3 * 8
    assert not study.models[0].is_known and not study.workloads[0].is_known
    assert parse_space(dict(study.document)).document == study.document
    assert "model" not in study.document and "workload" not in study.document

    found = prune(study)
    assert {one.rule for one in found.rejected} == {"requires"} and len(found.rejected) == 8 + 4
    reasons = {one.reason for one in found.rejected}
    assert any('"tp <= 2" does not hold at tp=4' in reason for reason in reasons)
    assert len({one.trial_id for one in found.kept}) == len(found.kept) == 12
    assert dict(found.kept[0].config) == {"tp": 1, "lr": 0.001, "algo": "Ring", "flash": True}
    assert found.kept[0].spec.label == "dp4 lr=0.001 algo=Ring flash=true"


def test_a_command_is_warm_where_its_processes_are_pythons():
    command = {"run": OWN["command"], "warm": True}
    study, cold = parse_space(changed(command=command)), parse_space(OWN)
    assert study.document["command"] == command == parse_space(dict(study.document)).document["command"]
    warm, other = prune(study).kept[0].spec, prune(cold).kept[0].spec
    assert warm.program.warm and warm.program.command == other.program.command and warm.trial_id != other.trial_id
    assert type(warm).from_json(warm.to_json()) == warm
    for same in (command | {"warm": False}, {"run": command["run"]}):
        assert parse_space(changed(command=same)).program == cold.program
    for run in ("python3.12 -u -m pkg.train", "/opt/venv/bin/python train.py", ["torchrun", "train.py"]):
        problem = problems(changed(command={"run": run, "warm": True}))
        assert not [line for line in problem if "warm" in line], problem  # only of axes that it does not use
    for run in (
        "bash train.sh {tp}",
        "python -c pass",
        "python -u -c pass",
        "torchrun --no-python x",
        "srun python train.py",
    ):
        (line, *_) = problems(changed(command={"run": run, "warm": True}))
        assert line.startswith("command.run: is no python SCRIPT, python -m MODULE or torchrun"), run
    for wrong in ({"warm": True}, {"run": "python x", "warm": "yes"}, {"run": command, "warm": True}):
        assert problems(changed(command=wrong))[0].startswith("command: got")


def test_variables_are_axes_of_the_built_in_engines_too():
    own = changed(
        engine="torch",
        command=None,
        flags={"algo": ["Ring", "Tree"]},
        requires=None,
        space={"tp": [1]},
        model="llama3_8b",
        workload={"seq_len": 4096, "global_batch_size": 16},
    )
    kept = prune(parse_space(own)).kept
    assert [one.spec.program.environment for one in kept] == [(("NCCL_ALGO", "{algo}"),)] * 2
    assert len({one.trial_id for one in kept}) == 2


def test_what_another_engine_of_the_study_varies_is_equivalent_in_a_command():
    both = changed(
        engine=["torch", "command"],
        model="llama3_8b",
        workload={"seq_len": 4096, "global_batch_size": 16},
        space={"tp": [1], "sharding": ["none", "zero3"]},
        flags={"lr": [0.001, 0.01], "algo": ["Ring"], "flash": [True]},
        requires=None,
    )
    found = prune(parse_space(both))
    assert {(one.spec.engine, one.spec.plan.sharding, one.spec.flags) for one in found.kept} == {
        ("torch", "none", (("algo", "Ring"),)),
        ("torch", "zero3", (("algo", "Ring"),)),
        ("command", "none", (("lr", 0.001), ("algo", "Ring"), ("flash", True))),
        ("command", "none", (("lr", 0.01), ("algo", "Ring"), ("flash", True))),
    }
    reasons = " ".join(one.reason for one in found.equivalent)
    assert "lr=0.01 does nothing in engine torch" in reasons
    assert "sharding=zero3 does nothing in the command, which has no {sharding}" in reasons


def test_a_command_without_tp_runs_once_whatever_tp_another_engine_tries():
    both = changed(
        engine=["torch", "command"],
        command="python train.py",
        env=None,
        flags=None,
        requires=None,
        model="llama3_8b",
        workload={"seq_len": 4096, "global_batch_size": 16},
        space={"tp": [1, 2, 4]},
    )
    found = prune(parse_space(both))
    assert Counter(one.spec.engine for one in found.kept) == {"torch": 3, "command": 1}
    assert [dict(one.config) for one in found.equivalent] == [{"engine": "command", "tp": tp} for tp in (2, 4)]


def test_sizes_that_the_command_ignores_are_refused_beside_another_engine_too():
    """Tokens per second of a command that ignores `seq_len` would double with it."""
    both = changed(
        engine=["torch", "command"],
        flags=None,
        env=None,
        requires=None,
        command="python train.py",
        model=["llama3_8b", "llama3_70b"],
        workload={"seq_len": [2048, 4096], "global_batch_size": [16, 32]},
        space={"tp": [1]},
        objective="maximize tokens_per_s",
    )
    found = problems(both)
    assert [line.split(":")[0] for line in found] == ["workload.seq_len", "workload.global_batch_size", "model"], found
    used = "python train.py --seq {seq_len} --batch {global_batch_size} --model {model}"
    assert parse_space(both | {"command": used}).num_combinations == 16
    stored = dict(parse_space(both | {"command": used}).document) | {"command": "python train.py", "format": 4}
    assert parse_space(stored).num_combinations == 16  # accepted once: its results stay readable


def test_a_pattern_is_one_source_however_a_space_writes_it():
    ways = ({"pattern": "took ([0-9.]+)", "unit": "ms"}, "pattern/ms:took ([0-9.]+)")
    ids = [[one.trial_id for one in prune(parse_space(changed(steps=way))).kept] for way in ways]
    assert ids[0] == ids[1] != [one.trial_id for one in prune(parse_space(changed())).kept]


def test_ten_mistakes_are_ten_lines_of_one_reading():
    wrong = changed(
        command="torchrun train.py --tp {tpp} --seq {seq_len} --lr {lr",
        env={"RANK OF IT": "1", "CUDA_VISIBLE_DEVICES": "0", "ALGO": True},
        flags={"lr": [0.1, 0.1], "tp": [1], "mfu_frac": [1], "unused": [1, 2]},
        requires=["tp =< 2"],
        steps="sometimes",
        space={"tp": [1, 2], "pp": [1, 2]},
        objective="maximize mfu_frac",
    )
    found = problems(wrong)
    for place, words in (
        ("command", "brace without its partner"),
        ("env.RANK OF IT", "is no name of a variable"),
        ("env.CUDA_VISIBLE_DEVICES", "which wattune sets"),
        ("env.ALGO", "got the boolean true"),
        ("flags.lr[1]", "the same as entry 0"),
        ("flags.tp", "list its values in space.tp"),
        ("flags.mfu_frac", "is a metric's name"),
        ("requires[0]", ""),
        ("steps", 'got "sometimes"'),
        ("objective", "needs the model and the workload"),
    ):
        assert any(line.startswith(f"{place}:") and words in line for line in found), (place, found)


@pytest.mark.parametrize(
    ("keys", "line"),
    [
        ({"command": None}, "command: missing; engine: command runs it"),
        ({"command": 3}, "command: got 3, allowed: a text"),
        ({"command": ["a", 3]}, "command[1]: got 3, allowed: a text"),
        ({"command": "run {tp} {lr} {flash} 'x"}, "command: cannot be split into arguments (No closing quotation)"),
        ({"command": "run {tp} {lr} {flash} {zz}"}, 'command: "{zz}" names nothing'),
        (
            {"command": "run {tp} {lr} {flash} {seq_len}"},
            'command: "{seq_len}" has no value: the space has no workload',
        ),
        ({"command": "run {tp} {lr}"}, "flags.flash: nothing uses it; write {flash} in command or env"),
        ({"command": "run {lr} {flash}"}, "space.tp: has 3 values and the command uses none"),
        ({"space": {"tp": [1], "rank_order": [[1, 0, 2, 3]]}}, "space.rank_order: places ranks"),
        ({"cluster": "2x4 h200_sxm"}, "command: runs on 2 nodes, and nothing tells its processes of each other"),
        ({"requires": ["zz <= 2"]}, 'requires[0]: "zz" in "zz <= 2" is no field'),
        ({"requires": ["tp"]}, 'requires[0]: "tp" is not a requirement'),
        ({"requires": ["algo <= 2"]}, 'requires[0]: "algo <= 2": algo is a name, which has no order'),
        ({"requires": ["2 <= 3"]}, 'requires[0]: "2 <= 3" names no field'),
        ({"steps": {"pattern": "("}}, "steps: pattern: '(' is not a regular expression"),
        ({"steps": "none"}, "objective: step_time_s needs steps"),
        *(
            ({"steps": "none", "objective": f"minimize {name}"}, f"objective: {name} needs steps")
            for name in ("energy_per_token_j", "energy_per_step_j", "energy_delay_product_js")
        ),
        ({"steps": "none", "constraints": ["energy_per_step_j <= 9"]}, "constraints[0]: energy_per_step_j needs steps"),
        (
            {"engine": ["torch", "command"], "objective": "minimize total_energy_j"},
            "objective: total_energy_j is of runs without steps, and engine torch has steps",
        ),
        (
            {"steps": "optimizer", "objective": "maximize tokens_per_s"},
            "objective: tokens_per_s needs tokens, and steps by optimizer have none; add workload",
        ),
        ({"engine": "torch"}, "command: does nothing with engine: torch"),
        ({"engine": "torch"}, "model: missing; add it"),
        ({"measure": {"profile_steps": 2}}, "measure.profile_steps: does nothing with engine: command"),
        ({"flags": {"lr": [1, True], "algo": ["Ring"], "flash": [True]}}, "flags.lr: mixes true or false"),
        ({"env": {"NCCL_ALGO": "{algo}", "RAY_ADDRESS": "x"}}, "env.RAY_ADDRESS: belongs to Ray"),
        ({"flags": {"lr": [1], "algo": ["Ring"], "flash": []}}, "flags.flash: empty"),
        ({"flags": {"lr": [1, 1.0], "algo": ["Ring"], "flash": [True]}}, "flags.lr[1]: the same as entry 0"),
        ({"flags": {"lr": [1, 10**400], "algo": ["Ring"], "flash": [True]}}, "flags.lr[1]: is a number of more than"),
    ],
)
def test_each_mistake_is_one_line(keys, line):
    assert any(one.startswith(line) for one in problems(changed(**keys))), problems(changed(**keys))


def test_flags_extend_a_study_and_another_command_is_refused():
    stored = parse_space(OWN).document
    more = parse_space(changed(flags=OWN["flags"] | {"lr": [0.01, 0.1]}, requires=["tp <= 4"])).document
    assert contradictions(stored, more) == []
    assert any("flags.lr: adds 0.1 and drops 0.001" in line for line in changes(stored, more))
    other = parse_space(changed(command=OWN["command"] + " --more")).document
    assert [one.partition(":")[0] for one in contradictions(stored, other)] == ["command"]
