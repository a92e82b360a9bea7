"""Probability of running out of memory: by the estimate, against what a device leaves, and against what trials did."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from specs import made_run

from wattune.catalog.hardware import DEVICES
from wattune.cost.defaults import default_coefficients
from wattune.cost.estimate import estimate
from wattune.cost.out_of_memory import CERTAIN, LIKELY, MemoryRisk, out_of_memory_probability, usable_bytes
from wattune.cost.tables import EstimatedMetric
from wattune.run import Numbers, RunStatus
from wattune.trial import TrialSpec

DATA = Path(__file__).parents[3] / "benchmarks" / "data"
ON_GPUS = [path for path in sorted(DATA.glob("*_h[12]00*.parquet")) if not path.stem.startswith("own_")]


def measured(name):
    rows = pq.read_table(DATA / f"{name}.parquet", columns=["spec", "status", "memory_peak_bytes"]).to_pylist()
    return [(TrialSpec.from_json(json.loads(row["spec"])), row) for row in rows]


def test_more_bytes_are_likelier_too_many():
    spec = measured("moe_ep_h100x2")[0][0]
    found = estimate([spec] * 50, default_coefficients)
    sizes = np.linspace(0.5, 1.5, 50) * usable_bytes(DEVICES["h100_sxm"])
    found = replace(found, columns={**found.columns, "memory_peak_bytes": EstimatedMetric.of(sizes, 0.03)})
    risk = out_of_memory_probability([spec] * 50, found)
    assert (np.diff(risk) > 0).all() and risk[0] < 0.01 and risk[-1] > 0.99
    assert (risk > 0.5).tolist() == (sizes > usable_bytes(DEVICES["h100_sxm"])).tolist()


def test_a_device_of_unknown_memory_rejects_nothing():
    spec = measured("moe_ep_h100x2")[0][0]
    cluster = replace(spec.cluster, own_device=replace(DEVICES["h100_sxm"], memory_bytes=None))
    found = estimate([spec], default_coefficients)
    assert out_of_memory_probability([replace(spec, cluster=cluster)], found).tolist() == [0.0]


@pytest.mark.parametrize("path", ON_GPUS, ids=lambda path: path.stem)
def test_nothing_that_ran_is_rejected_or_put_last(path):
    ran = [spec for spec, row in measured(path.stem) if row["status"] == "completed"]
    risk = out_of_memory_probability(ran, estimate(ran, default_coefficients))
    assert risk.max(initial=0.0) < LIKELY < CERTAIN


def test_trials_that_ran_out_of_memory_are_the_likeliest_to():
    trials = measured("moe_ep_h100x2")
    specs = [spec for spec, _ in trials]
    risk = out_of_memory_probability(specs, estimate(specs, default_coefficients))
    failed = np.array([row["status"] == "out_of_memory" for _, row in trials])
    assert failed.sum() == 6 and (risk > 0.2).tolist().count(True) == 4, "fragmentation is not foretold"
    assert failed[risk > 0.2].all() and (risk[failed] > CERTAIN).any()


def test_results_that_disagree_leave_a_probability():
    """A thousand trials that need 0.6 of what there is and fail, and as many that hold all of it and run."""
    fails, runs, other = [*dict.fromkeys(spec for spec, _ in measured("moe_ep_h100x2"))][:3]
    usable = usable_bytes(DEVICES["h100_sxm"])
    risk = MemoryRisk([fails, runs, other], estimate([fails, runs, other], default_coefficients))
    failed = made_run(fails, status=RunStatus.OUT_OF_MEMORY, numbers=Numbers(memory_asked_bytes=round(0.6 * usable)))
    ran = made_run(runs, metrics={"memory_peak_bytes": usable})
    for _ in range(1000):
        assert risk.note(fails, failed) and risk.note(runs, ran)
    assert 0 <= risk(other) <= 1
