"""The device of a rank: claimed only for a specification that can run there; processors have no memory count."""

from dataclasses import replace

import pytest
import torch
from specs import trial_spec

from wattune.catalog.models import ModelSpec
from wattune.errors import EngineError
from wattune.plans.axes import Plan
from wattune.workers.device import allocator_retries, claim, device_memory, device_uuid
from wattune.workers.engine import Ranks

SPEC = trial_spec(
    ModelSpec(
        name="tiny", num_layers=2, hidden_size=64, ffn_hidden_size=128, num_heads=4, num_kv_heads=2, vocab_size=256
    ),
    on="1x2 cpu",
    seq_len=32,
    batch=4,
    dtype="fp32",
)
RANKS = Ranks(rank=1, world_size=2, local_rank=1, device="cpu")


def test_a_rank_claims_the_device_it_was_given() -> None:
    assert claim(SPEC, RANKS) == torch.device("cpu")


def test_a_specification_that_breaks_a_rule_is_refused_by_the_rule_s_name() -> None:
    with pytest.raises(EngineError, match=r"^\w+: "):
        claim(replace(SPEC, plan=Plan(dtype="fp32", pp=4)), RANKS)


def test_ranks_of_another_cluster_are_refused() -> None:
    with pytest.raises(EngineError, match="has 2 ranks; got 3"):
        claim(SPEC, replace(RANKS, world_size=3))


def test_a_processor_has_neither_a_count_of_memory_nor_an_identity() -> None:
    assert device_memory("cpu") == {} and device_uuid("cpu") is None and allocator_retries("cpu") == 0


@pytest.mark.parametrize("torchs", ["163b45e6-75c7-fc2e-765c-f19788620a68", "GPU-163b45e6-75c7-fc2e-765c-f19788620a68"])
def test_an_identity_is_written_as_nvml_writes_it(monkeypatch: pytest.MonkeyPatch, torchs: str) -> None:
    class Properties:
        uuid = torchs
        total_memory = 141 * 10**9

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: Properties)
    assert device_uuid("cuda:0") == "GPU-163b45e6-75c7-fc2e-765c-f19788620a68"
    counts = {"memory_allocated": 1, "memory_reserved": 2, "max_memory_reserved": 3}
    for name, count in counts.items():
        monkeypatch.setattr(torch.cuda, name, lambda _, count=count: count)
    memory = {"allocated_bytes": 1, "reserved_bytes": 2, "reserved_peak_bytes": 3, "total_bytes": 141 * 10**9}
    assert device_memory("cuda:0") == memory
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda _: {"num_alloc_retries": 4, "num_ooms": 1})
    assert allocator_retries("cuda:0") == 4
