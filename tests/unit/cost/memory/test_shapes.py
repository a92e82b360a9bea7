"""Sizes of stages and numbers of weights agree with the model, the plan and the schedule."""

from dataclasses import replace

import numpy as np
import pytest
from specs import trial_spec

from wattune.catalog.models import model
from wattune.cost.batch import batches
from wattune.cost.memory.shapes import Shapes, shapes
from wattune.plans.axes import Plan
from wattune.plans.schedule import passes
from wattune.workload import Lora, Routing, Workload


def shapes_of(name: str = "llama3_8b", *, plan: Plan, ranks: int = 8, workload: Workload | None = None) -> Shapes:
    of = replace(model(name), vocab_size=32_000)
    spec = trial_spec(
        of, on=f"1x{ranks} h200_sxm", workload=workload or Workload(seq_len=4096, global_batch_size=64), plan=plan
    )
    ((_, batch),) = batches([spec])
    return shapes(batch, splits_ends=True, rounds_of_pp=False)


@pytest.mark.parametrize("name", ["llama3_8b", "mixtral_8x7b", "gpt3_175b"])
def test_one_rank_holds_the_parameters_of_the_model(name: str) -> None:
    sizes = shapes_of(name, plan=Plan(), ranks=1)
    assert np.add(*sizes.total)[0, 0] == sizes.model.num_parameters


@pytest.mark.parametrize("name", ["llama3_8b", "mixtral_8x7b"])
def test_stages_and_tensor_parallel_ranks_hold_all_weights_between_them(name: str) -> None:
    sizes = shapes_of(name, plan=Plan(tp=2, etp=2, pp=2))
    assert sizes.stage[0].tolist() == [0, 1, 1]
    held = np.add(*sizes.total)[0]
    norms = (2 * 32 + 1) * sizes.model.hidden_size  # and routers: every tensor parallel rank has them
    routers = 32 * sizes.model.num_experts * sizes.model.hidden_size
    assert 2 * (held[0] + held[2]) == sizes.model.num_parameters + norms + routers


@pytest.mark.parametrize(("pp", "vpp", "micro_batches"), [(4, 1, 8), (4, 1, 2), (4, 2, 8), (2, 4, 16), (8, 2, 8)])
def test_micro_batches_in_flight_are_those_of_the_schedule(pp: int, vpp: int, micro_batches: int) -> None:
    workload = Workload(seq_len=4096, global_batch_size=micro_batches)
    sizes = shapes_of(plan=Plan(pp=pp, vpp=vpp), ranks=pp, workload=workload)
    for column, stage in enumerate(sizes.stage[0]):
        held = most = 0
        for one in passes(stage, num_stages=pp, num_chunks=vpp, num_micro_batches=micro_batches):
            held += -1 if one.backward else 1
            most = max(most, held)
        assert sizes.in_flight[0, column] == most / vpp


def test_uneven_stages_are_all_looked_at() -> None:
    sizes = shapes_of(plan=Plan(pp=4, layout=(5, 10, 9, 8)), ranks=4)
    assert sizes.stage[0].tolist() == [0, 1, 2, 3]
    assert sizes.num_layers[0].tolist() == [5, 10, 9, 8]
    assert sizes.first[0].tolist() == [1, 0, 0, 0] and sizes.last[0].tolist() == [0, 0, 0, 1]


def test_adapters_are_trained_beside_frozen_weights() -> None:
    workload = Workload(mode="lora", seq_len=4096, global_batch_size=64, lora=Lora(rank=16, targets=("q", "v")))
    sizes = shapes_of(plan=Plan(), ranks=1, workload=workload)
    each = 16 * (4096 + 4096) + 16 * (4096 + 1024)
    assert np.add(*sizes.of_stage(sizes.trained))[0, 0] == 32 * each
    assert np.add(*sizes.total)[0, 0] == sizes.model.num_parameters + 32 * each


def test_skewed_routing_loads_the_rank_of_the_most_popular_expert() -> None:
    for skew, most in ((0.0, 1.0), (50.0, 4 * (0.5 + 0.5 / 7))):
        workload = Workload(seq_len=4096, global_batch_size=64, routing=Routing(by="skew", skew=skew))
        sizes = shapes_of("mixtral_8x7b", plan=Plan(ep=4), workload=workload)
        assert sizes.imbalance[0, 0] == pytest.approx(most)
