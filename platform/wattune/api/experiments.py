"""Experiments: a file a question, with two arms of a space, and what is expected of the second against the first.

A file declares `PAPER` (whose finding), `SPACE` (a search space without plans), `ARMS` (two entries of `plans`, which
may also replace keys of the space), `CLAIMS` (`higher`, `lower` or `same` by metric; the first one decides) and, where
nobody can run it, `EVIDENCE = "estimated"`. Everything else is computed: estimates, order, effects, verdicts.
"""

import json
import math
import os
import runpy
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from wattune.api.estimates import forecast
from wattune.api.results import compare
from wattune.api.runs import run_study
from wattune.api.spaces import StudyPlan, plan
from wattune.api.studies import Study
from wattune.catalog.hardware import device_of_product
from wattune.errors import PlanError, TelemetryError, closest
from wattune.intervals import NORMAL_95
from wattune.metrics import METRICS
from wattune.orchestrate.events import Listener
from wattune.ranking.difference import Counted, difference
from wattune.run import QUALITIES, RunStatus
from wattune.search.command_entry import OF_PLAN
from wattune.search.fields import listed
from wattune.search.grammar import SpaceFile
from wattune.storage.files import write_asked
from wattune.telemetry.probe import nvidia_products
from wattune.units import unit_of
from wattune.version import __version__
from wattune.view.effects import effects_picture, results_page
from wattune.workload import OF_WORK

FOLDER: Final = "experiments"
REPEATS: Final = 3
"""Runs of each arm, in turn."""

SAME: Final = 0.03
"""Largest effect, as a log ratio, that counts as none where `same` is expected. Our choice."""

_TINY: Final = {"hidden_size": 64, "ffn_hidden_size": 128, "num_heads": 4, "num_kv_heads": 2, "vocab_size": 256}
_QUICK: Final = {"warmup_steps": 2, "min_steps": 4, "min_seconds": 1.2, "timeout_s": 240, "stall_s": 30, "repeats": 1}
_ON_CPU: Final = {"device": "cpu", "devices_per_node": 2, "simulate_sensors_of": "h200_sxm"}
_MARKS: Final = ("<!-- results -->\n", "<!-- end of results -->")
_MOST_REPEATS: Final = 998
_TRIED_AGAIN: Final = (RunStatus.CRASHED, RunStatus.TIMED_OUT)  # ranks may hang by chance

_AS_DECLARED: Final[Mapping[str, Any]] = MappingProxyType({})

_Arms = tuple[dict[str, Any], dict[str, Any]]
_Expected = Mapping[str, tuple[float, float]]
_Effects = dict[str, dict[str, Any]]


def find_experiments(folder: str | Path = FOLDER) -> dict[str, dict[str, Any]]:
    """Loads every file of a folder that declares `CLAIMS`, by name; `QUESTION` is its docstring's first line.

    Raises `PlanError`: there is none.
    """
    found = {}
    for path in sorted(Path(folder).glob("*.py")):
        if "\nCLAIMS" in path.read_text(encoding="utf-8"):
            declared = runpy.run_path(str(path))
            found[path.stem] = declared | {"QUESTION": (declared["__doc__"] or path.stem).strip().splitlines()[0]}
    if not found:
        raise PlanError(f"no experiment in {Path(folder).resolve()}; give --folder, or call it where experiments/ is")
    return found


def results_of(folder: str | Path = FOLDER, results: str | Path | None = None) -> dict[str, dict[str, Any]]:
    """Reads the results of a folder's experiments by name, of repeats as NAME@2; one that did not run has none."""
    paths = sorted(Path(results or Path(folder) / "results").glob("*.json"))
    return {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in paths}


def written_page(folder: str | Path = FOLDER) -> str:
    """Returns a folder's `README.md` with the table of its results between the two marks."""
    before, _, rest = (Path(folder) / "README.md").read_text(encoding="utf-8").partition(_MARKS[0])
    return before + _MARKS[0] + results_page(results_of(folder)) + _MARKS[1] + rest.partition(_MARKS[1])[2]


def run_experiments(
    names: Sequence[str],
    *,
    folder: str | Path = FOLDER,
    results: str | Path | None = None,
    storage: str | None = None,
    short: bool = False,
    max_hours: float | None = None,
    measure: Mapping[str, Any] = _AS_DECLARED,
    watch: Callable[[StudyPlan], AbstractContextManager[Listener]] | None = None,
) -> dict[str, dict[str, Any]]:
    """Runs experiments and writes result, figure and runs of each as NAME.json, NAME.svg and NAME.parquet.

    Those that can be plans of one study are one: its workers start once, and an arm that several have runs once. Where
    the runs of an earlier call are there, the first result stays, and the new one is NAME@2.json, and so on. Raises
    `PlanError`: there is no such experiment, this machine has no devices for it, or an arm cannot run or did not
    complete; what the others found is written then.

    Args:
        names: Names of their files without `.py`.
        folder: The folder of experiments.
        results: The folder to write to; None is `results` in `folder`.
        storage: The place their studies are kept in. Called again, an experiment goes on with what is there.
        short: True runs the same plans of a tiny model on two processors, with simulated sensors.
        max_hours: Hours of each study: no run starts that is expected to end later. What is there by then is judged.
        measure: Keys of the spaces' `measure` that replace their own, such as shorter windows for a short loan.
        watch: Makes a view of each study that runs.
    """
    known, place = find_experiments(folder), Path(results or Path(folder) / "results")
    arms, expected, groups = dict[str, _Arms](), dict[str, list[_Expected]](), list[list[str]]()
    estimated = {name for name, declared in known.items() if declared.get("EVIDENCE") == "estimated"}
    for name in dict.fromkeys(names):
        if name not in known:
            raise PlanError(f'unknown experiment "{name[:60]}"; {closest(name, known)}')
        cluster: Any = "1x2 h200_sxm" if short or name in estimated else _devices_here(known[name].get("DEVICES", 4))
        first, second = (_space(known[name], arm, cluster, measure) for arm in known[name]["ARMS"].values())
        expected[name] = [_estimated(first), _estimated(second)]
        arms[name] = (_shortened(first), _shortened(second)) if short and name not in estimated else (first, second)
        alike = (one for one in groups if _joined([arm for other in [*one, name] for arm in arms[other]]))
        group = next((one for one in alike if not {name, one[0]} & estimated), [])
        group.append(name)
        groups += [group] if len(group) == 1 else []
    place.mkdir(parents=True, exist_ok=True)
    found, problems = dict[str, dict[str, Any]](), list[str]()
    with ExitStack() as held:
        if sum(one[0] not in estimated for one in groups) > 1:
            from wattune.orchestrate.cluster import connect  # Ray takes seconds to import, and estimates need none

            held.enter_context(connect())
        for group in groups:
            spaces = [arm for name in group if name not in estimated for arm in arms[name]]
            studies = _run(spaces, group[0], storage, max_hours, watch) if spaces else {}
            for name in group:
                predicted = _between(expected[name])
                table, facts, effects = None, {"hardware": "", "quality": ""}, predicted
                try:
                    if spaces:
                        effects, facts, table = _measured(arms[name], studies, storage)
                except PlanError as error:  # an arm did not complete; the others are told
                    problems.append(f"{name}: {error}")
                    continue
                evidence = "estimated" if not spaces else "simulated" if short else "measured"
                stem = _free_name(name, place, table)
                found[stem] = result = _result(known[name], evidence, predicted, effects, facts)
                write_asked(place / f"{stem}.svg", effects_picture(result))
                if table is not None:
                    pq.write_table(table, place / f"{stem}.parquet")
                write_asked(place / f"{stem}.json", json.dumps(result, indent=1) + "\n")
    if problems:
        raise PlanError("\n".join(problems))
    return found


def _result(
    declared: Mapping[str, Any], evidence: str, predicted: _Effects, effects: _Effects, facts: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns what an experiment's file of results holds."""
    unmeasured = {"effect": None, "low": None, "high": None, "repeats": 0}
    claims = [
        {"metric": metric, "expected": side, "predicted": predicted.get(metric, unmeasured)["effect"]}
        | (found := effects.get(metric, unmeasured))
        | judged(side, found)
        for metric, side in declared["CLAIMS"].items()
    ]
    return {
        "question": declared["QUESTION"],
        "paper": declared["PAPER"],
        "evidence": evidence,
        "arms": [*declared["ARMS"]],
        "date": datetime.now(UTC).date().isoformat(),
        **facts,
        "versions": {"wattune": __version__, **facts.get("versions", {})},
        "claims": claims,
        "verdict": claims[0]["verdict"],
    }


def measured_effects(a: Counted, b: Counted) -> _Effects:
    """Returns the effect of B over A with its 95 % interval, for every metric that the runs of both measured."""
    effects = {}
    for one in filter(None, (difference(metric, a, b) for metric in METRICS)):
        ends, of_a = [one.change, one.low, one.high], one.a.value
        if unit_of(one.metric) != "degC":  # of traffic too, which can be 0
            ends = [None if end is None or min(of_a, of_a + end) <= 0 else math.log1p(end / of_a) for end in ends]
        if ends[0] is not None:
            repeats = min(len(a.runs), len(b.runs))
            effects[one.metric] = {"effect": ends[0], "low": ends[1], "high": ends[2], "repeats": repeats}
    return effects


def judged(expected: str, effect: Mapping[str, Any]) -> dict[str, Any]:
    """Computes a verdict: `agrees` or `contests` where the 95 % interval lies on one side, else `cannot tell`.

    Returns `verdict`, and `would_tell`: repeats of each arm by which the interval would lie on one side if the effect
    stays, as it shrinks with their square root. None where it is decided, or no number of repeats would tell.

    Args:
        expected: `higher` or `lower` than no effect, or the `same` within 3 %.
        effect: `effect` with the ends `low` and `high`, and `repeats` of each arm; 0 is no effect. `high` alone is the
            end of an interval that holds a fall to nothing.
    """
    low, high, middle, repeats = (effect[key] for key in ("low", "high", "effect", "repeats"))
    edges = (-SAME, SAME) if expected == "same" else (0.0,)
    if high is None:
        return {"verdict": "cannot tell", "would_tell": None}
    low = -math.inf if low is None else low
    if not any(low <= edge <= high for edge in edges):
        agrees = abs(middle) < SAME if expected == "same" else (middle > 0) == (expected == "higher")
        return {"verdict": "agrees" if agrees else "contests", "would_tell": None}
    away = min(abs(middle - edge) for edge in edges)
    wanted = math.ceil(repeats * ((high - low) / 2 / away) ** 2) if away and low > -math.inf else 0
    return {"verdict": "cannot tell", "would_tell": max(wanted, repeats + 1) if 0 < wanted <= _MOST_REPEATS else None}


def _devices_here(most: int = 4) -> str:
    """Returns this machine as a cluster: two or, unless `most` is less, four of the GPUs that a program here sees."""
    try:
        products = nvidia_products()
    except TelemetryError:
        products = []
    shown = os.environ.get("CUDA_VISIBLE_DEVICES")
    number = len(products) if shown is None else min(len(products), len([*filter(None, shown.split(","))]))
    kind = device_of_product(products[0]) if number >= 2 else None
    if kind is None:
        raise PlanError("experiments: this machine has no two GPUs of the catalog; --short simulates their sensors")
    return f"1x{4 if min(number, most) >= 4 else 2} {kind.name}"


def _space(
    declared: Mapping[str, Any], arm: Mapping[str, Any], cluster: Any, measure: Mapping[str, Any] = _AS_DECLARED
) -> dict[str, Any]:
    """Returns the space of one arm on a cluster, unless the file names one."""
    own = {key: arm[key] for key in arm if key in SpaceFile.model_fields.keys() - {*OF_PLAN, "flags"}}
    given = {"study": "experiment", "cluster": cluster, "engine": "torch", **declared["SPACE"], **own}
    return given | {
        "objective": "maximize tokens_per_s",
        "plans": [{key: value for key, value in arm.items() if key not in own}],
        "measure": {"reference_every": 0, "repeats": REPEATS} | given.get("measure", {}) | dict(measure),  # in rounds
    }


def _shortened(space: dict[str, Any]) -> dict[str, Any]:
    """Returns the same plan of a tiny model on processors: seconds an arm, and nothing that says anything of a GPU."""
    quick = space | {"cluster": _ON_CPU, "measure": space["measure"] | _QUICK}
    if space["engine"] == "command":
        return quick
    depth = {4: 2, 8: 4}  # of slices; a layout names all layers of deeper ones
    models = ({**one, **_TINY, "num_layers": depth.get(n := one["num_layers"], n)} for one in listed(space["model"]))
    return quick | {"model": [*models], "workload": space["workload"] | {"seq_len": 64, "global_batch_size": 8}}


def _estimated(space: dict[str, Any]) -> _Expected:
    """Returns the estimate of every metric of an arm, with the standard deviation of its log; none of a command."""
    planned = plan(space)
    planned.candidates.require_kept()
    if space["engine"] == "command":
        return {}
    made = forecast(planned)
    if made.rejected:
        raise PlanError(f"{planned.kept[0].spec.label} does not fit: {made.rejected[0].reason}")
    return {name: (float(one.value[0]), float(one.log_std[0])) for name, one in made.estimates.columns.items()}


def _between(arms: Sequence[_Expected]) -> _Effects:
    """Returns effects between two estimates. Their errors are taken as independent, which is the wider interval."""
    found = {}
    for metric, (a, of_a) in arms[0].items():
        b, of_b = arms[1].get(metric, (0.0, 0.0))
        kelvin = unit_of(metric) == "degC"
        if a > 0 and b > 0:
            effect = b - a if kelvin else math.log(b / a)
            reach = NORMAL_95 * (math.hypot(a * of_a, b * of_b) if kelvin else math.hypot(of_a, of_b))
            found[metric] = {"effect": effect, "low": effect - reach, "high": effect + reach, "repeats": 0}
    return found


def _free_name(name: str, place: Path, table: pa.Table | None) -> str:
    """Returns the name of a result: its experiment's, or with a number where other runs of it are there."""
    keys = ["trial_id", "energy_per_step_j"]  # no two runs measure the same joules

    def is_free(stem: str) -> bool:
        path, now = place / f"{stem}.parquet", [] if table is None else table.select(keys).to_pylist()
        return (
            table is None
            or not path.exists()
            or all(row in now for row in pq.read_table(path, columns=keys).to_pylist())
        )

    return next(filter(is_free, (name if number == 1 else f"{name}@{number}" for number in count(1))))


def _joined(spaces: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """Returns one space with the plans of several, each with what it is of; None where they are other studies."""
    models, adapters, plans = dict[str, Any](), list[Any](), list[dict[str, Any]]()
    works: dict[str, dict[Any, None]] = {key: {} for key in OF_WORK}
    rests = list[dict[str, Any]]()
    for space in spaces:
        own = [{"name": one} if isinstance(one, str) else one for one in listed(space.get("model", []))]
        work = {"mode": "pretrain", **space["workload"]} if "workload" in space else {}
        rests.append({key: space[key] for key in space if key not in ("plans", "model", "workload")})
        rests[-1] |= {key: work[key] for key in work if key not in works and key != "lora"}
        adapters += [work["lora"]] if "lora" in work else []
        alone = {key: listed(work[key]) for key in works if work} | {"model": [one["name"] for one in own]}
        of = {key: values[0] for key, values in alone.items() if len(values) == 1}
        plans += [of | plan for plan in space["plans"] if of | plan not in plans]
        for key in works if work else ():
            works[key] |= dict.fromkeys(alone[key])
        if any(models.setdefault(one["name"], one) != one for one in own):
            return None
    if any(one != rests[0] for one in rests) or any(one != adapters[0] for one in adapters):
        return None
    joined = spaces[0] | {"plans": plans}
    if models:
        own_work = spaces[0]["workload"] | {key: [*values] for key, values in works.items()}
        joined |= {"model": [*models.values()], "workload": own_work | ({"lora": adapters[0]} if adapters else {})}
    return joined


def _run(
    spaces: Sequence[dict[str, Any]], name: str, storage: str | None, max_hours: float | None, watch: Any
) -> dict[str, Study]:
    """Runs arms in turn, as one study if they can be; returns the study of each trial by its id."""
    name, joined, began_s = f"experiment_{name}", _joined(spaces), time.monotonic()
    ends = [one | {"study": f"{name}_{end}"} for one, end in zip(spaces, "ab", strict=False)]
    own, most = spaces[0]["measure"], spaces[0]["measure"]["repeats"]
    # A, B B, A A, and so on: drift cancels, and two runs of one arm in a row start its workers once.
    turns = [ends[k % 2] | {"measure": own | {"repeats": min(k + 1, most)}} for k in range(most + 1)]
    studies = dict[str, Study]()
    for space in [joined | {"study": name}] if joined else turns:
        planned = plan(space)
        for retry in ((), _TRIED_AGAIN):
            left_h = None if max_hours is None else max(max_hours - (time.monotonic() - began_s) / 3600, 0.0)
            with nullcontext() if watch is None else watch(planned) as listener:
                done = run_study(planned, storage=storage, max_hours=left_h, retry=retry, listener=listener)
            if done.ending == "interrupted":
                raise KeyboardInterrupt
            if not {*_TRIED_AGAIN} & {one.status for row in done.ranking.trials for one in row.repeats}:
                break
        studies |= dict.fromkeys((one.trial_id for one in planned.kept), done.study)
    return studies


def _measured(
    arms: _Arms, studies: Mapping[str, Study], storage: str | None
) -> tuple[_Effects, dict[str, Any], pa.Table]:
    """Returns effects of one arm over the other by metric, facts of their runs, and the runs as a table."""
    ids = [plan(one).kept[0].trial_id for one in arms]
    compared = compare(*(f"{studies[one].path}/trials/{one}" for one in ids), storage=storage)
    runs = [*compared.a.counted.runs, *compared.b.counted.runs]
    facts = {
        "hardware": compared.a.spec.cluster.label,
        "quality": min((run.quality for run in runs), key=QUALITIES.index),
        "versions": {key[len("version.") :]: text for key, text in runs[0].tags.items() if key.startswith("version.")},
    }
    tables = [studies[one].metrics().filter(pc.equal(pc.field("trial_id"), one)) for one in ids]
    effects = measured_effects(compared.a.counted, compared.b.counted)
    return effects, facts, pa.concat_tables(tables, promote_options="default")
