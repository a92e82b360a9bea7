#!/usr/bin/env python
"""Do 32 H200 train GPT-3 175B as fast as 64 H100, with tensor parallel pairs and deep pipelines?

Hypothesis: half of the devices have half of the compute; they would have to lose half of what the others wait for the
network, and a pipeline sends little. The paper's figures 2 and 3 have 32 H200 match or beat 64 H100 in this plan, in
speed and energy a token.
Estimated: nobody here has 64 devices. Expected by `wattune.estimate`, before: speed -37 %, energy a token -15 %: the
estimate contests the speed.
"""

EVIDENCE = "estimated"
PAPER = "MICRO 2025, figures 2 and 3"
SPACE = {
    "model": "gpt3_175b",
    "cluster": [
        {"device": "h100_sxm", "num_nodes": 8, "devices_per_node": 8, "network": "roce_100", "rails": 1},
        {"device": "h200_sxm", "num_nodes": 4, "devices_per_node": 8, "network": "roce_100", "rails": 1},
    ],
    "workload": {"seq_len": 2048, "global_batch_size": 128},
}
ARMS = {
    "64 H100": {"cluster": "8x8 h100_sxm over roce_100_1_rails", "tp": 2, "pp": 32, "recompute": "full"},
    "32 H200": {"cluster": "4x8 h200_sxm over roce_100_1_rails", "tp": 2, "pp": 16, "recompute": "full"},
}
CLAIMS = {"tokens_per_s": "higher", "energy_per_token_j": "lower"}

if __name__ == "__main__":
    from shared.one_study import ask

    raise SystemExit(ask(__file__))
