"""The benchmark of other people's work: it reads what is right where the cases say it, and a wrong answer counts."""

import json
from pathlib import Path

import foreign as script
import pytest

CASES = script.CASES


@pytest.mark.parametrize(
    ("found", "num", "verdict"),
    [
        ({"steps": {"num_steps": 59}, "metrics": {"step_time_s": 0.2}}, 60, "right"),
        ({"steps": {"num_steps": 57}, "metrics": {"step_time_s": 0.2}}, 60, "wrong"),
        ({"steps": {"num_steps": 60}, "metrics": {"step_time_s": 0.23}}, 60, "wrong"),
        ({"steps": {"num_steps": 60}, "metrics": {}}, 60, "wrong"),
        ({"steps": {}, "metrics": {}}, 60, "none"),
        ({}, 60, "none"),
        ({"steps": {"num_steps": 3}, "metrics": {"step_time_s": 0.2}}, 0, "wrong"),
        ({"steps": {}}, 0, "right"),
        ({"steps": {"num_steps": 3}}, None, "unjudged"),
    ],
)
def test_steps_are_judged(found: dict, num: int | None, verdict: str) -> None:
    assert script.judged_steps("a", "", found, num, 0.2).verdict == verdict


def test_what_is_right_is_read_from_the_cases_themselves() -> None:
    rights = script.rights_of(CASES / "failures")
    assert rights["advice"] == ("crashed", "AssertionError") and rights["fine"] == ("completed", "")
    assert {rights[f"jax{count}"] for count in range(5, 10)} == {rights["hip"]} == {("out_of_memory", "")}
    assert script._STEPS.search("Right: no steps")[1] is None
    assert script._STEPS.search("right: 40 steps (39 intervals) of 25 ms").groups() == ("40", "25", "ms")
    for path in (CASES / "steps").glob("*.py"):
        assert script._STEPS.search(path.read_text()[:2000]), path
    assert script._TOKENS.search((CASES / "steps" / "tokens_in_lines.txt").read_text())
    assert [name for _, name in script._WRITTEN.findall((CASES / "trace" / "make.py").read_text())] == [
        "milliseconds",
        "second_die_zero",
    ]
    for path in (CASES / "config").glob("*.right.txt"):
        assert script._FIELD.search(path.read_text()) or script._WIDTHS.search(path.read_text()), path


def test_a_log_is_integrated_without_wattune() -> None:
    found = script.nvidia_smi(CASES / "import" / "nvidia_smi.csv")
    assert found == {"energy_j": pytest.approx((512.33 + 518.90) / 2), "num_power_readings": 3}
    assert script.nvidia_smi(CASES / "failures" / "fail.py") == {}


def test_wrong_answers_miss_the_bar_and_other_folders_are_taken(tmp_path: Path, capsys, monkeypatch) -> None:
    (tmp_path / "command").mkdir()
    space = "study: a\nengine: command\nflags: {lr: [0.1]}\nobjective: minimize step_time_s\n"
    space += "cluster: {device: cpu, devices_per_node: 1, simulate_sensors_of: h100_sxm}\n"
    for name, right, command in (
        ("piped", "refused", "a {lr} | b"),
        ("plain", "refused", "a {lr}"),
        ("kept", "kept", "a {lr}"),
    ):
        (tmp_path / "command" / f"{name}.yaml").write_text(f"# right: {right}\n{space}command: {command}\n")
    asked = []

    def answers(*arguments: object, folder: Path | None = None):
        text = Path(str(arguments[1])).read_text()
        asked.append(arguments[0])
        if "|" in text and "bash" not in text:
            return 2, {}, 'command: "|" is of a shell; write [bash, -c, TEXT]'
        return 0, {"num_trials": 1}, ""

    monkeypatch.setattr(script, "wattune", answers)
    with pytest.raises(SystemExit) as ended:
        script.main(["--cases", str(tmp_path), "--json"])
    assert ended.value.code == 1
    found = json.loads(capsys.readouterr().out)
    verdicts = {row["case"]: row["verdict"] for row in found["rows"]}
    assert verdicts == {
        "kept": "right", "piped": "right", "piped, by bash -c": "right", "plain": "wrong", "plain, by bash -c": "right"
    }  # fmt: skip
    assert found["missed"] == ["command: 4 of 5 right, 1 confidently wrong, 0 not answered"]
    assert set(asked) == {"plan"}
