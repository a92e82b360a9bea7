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
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "platform"))  # a job's nodes need the dependencies, not an installed wattune

from wattune.cli import main  # noqa: E402 - the path comes first

if __name__ == "__main__":
    arguments = sys.argv[1:]
    space = arguments.pop(0) if arguments and not arguments[0].startswith("-") else "search_spaces/moe_ep_cpu.yaml"
    sys.argv = ["wattune", "run", str(ROOT / space), *arguments]
    main()
