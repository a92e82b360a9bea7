"""Measures the cost of sampling to a running load and to a processor, on this machine.

    python benchmarks/sampler_overhead.py [--backend nvml] [--pairs 60] [--out FOLDER]

Matrix products without pause on one GPU, beside the sampler a study runs (all tiers at their default rates, and the
host's). The sampler is paused and resumed in blocks of 2 s, two blocks a pair, their order reversed from pair to pair;
the ratio of mean step times is the geometric mean over pairs, its interval a seeded bootstrap over pairs. The script
prints the rows of benchmarks/results/sampler_overhead.md.
"""

import argparse
import json
import platform
import tempfile
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

from wattune.calibration.fit import CONFIDENCE_FRAC
from wattune.calibration.run import Protocol, find_devices, measure_overhead
from wattune.simulation.sensors import BACKEND as SIMULATED

RATIO_WITHIN = 0.002
CPU_BELOW_FRAC = 0.03


def verdict(met: bool) -> str:
    """The word of the table's last column."""
    return "met" if met else "MISSED"


def main() -> None:
    """Measures, prints a table, and writes it with its figures where `--out` says."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", default="nvml")
    parser.add_argument("--pairs", type=int, default=60)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    simulated = given.backend == SIMULATED
    backends = ["host"] if simulated else [given.backend, "host"]
    info = find_devices(given.backend)[0]
    protocol = Protocol(num_pairs=given.pairs)
    with tempfile.TemporaryDirectory() as folder:
        cost, cpu_frac = measure_overhead(backends, info, Path(folder), protocol, simulated=simulated)
    load = "fp32 512^3 products on a CPU" if simulated else "bf16 8192^3 products"
    inside = cost.low >= 1 - RATIO_WITHIN and cost.high <= 1 + RATIO_WITHIN
    lines = [
        "# What sampling costs",
        "",
        (
            f"{datetime.now(UTC):%Y-%m-%d}, {info.name}, driver {info.driver or 'none'}, Python "
            f"{platform.python_version()}, torch {version('torch')}; {load} without pause; sampler of backends "
            f"{' and '.join(backends)} at default rates; {cost.num_pairs} pairs of {protocol.block_s:g} s blocks, "
            f"{cost.num_steps} steps."
        ),
        "",
        "| what | measured | target | |",
        "|---|---|---|---|",
        (
            f"| step time, sampler on over off | {cost.ratio:.5f}, {CONFIDENCE_FRAC:.0%} interval {cost.low:.5f} to "
            f"{cost.high:.5f} | 1.000 ± {RATIO_WITHIN} | {verdict(inside)} |"
        ),
        (
            f"| sampler's processor time, of one core | {cpu_frac:.2%} | below {CPU_BELOW_FRAC:.0%} | "
            f"{verdict(cpu_frac < CPU_BELOW_FRAC)} |"
        ),
        "",
    ]
    print("\n".join(lines))
    if given.out:
        given.out.mkdir(parents=True, exist_ok=True)
        (given.out / "sampler_overhead.md").write_text("\n".join(lines))
        facts = {**info.to_json(), **asdict(cost), "sampler_cpu_frac": cpu_frac}
        (given.out / "sampler_overhead.json").write_text(json.dumps(facts, indent=1))


if __name__ == "__main__":
    main()
