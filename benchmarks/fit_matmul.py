#!/usr/bin/env python3
"""Makes the table of `wattune.cost.step_time.matmul` from measured matrix products.

Input: a Parquet table of bf16 products on one H100 SXM with columns m, n, k, latency_ms. The shipped table was made
from AIConfigurator (https://github.com/ai-dynamo/aiconfigurator, commit 095f58a, Apache-2.0), vLLM 0.24.0 tables.
H200's table of the same source holds products under its power limit. H100's is from short runs at a high clock, which
is what a prediction at the highest clock needs.
"""

import argparse
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq

from wattune.cost.step_time import matmul

M = np.log2([1, 8, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768])
NK = np.log2([32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 65536])
LAUNCH_S = 2.5e-6
"""Least time between kernels in the table, which a prediction adds by itself."""
SMOOTH = 0.3
"""Weight of second differences between knots: few shapes were measured at the edges."""


def fit(m: np.ndarray, n: np.ndarray, k: np.ndarray, time_s: np.ndarray) -> np.ndarray:
    """Fits the log of the ratio at the knots by weighted least squares, larger products counting more."""
    base_s = matmul.roofline_s(
        m, n, k, flop_per_s=matmul.REFERENCE_FLOP_PER_S, bytes_per_s=matmul.REFERENCE_BYTES_PER_S
    )
    target = np.log(np.maximum(time_s - LAUNCH_S, 0.3 * time_s) / base_s)
    size = (len(M), len(NK), len(NK))
    columns, values = [], []
    (i, a), (j, b), (h, c) = (
        matmul.weights(knots, np.log2(x)) for knots, x in zip((M, NK, NK), (m, n, k), strict=True)
    )
    for di, wi in ((0, 1 - a), (1, a)):
        for dj, wj in ((0, 1 - b), (1, b)):
            for dh, wh in ((0, 1 - c), (1, c)):
                columns.append(np.ravel_multi_index((i + di, j + dj, h + dh), size))
                values.append(wi * wj * wh)
    weight = np.clip(np.sqrt(time_s / 50e-6), 0.1, 3.0)
    total = np.prod(size)
    normal, right = np.zeros((total, total)), np.zeros(total)
    for p, x in zip(columns, values, strict=True):
        np.add.at(right, p, weight * x * target)
        for q, y in zip(columns, values, strict=True):
            np.add.at(normal, (p, q), weight * x * y)
    index = np.arange(total).reshape(size)
    for axis in range(3):
        turned = np.moveaxis(index, axis, 0)
        for first, middle, last in zip(turned[:-2].ravel(), turned[1:-1].ravel(), turned[2:].ravel(), strict=True):
            for p, x in ((first, 1), (middle, -2), (last, 1)):
                for q, y in ((first, 1), (middle, -2), (last, 1)):
                    normal[p, q] += SMOOTH * x * y
    return np.linalg.solve(normal + 1e-6 * np.eye(total), right).reshape(size)


def main() -> None:
    """Prints the error on pairs (n, k) held out, and writes the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("products", type=Path, help="table with columns m, n, k, latency_ms")
    parser.add_argument("--out", type=Path, required=True, help="the .npz file to write")
    arguments = parser.parse_args()
    table = pq.read_table(arguments.products)
    m, n, k = (table[name].to_numpy().astype(float) for name in "mnk")
    time_s = table["latency_ms"].to_numpy() / 1e3
    held = ((np.log2(n) * 7).round() + (np.log2(k) * 13).round()) % 5 == 0
    for name, rows in (("held out", ~held), ("shipped", np.ones(len(m), bool))):
        values = fit(m[rows], n[rows], k[rows], time_s[rows])
        matmul._ratios = lambda values=values: matmul._Ratios((M, NK, NK), values)
        predicted = LAUNCH_S + matmul.matmul_s(
            m, n, k, flop_per_s=matmul.REFERENCE_FLOP_PER_S, bytes_per_s=matmul.REFERENCE_BYTES_PER_S
        )
        error = np.abs(predicted / time_s - 1)
        plain_s = matmul.roofline_s(m, n, k, flop_per_s=989.4e12, bytes_per_s=3.35e12)
        flat_s = np.maximum(2 * m * n * k / 989.4e12, 2 * (m * k + k * n + m * n) / 3.35e12)
        for label, chosen in (
            ("all", held),
            (">= 50 us", held & (time_s > 50e-6)),
            ("training", held & (np.minimum(m, np.minimum(n, k)) >= 1024)),
        ):
            print(
                f"{name:9s} {label:9s} {chosen.sum():6d} rows: mean {error[chosen].mean():.1%} median "
                f"{np.median(error[chosen]):.1%} p90 {np.quantile(error[chosen], 0.9):.1%}; tiles alone "
                f"{np.abs(plain_s / time_s - 1)[chosen].mean():.1%}; roofline "
                f"{np.abs(flat_s / time_s - 1)[chosen].mean():.1%}"
            )
    np.savez_compressed(arguments.out, m=M, n=NK, k=NK, log_ratio=values.astype(np.float32))
    print(f"{arguments.out}: {arguments.out.stat().st_size} bytes")


if __name__ == "__main__":
    main()
