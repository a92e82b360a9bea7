"""Trials that run out of memory teach the others: the recorded mixture on two H100 in any order, and made-up worlds."""

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from wattune import api
from wattune.api.beforehand import Beforehand
from wattune.cost.defaults import default_coefficients
from wattune.cost.estimate import estimate
from wattune.cost.out_of_memory import CERTAIN, UNLIKELY, MemoryRisk, usable_bytes
from wattune.run import Numbers, Run, RunStatus
from wattune.storage.study import StudyFolder
from wattune.trial import Measure, TrialSpec

DATA = Path(__file__).parents[4] / "benchmarks" / "data"
OUT = RunStatus.OUT_OF_MEMORY


def recorded() -> dict[str, tuple[TrialSpec, float | None, int | None]]:
    """Returns the plans of the mixture on two H100: the peak of each that ran, what each that did not asked for."""
    found = {}
    for row in pq.read_table(DATA / "moe_ep_h100x2.parquet").to_pylist():
        asked = re.search(r"([\d,]+) bytes asked for, ([\d,]+) allocated", row["reason"])
        needed = sum(int(part.replace(",", "")) for part in asked.groups()) if asked else None
        spec = TrialSpec.from_json(json.loads(row["spec"]))
        found[row["trial_id"]] = spec, row["memory_peak_bytes"], needed if row["status"] == OUT else None
    return found


@pytest.mark.parametrize("seed", range(6))
def test_of_a_recorded_mixture_two_trials_run_out_of_memory_and_none_that_runs_is_rejected(
    world, new_node, seed: int
) -> None:
    """Six of its 39 trials did; nothing here was fitted to their order."""
    plans = recorded()
    planned = api.plan(DATA / "moe_ep_h100x2.yaml")
    other = StudyFolder(world.study.path.parent / "other")
    known = Beforehand(planned, other.path.parent).fitting(other)
    world.nodes = [new_node("n0", **{"wattune.io/device": "h100_sxm"})]
    rejected = {one.config["micro_batch_size"] for one in known.planned.rejected if one.rule == "memory"}
    assert rejected == {2}, "two plans are certain not to fit"
    controller = world.controller(
        known.planned.candidates.specs,
        measure=Measure(reference_every=10),
        order="shuffled",
        seed=seed,
        candidates=known.planned.candidates.specs,
        out_of_memory=known.out_of_memory,
        learns_memory=known.out_of_memory.note,
        rejects=known.rejects,
    )
    ran = []
    while (running := controller.next(f"t{len(ran)}")) is not None:
        _, peak_bytes, needed = plans[running.trial_id]
        world.measured = lambda _spec, _repeat, peak=peak_bytes: {"memory_peak_bytes": peak}
        numbers = Numbers(memory_asked_bytes=needed)
        status = OUT if needed else RunStatus.COMPLETED
        world.write(running.spec, running.repeat, status, tags=dict(running.tags), numbers=numbers)
        controller.finish(f"t{len(ran)}", error=False)
        ran.append((running, status))
    assert sum(status is OUT for _, status in ran) == 2, "of three whose estimate alone lets them run"
    known_risk = dict(zip(known.planned.candidates.specs, known.out_of_memory.estimated, strict=True))
    assert all(known_risk[one.spec] < UNLIKELY for one, _ in ran if one.role == "reference")
    results = [folder.result() for folder in world.study.trials()]
    left_out = [one for one in results if one.status is RunStatus.REJECTED]
    assert left_out and all(plans[one.trial_id][2] for one in left_out), "nothing that runs is rejected"
    assert all(one.reason.startswith("memory: ") and "--try-all" in one.reason for one in left_out)


def test_in_made_up_worlds_fewer_run_out_of_memory_and_few_that_would_run_are_rejected() -> None:
    """The share of memory that is lost, the errors of estimates and the order are drawn anew in each world."""
    specs = [spec for spec, *_ in recorded().values()]
    found = estimate(specs, default_coefficients)
    usable = usable_bytes(specs[0].cluster.sensed_device)
    estimated = found.columns["memory_peak_bytes"].value
    draw = np.random.default_rng(7)
    num_failed, num_without, num_wrong, num_rejected = 0, 0, 0, 0
    for _ in range(60):
        lost = draw.uniform(0.0, 0.12)
        need = estimated * np.exp(0.01 * draw.standard_t(4, len(specs)))
        fails = need * np.exp(0.01 * draw.standard_t(4, len(specs))) > usable * (1 - lost)
        risk = MemoryRisk(specs, found)
        for place in draw.permutation(len(specs)):
            spec = specs[place]
            num_without += bool(fails[place]) and risk.estimated[place] <= CERTAIN
            if risk(spec) > CERTAIN:
                num_wrong += not fails[place]
                num_rejected += 1
                continue
            num_failed += bool(fails[place])
            status = OUT if fails[place] else RunStatus.COMPLETED
            numbers = Numbers(memory_asked_bytes=int(need[place]) if fails[place] else None)
            metrics = {} if fails[place] else {"memory_peak_bytes": float(need[place])}
            risk.note(spec, Run(trial_id="a", repeat=0, status=status, metrics=metrics, numbers=numbers))
    assert num_failed < 0.75 * num_without
    assert num_rejected > 60 and num_wrong <= (1 - CERTAIN) * num_rejected


def test_a_failure_teaches_plans_of_its_family_that_need_as_much_and_did_not_run() -> None:
    specs = [spec for spec, *_ in recorded().values()]
    found = estimate(specs, default_coefficients)
    risk = MemoryRisk(specs, found)
    in_order = [specs[place] for place in np.argsort(found.columns["memory_peak_bytes"].value)]
    small, second, largest = in_order[0], in_order[-3], in_order[-1]
    before = risk(second)
    failed = Run(trial_id="a", repeat=0, status=OUT, numbers=Numbers(memory_asked_bytes=int(74e9)))
    crashed = Run(trial_id="b", repeat=0, status=RunStatus.CRASHED)
    assert not risk.note(small, crashed) and risk(second) == before < CERTAIN
    assert risk.note(largest, failed) and risk(second) > CERTAIN and risk(small) < UNLIKELY
    assert risk.learned(small) and not risk.learned(replace(small, engine="megatron"))
    risk.note(second, Run(trial_id="c", repeat=0, status=RunStatus.COMPLETED, metrics={"memory_peak_bytes": 8e10}))
    assert risk(second) == 0.0, "it ran"
    unknown = MemoryRisk(specs, None)
    assert unknown(largest) == 0.0 and not unknown.note(largest, failed)
