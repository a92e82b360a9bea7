#!/usr/bin/env python
"""Does full recomputation cost speed where memory does not need it?

Hypothesis: a third forward pass is a third more work of layers, so speed falls by less than a quarter, energy a token
rises as much, and memory falls. The paper's figure 8 has it slower but where it makes a better plan fit.
Expected by `wattune.estimate` on two H200, before the run: speed -22 %, energy a token +29 %, memory -17 %.
"""

PAPER = "MICRO 2025, figures 8 and 10"
SPACE = {
    "model": {"name": "llama3_8b", "num_layers": 4, "vocab_size": 32000},
    "workload": {"seq_len": 4096, "global_batch_size": 16},
    "measure": {"warmup_steps": 5, "min_steps": 10, "min_seconds": 5, "profile_steps": 0},
}
ARMS = {
    "kept activations": {"tp": 2, "micro_batch_size": 2},
    "full recomputation": {"tp": 2, "micro_batch_size": 2, "recompute": "full"},
}
CLAIMS = {"tokens_per_s": "lower", "energy_per_token_j": "higher", "memory_peak_bytes": "lower"}

if __name__ == "__main__":
    from shared.one_study import ask

    raise SystemExit(ask(__file__))
