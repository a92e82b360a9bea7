"""`doctor --map` and `place`: from a study's folder to the map, to the placement that pays, and to its check."""

import json
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pytest
from decided_study import SPACE
from decided_study import write_study as simulated_study
from specs import made_run, store_run, trial_spec

from wattune import api
from wattune.api.placement import _drawn
from wattune.catalog.hardware import DeviceSpec
from wattune.placement.slots import SlotReading
from wattune.plans.axes import Plan
from wattune.run import Numbers
from wattune.schema import SPANS
from wattune.simulation.device_model import DeviceModel, device_model
from wattune.simulation.sensors import simulate
from wattune.storage.study import StudyFolder
from wattune.trial import TrialSpec
from wattune.view.placement import placement_view

Command = Callable[..., tuple[int, str, str]]
SLOW = 1.6
"""Slot 1 over slot 0."""
NUM_MICRO = 8


def spans(spec: TrialSpec, draw: np.random.Generator, node: str, slow: float = SLOW) -> pa.Table:
    """Spans of a pipeline of two stages on two slots; the order of ranks says which stage is on the slow one."""
    rows = []
    order = range(2) if isinstance(spec.plan.rank_order, str) else spec.plan.rank_order
    for rank, slot in enumerate(order):
        layers = (spec.plan.layout or (2, 2))[rank] if spec.plan.pp == 2 else 4
        for step in range(6):
            count = NUM_MICRO // (1 if spec.plan.pp == 2 else 2)
            unit_ns = int(1e7 * layers * (slow if slot else 1.0) * np.exp(draw.normal(0, 0.003)))
            start_ns = 10**10 + step * 10**9
            key = {"node": node, "device": f"cpu{slot}", "rank": rank, "step": step}
            whole = [("step", None, start_ns, start_ns + 9 * 10**8)]
            for micro in range(count):
                at_ns = start_ns + micro * unit_ns
                whole += [("forward", micro, at_ns, at_ns + unit_ns // 3)]
                whole += [("backward", micro, at_ns + unit_ns // 3, at_ns + unit_ns)]
            for phase, micro, begin_ns, end_ns in whole:
                at = {"start_mono_ns": begin_ns, "end_mono_ns": end_ns, "micro_batch": micro, "chunk": None}
                rows.append(key | at | {"phase": phase, "start_wall_ns": begin_ns, "end_wall_ns": end_ns})
    return pa.Table.from_pylist(rows, schema=SPANS)


def write(
    storage: Path,
    name: str = "turned",
    *,
    plans: tuple[dict, ...] | None = None,
    node: str = "n",
    repeats: int = 3,
    slower: float = 0.0,
    **of_cluster: str,
) -> StudyFolder:
    """Writes a study of turned ranks; slot 1 becomes so much slower from run to run."""
    cluster = {"device": "cpu", "num_nodes": 1, "devices_per_node": 2, **of_cluster}
    plans = ({"pp": 2}, {"pp": 2, "rank_order": [1, 0]}) if plans is None else plans
    workload = {"mode": "pretrain", "seq_len": 128, "global_batch_size": NUM_MICRO}
    space = {**SPACE, "study": name, "cluster": cluster, "workload": workload, "constraints": [], "plans": list(plans)}
    planned = api.plan({**space, "space": {"micro_batch_size": [1]}, "objective": "minimize step_time_s"})
    study, draw = StudyFolder.create(storage, name, planned.spec.document), np.random.default_rng(4)
    for number, spec in enumerate(planned.candidates.specs):
        for repeat in range(repeats):
            folder = study.trial(spec.trial_id, repeat)
            folder.write_spec(spec)
            folder.write_spans(spans(spec, draw, node, SLOW * (1 + slower * (2 * repeat + number))))
            start_ns = 10**18 + (2 * repeat + number) * 10**11
            folder.write_result(
                made_run(
                    spec, repeat=repeat, quality="indicative", start_wall_ns=start_ns,
                    metrics={"step_time_s": 0.4 + 0.1 * (spec.plan.pp == 1)}, end_wall_ns=start_ns + 20 * 10**9,
                    numbers=Numbers(start_time_s=3.0, build_time_s=20.0, first_step_time_s=2.0),
                )
            )  # fmt: skip
    return study


@pytest.fixture
def storage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("WATTUNE_STORAGE", str(tmp_path))
    return tmp_path


def test_the_map_of_a_turned_study_has_the_slow_slot(storage: Path, wattune: Command) -> None:
    write(storage)
    code, out, _ = wattune("doctor", "--map")
    assert code == 0 and "n/1" in out and "chip and slot are told together" in " ".join(out.split())
    code, out, _ = wattune("doctor", "--map", "turned", "--json")
    rows = json.loads(out)["slots"]
    assert code == 0 and rows[1]["slower_frac"] == pytest.approx(SLOW - 1, abs=3 * rows[1]["slower_half_frac"])


def test_a_hot_slot_is_told_placed_around_and_its_drift_flagged(
    storage: Path, wattune: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sensors are simulated, with a bad cooler on slot 1, whose device slows down from run to run.

    Half of the runs have a lower limit, so that resistances can be told.
    """

    def badly_cooled(device: DeviceSpec) -> DeviceModel:
        made = device_model(device)
        return replace(made, die_c_per_w=(0.034, 0.064), upstream=(None, None))

    monkeypatch.setattr("wattune.simulation.sensors.device_model", badly_cooled)
    study = write(storage, repeats=4, slower=0.02, simulate_sensors_of="h200_sxm")
    for folder in study.trials():
        of, (_, repeat) = folder.spec(), folder.key()
        limited = replace(of, plan=replace(of.plan, power_limit_w=300 if repeat % 2 else None))
        for node, told in simulate(limited, folder.spans(), seed=repeat).items():
            folder.write_telemetry(node, *told)
    code, out, _ = wattune("doctor", "--map", "turned", "--json")
    cool, hot = (found := json.loads(out))["slots"]
    assert code == 0 and any(note.startswith("drift: n/1 became") for note in found["notes"])
    assert hot["slower_frac"] - hot["slower_half_frac"] > 0.5
    for slot, cooler in ((cool, 0.034), (hot, 0.064)):
        assert slot["inlet_c"] == pytest.approx(26.9, abs=slot["inlet_half_k"])
        wanted = pytest.approx(cooler + 0.0045, abs=slot["resistance_half_k_per_w"])  # and the sink that both have
        assert slot["resistance_k_per_w"] == wanted and slot["resistance_half_k_per_w"] < 0.01
    code, out, _ = wattune("place", "turned", "--json")
    plan = (chosen := json.loads(out)["chosen"])["plan"]
    layers = dict(zip([0, 1] if plan["rank_order"] == "topology" else plan["rank_order"], plan["layout"], strict=True))
    assert code == 0 and layers == {0: 3, 1: 1} and chosen["probability"] > 0.95


def test_place_recommends_the_layer_that_pays_and_says_after_what_time(storage: Path, wattune: Command) -> None:
    study = write(storage)
    code, out, _ = wattune("place", "turned", "--json")
    found = json.loads(out)
    assert code == 0 and found["chosen"]["what"] == "split layers" and found["restart_s"] == 25.0
    fast = found["chosen"]["plan"]["layout"][0 if found["chosen"]["plan"]["rank_order"] == "topology" else 1]
    assert fast == 3 and found["chosen"]["low_frac"] > 0.0
    code, out, _ = wattune("place", f"turned:{study.results()[0][0].trial_id}", "--horizon", "90s")
    assert code == 0 and "pays for a restart of 25 s after" in out and "P(gain > 0)" in out


def test_its_check_is_a_study_of_two_plans_in_turn(storage: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    study = write(storage)
    found = api.place("turned")

    def ran(planned, **_):
        """Runs the two plans: the moved one takes a quarter less time."""
        made = StudyFolder.create(storage, planned.name, planned.spec.document)
        present, moved = planned.candidates.specs
        assert present == found.spec and planned.spec.measure.repeats == 6 and planned.spec.search.order == "shuffled"
        assert replace(moved.plan, layout=present.plan.layout) == present.plan
        for repeat in range(6):
            for spec, time_s in ((present, 0.4), (moved, 0.3)):
                result = replace(study.results()[0][1], trial_id=spec.trial_id, repeat=repeat)
                store_run(made, spec, replace(result, metrics={"step_time_s": time_s * (1 + 0.001 * repeat)}))
        return SimpleNamespace(study=api.Study(made))

    monkeypatch.setattr("wattune.api.placement.run_study", ran)
    move, told = api.verify(found, watch=nullcontext)
    assert told.change_frac == pytest.approx(-0.25) and told.told_apart is False and move == found.chosen
    text = placement_view(found, (move, told))[-1].text
    assert "measured +33.3 %" in text and f"predicted {100 * move.gain_frac:+.1f} %" in text


def bad(storage: Path) -> None:
    simulated_study(storage, lambda _: True)
    write(storage, "flat", plans=({"pp": 1}, {"pp": 1, "sharding": "zero1"}))
    write(storage, "still", plans=({"pp": 2},))
    write(storage, "turned")
    write(storage, "elsewhere", node="other")
    StudyFolder.create(storage, "empty", StudyFolder(storage / "flat").document() | {"study": "empty"})


def test_what_cannot_be_placed_is_one_line_and_exit_code_2(storage: Path, wattune: Command) -> None:
    bad(storage)
    for arguments, said in {
        ("place", "flat"): "a plan of one stage",
        ("place", "decided"): "only simulated sensors",
        ("place", "still"): "look alike",
        ("place", "nobody"): 'no study "nobody"',
        ("place", "empty"): "has no plan that was measured",
        ("place", "turned:ffff"): 'no trial "ffff"',
        ("place", "turned", "--map", "elsewhere"): "the map is of other machines or plans: it has no n/0/",
        ("place", "turned", "--horizon", "soon"): "--horizon: got",
        ("place", "flat", "--verify"): "a plan of one stage",
        ("doctor", "--map", "decided"): "only simulated sensors",
        ("doctor", "turned"): "give --map",
    }.items():
        code, out, err = wattune(*arguments)
        assert (code, out) == (2, "") and said in err and len(err.strip().splitlines()) == 1, (arguments, err)


def test_a_slow_device_that_draws_less_than_its_limit_is_not_slowed_by_it() -> None:
    """The other one waits for half of a round: it draws 1.34 of what the limit leaves above idle while it works."""
    spec = trial_spec(on="1x2 h200_sxm", batch=8, plan=Plan(pp=2))
    for power_w, known in ((690.0, np.nan), (450.0, 0.0)):
        own = [
            SlotReading("run", ("a", slot, ""), ("t", slot), 0.0, time_s, True, None, watts)
            for slot, (time_s, watts) in enumerate([(0.06, 560.0), (0.1, power_w)])
        ]
        found = _drawn(spec, SimpleNamespace(metrics={"step_time_s": 0.9}), own)
        assert found == pytest.approx([1.34, known], abs=0.005, nan_ok=True)
