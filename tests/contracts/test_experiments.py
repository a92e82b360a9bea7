"""The ratios that `experiments/README.md` states follow from the runs that it lists."""

import re
from pathlib import Path

import numpy as np
import pytest

PAGE = Path(__file__).parents[2] / "experiments" / "README.md"
SECTION = PAGE.read_text().partition("## own_code: a loop of one's own")[2].partition("\n## ")[0]
DISTURBED_BELOW = 13e3
"""Tokens/s. The page names one run that tests disturbed; every other is faster than this."""


def runs() -> list[tuple[int, int, float]]:
    """Micro-batch, bucket in MB, tokens/s of every run that the page lists."""
    rows = re.findall(r"^\| \d x (\d) \| (\d+) MB \| (.+) \|$", SECTION, flags=re.MULTILINE)
    return [
        (int(size), int(bucket), 1e3 * float(run.split()[0])) for size, bucket, text in rows for run in text.split(",")
    ]


def stated() -> dict[str, list[tuple[float, ...]]]:
    """Ratio with its interval, for each column of the table of ratios."""
    rows = re.findall(r"^\| ([a-z][^|]*) \| (\d[^|]*\)) \| (\d[^|]*\)) \|$", SECTION, flags=re.MULTILINE)
    return {name: [tuple(map(float, re.findall(r"\d\.\d+", text))) for text in columns] for name, *columns in rows}


def computed(rows: list[tuple[int, int, float]], contrast: list[int]) -> tuple[float, float, float]:
    """A ratio of tokens/s and its 95 % interval: least squares of logarithms, t intervals."""
    design = np.array([[1, size == 4, size == 8, bucket == 25] for size, bucket, _ in rows], float)
    logs = np.log([speed for *_, speed in rows])
    effects, *_ = np.linalg.lstsq(design, logs, rcond=None)
    freedom = len(logs) - len(effects)
    variance = ((logs - design @ effects) ** 2).sum() / freedom
    deviation = np.sqrt(contrast @ np.linalg.inv(design.T @ design) @ contrast * variance)
    from scipy import stats  # loaded by the process that runs this, not by each that collects it

    middle, away = contrast @ effects, stats.t.ppf(0.975, freedom) * deviation
    return tuple(np.exp([middle, middle - away, middle + away]))


@pytest.mark.parametrize(
    ("name", "contrast"),
    [
        ("one micro-batch over two", [0, -1, 1, 0]),
        ("one micro-batch over four", [0, 0, 1, 0]),
        ("buckets of 25 MB over 1 MB", [0, 0, 0, 1]),
        ("first ratio over the third", [0, -1, 1, -1]),
    ],
)
def test_ratios_of_own_code_follow_from_its_runs(name: str, contrast: list[int]) -> None:
    found = runs()
    assert len(found) == 18 and sum(speed < DISTURBED_BELOW for *_, speed in found) == 1
    kept = [row for row in found if row[2] >= DISTURBED_BELOW]
    for rows, ratio in zip((found, kept), stated()[name], strict=True):
        # The page rounds runs to 100 tokens/s, and ratios to 0.01.
        assert computed(rows, np.array(contrast)) == pytest.approx(ratio, abs=0.0075)
