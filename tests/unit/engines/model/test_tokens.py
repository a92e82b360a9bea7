from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from specs import trial_spec

from wattune.catalog.hardware import ClusterSpec
from wattune.catalog.models import ModelSpec
from wattune.engines.model.tokens import Batches, FileSamples, stable_seed
from wattune.errors import EngineError
from wattune.plans.axes import Plan
from wattune.trial import TrialSpec
from wattune.workers.engine import Ranks
from wattune.workload import TokenFile


def batches(replica: int, replica_batch_size: int, seed: int = 1) -> Batches:
    return Batches(
        seed=seed,
        vocab_size=50,
        seq_len=6,
        replica_batch_size=replica_batch_size,
        replica=replica,
        device=torch.device("cpu"),
    )


@settings(deadline=None)
@given(dp=st.sampled_from([1, 2, 4, 8]), step=st.integers(0, 100))
def test_replicas_share_the_same_global_batch(dp: int, step: int) -> None:
    whole = batches(0, 8).at(step)
    for index in range(2):
        parts = [batches(replica, 8 // dp).at(step)[index] for replica in range(dp)]
        assert torch.equal(torch.cat(parts), whole[index])


def test_targets_are_the_next_tokens() -> None:
    inputs, targets = batches(0, 4).at(0)
    assert inputs.shape == targets.shape == (4, 6)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    assert set(inputs.flatten().tolist()) <= set(range(50))


def test_steps_seeds_and_samples_differ() -> None:
    first = batches(0, 2).at(0)[0]
    assert not torch.equal(first, batches(0, 2).at(1)[0])
    assert not torch.equal(first, batches(0, 2, seed=2).at(0)[0])
    assert not torch.equal(first[0], first[1])


def test_no_global_seed_is_touched() -> None:
    state = torch.get_rng_state()
    batches(0, 2).at(0)
    assert torch.equal(torch.get_rng_state(), state)


def test_seeds_are_the_same_for_ever() -> None:
    assert stable_seed("tokens", 1, 2) == 2255039089416440684
    assert stable_seed("a", 1) != stable_seed("a/1", "")


TINY = ModelSpec(
    name="tiny", num_layers=1, hidden_size=8, ffn_hidden_size=8, num_heads=2, num_kv_heads=2, vocab_size=300
)


def reading(path: Path, dtype: str = "uint16", seq_len: int = 6) -> TrialSpec:
    return trial_spec(
        TINY, on="1x1 cpu", seq_len=seq_len, batch=4, tokens=TokenFile(path=str(path), dtype=dtype), dtype="fp32"
    )


def written(path: Path, count: int, dtype: str = "uint16") -> Path:
    np.arange(count, dtype=dtype).tofile(path)
    return path


@pytest.mark.parametrize("dtype", ["uint16", "uint32", "int32", "int64"])
def test_a_file_is_read_in_its_order_and_again_from_the_start(tmp_path: Path, dtype: str) -> None:
    samples = FileSamples(reading(written(tmp_path / "t.bin", 33, dtype), dtype))  # five sequences of six
    assert samples.at(0, 0).tolist() == [0, 1, 2, 3, 4, 5, 6]
    assert samples.at(0, 1).tolist() == [6, 7, 8, 9, 10, 11, 12]
    assert samples.at(1, 0).tolist() == list(range(24, 31))
    assert torch.equal(samples.at(1, 1), samples.at(0, 0))
    assert samples.at(0, 0).dtype == torch.int64


@settings(deadline=None)
@given(dp=st.sampled_from([1, 2, 4]), step=st.integers(0, 9))
def test_replicas_share_what_a_file_holds(tmp_path_factory: pytest.TempPathFactory, dp: int, step: int) -> None:
    samples = FileSamples(reading(written(tmp_path_factory.mktemp("tokens") / "t.bin", 100)))
    device = torch.device("cpu")

    def part(replica: int, size: int) -> torch.Tensor:
        batches = Batches(
            seed=1, vocab_size=300, seq_len=6, replica_batch_size=size, replica=replica, device=device, samples=samples
        )
        return batches.at(step)[0]

    assert torch.equal(torch.cat([part(replica, 4 // dp) for replica in range(dp)]), part(0, 4))


def test_a_rank_gets_the_batches_of_its_replica(tmp_path: Path) -> None:
    spec = replace(reading(written(tmp_path / "t.bin", 100)), plan=Plan(pp=2, dtype="fp32"))
    spec = replace(spec, cluster=ClusterSpec(device="cpu", devices_per_node=4))
    device = torch.device("cpu")
    of = [
        Batches.of(spec, Ranks(rank=rank, world_size=4, local_rank=rank, device="cpu"), seed=1, device=device)
        for rank in range(4)
    ]
    assert [(each.replica, each.replica_batch_size) for each in of] == [(0, 2), (1, 2), (0, 2), (1, 2)]
    assert of[1].at(0)[0][:, 0].tolist() == [12, 18]
    drawn = replace(spec, workload=replace(spec.workload, tokens=None))
    ranks = Ranks(rank=0, world_size=4, local_rank=0, device="cpu")
    assert Batches.of(drawn, ranks, seed=1, device=device).samples is None


def test_a_file_that_cannot_be_used_says_why(tmp_path: Path) -> None:
    good = written(tmp_path / "t.bin", 20)
    odd = tmp_path / "odd.bin"
    odd.write_bytes(good.read_bytes() + b"x")
    large = written(tmp_path / "large.bin", 400)
    for spec, words in (
        (reading(tmp_path / "absent.bin"), r"workload.tokens.path: .*absent.bin cannot be read \(No such file"),
        (reading(odd), "odd.bin has 41 bytes, no multiple of the 2 of uint16; name its data type"),
        (reading(good, seq_len=20), "has 20 tokens of uint16; a sequence of seq_len=20 needs 21"),
        (reading(good, dtype="float32"), "workload.tokens.dtype: got float32; use one of: uint16"),
    ):
        with pytest.raises(EngineError, match=words):
            FileSamples(spec)
    with pytest.raises(EngineError, match="has token 300 in sequence 49; the model's vocab_size is 300"):
        FileSamples(reading(large)).at(12, 1)
    np.array([-1] * 20, dtype="int32").tofile(good)
    with pytest.raises(EngineError, match="has token -1 in sequence 0"):
        FileSamples(reading(good, dtype="int32")).at(0, 0)
