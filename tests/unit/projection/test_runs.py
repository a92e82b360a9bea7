"""Tables of runs: what a row tells, what is refused, and published runs at sizes that were left out."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from wattune.errors import PlanError
from wattune.projection.projected import Projected, nodes_and_devices, project_recording, project_runs
from wattune.projection.runs import layout_of, read_runs, sized_runs
from wattune.run import Recorded, RunStatus
from wattune.run import Run as RunRecord

HEAD = "model,gpus,gpu,tp,pp,cp,ep,vpp,mbs,microbatches,global_batch,seq_len,precision,step_time_s"
LLAMA = "Llama3.1-405B,{},H100,8,8,2,,8,1,,{},8192,FP8,{}"
# MLPerf Training v5.0 logs, as in shared published tables: derived from logs, not an MLPerf metric, not verified by
# MLCommons.
MLPERF = [(512, 1152, 55.143), (2048, 1152, 14.222), (2432, 1216, 12.712)]
# NVIDIA DGXC benchmarking v25.04.01: Nemotron4-15B BF16 and Llama 3.1 70B FP8 on H100, weak scaling.
NEMOTRON = [(16, 2.66), (32, 2.66), (64, 2.67), (128, 2.67), (256, 2.68), (512, 2.71)]
LLAMA_70B = [(64, 9.86), (128, 9.95), (256, 10.0), (512, 10.07)]

Table = Callable[..., Path]


@pytest.fixture
def table(tmp_path: Path) -> Table:
    def write(*rows: str, head: str = HEAD, name: str = "runs.csv") -> Path:
        path = tmp_path / name
        path.write_text("\n".join([head, *rows]) + "\n")
        return path

    return write


def test_a_row_tells_its_replicas_batch_and_time(table: Table) -> None:
    batched, timed, blank = read_runs(
        table(
            "M,64,H100,4,2,,,,2,8,,4096,BF16,1.5,",
            "M,64,H100,4,2,,,,2,,128,4096,BF16,,1024",
            "M,64,H100,,,,,,,,,,,2.0,",
            head=f"{HEAD},tokens_per_s_per_gpu",
        )
    )
    assert batched.numbers["global_batch"] == 128 and timed.numbers["micro_batches"] == 8
    assert timed.numbers["step_time_s"] == 128 * 4096 / (1024 * 64)
    assert blank.numbers["micro_batches"] == 1 and blank.numbers["replicas"] == 64
    assert batched.resized(128, None).numbers["micro_batches"] == 8
    assert batched.resized(128, 128).numbers["micro_batches"] == 4


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ("M,-64,H100,,,,,,,,,,,1.0", 'gpus: got "-64"'), ("M,64.5,H100,,,,,,,,,,,1.0", "gpus"),
        ("M,64,H100,0,,,,,,,,,,1.0", "tp"), ("M,64,H100,x,,,,,,,,,,1.0", "tp"),
        ("M,64,H100,5,,,,,,,,,,1.0", "multiples"),
        ("M,64,H100,,,,,,,,,,,nan", "step_time_s"), ("M,64,H100,,,,,,,,,,,-1", "step_time_s"),
        ("M,,H100,,,,,,,,,,,1.0", "gpus is blank"), (",64,H100,,,,,,,,,,,1.0", "model is blank"),
        ("M,80000000,H100,3,,,,,,,,,,1.0", "up to 1,000,000"),
        ("M,64,H100,,,,,,,,,,,", "no row has step_time_s"), ("M,64,H100,8,,,,,,,4,,,1.0", "one micro-batch each"),
    ],
)  # fmt: skip
def test_what_is_no_run_is_refused_in_one_line(table: Table, row: str, said: str) -> None:
    with pytest.raises(PlanError) as refused:
        read_runs(table(row))
    assert said in str(refused.value) and "\n" not in str(refused.value)


def test_a_file_without_runs_is_refused(table: Table, tmp_path: Path) -> None:
    (tmp_path / "bytes.csv").write_bytes(b"\xff\xfe\x00")
    twice = table("M,64,H100,1,1", head="model,gpus,gpu,step_time_s,step_time_s", name="twice.csv")
    for path in (
        twice,
        table("a,1", head="model,step"),
        table(),
        tmp_path / "none.csv",
        tmp_path / "bytes.csv",
        tmp_path,
    ):
        with pytest.raises(PlanError):
            read_runs(path)


def test_a_step_in_another_unit_is_refused(table: Table) -> None:
    runs = read_runs(table(LLAMA.format(512, 1152, 55143)))
    with pytest.raises(PlanError, match="got a step of 55,143 s, allowed: within 30 times the estimate"):
        project_runs(runs, 2048, [], None)


def error(found: list[Projected]) -> float:
    (row,) = found
    assert row.error is not None and row.error[1]
    return abs(row.error[0])


def test_the_largest_size_of_published_runs_is_predicted(table: Table) -> None:
    small = read_runs(table(*(LLAMA.format(*row) for row in MLPERF[:2])))
    truth = read_runs(table(LLAMA.format(*MLPERF[2]), name="truth.csv"))
    assert error(project_runs(small, None, truth, None)) < 0.01
    assert project_runs(small, None, truth, None)[0].prior == "cost model"
    assert error(project_runs(small[1:], None, truth, None)) < 0.01


@pytest.mark.parametrize(
    ("rows", "row", "prior"),
    [
        (NEMOTRON, "Nemotron4-15B,{},H100-SXM-80GB,2,1,1,,,2,4,,4096,BF16,{}", "shape of the pipeline"),
        (LLAMA_70B, "Llama3.1-70B,{},H100-SXM-80GB,4,8,1,,5,1,64,,8192,FP8,{}", "cost model"),
    ],
)
def test_weak_scaling_of_published_runs_is_predicted_from_one_size(
    table: Table, rows: list[tuple[int, float]], row: str, prior: str
) -> None:
    small, *truth = read_runs(table(*(row.format(*one) for one in rows)))
    found = project_runs([small], None, truth, None)
    assert {one.prior for one in found} == {prior}
    errors = [abs(one.error[0]) for one in found if one.error and one.error[1]]
    assert np.median(errors) < 0.02 and max(errors) < 0.06 and len(errors) == len(found)


def test_far_is_transferred_and_an_unknown_run_is_left_out(table: Table) -> None:
    small = read_runs(table(LLAMA.format(*MLPERF[0])))
    near, far = (project_runs(small, size, [], None)[0] for size in (8192, 16384))
    assert not near.untested and "32 times" in far.untested
    other = read_runs(table("M,64,H100,,,,,,,,,,,1.0"))
    assert [one.label for one in project_runs(small, 8192, other, None)] == ["left out", "projected"]
    with pytest.raises(PlanError, match="no smaller run"):
        project_runs(small, None, other, None)
    with pytest.raises(PlanError, match="multiples of tp x pp x cp = 128"):
        project_runs(small, 8, [], None)


def test_a_recording_is_projected_by_its_own_share_of_communication() -> None:
    machine = Recorded(command=("train",), machine={"devices": "8 x H100"})
    told = {"step_time_s": 2.0, "exposed_comm_frac": 0.2, "straggler_frac": 0.02}
    run = RunRecord(trial_id="mine", repeat=0, status=RunStatus.COMPLETED, metrics=told, recorded=machine)
    found, cluster = project_recording(run, 8, 8)
    assert cluster is not None and cluster.world_size == 64
    assert 2.0 < found.figures["step_time_s"].value < 2.2 and found.label == "transferred"
    alone = replace(run, recorded=replace(machine, machine={"devices": "1 x H100"}))
    for wrong in (replace(run, metrics={"step_time_s": 2.0}), replace(run, metrics={}), alone):
        with pytest.raises(PlanError, match="mine: got"):
            project_recording(wrong, 8, 8)


def test_another_site_or_plan_tells_less(table: Table) -> None:
    row = "Llama3.1-405B,{},H100,8,8,2,,{},1,,1152,8192,FP8,{},{}"
    runs = read_runs(
        table(
            row.format(512, 8, 55.143, "A"), row.format(512, 8, 55.143, "B"), row.format(512, 1, 60.0, "A"),
            row.format(2048, 8, 14.222, "A"), head=f"{HEAD},submitter",
        )
    )  # fmt: skip
    steps, _ = sized_runs(runs)
    assert steps[0].log_std < steps[1].log_std and steps[0].log_std < steps[2].log_std


def test_a_layout_keeps_all_layers_with_fewest_at_the_ends() -> None:
    for layers in range(1, 130):
        for stages in range(1, 33):
            found = layout_of(layers, stages)
            if found:
                assert sum(found) == layers and len(found) == stages and min(found) >= 1 and found[0] == min(found)


@pytest.mark.parametrize(
    "text", ["", "8", "0x8", "-4x8", "4x-8", "4 x 8", "1e3x8", "4x8x2", "x8", "\u0664x8", "8x8 mi300x", "9999999x9999"]
)
def test_what_is_no_size_is_refused_in_one_line(text: str) -> None:
    with pytest.raises(PlanError, match="--to: got") as refused:
        nodes_and_devices(text)
    assert "\n" not in str(refused.value)
    assert nodes_and_devices(" 1024x8 ") == (1024, 8)
