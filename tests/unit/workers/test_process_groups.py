"""Process groups that are made anew for each trial, over the store of the group somebody else made."""

import re
import sys
import threading
import time
import traceback
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from specs import trial_spec
from warm_ranks import run_ranks, store_of_two

from wattune.catalog.models import ModelSpec
from wattune.engines.torch.engine import TorchEngine
from wattune.plans.axes import Plan
from wattune.run import RunStatus
from wattune.trial import Measure, TrialSpec
from wattune.workers import process_groups
from wattune.workers.engine import Ranks, StepSpans
from wattune.workers.loop import measure_trial
from wattune.workers.process_groups import abort_groups, begun, group_of, join_groups, leave_groups

pytestmark = pytest.mark.timeout(240)

SPEC = trial_spec(
    ModelSpec(
        name="tiny",
        num_layers=2,
        hidden_size=64,
        ffn_hidden_size=128,
        num_heads=4,
        num_kv_heads=2,
        vocab_size=256,
        source="made up",
    ),
    on="1x2 cpu",
    seq_len=32,
    batch=4,
    dtype="fp32",
)


def _worker(rank: int, folder: Path) -> None:
    store = store_of_two(rank, folder)
    assert not dist.is_initialized() and leave_groups() == 0
    names = set()
    for trial in range(3):
        # Ranks may change places from trial to trial.
        mine = rank if trial % 2 == 0 else 1 - rank
        join_groups(store, f"trial-{trial}", rank=mine, world_size=2, device="cpu", timeout_s=100)
        extra = dist.new_group([0, 1])
        tensor = torch.tensor([mine + 1])
        dist.all_reduce(tensor, group=extra)
        assert tensor.item() == 3 and dist.get_rank() == mine
        pair = group_of((0, 1), 0, "mesh_tp")
        for number, role in ((1, "mesh_pp"), (0, "mesh_shard")):  # the next trial of the meeting
            join_groups(store, f"trial-{trial}", rank=mine, world_size=2, device="cpu", timeout_s=100)
            one = group_of((0, 1), number, role)
            assert (one is pair) == (number == 0) and one.group_desc == role and dist.get_world_size(extra) == 2
            dist.all_reduce(tensor := torch.tensor([mine + 1]), group=one)
            assert tensor.item() == 3
        names.add(pair.group_name)
        abort_groups()  # nothing on processors
        assert leave_groups() == 1 and not dist.is_initialized()
    assert len(names) == 1, "graphs are kept by the names of their groups"
    join_groups(store, "left", rank=rank, world_size=2, device="cpu", timeout_s=100)
    group_of((0, 1), 0, "mesh_tp")  # what is kept does not outlast its meeting
    # A rank that leaves frees one that waits for it.
    join_groups(store, "unequal", rank=rank, world_size=2, device="cpu", timeout_s=100)
    if rank == 0:
        time.sleep(0.5)
        leave_groups()
    else:
        begun_s = time.monotonic()
        try:
            dist.barrier()
        except RuntimeError:
            assert time.monotonic() - begun_s < 60
        else:
            raise AssertionError("there was nobody to wait for")
        leave_groups()
    join_groups(store, "after", rank=rank, world_size=2, device="cpu", timeout_s=100)
    dist.barrier()
    leave_groups()


def test_groups_come_and_go(tmp_path: Path) -> None:
    run_ranks(_worker, tmp_path)


def _run_trials(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    sys.path.insert(0, str(Path(__file__).parents[2] / "fakes"))
    from faulty_engine import GOOD, OUT_OF_MEMORY, Faulty

    store = store_of_two(rank, folder)
    held = []
    for number, (plan, fault) in enumerate(
        [
            (Plan(dtype="fp32"), GOOD),
            (Plan(dtype="fp32", sharding="zero3"), OUT_OF_MEMORY),
            (Plan(dtype="fp32", tp=2, etp=2), OUT_OF_MEMORY),
            (Plan(dtype="fp32", pp=2), OUT_OF_MEMORY),
            (Plan(dtype="fp32"), GOOD),
        ]
    ):
        join_groups(store, f"trial-{number}", rank=rank, world_size=2, device="cpu", timeout_s=100)
        begun_s = time.monotonic()
        try:
            outcome = measure_trial(
                Faulty(),
                replace(SPEC, plan=plan),
                Measure(warmup_steps=2, min_steps=4, min_seconds=0.0),
                Ranks(rank=rank, world_size=2, local_rank=rank, device="cpu"),
                node="n0",
                device=f"cpu{rank}",
                seed=fault,
            )
            status = outcome.status
            del outcome
        except RuntimeError as error:
            assert "onnection" in str(error), error
            status = None
            traceback.clear_frames(error.__traceback__)
        if fault == GOOD:
            assert int(re.findall(r"group \S+: (\d+) collectives begun", begun())[0]) > 0
        leave_groups()
        assert time.monotonic() - begun_s < 80, "freed by the rank that failed, not by the time-out"
        failing = RunStatus.OUT_OF_MEMORY if rank == 1 else None
        assert status is (RunStatus.COMPLETED if fault == GOOD else failing)
        held.append([len(list(Path("/proc/self", kind).iterdir())) for kind in ("fd", "task")])
    # Every group that stays alive would hold a dozen threads and more files.
    assert held[-1][0] <= held[0][0] + 5 and held[-1][1] <= held[0][1] + 8, held


def test_a_rank_out_of_memory_frees_the_others_whatever_the_plan_and_no_group_stays(tmp_path: Path) -> None:
    run_ranks(_run_trials, tmp_path)


class _FailsInProfile(TorchEngine):
    """Runs out of memory on rank 1 in the second step of the profiled pass, where rank 0 then waits for it."""

    part, num_profiled = "", 0

    def build(self, spec: TrialSpec, ranks: Ranks, *, seed: int) -> None:
        super().build(spec, ranks, seed=seed)
        self._rank = ranks.rank

    def progress(self, part: str, *_: float) -> None:
        self.part = part

    def step(self) -> StepSpans:
        self.num_profiled += self.part == "profile"
        if self.num_profiled == 2 and self._rank == 1:
            torch.zeros(1 << 50)
        return super().step()


def _run_profiled(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    store = store_of_two(rank, folder)
    for number, kind in enumerate((_FailsInProfile, TorchEngine)):
        join_groups(store, f"trial-{number}", rank=rank, world_size=2, device="cpu", timeout_s=100)
        engine = kind()
        outcome = measure_trial(
            engine,
            SPEC,
            Measure(warmup_steps=2, min_steps=4, min_seconds=0.0, profile_steps=3),
            Ranks(rank=rank, world_size=2, local_rank=rank, device="cpu"),
            node="n0",
            device=f"cpu{rank}",
            seed=0,
            progress=getattr(engine, "progress", None),
        )
        leave_groups()
        assert outcome.status is RunStatus.COMPLETED and len(outcome.losses) >= 4 and outcome.memory_peak_bytes > 0
        if kind is TorchEngine:
            assert outcome.kernels is not None and "profile" not in outcome.facts
        else:
            said = "out of memory, rank 1 in profile" if rank == 1 else "rank 0: RuntimeError: "
            assert outcome.kernels is None and said in outcome.facts["profile"], outcome.facts["profile"]


@pytest.mark.slow
def test_a_rank_that_fails_in_the_profiled_pass_costs_no_rank_what_it_measured(tmp_path: Path) -> None:
    run_ranks(_run_profiled, tmp_path)


def test_communicators_are_aborted_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, where an idle communicator cannot go before the one whose kernel hangs."""
    hangs_no_more = threading.Event()
    aborted: list[str] = []

    class Idle:
        def abort(self) -> None:
            assert hangs_no_more.wait(10), "waits for a communicator that is aborted after it"
            aborted.append("idle")

    class Hanging:
        def abort(self) -> None:
            aborted.append("hanging")
            hangs_no_more.set()

    backends = {"0": Idle(), "1": Idle(), "2": Hanging(), "no GPUs": None}
    monkeypatch.setattr(
        process_groups.distributed_c10d, "_world", SimpleNamespace(pg_names=dict.fromkeys(backends, ""))
    )
    monkeypatch.setattr(process_groups, "_nccl", backends.get)
    abort_groups()
    assert aborted == ["hanging", "idle", "idle"]
