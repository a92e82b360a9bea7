"""Compiled parts: the same numbers, graphs made once and shared, and nothing that silently runs eagerly."""

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import tiny_models
import torch
from specs import trial_spec
from torch import Tensor
from torch._dynamo.utils import counters
from warm_ranks import run_ranks, store_of_two

from wattune.catalog.hardware import ClusterSpec
from wattune.engines.model import compiler
from wattune.engines.model.compiler import (
    EAGER,
    GRAPHS_PER_VARIANT,
    MOST_VARIANTS,
    Compiler,
    begin_variant,
    compiler_for,
)
from wattune.engines.torch.engine import TorchEngine
from wattune.orchestrate.scheduling.graphs import PLANS_KEPT, graphs_of
from wattune.plans.axes import Plan
from wattune.trial import TrialSpec
from wattune.workers.engine import Ranks, StepSpans
from wattune.workers.process_groups import join_groups, leave_groups

RANKS = Ranks(rank=0, world_size=1, local_rank=0, device="cpu")
LLAMA = replace(tiny_models.LLAMA, num_layers=3)
GRAPHS = Compiler(backend="aot_eager")


@pytest.fixture(autouse=True)
def fresh_compiler(process_group: None) -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def spec(seq_len: int = 8, **axes: object) -> TrialSpec:
    return trial_spec(LLAMA, on="1x1 cpu", seq_len=seq_len, batch=4, **({"dtype": "fp32"} | axes))


def trained(compiler: Compiler, wanted: TrialSpec) -> list[StepSpans]:
    engine = TorchEngine(compiler)
    engine.build(wanted, RANKS, seed=3)
    assert engine.facts() == {"compiler": str(compiler)}
    steps = [engine.step() for _ in range(3)]
    engine.close()
    return steps


def num_graphs() -> int:
    return int(counters["stats"]["unique_graphs"])


def test_processors_run_eagerly_unless_told_otherwise() -> None:
    assert compiler_for(torch.device("cpu")) == EAGER
    assert compiler_for(torch.device("cuda")).backend == "inductor"
    assert trained(EAGER, spec()) and num_graphs() == 0


def test_what_is_not_timed_is_an_option_of_inductors() -> None:
    options: list[str] = torch._inductor.list_options()
    assert "triton.autotune_pointwise" in options


def test_a_graph_is_made_once_and_shared_by_layers_and_trials() -> None:
    eager = trained(EAGER, spec())
    first = trained(GRAPHS, spec())
    made = num_graphs()
    assert made == 2  # one for three layers, one for the loss
    again = trained(GRAPHS, spec())
    assert num_graphs() == made
    assert [step.loss for step in first] == [step.loss for step in again]
    assert [step.loss for step in first] == pytest.approx([step.loss for step in eager], rel=1e-6)
    trained(GRAPHS, spec(seq_len=16))
    assert num_graphs() == 2 * made  # another shape is another graph, and none is made for shapes that vary


@pytest.mark.slow
def test_the_order_of_trials_knows_which_of_them_compile() -> None:
    """A trial makes new graphs exactly where its key is new: trials of one key are run side by side."""
    known = set()
    for axes in (
        {},
        {"sharding": "zero1"},
        {"sharding": "zero3", "overlap": "grad_param"},
        {"recompute": "full"},
        {"micro_batch_size": 2},
        {"recompute": "selective"},
        {"recompute": "selective", "sharding": "zero2"},
        {},
    ):
        before, wanted = num_graphs(), spec(**axes)
        trained(Compiler(backend="eager"), wanted)
        key = graphs_of(replace(wanted, cluster=ClusterSpec(device="h200_sxm", devices_per_node=1)))
        assert (num_graphs() > before) == (key not in known), axes
        known.add(key)
    assert PLANS_KEPT == MOST_VARIANTS


def _tensor_parallel_trials(rank: int, folder: Path) -> None:
    """Trials of one plan in process groups of their own; in the third the processes have changed places."""
    torch.set_num_threads(1)
    store = store_of_two(rank, folder)
    wanted = replace(
        spec(tp=2, etp=2), model=replace(LLAMA, num_layers=1), cluster=ClusterSpec(device="cpu", devices_per_node=2)
    )
    made, losses = [], []
    for trial, mine in enumerate((rank, rank, 1 - rank, rank)):
        join_groups(store, f"trial-{trial}", rank=mine, world_size=2, device="cpu", timeout_s=120)
        engine = TorchEngine(GRAPHS)
        engine.build(wanted, Ranks(rank=mine, world_size=2, local_rank=rank, device="cpu"), seed=3)
        losses.append([engine.step().loss for _ in range(2)])
        engine.close()
        assert leave_groups() == 0
        made.append(num_graphs())
    # One of the layer and one of the head with its loss. That of the head knows the rank's piece of the vocabulary:
    # another rank needs its own, and an equal one none.
    assert made == [2, 2, 3, 3]
    assert all(each == losses[0] for each in losses)


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_equal_plans_share_graphs_of_tensor_parallel_layers(tmp_path: Path) -> None:
    run_ranks(_tensor_parallel_trials, tmp_path)


@pytest.mark.slow
def test_many_configurations_are_forgotten_before_torch_gives_up() -> None:
    compiler._variants.clear()
    for number in range(MOST_VARIANTS - 1):
        begin_variant(("test", number))
    trained(GRAPHS, spec(seq_len=4))
    made = num_graphs()
    begin_variant("one too many")
    trained(GRAPHS, spec(seq_len=4))
    assert num_graphs() == 2 * made
    assert torch._dynamo.config.recompile_limit == MOST_VARIANTS * GRAPHS_PER_VARIANT


def test_what_cannot_be_one_graph_is_an_error() -> None:
    def asks_the_host(x: Tensor) -> Tensor:
        return x * x.sum().item() if x.sum().item() > 0 else x

    with pytest.raises(torch._dynamo.exc.TorchDynamoException):
        GRAPHS.run(asks_the_host, torch.ones(3))


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor on processors needs g++")
def test_generated_code_gives_the_same_training() -> None:
    wanted = replace(spec(), plan=Plan(dtype="fp32", recompute="selective"))
    eager, compiled = trained(EAGER, wanted), trained(Compiler(backend="inductor"), wanted)
    assert [step.loss for step in compiled] == pytest.approx([step.loss for step in eager], rel=1e-5)
    assert [step.grad_norm for step in compiled] == pytest.approx([step.grad_norm for step in eager], rel=1e-5)
