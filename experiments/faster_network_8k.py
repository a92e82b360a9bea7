#!/usr/bin/env python
"""Does a network of 800 in place of 400 Gb/s a port pay at 8,192 devices?

Hypothesis: Llama-3 405B on 8,192 H100 with 64 replicas hides most of its gradients; what stages send, and the tail of
the reduction, is a few percent of a step, so twice the network brings less. The paper's figure 22 projects a what-if
of 800 Gb/s to 8,192 devices without a calibration.
Estimated: nobody here has 1,024 nodes. Expected by `wattune.estimate`, before: speed +1.4 %, energy a token -1.8 %.
"""

EVIDENCE = "estimated"
PAPER = "MICRO 2025, figure 22"
SPACE = {
    "model": "llama3_1_405b",
    "cluster": [
        {"device": "h100_sxm", "num_nodes": 1024, "devices_per_node": 8, "network": "ndr"},
        {"device": "h100_sxm", "num_nodes": 1024, "devices_per_node": 8, "network": "xdr"},
    ],
    "workload": {"seq_len": 8192, "global_batch_size": 2048},
}
KEPT = {"tp": 8, "pp": 16, "layout": [8] * 14 + [7, 7], "recompute": "full", "sharding": "zero1"}
ARMS = {
    "400 Gb/s": {"cluster": "1024x8 h100_sxm over ndr", **KEPT},
    "800 Gb/s": {"cluster": "1024x8 h100_sxm over xdr", **KEPT},
}
CLAIMS = {"tokens_per_s": "same", "energy_per_token_j": "same"}

if __name__ == "__main__":
    from shared.one_study import ask

    raise SystemExit(ask(__file__))
