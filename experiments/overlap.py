#!/usr/bin/env python
"""Does overlap of communication with compute raise power, and speed with it?

Hypothesis: gradients that are reduced beside the backward pass leave less to wait for, so speed rises, and with it
the mean power. The paper has overlap raise power and heat consistently, where devices are air-cooled and below their
limit.
Expected by `wattune.estimate` on two H200, before the run: mean power 0.0 %, speed +2.0 %, 1 s peak -0.3 %: the
devices are at their limit already, so the estimate contests the paper.
"""

PAPER = "MICRO 2025, figures 8 and 10"
SPACE = {
    "model": {"name": "llama3_8b", "num_layers": 4, "vocab_size": 32000},
    "workload": {"seq_len": 4096, "global_batch_size": 16},
    "measure": {"warmup_steps": 5, "min_steps": 10, "min_seconds": 5, "profile_steps": 0},
}
ARMS = {
    "one after another": {"micro_batch_size": 2, "sharding": "zero1"},
    "overlap": {"micro_batch_size": 2, "sharding": "zero1", "overlap": "grad_param"},
}
CLAIMS = {"device_power_mean_w": "higher", "tokens_per_s": "higher", "node_device_power_peak_1s_w": "higher"}

if __name__ == "__main__":
    from shared.one_study import ask

    raise SystemExit(ask(__file__))
