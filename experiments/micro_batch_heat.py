#!/usr/bin/env python
"""Do larger micro-batches leave devices warmer, once temperatures have settled?

Hypothesis: what draws more settles warmer, by the thermal resistance of the slot: some 0.06 K a watt. The paper's
figures 13 and 15 have peak temperature rise with the micro-batch, after ten steps of warm-up. Here each run is soaked
for three time constants (98 s each on H200), so it takes 22 minutes for two runs of each arm.
Expected by `wattune.estimate` on two H200, before the run: the warmest device +1.0 K.
"""

PAPER = "MICRO 2025, figures 13 and 15"
SPACE = {
    "model": {"name": "llama3_8b", "num_layers": 4, "vocab_size": 32000},
    "workload": {"seq_len": 4096, "global_batch_size": 16},
    "measure": {"warmup_steps": 5, "min_steps": 10, "min_seconds": 300, "profile_steps": 0, "repeats": 2},
}
ARMS = {"one sequence": {"tp": 2, "micro_batch_size": 1}, "four": {"tp": 2, "micro_batch_size": 4}}
CLAIMS = {"device_temp_max_c": "higher", "device_power_mean_w": "higher"}

if __name__ == "__main__":
    from shared.one_study import ask

    raise SystemExit(ask(__file__))
