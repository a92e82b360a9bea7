"""Communication inside layers, and loads of experts."""

from dataclasses import replace

import numpy as np
import pytest
from kernel_shapes import shapes

from wattune.catalog.hardware import ClusterSpec, device
from wattune.catalog.models import model
from wattune.cost.coefficients import PUBLISHED_STEP_TIME
from wattune.cost.step_time.facts import FACTS
from wattune.cost.step_time.links import Links
from wattune.cost.step_time.traffic import expert_imbalance, layer_traffic
from wattune.cost.step_time.work import Machine
from wattune.workload import Routing, Workload

CLUSTER = ClusterSpec(device="h200_sxm", devices_per_node=8)
WORKLOAD = Workload(seq_len=4096, global_batch_size=8)


def traffic(name="llama3_70b", engine="torch", overlaps=0.0, attention_s=0.0, **degrees):
    machine = Machine.of(device("h200_sxm"), "bf16", PUBLISHED_STEP_TIME)
    links = Links.of(CLUSTER, PUBLISHED_STEP_TIME.link)
    found = layer_traffic(
        machine, links, model(name), shapes(**degrees), FACTS[engine], np.array([attention_s]), np.array([overlaps])
    )
    return {kind: float(getattr(found, kind)[0]) for kind in found.__slots__}


def test_one_rank_sends_nothing():
    assert set(traffic("mixtral_8x7b").values()) == {0.0}


def test_recomputing_communicates_again():
    once, again = traffic(tp=4), traffic(tp=4, recompute=2)
    assert again["tp_forward_s"] == once["tp_forward_s"]
    assert again["tp_backward_s"] == pytest.approx(once["tp_backward_s"] + once["tp_forward_s"])


def test_deepspeed_reduces_for_every_reader_of_the_input():
    found = traffic(engine="deepspeed", tp=4)
    assert found["tp_backward_s"] == pytest.approx(2.5 * found["tp_forward_s"])  # q, k, v, gate and up against two
    assert traffic("gpt3_175b", engine="deepspeed", tp=4)["tp_backward_s"] == pytest.approx(
        2 * traffic("gpt3_175b", engine="deepspeed", tp=4)["tp_forward_s"]
    )


def test_overlap_hides_most_of_tensor_parallel():
    assert traffic(engine="megatron", tp=4, overlaps=1.0)["tp_forward_s"] == pytest.approx(
        0.2 * traffic(engine="megatron", tp=4)["tp_forward_s"]
    )


def test_attention_hides_the_ring_of_context_parallel():
    exposed, beside = traffic(cp=4), traffic(cp=4, attention_s=1.0)
    assert 0 < beside["cp_forward_s"] < exposed["cp_forward_s"]


def test_experts_exchange_in_both_passes():
    found = traffic("mixtral_8x7b", ep=4)
    assert found["ep_forward_s"] == found["ep_backward_s"] > 0


def test_gathered_rows_are_as_many_as_experts_a_token(monkeypatch):
    """Two experts a token: rows take a pair of collectives as large as two of tokens; attention keeps its own."""
    rows, sent = (traffic("mixtral_8x7b", engine="megatron", tp=4, etp=4, ep=ep) for ep in (1, 2))
    monkeypatch.setitem(FACTS, "megatron", replace(FACTS["megatron"], gathers_rows=False))
    tokens, all_sent = (traffic("mixtral_8x7b", engine="megatron", tp=4, etp=4, ep=ep) for ep in (1, 2))
    exchanged = sent["ep_forward_s"] - rows["ep_forward_s"]
    assert 4 * exchanged == pytest.approx(all_sent["ep_forward_s"], rel=0.6), "each rank sends its own tokens alone"
    assert tokens["ep_forward_s"] == 0
    assert rows["tp_forward_s"] == pytest.approx(tokens["tp_forward_s"] / 2)
    assert 1.6 < rows["ep_forward_s"] / rows["tp_forward_s"] < 2.0  # latency is paid once


@pytest.mark.parametrize(
    ("routing", "least", "most"),
    [(Routing(by="balanced"), 1.0, 1.0), (Routing(by="skew", skew=1.2), 1.5, 4.0), (Routing(by="learned"), 1.05, 1.2)],
)
def test_imbalance_follows_the_routing(routing, least, most):
    found = expert_imbalance(model("mixtral_8x7b"), replace(WORKLOAD, routing=routing), np.array([1.0, 8.0]))
    assert found[0] == 1.0
    assert least <= found[1] <= most
