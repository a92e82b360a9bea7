#!/usr/bin/env python
"""Do two jobs on one node that work half a step apart swing the node's power less than two in phase?

Hypothesis: each job works for a second and waits for one, on half of the devices. In phase both rise and fall together;
half a step apart one falls as the other rises, and the amplitude is |cos(90 degrees)| of that: only edges are left. The
peak over 1 s falls from two busy halves to one, at the same work. Jobs with clocks of their own drift through all
phases, so only the sum in phase is a bound; and one synchronous job cannot be staggered. Nobody's figure.
By counting before the run, two H200 of 700 W busy and 130 W idle: swing 570 W to less than 150 W, 1 s peak -41 %.
Ran on two H100: swing 622 to 238 W, 1 s peak -39 %. Speed and mean power contest `same` by the ends of the window
alone: nine steps of both jobs are there after 16.8 s in phase, and a second later where the second job starts a second
later (-5.6 %). By the node's clock each job does a step every 2 s in both.
"""

import os
from pathlib import Path

PROGRAM = os.path.relpath(Path(__file__).parent / "own_code" / "two_jobs.py")  # from where trials run

PAPER = "ours: phase of two jobs"
SPACE = {
    "engine": "command",
    "command": f"torchrun --standalone --nproc-per-node {{devices_per_node}} {PROGRAM} --late-frac {{late_frac}}",
    "steps": "spans",
    "measure": {"warmup_steps": 2, "min_steps": 8, "min_seconds": 16},
}
ARMS = {"in phase": {"flags": {"late_frac": 0.0}}, "half a step apart": {"flags": {"late_frac": 0.5}}}
CLAIMS = {
    "power_swing_rms_w": "lower",
    "node_device_power_peak_1s_w": "lower",
    "power_ramp_max_w_per_s": "lower",
    "node_device_power_mean_w": "same",
    "tokens_per_s": "same",
}

if __name__ == "__main__":
    from shared.one_study import ask

    raise SystemExit(ask(__file__))
