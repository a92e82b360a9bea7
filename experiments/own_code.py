#!/usr/bin/env python
"""Does one large micro-batch beat two smaller ones in a training loop that nobody here wrote?

Hypothesis, written before the first run: at equal samples a step, one micro-batch beats two accumulated ones on every
example, because each pass launches the same kernels whatever its size. The size of DDP's gradient buckets matters less
than that, because two ranks of one node exchange gradients faster than they compute them.

Runs `experiments/own_code/plain_loop.yaml` (any machine, sensors simulated) unless another space is named:

    experiments/own_code.py
    ray job submit --working-dir . -- experiments/own_code.py
    ray job submit --working-dir . -- experiments/own_code.py experiments/own_code/hf_trainer_h200x4.yaml

Commands run in the job's working directory, and name their scripts from there. Results go to the storage folder
(`--storage`, else $WATTUNE_STORAGE, else ~/wattune-studies), which outlives the job.
"""

import sys

from shared.one_study import main

if __name__ == "__main__":
    sys.exit(main(__doc__, "experiments/own_code/plain_loop.yaml"))
