"""A whole node of four or eight GPUs: the paper's sweep guided and exhaustive, then slots, placement, heat and swing.

    python benchmarks/whole_node.py sweep --out DIR --minutes 8        # dense and mixture; estimates are written first
    python benchmarks/whole_node.py slots --out DIR --minutes 8        # arms, turned ranks, layouts
    python benchmarks/whole_node.py place --out DIR --minutes 8        # after slots, with the same --storage
    python benchmarks/whole_node.py heat --out DIR --minutes 9         # arms at full load, a minute each
    python benchmarks/whole_node.py sweep --out DIR --minutes 8 --go-on sweep.tar slots.tar  # only what is left
    python benchmarks/whole_node.py sweep --out DIR --minutes 8 --cpu                        # a dry run

`sweep` takes Llama-3 70B and Mixtral 8x7B of `search_spaces/paper/parallelism_h200x32.yaml`, cut in depth, over every
tuple of a node. A guided search proposes some trials of each under a bound on power, which is the median of what is
estimated; then all others follow. `slots` is one study: the arms of five experiments, a pipeline with its ranks turned
over all slots, one layer moved off the last stage and one moved to it. `place` asks what pays for the even pipeline and
for the one with a layer too many on its last stage, and measures it in turn. `heat` runs two pairs of arms, twice.

A trial on eight GPUs takes 18 to 30 s, so that each needs two calls of eight minutes. After every few trials
DIR/PART.parquet (a row a run) and DIR/PART.tar (the study with its telemetry) are written anew: a call may be cut.
DIR/PART_estimates.parquet is written before anything starts.
"""

import argparse
import json
import sys
import tarfile
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from collect_trials import export

from wattune.api.estimates import forecast
from wattune.api.placement import place, slot_map, verify
from wattune.api.runs import run_study
from wattune.api.spaces import StudyPlan, plan
from wattune.catalog.hardware import device_of_product
from wattune.errors import PlanError, WattuneError
from wattune.orchestrate.events import Event, Listener, TrialEvent
from wattune.run import Run, RunStatus
from wattune.search.strategies.model_guided import ModelGuided
from wattune.search.strategies.protocol import Problem
from wattune.search.strategy import STRATEGIES
from wattune.storage.study import StudyFolder
from wattune.telemetry.probe import nvidia_products
from wattune.trial import TrialSpec

POWER: Final = "node_device_power_peak_1s_w"
GUIDED: Final = 8
"""Most proposals of the guided search, of each model, before all others follow; at most half of its plans."""

PACK_EVERY: Final = 6
"""Trials after which results are packed."""

HEAT_S: Final = 50.0
"""Seconds of each run of `heat`: more than half of an H200's time constant."""

TINY: Final = {"hidden_size": 64, "ffn_hidden_size": 128, "num_heads": 8, "num_kv_heads": 8, "vocab_size": 256}
MEASURE: Final = {"warmup_steps": 5, "profile_steps": 0, "timeout_s": 120, "stall_s": 60}


def guided(num_plans: int) -> int:
    """Returns how many of a model's plans the guided search proposes before all others follow."""
    return min(GUIDED, num_plans // 2)


class GuidedFirst:
    """A guided search for each model, in turn, then everything else, also as those searches propose it."""

    learns = True
    stopped_because: str | None = None

    def __init__(self, problem: Problem) -> None:
        """Gives every model a search of its own, with the estimates of its candidates."""
        self._models: dict[str, ModelGuided] = {}
        names = np.array([spec.model.name for spec in problem.specs])
        for name in dict.fromkeys(names.tolist()):
            at = np.flatnonzero(names == name)
            found = problem.estimates and {key: column.at(at) for key, column in problem.estimates.items()}
            own = replace(problem, specs=[problem.specs[place] for place in at.tolist()], estimates=found)
            self._models[name] = ModelGuided(own, stops=False)
        self._asked = dict.fromkeys(self._models, 0)
        self._guided = {name: guided(int((names == name).sum())) for name in self._models}

    def ask(self, n: int) -> list[TrialSpec]:
        """Returns up to `n` proposals."""
        asked: list[TrialSpec] = []
        for most in (self._guided, dict.fromkeys(self._models, 1000)):
            for name, search in self._models.items():
                new = search.ask(min(n - len(asked), max(0, most[name] - self._asked[name])))
                self._asked[name] += len(new)
                asked += new
        return asked

    def tell(self, spec: TrialSpec, result: Run) -> None:
        """Tells the model's search."""
        self._models[spec.model.name].tell(spec, result)


def tuples(size: int) -> Iterator[tuple[int, int, int]]:
    """Every (tp, pp, dp) of a node."""
    powers = [2**one for one in range(size.bit_length())]
    return ((tp, pp, size // tp // pp) for tp in powers for pp in powers if tp * pp <= size)


def sweep(size: int) -> dict[str, Any]:
    """The paper's parallelism sweep on one node: recomputation on, overlap off, balanced routing."""
    dense, mixture = "llama3_70b", "mixtral_8x7b"
    each_of = (1, 2) if size > 4 else (1, 2, 4)
    spread = [
        {"model": mixture, "seq_len": 4096, "tp": tp, "pp": pp, "ep": 2**one, "micro_batch_size": each}
        for tp, pp, dp in tuples(size)
        if pp <= 2 and tp <= 4 and dp > 1
        for one in range(1, dp.bit_length())
        for each in each_of
        if each > 1 or size == 4
    ]
    whole = [
        {"model": dense, "seq_len": 2048, "tp": tp, "pp": pp, "micro_batch_size": each}
        for tp, pp, _ in tuples(size)
        for each in each_of
    ]
    return {
        "study": "node_sweep",
        "model": [
            {"name": dense, "num_layers": size, "vocab_size": 32000},
            {"name": mixture, "num_layers": size},
        ],
        "workload": {"mode": "pretrain", "seq_len": [2048, 4096], "global_batch_size": 16, "routing": "balanced"},
        "plans": whole + spread,
        "space": {"recompute": ["full"], "sharding": ["zero1"]},
        "measure": MEASURE | {"min_steps": 3, "min_seconds": 2.5, "reference_every": 9},
        "search": {"strategy": "model_guided"},
    }


def slots(size: int) -> dict[str, Any]:
    """Arms of the experiments on a whole node, a pipeline over all slots in every turn, and layouts of it."""
    ranks = [*range(size)]
    uneven = [3] * (size - 2)
    pipes: list[dict[str, Any]] = [{}, *({"rank_order": ranks[one:] + ranks[:one]} for one in ranks[1:])]
    pipes += [{"layout": [*uneven, 4, 2]}, {"layout": [*uneven, 2, 4]}]
    return {
        "study": "node_slots",
        "model": {"name": "llama3_8b", "num_layers": 3 * size, "vocab_size": 64000},
        "workload": {"mode": "pretrain", "seq_len": 4096, "global_batch_size": 2 * size},
        "plans": [
            {"tp": size, "micro_batch_size": 1, "sharding": "none"},
            {"tp": size, "micro_batch_size": 4, "sharding": "none"},
            {"micro_batch_size": 1, "sharding": "zero1"},
            {"micro_batch_size": 1, "sharding": "zero1", "overlap": "grad_param"},
            *({"pp": size, "micro_batch_size": 1, "sharding": "none", **one} for one in pipes),
        ],
        "measure": MEASURE | {"min_steps": 5, "min_seconds": 4, "repeats": 2, "reference_every": 0},
        "search": {"strategy": "grid"},
    }


def heat(size: int) -> dict[str, Any]:
    """Overlap and micro-batches at equal work, each run long enough to tell where its temperature settles."""
    return slots(size) | {
        "study": "node_heat",
        "plans": slots(size)["plans"][:4],
        "measure": MEASURE | {"min_steps": 5, "min_seconds": HEAT_S, "repeats": 2, "reference_every": 0},
    }


def here(on_cpu: bool) -> tuple[dict[str, Any], int]:
    """Returns this machine as a cluster, and how many devices of it are used."""
    if on_cpu:
        return {"device": "cpu", "num_nodes": 1, "devices_per_node": 2, "simulate_sensors_of": "h200_sxm"}, 2
    products = nvidia_products()
    kind, size = device_of_product(products[0]), 8 if len(products) >= 8 else 4
    if kind is None or len(products) < 4:
        raise SystemExit(f"whole_node: got {products}, allowed: four or eight GPUs of the catalog")
    return {"device": kind.name, "num_nodes": 1, "devices_per_node": size}, size


def shortened(space: dict[str, Any]) -> dict[str, Any]:
    """The same plans of tiny models."""
    models = space["model"] if isinstance(space["model"], list) else [space["model"]]
    quick = {
        "min_steps": 3,
        "min_seconds": 0.3,
        "reference_every": min(3, space["measure"]["reference_every"]),
    }
    return space | {
        "model": [{**one, **TINY} for one in models],
        "workload": space["workload"] | {"seq_len": 32, "global_batch_size": 8},
        "plans": [{key: value for key, value in one.items() if key != "seq_len"} for one in space["plans"]],
        "measure": space["measure"] | quick,
    }


def write_estimates(space: dict[str, Any], path: Path) -> float:
    """Writes what is estimated of every plan before anything runs; returns the median of the dense plans' power."""
    found = forecast(space | {"objective": "maximize tokens_per_s"})
    specs = [one.spec for one in found.kept]
    table = found.estimates.table()
    for name, values in (("model", [one.model.name for one in specs]), ("trial_id", [one.trial_id for one in specs])):
        table = table.add_column(0, name, pa.array(values))
    pq.write_table(table, path)
    dense = [place for place, spec in enumerate(specs) if not spec.model.num_experts]
    return float(np.median(found.estimates.columns[POWER].value[dense]))


def pack(study: Path, out: Path, part: str) -> None:
    """Writes a study's runs as a table, and its folder without the pages as one file."""
    export(StudyFolder(study), out / f"{part}.parquet")
    with tarfile.open(out / f"{part}.tar", "w") as packed:
        for path in sorted(study.rglob("*")):
            if path.is_file() and path.suffix != ".html" and "output" not in path.parts:
                packed.add(path, str(path.relative_to(study.parent)))


class Told:
    """Prints a line for every trial that ends, and packs after every few."""

    def __init__(self, study: Path, out: Path, part: str) -> None:
        self._where, self._began_s, self._done = (study, out, part), time.monotonic(), 0

    def __call__(self, event: Event) -> None:
        """Takes an event of the study."""
        if not isinstance(event, TrialEvent) or event.kind != "finished" or event.result is None:
            return
        run, at_s = event.result, time.monotonic() - self._began_s
        power, speed = (run.metrics.get(name, float("nan")) for name in (POWER, "tokens_per_s"))
        what = f"{event.spec.model.name} {event.spec.label} {event.role} {run.repeat}"
        print(f"{at_s:5.0f} s  {what}: {run.status} {speed:.0f} tokens/s {power:.0f} W {run.reason[:90]}", flush=True)
        self._done += 1
        if self._done % PACK_EVERY == 0:
            pack(*self._where)


def checked_placement(study: Path, out: Path, storage: str) -> None:
    """Asks what pays for the even pipeline, and for one with a layer too many at its end, and measures that in turn."""
    found_map = slot_map(str(study))
    text = json.dumps({"slots": found_map.rows, "notes": found_map.notes}, default=float)
    (out / "map.json").write_text(text + "\n")
    said, foretold = [text], list[dict[str, Any]]()
    pipes = {
        spec.plan.layout: spec
        for spec, run in StudyFolder(study).results()
        if run.status is RunStatus.COMPLETED and spec.plan.pp > 1 and spec.plan.rank_order == "topology"
    }
    for layout, spec in sorted(pipes.items()):
        if layout and layout[-1] < layout[0]:
            continue
        said.append(f"present {spec.label}")
        part, beside = f"place{len(layout)}", list[Path]()

        def watch(
            planned: StudyPlan, part: str = part, beside: list[Path] = beside
        ) -> AbstractContextManager[Listener]:
            beside.append(study.parent / planned.name)
            return nullcontext(Told(beside[0], out, part))

        try:
            advice = place(f"{study.name}:{spec.trial_id}", storage=storage)
            said += [
                f"{one.what} {one.plan.label}: {one.gain_frac:+.4f} from {one.low_frac:+.4f} to {one.high_frac:+.4f} "
                f"P {one.probability:.3f} {one.needs}"
                for one in advice.moves
            ]
            said.append(advice.why)
            (out / "place.txt").write_text("\n".join(said) + "\n")
            move, found = verify(advice, storage=storage, watch=watch)
            ids = {"present": spec.trial_id, "moved": replace(spec, plan=move.plan).trial_id}
            names = ("gain_frac", "low_frac", "high_frac", "probability")
            foretold.append(
                ids | {"from": spec.label, "label": move.plan.label} | {name: getattr(move, name) for name in names}
            )
            pq.write_table(pa.Table.from_pylist(foretold), out / "place_said.parquet")
            said.append(f"measured {move.plan.label}: {found.change_frac} of a step's time")
            said.append(f"from {found.low_frac} to {found.high_frac}")
        except PlanError as error:  # nothing pays: the page says so
            said.append(str(error))
        if beside:
            pack(beside[0], out, part)
    print(*said, sep="\n", flush=True)
    (out / "place.txt").write_text("\n".join(said) + "\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a part."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("sweep", "slots", "place", "heat"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--storage", type=Path, help="folder of the studies; DIR/studies unless given")
    parser.add_argument(
        "--go-on", type=Path, nargs="*", default=[], help="DIR/PART.tar of calls that this one goes on with"
    )
    parser.add_argument("--minutes", type=float, default=8.0, help="no trial starts that is expected to end later")
    parser.add_argument("--cpu", action="store_true")
    given = parser.parse_args(arguments)
    storage = given.storage or given.out / "studies"
    given.out.mkdir(parents=True, exist_ok=True)
    for packed in given.go_on:
        with tarfile.open(packed) as earlier:
            earlier.extractall(storage, filter="data")
    cluster, size = here(given.cpu)
    if given.part == "place":
        try:
            checked_placement(storage / "node_slots", given.out, str(storage))
        except WattuneError as error:
            print(error, file=sys.stderr)
            return 1
        return 0
    space = {"sweep": sweep, "slots": slots, "heat": heat}[given.part](size) | {"cluster": cluster, "engine": "torch"}
    real = space | ({"cluster": f"1x{size} h200_sxm"} if given.cpu else {})
    bound = write_estimates(real, given.out / f"{given.part}_estimates.parquet")
    space["objective"] = "maximize tokens_per_s"
    if given.part == "sweep":
        space["constraints"] = [f"{POWER} <= {bound:.0f}"]
        STRATEGIES["model_guided"] = GuidedFirst
    planned = plan(shortened(space) if given.cpu else space)
    for one in planned.rejected:
        print(f"rejected: {one.rule} {one.reason}", flush=True)
    print(f"{len(planned.kept)} plans on {cluster}, bound {bound:.0f} W", flush=True)
    study = storage / planned.name
    try:
        told = Told(study, given.out, given.part)
        done = run_study(planned, storage=str(storage), max_hours=given.minutes / 60, listener=told)
        print(f"{done.ending}, {done.num_left} left", flush=True)
    except WattuneError as error:
        print(error, file=sys.stderr)
        return 1
    finally:
        if study.is_dir():
            pack(study, given.out, given.part)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
