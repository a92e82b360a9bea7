"""Writes docs/data_dictionary.md: every file of a study, and every column, from the code's own schemas.

`python docs/_site/dictionary.py` writes the page. `tests/contracts/test_data_dictionary.py` holds it to this script and
to the folders of real studies.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import pyarrow as pa

from wattune.metrics import METRICS
from wattune.objective import Question
from wattune.plans.axes import AXES
from wattune.ranking.order import rank
from wattune.schema import KERNELS, SPANS, TELEMETRY
from wattune.storage.spaces import SPACE_COLUMN
from wattune.view.arrow import schema_of
from wattune.view.files import ranking_columns, repeats_schema

PAGE: Final = Path(__file__).resolve().parents[1] / "data_dictionary.md"

STUDY_FILES: Final = {
    "study.yaml": "The search space with every default, and the number and digests of the spaces before it (`record`).",
    "space.<n>.yaml": "An earlier space of a study that grew.",
    "candidates.parquet": "Every combination of the space: kept, rejected or equivalent.",
    "ranking.parquet": "One row a trial, as ranked at the end of the last `wattune run`.",
    "report.html": "The report, one file that opens offline.",
    "trials/<trial_id>-<repeat>/spec.json": "What the trial runs. `trial_id` is the hash of its content.",
    "trials/<trial_id>-<repeat>/run.json": "What came of it. It is written last: with it the trial is done.",
    "trials/<trial_id>-<repeat>/ranks.json": "Node, device and process of each rank.",
    "trials/<trial_id>-<repeat>/spans.parquet": "Phases of every rank's steps.",
    "trials/<trial_id>-<repeat>/kernels.parquet": "Kernels of the profiled steps (`measure.profile_steps`).",
    "trials/<trial_id>-<repeat>/error.txt": "An error of wattune itself that came while the trial ran.",
    "trials/<trial_id>-<repeat>/stacks/rank<k>.txt": "Python stacks of a rank that hung, and how many collectives "
    "it had begun in each process group.",
    "trials/<trial_id>-<repeat>/telemetry/<node>/<tier>.parquet": "Readings of one tier on one node.",
    "trials/<trial_id>-<repeat>/telemetry/<node>/manifest.json": "Facts of the node, its devices and the sampler.",
    "trials/<trial_id>-<repeat>/attempts/<n>/...": "The files of an attempt that did not count.",
}
STORAGE_FILES: Final = {
    "recordings/<name>/manifest.json": "The command of a recording and its window, from the start on.",
    "recordings/<name>/run.json": "What came of it, as in a trial. It is written last.",
    "recordings/<name>/telemetry/<node>/<tier>.parquet": "As in a trial.",
    "recordings/<name>/telemetry/<node>/manifest.json": "As in a trial.",
    "calibration/<device_uuid>.json": "What `wattune calibrate` measured of one device's sensors.",
    "mlflow.db": "MLflow's copy of all studies, which names no path of this machine.",
    "mlartifacts/<study>/<run>/artifacts/...": "Files of MLflow's runs. Copy this folder together with `mlflow.db`.",
    "wandb/sent-<study>-<place>.json": "With `--wandb`: what that project has of a study. `sync` sends the rest.",
    "wandb/...": "What `wandb` itself keeps of its runs.",
}

OBJECTS: Final[dict[str, dict[str, str]]] = {
    "spec.json": {
        "trial_id": "First 12 digits of the hash of the rest.",
        "model": "Name and shape of the model.",
        "cluster": "Device, devices of a node, nodes, and the device whose sensors are simulated.",
        "engine": "What trains: `torch`, `megatron` or `deepspeed`.",
        "workload": "Sequence length, global batch size, mode, tokens, routing, LoRA.",
        "plan": "A value on every axis, as in the columns of a plan.",
    },
    "run.json": {
        "trial_id": "The trial.",
        "repeat": "Number of the repeat, from 0. From 1000 on they are runs of the reference trial.",
        "status": "How it ended, such as `completed` or `out_of_memory`.",
        "reason": "Why, for every status but `completed`.",
        "metrics": "Values by the names below, in the unit of each. One that was not measured is absent.",
        "quality": "`publishable`, `indicative` or `invalid`.",
        "quality_reasons": "Codes of the thresholds it does not keep (telemetry.md).",
        "tags": "Facts that are no numbers: engine, device, versions, commit, `simulated`.",
        "numbers": "Numbers that are no metrics, such as `window_s` and `first_step`. One that nobody knows is absent.",
        "prediction": "What the strategy expected: metric, value, 95 % interval, P(runs and holds). Absent if nothing.",
        "start_wall_ns": "Start, Unix time in nanoseconds.",
        "end_wall_ns": "End, likewise.",
        "recorded": "Of a recording: command, exit code, machine, windows, energy, steps, devices. Absent of a trial.",
        "files": "Digest of every file of the run, by path.",
        "accepted": "Files that were edited on purpose (`wattune analyze --accept`). Absent where none was.",
        "digest": "Digest of this file itself.",
    },
    "ranks.json": {"ranks": "A list: `rank`, `node`, `device`, `device_uuid`, `slot`, `pid`."},
    "manifest.json": {
        "node": "The node's name.",
        "simulated": "True where the values were computed from a model of the device.",
        "model": "Source of the model's coefficients. Only where `simulated`.",
        "closed": "True where every stream has its end mark.",
        "ended": "Why the sampler ended.",
        "losses": "What was lost, a line each.",
        "devices": "By name: identity, power limit, highest clock, slot, power domain, capabilities.",
        "tiers": "By name: requested and achieved rate, rows, missed ticks, errors, times of a read.",
        "measured": "By device and tier: rows, and the time that they cover.",
        "clock": "Monotonic and wall clock read together at start and end, and steps of the wall clock.",
        "clock_offset_ns": "Shift of this node's monotonic clock to the reference node's.",
        "clock_offset_uncertainty_ns": "Its uncertainty.",
        "sampler": "What sampling cost: `pid`, CPU time, memory.",
        "own_processes": "Processes of the trial or the recorded command, which are not other processes.",
        "versions": "wattune, Python, pyarrow, kernel.",
        "boot_id": "Monotonic times compare within one boot.",
    },
}
"""Facts of each kind of JSON file, on its first level."""

COLUMNS: Final = {
    "rank": "1 plus the number of feasible trials that are told to be better. Null unless feasible.",
    "best_probability": "Probability to be the best trial that keeps every bound. Null where a bound breaks.",
    "verdict": "`feasible`, `undecided`, `behind`, `infeasible`, `unknown`, `interrupted` or `failed`.",
    "study": "Name of the study where several are ranked together, else empty.",
    "trial_id": "The trial.",
    "label": "Short name of the plan, with the sizes of the workload where trials differ in them.",
    "model": "Name of the model.",
    "num_parameters": "Parameters of the model.",
    "num_active_parameters": "Parameters that work on one token.",
    "cluster": "Nodes, devices and their kind.",
    "engine": "What trains.",
    "dp": "Degree of data parallelism: devices over `tp`, `pp` and `cp`.",
    "quality": "Quality of the metrics that the objective and the bounds use. Of a repeat, its own.",
    "simulated": "True if the telemetry was computed instead of measured.",
    "num_repeats": "Repeats that completed.",
    "missing": "Metrics that objective and bounds need and a repeat did not measure.",
    "reason": "Why it is not feasible. Of a repeat, why it did not complete.",
    "repeat": "Number of the repeat.",
    "status": "How the repeat ended. Of a combination `kept`, `rejected`, `equivalent` or `removed`.",
    "rule": "The rule that rejects the combination.",
    "config": "The combination as it was written, as JSON.",
    "space": "Number of the space that the combination is of, from 1. A study that grew has several.",
    "trial": "Name of the trial's folder.",
    "node": "The node.",
    "device": "The device's name on its node, `host` for the node itself.",
    "mono_ns": "Monotonic clock of the node.",
    "wall_ns": "Wall clock of the node, Unix time.",
    "sensor_ns": "The driver's own time of the sample.",
    "step": "Number of the step. Warm-up steps are negative in spans.",
    "micro_batch": "Number of the micro-batch. Null where it does not apply.",
    "chunk": "Number of the model's chunk on the rank. Null where it does not apply.",
    "phase": "`step`, `forward`, `backward`, `optimizer` or `wait`.",
    "start_mono_ns": "Start on the node's monotonic clock.",
    "end_mono_ns": "End, likewise.",
    "start_wall_ns": "Start on the wall clock.",
    "end_wall_ns": "End, likewise.",
    "stream": "Stream of the device.",
    "name": "The kernel's name. The row `step` is the step itself.",
    "collective": "Kind of the collective. Empty for other kernels.",
    "group": "Process group of the collective.",
    "group_ranks": "Its ranks.",
    "fabric": "`node` where the group's links stay inside a node, else `network`.",
    "start_ns": "Start from the start of the step.",
    "end_ns": "End, likewise.",
}
"""Meaning of every column that is no metric, no axis and no sensor's reading."""

_TEXTS: Final = ("status", "trial_id", "rule", "reason", "config")
_CANDIDATES: Final = pa.schema([*((name, pa.string()) for name in _TEXTS), (SPACE_COLUMN, pa.int64())])
_EXAMPLE: Final = ("maximize tokens_per_s", "node_device_power_peak_1s_w <= 2600")

_HEAD: Final = """# Data dictionary

This page lists every file that wattune leaves and every column in them. `docs/_site/dictionary.py` writes it from the
code's schemas. A test holds it to the folders of real studies.

All values are SI, with megahertz as the one exception. A fraction is never a percentage. A column's unit is in its name
and in the metadata of its Parquet field (`unit`). Null and absent mean "not measured", never 0. [Storage](storage.md)
says where the files are kept, [the metrics' pages](metrics/README.md) how each metric is computed.

To take a study along as one table: `wattune export STUDY --to csv`, `parquet` or `json`.
"""


_RANKED: Final = f"""One row a trial. `wattune rank STUDY --csv FILE` and `wattune export STUDY --rows trials` have the
same columns. The metadata has objective, constraints and notes. Each metric has a column: the middle of its interval
over the trial's repeats. The other columns are those of a study that is to `{_EXAMPLE[0]}` under
`{_EXAMPLE[1]}`.
"""

_TELEMETRY: Final = """[Telemetry](telemetry.md) says over which time each value holds. A column `<name>_error` beside
one that could not be read has the vendor's code. `Study.dataset` puts `trial` and `simulated` in front. The metadata of
a file says which backend wrote it and whether the values are simulated.
"""


_GROUPS: Final = dict.fromkeys(one.group for one in METRICS.values())
_METRICS: Final = f"""Columns of both tables, and names in `metrics` of `run.json`. Each has a row with its unit on the
page of its group: {", ".join(f"[{name}](metrics/{name}.md)" for name in _GROUPS)}.
`wattune metrics` lists all, with the direction that is better and the tables that each is computed from.
"""


def page() -> str:
    """Returns the text of the page."""
    ranking = rank([], Question.of(_EXAMPLE[0], _EXAMPLE[1]))
    ranked = schema_of(ranking_columns(ranking))
    own = [field for field in ranked if field.name not in METRICS and field.name not in AXES]
    repeats = [field for field in repeats_schema() if field.name not in METRICS and field.name not in AXES]
    parts = [
        _HEAD,
        "## Files of a study\n\nFiles whose name begins with a dot are locks and unfinished files.\n",
        _table(("file", "holds"), [(f"`{name}`", text) for name, text in STUDY_FILES.items()]),
        "Each says its format, 4: JSON and YAML as `format`, Parquet as `wattune.format` in its footer.\n",
        "## Files beside the studies\n",
        _table(("file", "holds"), [(f"`{name}`", text) for name, text in STORAGE_FILES.items()]),
    ]
    for name, facts in OBJECTS.items():
        parts += [f"## {name}\n", _table(("fact", "is"), [(f"`{key}`", text) for key, text in facts.items()])]
    parts += [
        "## candidates.parquet\n",
        _columns(_CANDIDATES),
        "`trial_id` of an equivalent combination is the trial that does the same work.\n",
        f"## ranking.parquet\n\n{_RANKED}",
        _columns(own, {**COLUMNS, **_of_example()}),
        "## One row a repeat\n\n`wattune export STUDY` and `Study.metrics` of Python give what each run measured.\n",
        _columns(repeats),
        "## Axes of a plan\n\nColumns of both tables.\n",
        _table(
            ("column", "type", "is"),
            [
                (
                    f"`{name}`",
                    _type(ranked.field(name).type),
                    f"{axis.meaning[:1].upper()}{axis.meaning[1:]}. Neutral: `{axis.neutral}`.",
                )
                for name, axis in AXES.items()
            ],
        ),
        f"## Metrics\n\n{_METRICS}",
        "## spans.parquet\n",
        _columns(SPANS),
        "## kernels.parquet\n",
        _columns(KERNELS),
        f"## Telemetry\n\n{_TELEMETRY}",
    ]
    for tier, schema in TELEMETRY.items():
        parts += [f"### {tier}.parquet\n", _columns(schema, {**_sources(tier), **COLUMNS})]
    return "\n".join(parts)


def _of_example() -> dict[str, str]:
    objective, bound = _EXAMPLE[0].split()[1], _EXAMPLE[1]
    return {
        f"{objective} low": "Lower end of the objective's 95 % interval.",
        f"{objective} high": "Upper end.",
        f"{objective} interval": "Source of the interval: `repeats`, `pooled`, `prior` or `steps`.",
        f"{objective} runs": "Runs behind it.",
        f"{bound}: got": "Value of the repeat that comes closest to the bound.",
        f"{bound}: bound": "The bound.",
        f"{bound}: slack": "Distance on the allowed side, negative where it is broken.",
        f"{bound}: holds_probability": "Probability that the next run keeps the bound.",
        f"{bound}: verdict": "`holds`, `undecided` or `breaks`.",
    }


def _sources(tier: str) -> dict[str, str]:
    """Reads the source of each column of a tier from telemetry.md, which another test holds to the code."""
    below = PAGE.with_name("telemetry.md").read_text().split(f"\n### {tier}\n", 1)[1].split("\n#", 1)[0]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in below.splitlines() if line[:1] == "|"]
    return {row[0].strip("`"): f"Source: {row[2]}." for row in cells[2:]}


def _columns(fields: Sequence[pa.Field] | pa.Schema, meanings: Mapping[str, str] = COLUMNS) -> str:
    rows = []
    for field in fields:
        about = {key.decode(): value.decode() for key, value in (field.metadata or {}).items()}
        meaning = meanings[field.name]
        meaning += " A counter, ever rising." if about.get("kind") == "cumulative" else ""
        rows.append((f"`{field.name}`", _type(field.type), about.get("unit") or "–", meaning))
    return _table(("column", "type", "unit", "is"), rows)


def _type(kind: pa.DataType) -> str:
    return (
        "string" if pa.types.is_dictionary(kind) else str(kind).replace("<", " of ").replace("item: ", "").rstrip(">")
    )


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
