#!/usr/bin/env python
"""Does a pipeline draw less and train slower than tensor parallelism on the same devices?

Hypothesis: stages wait for each other in the bubble, so the mean power falls, and so does the speed; tensor parallel
ranks keep their devices at the limit. The paper's figure 4 has deep pipelines below tensor parallelism in power.
Expected by `wattune.estimate` on two H200, before the run: mean power -2.5 %, 1 s peak -1.7 %, speed -2.1 %.
"""

PAPER = "MICRO 2025, figure 4"
SPACE = {
    "model": {"name": "llama3_8b", "num_layers": 4, "vocab_size": 32000},
    "workload": {"seq_len": 4096, "global_batch_size": 16},
    "measure": {"warmup_steps": 5, "min_steps": 10, "min_seconds": 5, "profile_steps": 0},
}
ARMS = {"tensor parallel": {"tp": 2}, "pipeline": {"pp": 2}}
CLAIMS = {"device_power_mean_w": "lower", "node_device_power_peak_1s_w": "lower", "tokens_per_s": "lower"}

if __name__ == "__main__":
    from shared.one_study import ask

    raise SystemExit(ask(__file__))
