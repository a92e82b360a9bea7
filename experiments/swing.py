#!/usr/bin/env python
"""Does a pipeline with a deep bubble swing the node's power more than tensor parallelism?

Hypothesis: with four micro-batches and two stages a fifth of each step is bubble, in which one device waits and the
other works, so the node's power falls and rises once a step; tensor parallel ranks fall only between steps. Nobody's
figure: fleets ask for the swing between 0.1 and 20 Hz, so a window holds a period of the lowest: 12 s.
No estimate speaks of swing. By counting before the run: a fifth of the step at half of the power is some 200 W of
swing.
Ran so on two H200, two runs an arm: 113 W rms with tensor parallelism, 259 W with the pipeline, at 11 % less power.
"""

PAPER = "ours: swing of a node"
SPACE = {
    "model": {"name": "llama3_8b", "num_layers": 4, "vocab_size": 32000},
    "workload": {"seq_len": 4096, "global_batch_size": 16},
    "measure": {"warmup_steps": 5, "min_steps": 10, "min_seconds": 12, "profile_steps": 0},
}
ARMS = {"tensor parallel": {"tp": 2, "micro_batch_size": 4}, "pipeline": {"pp": 2, "micro_batch_size": 4}}
CLAIMS = {"power_swing_rms_w": "higher", "power_ramp_max_w_per_s": "higher", "device_power_mean_w": "lower"}

if __name__ == "__main__":
    from shared.one_study import ask

    raise SystemExit(ask(__file__))
