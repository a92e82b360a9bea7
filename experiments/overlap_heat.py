#!/usr/bin/env python
"""Does overlap of communication with compute leave devices warmer at equal tokens?

Hypothesis: what draws more settles warmer, by the thermal resistance of the slot: some 0.06 K a watt. Overlap keeps a
device busy where it would have waited. The paper has it raise peak temperature consistently. Each run lasts one time
constant of an H200 (98 s), and the settled temperature is what stored heat and measured power lead to; so it takes
nine minutes for two runs of each arm, where a soak of three constants would take 22.
Expected by `wattune.estimate` on two H200, before the run: the warmest device 0.0 K, mean power 0.0 %: both plans
are at the limit already, so the estimate contests the paper.
Ran there in windows of 12 s, two runs an arm: 0.0 K (-2.3 to +2.3), mean power +0.4 % (0.1 to 0.8). That is 3 W, or
0.1 K by 36 to 46 mK/W: no window that anybody waits for tells so little, where both plans fill the limit. It can tell
where overlap adds 50 W or more: plans that wait for their network, on nodes, with a limit that neither fills.
"""

PAPER = "MICRO 2025, figures 8 and 10"
SPACE = {
    "model": {"name": "llama3_8b", "num_layers": 4, "vocab_size": 32000},
    "workload": {"seq_len": 4096, "global_batch_size": 16},
    "measure": {"warmup_steps": 5, "min_steps": 10, "min_seconds": 100, "profile_steps": 0, "repeats": 2},
}
ARMS = {
    "one after another": {"micro_batch_size": 2, "sharding": "zero1"},
    "overlap": {"micro_batch_size": 2, "sharding": "zero1", "overlap": "grad_param"},
}
CLAIMS = {"device_temp_settled_c": "higher", "device_temp_max_c": "higher", "device_power_mean_w": "higher"}

if __name__ == "__main__":
    from shared.one_study import ask

    raise SystemExit(ask(__file__))
