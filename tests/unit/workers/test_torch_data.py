import torch
from hypothesis import given
from hypothesis import strategies as st

from wattune.workers.torch_data import Batches, stable_seed


def batches(replica: int, replica_batch_size: int, seed: int = 1) -> Batches:
    return Batches(
        seed=seed,
        vocab_size=50,
        seq_len=6,
        replica_batch_size=replica_batch_size,
        replica=replica,
        device=torch.device("cpu"),
    )


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
