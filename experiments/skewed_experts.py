#!/usr/bin/env python
"""Do experts that get unequal shares of the tokens cost speed, while the node draws less?

Hypothesis: with shares by Zipf's law, exponent 1, the four experts of one device get twice the tokens of the other
four, so each layer waits for one device while the other is idle: speed falls, the mean power with it, and a token takes
more energy, since a waiting device draws a third of a busy one. The paper's experts are balanced; skew is what it
leaves open.
Expected by `wattune.estimate` on two H200, before the run: speed -12 %, energy a token +14 %, mean power +0.6 %, so it
contests lower power. Micro-batches are of two sequences: of one, two runs of the balanced plan were 29 % apart on two
H100 (0.80 and 0.62 s a step), as they waited for their host.
Ran so on two H200, two runs an arm in turns A, B B, A: speed -12.6 %, energy +7.1 %, power -6.3 %. Repeats are within
0.3 %. Speed is what the estimate said, power is not: the device that waits drew 628 W and the busy one 673 of 690.
"""

PAPER = "ours: skewed experts"
WORK = {"seq_len": 4096, "global_batch_size": 8}
SPACE = {
    "model": {"name": "mixtral_8x7b", "num_layers": 4},
    "workload": WORK | {"routing": "balanced"},
    "measure": {"warmup_steps": 5, "min_steps": 10, "min_seconds": 5, "profile_steps": 0},
}
PLAN = {"ep": 2, "micro_batch_size": 2, "sharding": "zero3"}
ARMS = {"balanced": PLAN, "skewed": PLAN | {"workload": WORK | {"routing": {"skew": 1.0}}}}
CLAIMS = {"tokens_per_s": "lower", "energy_per_token_j": "higher", "node_device_power_mean_w": "lower"}

if __name__ == "__main__":
    from shared.one_study import ask

    raise SystemExit(ask(__file__))
