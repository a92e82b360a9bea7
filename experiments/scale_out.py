#!/usr/bin/env python
"""Do 64 H100 train Llama-3 70B faster than 32 H200, and is a token of 32 H200 cheaper?

Hypothesis: twice the devices have twice the compute, and communication that a model of 70 billion parameters hides
well, so the larger cluster is nearly twice as fast. Fewer devices on fewer nodes lose less, so their tokens cost less
energy. The paper's figures 2 and 3 have scale-out win on speed for its compute-bound models.
Estimated: nobody here has 64 devices. Expected by `wattune.estimate`, before: speed +71 %, energy a token +12 %.
"""

EVIDENCE = "estimated"
PAPER = "MICRO 2025, figures 2 and 3"
SPACE = {
    "model": "llama3_70b",
    "cluster": [
        {"device": "h200_sxm", "num_nodes": 4, "devices_per_node": 8, "network": "roce_100", "rails": 1},
        {"device": "h100_sxm", "num_nodes": 8, "devices_per_node": 8, "network": "roce_100", "rails": 1},
    ],
    "workload": {"seq_len": 8192, "global_batch_size": 128},
}
KEPT = {"sharding": "zero1", "recompute": "full"}
ARMS = {
    "32 H200": {"cluster": "4x8 h200_sxm over roce_100_1_rails", "tp": 4, "pp": 4, **KEPT},
    "64 H100": {"cluster": "8x8 h100_sxm over roce_100_1_rails", "tp": 4, "pp": 8, **KEPT},
}
CLAIMS = {"tokens_per_s": "higher", "energy_per_token_j": "higher"}

if __name__ == "__main__":
    from shared.one_study import ask

    raise SystemExit(ask(__file__))
