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

import sys

from shared.one_study import main

if __name__ == "__main__":
    sys.exit(main(__doc__, "search_spaces/moe_ep_cpu.yaml"))
