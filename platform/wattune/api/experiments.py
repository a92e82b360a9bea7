"""Experiments: a file a question, with two arms of a space, and what is expected of the second against the first.

A file declares `PAPER` (whose finding), `SPACE` (a search space without plans), `ARMS` (two entries of `plans`, which
may also replace keys of the space), `CLAIMS` (`higher`, `lower` or `same` by metric; the first one decides) and, where
nobody can run it, `EVIDENCE = "estimated"`. Everything else is computed: estimates, order, effects, verdicts.
"""

import json
import math
import os
import runpy
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq

from wattune.api.estimates import forecast
from wattune.api.results import compare
from wattune.api.runs import run_study
from wattune.api.spaces import StudyPlan, plan
from wattune.catalog.hardware import device_of_product
from wattune.errors import PlanError, TelemetryError, closest
from wattune.intervals import NORMAL_95
from wattune.metrics import METRICS
from wattune.orchestrate.events import Listener
from wattune.ranking.difference import Counted, difference
from wattune.run import QUALITIES
from wattune.search.command_entry import OF_PLAN
from wattune.search.grammar import SpaceFile
from wattune.storage.files import write_asked_bytes
from wattune.telemetry.probe import nvidia_products
from wattune.units import unit_of
from wattune.version import __version__
from wattune.view.effects import effects_picture, results_page

FOLDER: Final = "experiments"
REPEATS: Final = 3
"""Runs of each arm, in turn."""

SAME: Final = 0.03
"""Largest effect, as a log ratio, that counts as none where `same` is expected. Our choice."""

_TINY: Final = {"hidden_size": 64, "ffn_hidden_size": 128, "num_heads": 4, "num_kv_heads": 2, "vocab_size": 256}
_QUICK: Final = {"warmup_steps": 2, "min_steps": 4, "min_seconds": 0.5, "profile_steps": 0, "timeout_s": 120}
_ON_CPU: Final = {"device": "cpu", "devices_per_node": 2, "simulate_sensors_of": "h200_sxm"}
_MARKS: Final = ("<!-- results -->\n", "<!-- end of results -->")
_MOST_REPEATS: Final = 998


def find_experiments(folder: str | Path = FOLDER) -> dict[str, dict[str, Any]]:
    """Loads every file of a folder that declares `CLAIMS`, by name; `QUESTION` is its docstring's first line.

    Raises:
        PlanError: There is none.
    """
    found = {}
    for path in sorted(Path(folder).glob("*.py")):
        if "\nCLAIMS" in path.read_text(encoding="utf-8"):
            declared = runpy.run_path(str(path))
            found[path.stem] = declared | {"QUESTION": (declared["__doc__"] or path.stem).strip().splitlines()[0]}
    if not found:
        raise PlanError(f"no experiment in {Path(folder).resolve()}; give --folder, or call it where experiments/ is")
    return found


def results_of(folder: str | Path = FOLDER) -> dict[str, dict[str, Any]]:
    """Reads the results of a folder's experiments by name; one that did not run has none."""
    paths = sorted((Path(folder) / "results").glob("*.json"))
    return {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in paths}


def written_page(folder: str | Path = FOLDER) -> str:
    """Returns a folder's `README.md` with the table of its results between the two marks."""
    before, _, rest = (Path(folder) / "README.md").read_text(encoding="utf-8").partition(_MARKS[0])
    return before + _MARKS[0] + results_page(results_of(folder)) + _MARKS[1] + rest.partition(_MARKS[1])[2]


def run_experiment(
    name: str,
    *,
    folder: str | Path = FOLDER,
    results: str | Path | None = None,
    storage: str | None = None,
    short: bool = False,
    watch: Callable[[StudyPlan], AbstractContextManager[Listener]] | None = None,
) -> dict[str, Any]:
    """Runs an experiment and writes its result, figure and runs as NAME.json, NAME.svg and NAME.parquet.

    Args:
        name: Its file's name without `.py`.
        folder: The folder of experiments.
        results: The folder to write to; None is `results` in `folder`.
        storage: The place its studies are kept in. Called again, an experiment goes on with what is there.
        short: True runs the same plans of a tiny model on two processors, with simulated sensors.
        watch: Makes a view of each study that runs.

    Raises:
        PlanError: There is no such experiment, an arm cannot run, or this machine has no devices for it.
    """
    known = find_experiments(folder)
    if name not in known:
        raise PlanError(f'unknown experiment "{name[:60]}"; {closest(name, known)}')
    declared = known[name]
    evidence = declared.get("EVIDENCE", "measured")
    cluster: Any = "1x2 h200_sxm" if short or evidence == "estimated" else _devices_here()
    arms = [_space(name, declared, arm, cluster) for arm in declared["ARMS"].values()]
    expected = [_estimated(arm) for arm in arms]
    facts: dict[str, Any] = {"hardware": "", "quality": ""}
    table = None
    if evidence == "estimated":
        effects = _between(expected)
    else:
        evidence = "simulated" if short else evidence
        effects, facts, table = _measured([_shortened(arm) for arm in arms] if short else arms, storage, watch)
    predicted = _between(expected)
    unmeasured = {"effect": None, "low": None, "high": None, "repeats": 0}
    claims = [
        {"metric": metric, "expected": side, "predicted": predicted.get(metric, unmeasured)["effect"]}
        | (found := effects.get(metric, unmeasured))
        | judged(side, found)
        for metric, side in declared["CLAIMS"].items()
    ]
    result = {
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
    place = Path(results or Path(folder) / "results")
    place.mkdir(parents=True, exist_ok=True)
    write_asked_bytes(place / f"{name}.svg", effects_picture(result).encode())
    if table is not None:
        pq.write_table(table, place / f"{name}.parquet")
    write_asked_bytes(place / f"{name}.json", (json.dumps(result, indent=1) + "\n").encode())
    return result


def measured_effects(a: Counted, b: Counted) -> dict[str, dict[str, Any]]:
    """Returns the effect of B over A with its 95 % interval, for every metric that the runs of both measured."""
    effects = {}
    for one in filter(None, (difference(metric, a, b) for metric in METRICS)):
        shares = (one.change_frac, one.low_frac, one.high_frac)
        logs = [None if share is None else math.log1p(share) for share in shares]
        ends = [one.change, one.low, one.high] if unit_of(one.metric) == "degC" else logs
        if ends[0] is not None:
            repeats = min(len(a.runs), len(b.runs))
            effects[one.metric] = {"effect": ends[0], "low": ends[1], "high": ends[2], "repeats": repeats}
    return effects


def judged(expected: str, effect: Mapping[str, Any]) -> dict[str, Any]:
    """Computes a verdict: `agrees` or `contests` where the 95 % interval lies on one side, else `cannot tell`.

    Args:
        expected: `higher` or `lower` than no effect, or the `same` within 3 %.
        effect: `effect` with the ends `low` and `high`, and `repeats` of each arm; 0 is no effect.

    Returns:
        `verdict`, and `would_tell`: repeats of each arm by which the interval would lie on one side if the effect
        stays, as it shrinks with their square root. None where it is decided, or no number of repeats would tell.
    """
    low, high, middle, repeats = (effect[key] for key in ("low", "high", "effect", "repeats"))
    edges = (-SAME, SAME) if expected == "same" else (0.0,)
    if low is None:
        return {"verdict": "cannot tell", "would_tell": None}
    if not any(low <= edge <= high for edge in edges):
        agrees = abs(middle) < SAME if expected == "same" else (middle > 0) == (expected == "higher")
        return {"verdict": "agrees" if agrees else "contests", "would_tell": None}
    away = min(abs(middle - edge) for edge in edges)
    wanted = math.ceil(repeats * ((high - low) / 2 / away) ** 2) if away else 0
    return {"verdict": "cannot tell", "would_tell": max(wanted, repeats + 1) if 0 < wanted <= _MOST_REPEATS else None}


def _devices_here() -> str:
    """Returns this machine as a cluster: two or four of the GPUs that a program here sees."""
    try:
        products = nvidia_products()
    except (TelemetryError, OSError):
        products = []
    shown = os.environ.get("CUDA_VISIBLE_DEVICES")
    number = len(products) if shown is None else min(len(products), len([*filter(None, shown.split(","))]))
    kind = device_of_product(products[0]) if number >= 2 else None
    if kind is None:
        raise PlanError("experiments: this machine has no two GPUs of the catalog; --short simulates their sensors")
    return f"1x{4 if number >= 4 else 2} {kind.name}"


def _space(name: str, declared: Mapping[str, Any], arm: Mapping[str, Any], cluster: Any) -> dict[str, Any]:
    """Returns the space of one arm on a cluster, unless the file names one."""
    own = {key: arm[key] for key in arm if key in SpaceFile.model_fields.keys() - {*OF_PLAN, "flags"}}
    given = {"study": f"experiment_{name}", "cluster": cluster, "engine": "torch", **declared["SPACE"], **own}
    return given | {
        "objective": "maximize tokens_per_s",
        "plans": [{key: value for key, value in arm.items() if key not in own}],
        "measure": {"reference_every": 0, "repeats": REPEATS, **given.get("measure", {})},  # in rounds of all arms
    }


def _shortened(space: dict[str, Any]) -> dict[str, Any]:
    """Returns the same plan of a tiny model on processors: seconds an arm, and nothing that says anything of a GPU."""
    quick = space | {"cluster": _ON_CPU, "measure": space["measure"] | _QUICK | {"repeats": 2}}
    if space["engine"] == "command":
        return quick
    models = space["model"] if isinstance(space["model"], list) else [space["model"]]
    return quick | {
        "model": [{**model, **_TINY} for model in models],
        "workload": space["workload"] | {"seq_len": 64},
    }


def _estimated(space: dict[str, Any]) -> dict[str, tuple[float, float]]:
    """Returns the estimate of every metric of an arm, with the standard deviation of its log; none of a command."""
    planned = plan(space)
    planned.candidates.require_kept()
    if space["engine"] == "command":
        return {}
    made = forecast(planned)
    if made.rejected:
        raise PlanError(f"{planned.kept[0].spec.label} does not fit: {made.rejected[0].reason}")
    return {name: (float(one.value[0]), float(one.log_std[0])) for name, one in made.estimates.columns.items()}


def _between(arms: Sequence[Mapping[str, tuple[float, float]]]) -> dict[str, dict[str, Any]]:
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


def _measured(
    arms: Sequence[dict[str, Any]], storage: str | None, watch: Any
) -> tuple[dict[str, dict[str, Any]], dict[str, Any], pa.Table]:
    """Runs two arms in turn; returns effects by metric, facts of the runs, and the runs as a table."""
    first, second = arms
    rounds = [first | {"plans": [*first["plans"], *second["plans"]]}]
    if any(first[key] != second[key] for key in first if key != "plans"):
        # Arms of other work are studies of their own, which take turns.
        first, second = (one | {"study": f"{one['study']}_{end}"} for one, end in zip(arms, "ab", strict=True))
        each = range(1, first["measure"]["repeats"] + 1)
        rounds = [one | {"measure": one["measure"] | {"repeats": n}} for n in each for one in (first, second)]
    studies = {}
    for space in rounds:
        planned = plan(space)
        with nullcontext() if watch is None else watch(planned) as listener:
            studies[space["study"]] = run_study(planned, storage=storage, listener=listener).study
    trials = [f"{studies[one['study']].path}/trials/{plan(one).kept[0].trial_id}" for one in (first, second)]
    compared = compare(*trials, storage=storage)
    runs = [trial.result for study in studies.values() for trial in study.trials()]
    facts = {
        "hardware": compared.a.spec.cluster.label,
        "quality": min((run.quality for run in runs), key=QUALITIES.index),
        "versions": {key[len("version.") :]: text for key, text in runs[0].tags.items() if key.startswith("version.")},
    }
    effects = measured_effects(compared.a.counted, compared.b.counted)
    return effects, facts, pa.concat_tables([one.metrics() for one in studies.values()], promote_options="default")
