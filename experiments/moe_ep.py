#!/usr/bin/env python
"""Does expert parallelism pay on one node, once the node has a power budget?

Hypothesis, written before the first run: with few experts per device, expert parallelism beats tensor parallelism at
equal devices, because an all-to-all of the chosen tokens moves less than two reductions of all of them a layer; and it
draws less peak power than plain data parallelism, because every layer waits for an exchange.

Runs `search_spaces/moe_ep_cpu.yaml` (any machine, sensors simulated) unless another space is named:

    experiments/moe_ep.py
    ray job submit --working-dir . -- experiments/moe_ep.py
    ray job submit --working-dir . -- experiments/moe_ep.py search_spaces/moe_ep_h200x4.yaml

Results go to the storage folder (`--storage`, else $WATTUNE_STORAGE, else ~/wattune-studies), which outlives the job.
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
    parser.add_argument("space", nargs="?", default="search_spaces/moe_ep_cpu.yaml", help="search space file")
    parser.add_argument("--storage", help="folder or URL that results go to")
    arguments = parser.parse_args()
    with in_order():
        planned = wattune.plan(ROOT / arguments.space)
        with view_of(planned) as view:
            outcome = wattune.run_study(planned, storage=arguments.storage, listener=view)
    return show(outcome)


if __name__ == "__main__":
    sys.exit(exit_code_of(main))
