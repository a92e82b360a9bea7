#!/usr/bin/env python
"""Do experts inside a node with stages across nodes beat experts and tensor parallelism across nodes?

Hypothesis: EP8-TP4 spreads each exchange of tokens over four nodes with one port each, EP8-TP1-PP4 keeps it on NVLink
and sends only activations between stages. The paper's figures 4 to 7 have more than half of the kernel time of
EP8-TP4-PP1 in communication.
Estimated: nobody here has four nodes. Expected by `wattune.estimate`, before any run: 8 times the speed. It said 27
where each rank of a split expert sent the tokens of all of them, as in the torch engine; Megatron-Core's send
their own.
"""

EVIDENCE = "estimated"
PAPER = "MICRO 2025, figures 4 to 7"
SPACE = {
    "engine": "megatron",
    "model": "mixtral_8x22b",
    "cluster": {"device": "h200_sxm", "num_nodes": 4, "devices_per_node": 8, "network": "roce_100", "rails": 1},
    "workload": {"seq_len": 4096, "global_batch_size": 128},
}
KEPT = {"ep": 8, "sharding": "zero1", "recompute": "full"}
ARMS = {"EP8-TP4-PP1": {"tp": 4, "pp": 1, **KEPT}, "EP8-TP1-PP4": {"tp": 1, "pp": 4, **KEPT}}
CLAIMS = {"tokens_per_s": "higher", "energy_per_token_j": "lower"}

if __name__ == "__main__":
    from shared.one_study import ask

    raise SystemExit(ask(__file__))
