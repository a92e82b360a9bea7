"""Ranks of the Megatron contract: `engine_worker.py` with `megatron_shim.py` put under Megatron first."""

import sys
from pathlib import Path

import megatron_shim

megatron_shim.install()

import engine_worker  # noqa: E402 - it must not load Megatron earlier

if __name__ == "__main__":
    engine_worker.main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
