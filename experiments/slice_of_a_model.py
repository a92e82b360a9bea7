#!/usr/bin/env python
"""Does a slice of half the layers train at the speed of the whole, layer for layer?

Hypothesis: shapes stay, so each layer's products are the same; the head and the embedding weigh twice as much in the
slice, so its model FLOP utilization may differ by a percent, and its power hardly. Ours, not the paper's: its slices
of 30 billion parameters are undisclosed.
Expected by `wattune.estimate` on two H200, before the run: utilization and power the same within 0.1 %.
"""

PAPER = "ours: slices stand for whole models"
SPACE = {
    "model": [
        {"name": "llama3_8b_8_layers", "like": "llama3_8b", "num_layers": 8, "vocab_size": 32000},
        {"name": "llama3_8b", "num_layers": 4, "vocab_size": 32000},
    ],
    "workload": {"seq_len": 4096, "global_batch_size": 16},
    "measure": {"warmup_steps": 5, "min_steps": 10, "min_seconds": 5, "profile_steps": 0},
}
ARMS = {
    "whole": {"model": "llama3_8b_8_layers", "tp": 2, "micro_batch_size": 2},
    "slice": {"model": "llama3_8b", "tp": 2, "micro_batch_size": 2},
}
CLAIMS = {"mfu_frac": "same", "device_power_mean_w": "same"}

if __name__ == "__main__":
    from shared.one_study import ask

    raise SystemExit(ask(__file__))
