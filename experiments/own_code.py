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

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "platform"))  # a job's nodes need the dependencies, not an installed wattune

import wattune  # noqa: E402 - the path comes first
from wattune.cli.shell import exit_code_of  # noqa: E402
from wattune.cli.study import in_order, show, view_of  # noqa: E402


def main() -> int:
    """Runs the study and returns the exit code of `wattune run`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("space", nargs="?", default="experiments/own_code/plain_loop.yaml", help="search space file")
    parser.add_argument("--storage", help="folder or URL that results go to")
    arguments = parser.parse_args()
    with in_order():
        planned = wattune.plan(ROOT / arguments.space)
        with view_of(planned) as view:
            outcome = wattune.run_study(planned, storage=arguments.storage, listener=view)
    return show(outcome)


if __name__ == "__main__":
    sys.exit(exit_code_of(main))
