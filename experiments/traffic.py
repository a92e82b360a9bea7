#!/usr/bin/env python
"""Does a pipeline move less over NVLink than tensor parallelism, on devices as warm?

Hypothesis: two reductions a layer move far more than one activation a stage and micro-batch, so traffic falls to a
small share of it. The paper's figures 5 and 17 have traffic and temperature differ by slot; two devices of a board
show the traffic of a plan, and no slots.
No estimate speaks of traffic. By counting before the run: four layers of two gathers and two scatters, forward and
backward, against one activation forward and one gradient back, is a factor of 16.
"""

PAPER = "MICRO 2025, figures 5 and 17"
SPACE = {
    "model": {"name": "llama3_8b", "num_layers": 4, "vocab_size": 32000},
    "workload": {"seq_len": 4096, "global_batch_size": 16},
    "measure": {"warmup_steps": 5, "min_steps": 10, "min_seconds": 5, "profile_steps": 0},
}
ARMS = {"tensor parallel": {"tp": 2, "micro_batch_size": 2}, "pipeline": {"pp": 2, "micro_batch_size": 2}}
CLAIMS = {"nvlink_bytes_per_s": "lower", "pcie_bytes_per_s": "same"}

if __name__ == "__main__":
    from shared.one_study import ask

    raise SystemExit(ask(__file__))
