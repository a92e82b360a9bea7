#!/usr/bin/env python
"""Does moving one layer from one stage to another pay where no device is hot?

Hypothesis: 21 layers beside 19 make every step as long as 21, so speed falls by up to 1/20, and by less where the
last stage also has the head. The paper's figures 21 and 22 gain 4 % with the longer stage on the cooler devices. One
layer moved pays only where the clocks of the two differ by more than one layer in a stage; so here it should not.
Expected by `wattune.estimate` on two H200, before the run: speed -1.8 %, energy a token +2.0 %.
"""

PAPER = "MICRO 2025, figures 21 and 22"
SPACE = {
    "model": {
        "name": "narrow_40",
        "like": "llama3_8b",
        "num_layers": 40,
        "hidden_size": 2048,
        "ffn_hidden_size": 8192,
        "num_heads": 16,
        "vocab_size": 32000,
    },
    "workload": {"seq_len": 2048, "global_batch_size": 32},
    "measure": {"warmup_steps": 5, "min_steps": 10, "min_seconds": 5, "profile_steps": 0},
}
ARMS = {
    "20 and 20 layers": {"pp": 2, "micro_batch_size": 2},
    "21 and 19": {"pp": 2, "micro_batch_size": 2, "layout": [21, 19]},
}
CLAIMS = {"tokens_per_s": "higher", "energy_per_token_j": "lower"}

if __name__ == "__main__":
    from shared.one_study import ask

    raise SystemExit(ask(__file__))
