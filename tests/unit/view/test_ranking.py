"""Rankings in terminals."""

from dataclasses import replace

from screen import shown
from study_files import SPEC, result_of

from wattune.objective import Question
from wattune.ranking.order import rank
from wattune.run import RunStatus
from wattune.view.ranking import front_table, ranking_view


def test_what_the_same_command_runs_again_stands_apart_from_what_failed() -> None:
    other = replace(SPEC, plan=replace(SPEC.plan, micro_batch_size=2 * SPEC.plan.micro_batch_size))
    stopped = replace(result_of(), status=RunStatus.INTERRUPTED, reason="stopped by the user", metrics={})
    broken = replace(
        stopped, trial_id=other.trial_id, status=RunStatus.CRASHED, reason="rank 1: ValueError: a broken engine"
    )
    ranking = rank([(SPEC, stopped), (other, broken)], Question.of("maximize tokens_per_s"))
    text = shown(*ranking_view(ranking), width=160)
    interrupted, failed = text.split("1 interrupted: run again by the same command")[1].split("1 failed")
    assert SPEC.trial_id in interrupted and "stopped by the user" in interrupted and other.trial_id not in interrupted
    assert other.trial_id in failed and "a broken engine" in failed and SPEC.trial_id not in failed


def test_sizes_of_the_workload_have_columns_or_are_in_the_name() -> None:
    long = replace(SPEC, workload=replace(SPEC.workload, seq_len=2 * SPEC.workload.seq_len))
    metrics = {"tokens_per_s": 1.0, "energy_per_token_j": 1.0}
    pairs = [(one, replace(result_of(), trial_id=one.trial_id, metrics=metrics)) for one in (SPEC, long)]
    ranking = rank(pairs, Question.of("maximize tokens_per_s"))
    front = front_table(ranking.feasible, ["tokens_per_s", "energy_per_token_j"], of="one study")
    table, front = shown(*ranking_view(ranking), front, width=240).split("Pareto front")
    line = next(one for one in table.splitlines() if long.trial_id in one and SPEC.label in one)
    assert str(long.workload.seq_len) in line and "seq" not in line
    assert f"{long.label} seq{long.workload.seq_len}" in front and f"{SPEC.label} seq{SPEC.workload.seq_len}" in front
