"""Two H100s, predicted before any H100 was measured and by the fit to H200 (`benchmarks/same_chip.py`)."""

import importlib.util
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
PAGE = (BENCHMARKS / "results" / "same_chip.md").read_text()


def load_script() -> Any:
    spec = importlib.util.spec_from_file_location("same_chip", BENCHMARKS / "same_chip.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(BENCHMARKS)
        spec.loader.exec_module(module)
    return module


script = load_script()


@pytest.fixture(scope="module")
def runs() -> dict[str, list[Any]]:
    found = {name.split("-")[0]: script.runs(table) for table, name in script.TABLES.items()}
    return {name.split()[0]: of for name, of in found.items()}


def shown(metric: str, model: str) -> list[float]:
    """The figures of a row of the page: median, 90th percentile, worst and inside, before and now."""
    (line,) = [line for line in PAGE.splitlines() if line.startswith(f"| {metric} | {model} |")]
    return [float(cell.strip(" %")) / 100 for cell in line.split("|")[3:-1]]


@pytest.mark.parametrize(
    ("metric", "name"),
    [
        ("step_time_s", "step time"),
        ("device_power_mean_w", "mean power of a device"),
        ("node_device_power_peak_1s_w", "1 s peak of the node"),
        ("energy_per_token_j", "energy a token"),
    ],
)
@pytest.mark.parametrize("model", ["Llama", "Mixtral"])
def test_the_page_shows_the_errors_before_and_now(runs, metric: str, name: str, model: str) -> None:
    of = runs[model]
    for way, figures in zip(("before", "now"), np.split(np.array(shown(name, model)), 2), strict=True):
        size = np.abs([run.error(way, metric) for run in of])
        inside = np.mean([run.inside(way, metric) for run in of])
        found = [np.median(size), np.quantile(size, 0.9), size.max(), inside]
        assert found == pytest.approx(figures.tolist(), abs=0.006)


def test_memory_was_known_before_an_h100_was_seen(runs) -> None:
    size = np.abs([run.error("before", "memory_peak_bytes") for of in runs.values() for run in of])
    assert len(size) == 65 and np.median(size) <= 0.003 and size.max() <= 0.031


def test_the_fit_to_the_same_chip_is_nearer_than_published_kernels_and_its_intervals_hold(runs) -> None:
    every = [run for of in runs.values() for run in of]
    for metric in ("step_time_s", "device_power_mean_w", "node_device_power_peak_1s_w", "energy_per_token_j"):
        before, now = (np.median(np.abs([run.error(way, metric) for run in every])) for way in ("before", "now"))
        assert now < before, metric
        assert np.mean([run.inside("now", metric) for run in every]) >= 0.95, metric
    assert all(run.inside("now", "memory_peak_bytes") for run in every)
    right, total = script.in_order(every, "now")
    assert right / total >= 0.92


def test_what_ran_out_of_memory_was_predicted_larger_than_what_did_not_but_for_a_plan_in_fragments(runs) -> None:
    failed = sorted(peak for table in script.TABLES for peak, _ in script.out_of_memory(table).values())
    fitted = max(run.predicted["before"]["memory_peak_bytes"][0] for of in runs.values() for run in of)
    assert len(failed) == 5 and sum(peak > fitted for peak in failed) == 4
