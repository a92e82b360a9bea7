"""Text that only a shell obeys is told from arguments, and a flag's value from several of them."""

from pathlib import Path

import pytest
import yaml

import wattune
from wattune.errors import SpaceError
from wattune.plans.program import Program, filled_arguments, shell_problem, split_command, text_of
from wattune.search.prune import prune
from wattune.search.space import parse_space

CASES = Path(__file__).parents[2] / "fixtures" / "cases"


@pytest.mark.parametrize(
    ("command", "part"),
    [
        ("NCCL_DEBUG=INFO torchrun train.py", "env: {NCCL_DEBUG: INFO}"),
        ("torchrun train.py | tee log.txt", '"|"'),
        ("torchrun train.py|tee log.txt", '"|"'),
        ("torchrun train.py > log.txt 2>&1", '">"'),
        ("torchrun train.py 2>/dev/null", '"2>"'),
        ("cd /job && python train.py", '"cd"'),
        ("module load cuda; python train.py", '"module"'),
        ("python a.py; python b.py", '";"'),
        ("python a.py &", '"&"'),
        ("python a.py || true", '"||"'),
        ("python train.py --out $SCRATCH/run", '"$S"'),
        ('python train.py --out "$SCRATCH/run"', '"$S"'),
        ("python train.py --id $(date +%s)", '"$("'),
        ("python train.py --id `date`", '"`"'),
        ("python ~/train.py", '"~"'),
        ("python train.py < input", '"<"'),
        ("python a.py\npython b.py", "second line"),
        ("python train.py --out ${SCRATCH}/run", '"${"'),
        ("python train.py --out ${{SCRATCH}}/run", '"${"'),
        ("PYTHONPATH=src:$PYTHONPATH python train.py", "[bash, -c, TEXT]"),
        ("python train.py --id $$", '"$$"'),
        ("python train.py --data data/*.bin", '"data/*.bin"'),
        ("python train.py --data *.bin", '"*.bin"'),
        ("python train.py # the small one", '"#"'),
        ("$ torchrun train.py", '"$"'),
        (["torchrun train.py | tee log.txt"], '"|"'),
        (["NCCL_DEBUG=INFO", "torchrun", "train.py"], "env: {NCCL_DEBUG: INFO}"),
    ],
)
def test_shell_text_is_refused_with_what_to_write(command, part):
    told = shell_problem(command)
    assert told is not None and part in told and "no shell sees it" in told
    written = f"{command} {{plan}}" if isinstance(command, str) else command
    assert part in refused(command=written, env={"PLAN": "{plan}"}, flags={"plan": [1]})


@pytest.mark.parametrize(
    "command",
    [
        "torchrun train.py --modules 'a|b' --note \"x; y > z\" --price '$5'",
        "python train.py {overlap=grad?--a>b} --re a\\|b {{x}}",
        ["bash", "-c", "NCCL_DEBUG=INFO torchrun train.py | tee log"],
        "bash -c 'cd /job && torchrun train.py > log'",
        'bash -c "torchrun train.py --out $SCRATCH | tee log"',
        "python train.py --re .*attn.* --freeze layers.*.w --data s3://bucket/*.bin --each=/data/*.bin 'b/*' a#b {{*}}",
        ["/opt/my program/train"],
        "env NCCL_DEBUG=INFO torchrun train.py --lr={lr} --a.b=c --x=~/y",
        ["python", "train.py", "|", "a;b", "$HOME"],
    ],
)
def test_what_reaches_the_program_as_meant_is_kept(command):
    assert shell_problem(command) is None


def test_case_command_pipe_and_prefix_is_refused_by_every_door():
    """`plan` and `run` read a space as `wattune.plan` does; the exit code is the error's."""
    with pytest.raises(SpaceError) as told:
        wattune.plan(CASES / "command" / "pipe_and_prefix.yaml")
    assert told.value.exit_code == 2 and "env: {NCCL_DEBUG: INFO}" in str(told.value)
    document = yaml.safe_load((CASES / "command" / "pipe_and_prefix.yaml").read_text())
    shell = {**document, "command": ["bash", "-c", document["command"]]}
    assert [one.spec.program.command[2] for one in prune(parse_space(shell)).kept] == [document["command"]] * 2


def test_a_command_of_several_lines_goes_on_behind_a_backslash():
    assert split_command("torchrun \\\n  train.py \\\n  --tp {tp}\n") == ("torchrun", "train.py", "--tp", "{tp}")


def space(**keys):
    return {
        "study": "own",
        "cluster": "1x4 h200_sxm",
        "engine": "command",
        "objective": "minimize step_time_s",
        "command": "python train.py {plan}",
        **keys,
    }


def test_a_value_may_be_several_arguments():
    values = [["--tp", 8, "--pp", "1"], [], ["--name", "a b"]]
    study = parse_space(space(flags={"plan": values}))
    assert parse_space(dict(study.document)).document == study.document
    kept = [one.spec for one in prune(study).kept]
    flags = [dict(one.flags) for one in kept]
    assert flags == [{"plan": ("--tp", "8", "--pp", "1")}, {"plan": ()}, {"plan": ("--name", "a b")}]
    assert filled_arguments(("python", "{plan}"), flags[0]) == ["python", "--tp", "8", "--pp", "1"]
    assert filled_arguments(("python", "{plan}"), flags[1]) == ["python"]
    assert len({one.trial_id for one in kept}) == 3 and "plan=--name 'a b'" in kept[2].label
    again = [type(one).from_json(one.to_json()) for one in kept]
    assert again == kept and text_of(("a b", "c")) == "'a b' c"
    with pytest.raises(TypeError):
        Program.from_json({"command": ["a"], "flags": [["plan", [1]]]})


def refused(**keys):
    with pytest.raises(SpaceError) as told:
        parse_space(space(**keys))
    return str(told.value)


def test_one_argument_with_blanks_is_refused_or_said():
    text = refused(flags={"plan": ["--tp 8 --pp 1", "none"]})
    assert "flags.plan: " in text and 'write the list [--tp, "8", --pp, "1"] for several' in text
    text = refused(flags={"plan": ["tp=8 pp=1"]})
    assert 'or ["tp=8 pp=1"] for one' in text
    parse_space(space(command="python train.py --prompt {plan}", flags={"plan": ["tell me more"]}))
    parse_space(space(flags={"plan": [["tell me more"]]}))
    text = refused(command="python train.py --x={plan}", env={"A": "{plan}"}, flags={"plan": [["a", "b"], ["c"]]})
    assert "command: {plan} is several arguments" in text and "env.A: {plan} is several arguments" in text
    assert "allowed: a number, a text of one line" in refused(flags={"plan": [[True], [["a"]], {"a": 1}]})
