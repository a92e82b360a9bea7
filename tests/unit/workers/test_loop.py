"""The measuring loop on an engine whose steps take as long as the test says."""

import math
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from specs import trial_spec
from warm_ranks import run_ranks

from wattune.run import RunStatus
from wattune.schema import KERNELS
from wattune.trial import Measure, TrialSpec
from wattune.workers import loop
from wattune.workers.engine import ExpertTokens, Ranks, StepSpans
from wattune.workers.loop import is_stable, measure_trial
from wattune.workers.outcome import RankOutcome
from wattune.workers.phases import PhaseRecorder, Span

pytestmark = pytest.mark.usefixtures("process_group")

SPEC = trial_spec(on="1x1 cpu", seq_len=8, batch=1, dtype="fp32")
RANKS = Ranks(rank=0, world_size=1, local_rank=0, device="cpu")


class ScriptedEngine:
    """Claims step times instead of taking them, so that tests of seconds take none."""

    def __init__(self, step_time_s: Callable[[int], float], step: Callable[[int], float] = lambda _: 1.0) -> None:
        self._step_time_s, self._loss = step_time_s, step
        self.num_steps, self.num_closed, self.num_counted = 0, 0, 0
        self._now_ns = time.monotonic_ns()

    def build(self, spec: TrialSpec, ranks: Ranks, *, seed: int) -> None:
        assert (spec, ranks, seed) == (SPEC, RANKS, 7)

    def step(self) -> StepSpans:
        loss = self._loss(self.num_steps)
        start_ns = self._now_ns
        self._now_ns += round(self._step_time_s(self.num_steps) * 1e9)
        self.num_steps += 1
        return StepSpans(spans=(Span("step", start_ns, self._now_ns),), loss=loss, grad_norm=1.0)

    def memory_peak_bytes(self) -> int:
        return 123

    def facts(self) -> dict[str, str]:
        return {"compiler": "none"}

    def expert_tokens(self) -> ExpertTokens:
        taken, self.num_counted = self.num_steps - self.num_counted, self.num_steps
        return ((taken, 2 * taken),)

    def close(self) -> None:
        self.num_closed += 1


def run(engine: ScriptedEngine, **measure: float) -> RankOutcome:
    return measure_trial(engine, SPEC, Measure(**measure), RANKS, node="n0", device="cpu0", seed=7)  # type: ignore[arg-type]


def numbers(outcome: RankOutcome) -> list[int]:
    assert outcome.spans is not None
    steps: list[int] = outcome.spans["step"].to_pylist()
    return steps


def test_tokens_of_experts_and_retries_of_memory_are_those_of_the_measured_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = ScriptedEngine(lambda _: 0.1)
    monkeypatch.setattr(loop, "allocator_retries", lambda _: 3 * engine.num_steps)
    outcome = run(engine, warmup_steps=4, min_steps=6, min_seconds=0.0, profile_steps=0)
    assert engine.num_steps == 10
    assert outcome.expert_tokens == ((6, 12),)
    assert (outcome.allocator_retries, len(outcome.losses)) == (18, 6)
    engine = ScriptedEngine(lambda step: 0.1 * 1.2**step)  # never stable: all of warm-up is left out
    assert run(engine, warmup_steps=2, min_steps=1, min_seconds=0).allocator_retries == 3


def test_warm_up_is_negative_and_measured_steps_count_from_zero() -> None:
    engine = ScriptedEngine(lambda _: 0.1)
    outcome = run(engine, warmup_steps=4, min_steps=3, min_seconds=0)
    assert outcome.status is RunStatus.COMPLETED and outcome.steady
    assert numbers(outcome) == [-4, -3, -2, -1, 0, 1, 2, 3]  # the steps that were judged are measured ones
    assert outcome.losses == (1.0, 1.0, 1.0, 1.0)
    assert outcome.memory_peak_bytes == 123 and engine.num_closed == 1


@pytest.mark.parametrize(
    ("step_time_s", "steady", "num_warmup_steps"),
    [(lambda step: 1.0 if step < 3 else 0.1, True, 3), (lambda step: 0.1 * 1.2**step, False, 20)],
    ids=["stable", "never"],
)
def test_warm_up_goes_on_until_step_time_is_stable_or_ends_and_says_so(step_time_s, steady, num_warmup_steps) -> None:
    outcome = run(ScriptedEngine(step_time_s), warmup_steps=2, min_steps=1, min_seconds=0)
    assert (outcome.steady, outcome.num_warmup_steps) == (steady, num_warmup_steps)


def test_the_window_is_waited_for_after_the_step_that_compiles_and_before_those_that_settle() -> None:
    engine, waited_at = ScriptedEngine(lambda _: 0.1), []
    outcome = measure_trial(
        engine,
        SPEC,
        Measure(warmup_steps=1, min_steps=3, min_seconds=0, profile_steps=0),
        RANKS,
        node="n0",
        device="cpu0",
        seed=7,
        await_window=lambda: waited_at.append(engine.num_steps),
    )
    assert waited_at == [1] and outcome.num_warmup_steps == 1


@pytest.mark.parametrize("measured_s", [0.02, 0.1, 0.5])
def test_the_least_seconds_are_kept_whatever_warm_up_foretold(measured_s: float) -> None:
    outcome = run(
        ScriptedEngine(lambda step: 0.1 if step < 5 else measured_s), warmup_steps=4, min_steps=3, min_seconds=2
    )
    measured = sum(step >= 0 for step in numbers(outcome))
    assert measured * measured_s >= 2 - 1e-9 and measured >= 3
    assert measured <= max(3, 2 / measured_s, 2 / 0.1) + 1


def test_a_loss_that_is_not_finite_is_an_outcome_and_keeps_the_steps_before() -> None:
    engine = ScriptedEngine(lambda _: 0.1, lambda step: math.nan if step == 9 else 1.0)
    outcome = run(engine, warmup_steps=4, min_steps=9, min_seconds=0)
    assert outcome.status is RunStatus.CRASHED and outcome.reason.startswith("non_finite_loss")
    assert numbers(outcome) == [-4, -3, -2, -1, 0, 1, 2, 3, 4]
    assert engine.num_closed == 1


@pytest.mark.parametrize(
    ("said", "requested_bytes"),
    [
        ("CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 139.80 GiB", 5 * 2**29),
        ("HIP out of memory. Tried to allocate 20.00 MiB. GPU 0 has", 20 * 2**20),
        ("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 4096 bytes.", 4096),
        ("Cannot allocate memory", None),
    ],
)
def test_out_of_memory_says_rank_phase_and_bytes(said: str, requested_bytes: int | None) -> None:
    recorder = PhaseRecorder()

    def exhausted(step: int) -> float:
        if step < 9:
            return 1.0
        with recorder.phase("step"), recorder.phase("backward", micro_batch=0):
            raise torch.OutOfMemoryError(said)

    outcome = run(ScriptedEngine(lambda _: 0.1, exhausted), warmup_steps=4, min_steps=9, min_seconds=0)
    assert outcome.status is RunStatus.OUT_OF_MEMORY
    assert outcome.out_of_memory is not None
    found = outcome.out_of_memory
    assert (found.rank, found.phase, found.requested_bytes, found.total_bytes) == (0, "backward", requested_bytes, None)
    assert outcome.reason.startswith("rank 0 in backward") and said in outcome.reason
    assert numbers(outcome) == [-4, -3, -2, -1, 0, 1, 2, 3, 4]


def test_out_of_memory_while_building_says_so() -> None:
    class Exhausted(ScriptedEngine):
        def build(self, spec: TrialSpec, ranks: Ranks, *, seed: int) -> None:
            raise MemoryError

    engine = Exhausted(lambda _: 0.1)
    outcome = run(engine)
    assert outcome.out_of_memory is not None and outcome.out_of_memory.phase == "build"
    assert outcome.reason == "rank 0 in build: MemoryError" and engine.num_closed == 1


def test_steps_are_profiled_after_the_measured_ones_and_not_among_them() -> None:
    class Working(ScriptedEngine):
        def step(self) -> StepSpans:
            start_ns = time.monotonic_ns()
            torch.ones(64, 64) @ torch.ones(64, 64)
            self.num_steps += 1
            return StepSpans(spans=(Span("step", start_ns, time.monotonic_ns()),), loss=1.0, grad_norm=1.0)

    engine = Working(lambda _: 0.1)
    outcome = run(engine, warmup_steps=4, min_steps=3, min_seconds=0, profile_steps=2)
    measured = sum(step >= 0 for step in numbers(outcome))
    assert outcome.kernels is not None and outcome.kernels.schema.equals(KERNELS)
    assert engine.num_steps == outcome.num_warmup_steps + measured + 2
    rows = outcome.kernels.to_pylist()
    assert [row["step"] for row in rows if row["name"] == "step"] == [0, 1]
    assert {row["step"] for row in rows if row["name"] == "aten::mm"} == {0, 1}
    assert outcome.facts == {"compiler": "none"}


def test_processors_are_profiled_only_when_asked() -> None:
    engine = ScriptedEngine(lambda _: 0.1)
    outcome = run(engine, warmup_steps=4, min_steps=3, min_seconds=0)
    assert outcome.kernels is None and outcome.facts == {"compiler": "none"}
    assert engine.num_steps == outcome.num_warmup_steps + 4


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (MemoryError("no more"), "out of memory, rank 0 in profile: no more"),
        (torch.OutOfMemoryError("Tried to allocate 2.00 GiB."), "2,147,483,648 bytes asked for"),
        (RuntimeError("Connection closed by peer\nand more"), "rank 0: RuntimeError: Connection closed by peer"),
    ],
)
def test_what_was_measured_stands_whatever_becomes_of_the_profile(error: Exception, said: str) -> None:
    begun: list[str] = []

    def failing(step: int) -> float:
        if begun[-1] == "profile":
            raise error
        return 1.0

    engine = ScriptedEngine(lambda _: 0.1, failing)
    measure = Measure(warmup_steps=4, min_steps=3, min_seconds=0, profile_steps=2)

    def progress(part: str, *_: float) -> None:
        begun.append(part)

    outcome = measure_trial(engine, SPEC, measure, RANKS, node="n0", device="cpu0", seed=7, progress=progress)
    assert (outcome.status, outcome.reason, outcome.out_of_memory) == (RunStatus.COMPLETED, "", None)
    assert outcome.losses == (1.0, 1.0, 1.0, 1.0) and outcome.memory_peak_bytes == 123 and outcome.kernels is None
    assert "the profiled pass failed" in outcome.facts["profile"] and said in outcome.facts["profile"]
    assert outcome.facts["compiler"] == "none" and engine.num_closed == 1


def test_a_profile_is_read_when_nobody_waits_for_a_step_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = ScriptedEngine(lambda _: 0.1)

    def read(*_: object, **__: object) -> None:
        raise ValueError("a trace cut short")

    monkeypatch.setattr(loop, "kernels_table", read)
    outcome = run(engine, warmup_steps=4, min_steps=3, min_seconds=0, profile_steps=1)
    assert outcome.status is RunStatus.COMPLETED and outcome.kernels is None and outcome.losses == (1.0,) * 4
    assert outcome.facts["profile"].endswith("rank 0: ValueError: a trace cut short") and engine.num_closed == 1


def test_any_other_error_is_the_runners() -> None:
    def broken(step: int) -> float:
        raise RuntimeError("Connection closed by peer")

    with pytest.raises(RuntimeError, match="closed by peer"):
        run(ScriptedEngine(lambda _: 0.1, broken))


def test_stable_needs_four_steps_and_close_halves() -> None:
    assert is_stable([1.0, 1.0, 1.04, 1.04])
    assert not is_stable([1.0, 1.0, 1.2, 1.2])
    assert not is_stable([1.0, 1.0, 1.0])


def stopping(engine: ScriptedEngine, above_s: float) -> RankOutcome:
    measure = Measure(warmup_steps=4, min_steps=20, min_seconds=10, profile_steps=0)
    return measure_trial(engine, SPEC, measure, RANKS, node="n0", device="cpu0", seed=7, stop_above_s=above_s)


def test_a_loser_stops_after_the_steps_that_prove_it_and_says_so() -> None:
    outcome = stopping(ScriptedEngine(lambda step: 0.1 + 0.001 * (step % 3)), above_s=0.08)
    assert outcome.status is RunStatus.COMPLETED
    assert numbers(outcome)[-1] == 19 and len(outcome.losses) == 20
    assert outcome.stopped_early.startswith("20 of ") and "above 0.08 s it loses" in outcome.stopped_early


def test_a_trial_that_may_win_is_measured_to_its_end() -> None:
    outcome = stopping(ScriptedEngine(lambda step: 0.1 + 0.001 * (step % 3)), above_s=0.105)
    assert outcome.stopped_early == "" and len(outcome.losses) >= 98


def _stop_on_two(rank: int, folder: Path) -> None:
    """Two ranks: in the first trial only one has a proof, in the second both have."""
    dist.init_process_group("gloo", init_method=f"file://{folder / 'two'}", rank=rank, world_size=2)
    global RANKS
    RANKS = Ranks(rank=rank, world_size=2, local_rank=rank, device="cpu")
    one, both = (stopping(ScriptedEngine(lambda _, s=s: s), above_s=0.1) for s in ((0.2, 0.05)[rank], 0.2))
    assert one.stopped_early == ""
    assert both.stopped_early and len(both.losses) == 20
    lengths = [torch.tensor([len(one.losses), len(both.losses)]) for _ in range(2)]
    dist.all_gather(lengths, lengths[rank].clone())
    assert torch.equal(*lengths)
    dist.destroy_process_group()


def test_a_rank_with_a_proof_goes_on_while_another_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, asked = ScriptedEngine(lambda _: 0.1), []

    def another_has_none(flag: bool) -> bool:
        asked.append((engine.num_steps - 4, flag))
        return False

    monkeypatch.setattr(loop, "_all_ranks", lambda flag: True)  # of warm-up
    monkeypatch.setattr(loop, "is_stable", lambda _: monkeypatch.setattr(loop, "_all_ranks", another_has_none) or True)
    outcome = stopping(engine, above_s=0.08)
    assert outcome.stopped_early == "" and len(outcome.losses) >= 99
    assert [steps for steps, _ in asked] == [20, 40, 80], "ranks speak between rounds only"


@pytest.mark.slow
def test_all_ranks_stop_together_or_none_does(tmp_path: Path) -> None:
    run_ranks(_stop_on_two, tmp_path)
