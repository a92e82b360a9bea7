#!/usr/bin/env python
"""Does a plan that waits more keep a bound on temperature that the fastest one breaks, and what does it cost?

Hypothesis: a pipeline of two micro-batches waits for a third of each step in its bubble, on every stage, so it draws
less and settles cooler, by some 0.06 K a watt; it is slower by about the share that it waits. A bound between the two
temperatures then costs that much speed, where a lower power limit would cost less (`power_limit.py`). The settled
temperature is what stored heat and measured power lead to, so windows of a quarter of a time constant (98 s on H200)
serve where the plans differ by 100 W or more: two runs an arm take two and a half minutes.
Expected by `wattune.estimate` on two H200, before the run: the warmest device -6.6 K, speed -29 %, mean power -22 %.
Ran there: settled temperature -3.2 K (-5.5 to -0.9), speed -20 %, mean power -19 %. With four micro-batches, whose
bubble is a fifth, in windows of 12 s: speed -9.8 %, mean power -10.7 %, settled temperature -0.9 K (-3.3 to +1.5). The
hotter slot's device drew 109 W less, the other one hardly less, and a bound is on the hottest: a plan must wait on all
stages to keep it.
"""

PAPER = "ours: thermal bound against plan"
DEVICES = 2  # with more the batch leaves a pipeline one micro-batch
SPACE = {
    "model": {"name": "llama3_8b", "num_layers": 4, "vocab_size": 32000},
    "workload": {"seq_len": 4096, "global_batch_size": 8},
    "measure": {"warmup_steps": 5, "min_steps": 10, "min_seconds": 25, "profile_steps": 0, "repeats": 2},
}
ARMS = {"tensor parallel": {"tp": 2, "micro_batch_size": 4}, "pipeline": {"pp": 2, "micro_batch_size": 4}}
CLAIMS = {"device_temp_settled_c": "lower", "device_temp_max_c": "lower", "tokens_per_s": "lower"}

if __name__ == "__main__":
    from shared.one_study import ask

    raise SystemExit(ask(__file__))
