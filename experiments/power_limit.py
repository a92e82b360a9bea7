#!/usr/bin/env python
"""Does a limit of 500 W cost less speed than it saves energy?

Hypothesis: below the limit clocks fall by less than power, so speed falls by less than the limit's share, and the
energy of a token falls. Ours: the paper varies no limit. GPUs that are lent may not be limited, so this is estimated.
Expected by `wattune.estimate` on two H200, before: energy a token -20 %, speed -10 %.
"""

EVIDENCE = "estimated"
PAPER = "ours: limit against plan"
SPACE = {
    "model": {"name": "llama3_8b", "num_layers": 4, "vocab_size": 32000},
    "workload": {"seq_len": 4096, "global_batch_size": 16},
}
ARMS = {
    "700 W": {"tp": 2, "micro_batch_size": 2},
    "500 W": {"tp": 2, "micro_batch_size": 2, "power_limit_w": 500},
}
CLAIMS = {"energy_per_token_j": "lower", "tokens_per_s": "lower"}

if __name__ == "__main__":
    from shared.one_study import ask

    raise SystemExit(ask(__file__))
