#!/usr/bin/env python
"""Does a plan that waits more keep a bound on temperature that the fastest one breaks, and what does it cost?

Hypothesis: a pipeline of four micro-batches waits for a fifth of each step in its bubble, so it draws less and settles
cooler, by some 0.06 K a watt; it is slower by about the share that it waits. A bound between the two temperatures then
costs that much speed, where a lower power limit would cost less (`power_limit.py`). Each run lasts one time constant
of an H200 (98 s), and the settled temperature is what stored heat and measured power lead to: nine minutes in all.
Expected by `wattune.estimate` on two H200, before the run: the warmest device -3.1 K, speed -18 %, mean power -13 %.
Ran there in windows of 12 s, two runs an arm: speed -9.8 %, mean power -10.7 %, settled temperature -0.9 K (-3.3 to
+1.5). The hotter slot's device drew 109 W less, which is 4 to 5 K by its 36 to 46 mK/W: windows of 12 s do not tell it,
and by the scatter of these 15 runs an arm would.
"""

PAPER = "ours: thermal bound against plan"
SPACE = {
    "model": {"name": "llama3_8b", "num_layers": 4, "vocab_size": 32000},
    "workload": {"seq_len": 4096, "global_batch_size": 16},
    "measure": {"warmup_steps": 5, "min_steps": 10, "min_seconds": 100, "profile_steps": 0, "repeats": 2},
}
ARMS = {"tensor parallel": {"tp": 2, "micro_batch_size": 4}, "pipeline": {"pp": 2, "micro_batch_size": 4}}
CLAIMS = {"device_temp_settled_c": "lower", "device_temp_max_c": "lower", "tokens_per_s": "lower"}

if __name__ == "__main__":
    from shared.one_study import ask

    raise SystemExit(ask(__file__))
