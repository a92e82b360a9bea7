#!/usr/bin/env python
"""Do larger micro-batches raise peak power and speed at equal work?

Hypothesis: four sequences at once launch fewer and larger kernels than one after another, so devices wait less and
draw more. The paper's figures 13 and 15 have peak power rise with the micro-batch, whatever the speed. A sample of
20 ms sees few kernels, of which both arms have large ones, so its peak should stay.
Expected by `wattune.estimate` on two H200, before the run: 1 s peak +2.6 %, mean power +2.9 %, speed +7.5 %.
Temperature is asked by micro_batch_heat.py.
"""

PAPER = "MICRO 2025, figures 13 and 15"
SPACE = {
    "model": {"name": "llama3_8b", "num_layers": 4, "vocab_size": 32000},
    "workload": {"seq_len": 4096, "global_batch_size": 16},
    "measure": {"warmup_steps": 5, "min_steps": 10, "min_seconds": 5, "profile_steps": 0},
}
ARMS = {"one sequence": {"tp": 2, "micro_batch_size": 1}, "four": {"tp": 2, "micro_batch_size": 4}}
CLAIMS = {
    "node_device_power_peak_1s_w": "higher",
    "device_power_peak_20ms_w": "same",
    "device_power_mean_w": "higher",
    "tokens_per_s": "higher",
}

if __name__ == "__main__":
    from shared.one_study import ask

    raise SystemExit(ask(__file__))
