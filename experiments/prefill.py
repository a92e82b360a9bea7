#!/usr/bin/env python
"""Do larger micro-batches of prompts read faster, and draw more?

Hypothesis: one prompt of 2,048 tokens leaves devices of a tensor parallel pair waiting for kernels to be launched and
for reductions; eight at once do not. The paper's "inference" is this forward pass alone: it generates no token.
Expected by `wattune.estimate` on two H200, before the run: speed +134 %, mean power +82 %, energy a token -22 %.
"""

PAPER = "MICRO 2025, inference"
SPACE = {
    "model": {"name": "llama3_8b_8_layers", "like": "llama3_8b", "num_layers": 8, "vocab_size": 32000},
    "workload": {"mode": "prefill", "seq_len": 2048, "global_batch_size": 64},
    "measure": {"warmup_steps": 5, "min_steps": 10, "min_seconds": 5, "profile_steps": 0},
}
ARMS = {"one prompt": {"tp": 2, "micro_batch_size": 1}, "eight": {"tp": 2, "micro_batch_size": 8}}
CLAIMS = {"tokens_per_s": "higher", "device_power_mean_w": "higher", "energy_per_token_j": "lower"}

if __name__ == "__main__":
    from shared.one_study import ask

    raise SystemExit(ask(__file__))
