"""Forced routing is fair by construction, follows its seed, and trains the router; the auxiliary loss is Switch's."""

from dataclasses import replace

import pytest
import torch
from specs import trial_spec

from wattune.catalog.models import MODELS
from wattune.engines.model.routing import (
    AUXILIARY_LOSS_COEFFICIENT,
    Routes,
    auxiliary_loss,
    choices,
    expert_shares,
    layer_choices,
    routing_facts,
)
from wattune.plans.axes import Plan
from wattune.trial import TrialSpec
from wattune.workload import Routing

MODEL = replace(MODELS["mixtral_8x7b"], num_layers=3)
CPU = torch.device("cpu")


def spec(routing: Routing | None, *, seq_len: int = 64, mode: str = "pretrain", recompute: str = "none") -> TrialSpec:
    return trial_spec(
        MODEL, on="1x1 cpu", seq_len=seq_len, batch=2, routing=routing, mode=mode, dtype="fp32", recompute=recompute
    )


BALANCED, SKEWED, LEARNED = Routing(by="balanced"), Routing(by="skew", skew=1.0), Routing(by="learned")


@pytest.mark.parametrize(("num_experts", "per_token"), [(8, 2), (8, 1), (8, 3), (60, 4), (16, 16)])
@pytest.mark.parametrize("skew", [0.0, 0.5, 1.0, 4.0, 300.0])
def test_shares_fall_by_zipfs_law_and_no_expert_gets_a_token_twice(
    num_experts: int, per_token: int, skew: float
) -> None:
    shares = expert_shares(num_experts, per_token, skew)
    assert sum(shares) == pytest.approx(1)
    assert shares == sorted(shares, reverse=True) and max(shares) <= 1 / per_token + 1e-9
    for rank in range(1, num_experts):  # what is not cut follows the law
        if shares[rank - 1] < 1 / per_token - 1e-9 and shares[rank] > 1e-12:
            assert shares[rank] / shares[rank - 1] == pytest.approx((rank / (rank + 1)) ** skew)
    if skew == 0:
        assert shares == pytest.approx([1 / num_experts] * num_experts)


def test_a_skew_of_one_over_eight_experts() -> None:
    harmonic = sum(1 / rank for rank in range(1, 9))
    assert expert_shares(8, 2, 1.0) == pytest.approx([1 / rank / harmonic for rank in range(1, 9)])
    # The first expert would get 0.55 of the assignments of two a token: it is sent every token, the rest share a half.
    rest = [rank**-1.7 for rank in range(2, 9)]
    assert expert_shares(8, 2, 1.7) == pytest.approx([0.5, *(0.5 * weight / sum(rest) for weight in rest)])


@pytest.mark.parametrize("skew", [0.0, 0.7, 2.5])
@pytest.mark.parametrize(("num_experts", "per_token"), [(8, 2), (8, 3), (4, 1)])
def test_every_stretch_of_a_sequence_is_shared_as_the_whole(num_experts: int, per_token: int, skew: float) -> None:
    chosen = choices(256, num_experts, per_token, skew, 7)
    assert chosen.shape == (256, per_token)
    assert all(len(set(experts)) == per_token for experts in chosen.tolist())
    shares = torch.tensor(expert_shares(num_experts, per_token, skew), dtype=torch.float64)
    for first, last in ((0, 256), (0, 64), (64, 128), (192, 256), (100, 131)):
        counts = chosen[first:last].flatten().bincount(minlength=num_experts)
        assert (counts - shares * (last - first) * per_token).abs().max() <= 2


def test_balanced_shares_are_exactly_equal_in_every_block() -> None:
    chosen = choices(64, 8, 2, 0.0, 7)
    for block in chosen.split(4):  # E / k tokens
        assert block.flatten().bincount(minlength=8).tolist() == [1] * 8
    assert len({tuple(sorted(pair)) for pair in chosen.tolist()}) > 8, "not the same experts together for ever"


def test_the_choice_follows_seed_and_layer_alone() -> None:
    of = {(layer, seed): layer_choices(spec(SKEWED), layer, seed) for layer in (0, 1) for seed in (7, 8)}
    again = layer_choices(spec(SKEWED), 0, 7)
    assert again is not None and torch.equal(of[0, 7], again)
    others = layer_choices(replace(spec(SKEWED), plan=Plan(dtype="bf16", micro_batch_size=2)), 0, 7)
    assert others is not None and torch.equal(others, again)
    busiest = {key: int(chosen.flatten().bincount(minlength=8).argmax()) for key, chosen in of.items()}
    assert len(set(busiest.values())) > 1
    assert not torch.equal(of[0, 7], of[1, 7]) and not torch.equal(of[0, 7], of[0, 8])
    assert layer_choices(spec(LEARNED), 0, 7) is None and layer_choices(spec(None), 0, 7) is None


def test_forced_tokens_are_weighed_by_the_router_and_train_it() -> None:
    routes = Routes(spec(BALANCED), 7, CPU)
    logits = torch.randn(128, 8, requires_grad=True)
    experts, gates, counts = routes.layer(1)(logits)
    assert torch.equal(experts, layer_choices(spec(BALANCED), 1, 7).repeat(2, 1))
    chosen = logits.gather(1, experts)
    assert torch.allclose(gates, chosen.softmax(-1))
    assert counts.tolist() == [32] * 8
    (grad,) = torch.autograd.grad((gates * torch.randn_like(gates)).sum(), logits)
    sent = torch.zeros(128, 8, dtype=torch.bool).scatter(1, experts, True)
    assert (grad[sent] != 0).all() and (grad[~sent] == 0).all()


def test_places_of_a_piece_of_the_sequence_are_routed_as_in_the_whole() -> None:
    whole, places = layer_choices(spec(SKEWED), 2, 7), torch.arange(16, 48)
    piece = Routes(spec(SKEWED), 7, CPU, places=places).layer(2)
    assert torch.equal(piece(torch.zeros(32, 8))[0], whole[places])


def test_learned_routing_takes_the_most_probable_experts() -> None:
    logits = torch.randn(128, 8)
    for routing in (LEARNED, None):
        experts, gates, _ = Routes(spec(routing), 7, CPU).layer(0)(logits)
        assert torch.equal(experts, logits.topk(2).indices)
        assert torch.allclose(gates, logits.topk(2).values.softmax(-1))


def test_the_auxiliary_loss_is_switchs_by_sequence() -> None:
    even = auxiliary_loss(torch.zeros(3, 16, 8), torch.full((3, 8), 4))
    assert even.item() == pytest.approx(3 * AUXILIARY_LOSS_COEFFICIENT)  # a E E (1/E)^2 = a, the least there is
    logits = torch.randn(2, 16, 8)
    sent = torch.zeros(2, 16, 8).scatter(2, logits.topk(2).indices, 1.0).sum(1).long()
    by_hand = 0.0
    for sequence in range(2):
        for expert in range(8):
            share = sent[sequence, expert].item() / 32
            by_hand += 0.02 * 8 * share * logits[sequence].softmax(-1)[:, expert].mean().item()
    assert auxiliary_loss(logits, sent).item() == pytest.approx(by_hand)


@pytest.mark.parametrize(("routing", "mode", "has_loss"), [(LEARNED, "pretrain", True), (LEARNED, "prefill", False)])
def test_the_auxiliary_loss_reaches_the_router_alone(routing: Routing, mode: str, has_loss: bool) -> None:
    routes = Routes(spec(routing, mode=mode), 7, CPU, sequence_loss_scale=0.25)
    logits = torch.randn(128, 8, requires_grad=True)
    experts, gates, _ = routes.layer(0)(logits)
    (grad,) = torch.autograd.grad((gates * 0).sum(), logits)
    sent = torch.zeros(2, 64, 8).scatter(2, experts.view(2, 64, 2), 1.0).sum(1)
    (wanted,) = torch.autograd.grad(0.25 * auxiliary_loss(logits.view(2, 64, 8), sent), logits)
    assert torch.allclose(grad, wanted if has_loss else torch.zeros_like(wanted)) and wanted.abs().sum() > 0


def test_tokens_are_counted_by_layer_until_they_are_taken() -> None:
    routes = Routes(spec(BALANCED), 7, CPU)
    for _ in range(3):
        routes.layer(1)(torch.zeros(64, 8))
    assert routes.take_counts() == ((0,) * 8, (48,) * 8, (0,) * 8)
    assert routes.take_counts() == ((0,) * 8,) * 3


def test_a_layer_computed_again_counts_once() -> None:
    routes = Routes(spec(BALANCED, recompute="full"), 7, CPU)
    for _ in range(2):
        routes.layer(0)(torch.zeros(64, 8))
    assert routes.take_counts()[0] == (16,) * 8


def test_results_say_how_tokens_were_routed() -> None:
    said = [routing_facts(spec(routing))["routing"] for routing in (BALANCED, SKEWED, LEARNED, None)]
    assert said == ["balanced", "skew 1", "learned", "uncontrolled"]
    assert routing_facts(replace(spec(None), model=MODELS["llama3_8b"])) == {}
