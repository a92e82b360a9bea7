"""View of a study on MLflow's own pages: chosen columns, and charts that compare its trials.

MLflow keeps a shared view as JSON in a tag of the experiment and opens it by its key in the address. This module writes
such a tag. The names in it are the UI's own (state of its experiment page, MLflow 3.17.2). A UI ignores names that it
does not know.
"""

import base64
import json
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, Final
from urllib.parse import quote

from wattune.objective import Constraint, Objective
from wattune.plans.axes import AXES
from wattune.units import with_unit

VIEW_KEY: Final = "wattune"
VIEW_TAG: Final = f"mlflow.sharedViewState.{VIEW_KEY}"
NOTE_TAG: Final = "mlflow.note.content"

MOST_RUNS: Final = 100
"""Most runs that a chart of the view compares."""

_ALWAYS_SHOWN: Final = (
    "tokens_per_s",
    "mfu_frac",
    "energy_per_token_j",
    "node_device_power_peak_1s_w",
    "throttle_frac",
    "device_temp_max_c",
)
"""Metrics that an operator wants to see for any objective."""

_LISTS: Final = ("model", "cluster", "engine")
"""Keys of a search space that are dimensions if they are lists."""


def view_path(experiment_id: str) -> str:
    """Returns the path of the view, after the server's address."""
    return f"#/experiments/{experiment_id}/runs?compareRunsMode=CHART&viewStateShareKey={VIEW_KEY}"


def compare_path(experiment_id: str, run_ids: Sequence[str]) -> str:
    """Returns the path of MLflow's classic comparison of runs, a named column each, after the server's address."""
    runs, experiments = (quote(json.dumps(list(ids))) for ids in (run_ids, [experiment_id]))
    return f"#/compare-runs?runs={runs}&experiments={experiments}"


def view_tags(document: Mapping[str, Any], objective: Objective, constraints: Sequence[Constraint]) -> dict[str, str]:
    """Returns tags of an experiment that arrange its page for comparison, from its space with every default."""
    varied = dimensions(document)
    bounded = [name for bound in constraints for name in (bound.metric, bound.limit_metric) if name]
    metrics = list(dict.fromkeys([objective.metric, *bounded, *_ALWAYS_SHOWN]))
    columns = [
        "attributes.`Run Name`",
        *(f"metrics.`{name}`" for name in metrics),
        *(f"params.`{name}`" for name in varied),
        *(f"tags.`{name}`" for name in ("status", "quality", "simulated")),
    ]
    first = bounded[:1] or ["energy_per_token_j"]
    charts = [
        _chart("PARALLEL", selectedParams=varied, selectedMetrics=[*first, objective.metric], showAllRuns=True),
        _chart("SCATTER", xaxis=_axis(first[0]), yaxis=_axis(objective.metric)),
        *(
            _chart("BAR", metricKey=name, displayName=with_unit(name))
            for name in dict.fromkeys([objective.metric, *first])
        ),
    ]
    # The flat state of the page: first the search, then the display.
    state = {
        "searchFilter": "tags.trial_id LIKE '%'",  # not the study's own run
        "orderByKey": f"metrics.`{objective.metric}`",
        "orderByAsc": not objective.maximize,
        "startTime": "ALL",
        "lifecycleFilter": "Active",
        "datasetsFilter": [],
        "modelVersionFilter": "All Runs",
        "selectedColumns": columns,
        "runsExpanded": {},
        "runsPinned": [],
        "runsHidden": [],
        "runsHiddenMode": "SHOWALL",
        "runsVisibilityMap": {},
        "compareRunCharts": charts,
        "compareRunSections": [
            # In two columns: in MLflow's three the axes of parallel coordinates lie on each other.
            {"uuid": "wattune", "name": "Objective and constraints", "display": True, "isReordered": True, "columns": 2}
        ],
        "viewMaximized": False,
        "runListHidden": False,
        "isAccordionReordered": True,
        "groupBy": None,
        "autoRefreshEnabled": True,
        "useGroupedValuesInCharts": True,
        "hideEmptyCharts": True,
        "globalLineChartConfig": {"xAxisKey": "time", "lineSmoothness": 0, "selectedXAxisMetricKey": ""},
    }
    # On one line: it is all that MLflow shows of a note before it is opened.
    held = ", ".join(f"`{bound}`" for bound in constraints) or "no constraints"
    note = (
        f"**{objective}** under {held}\n\n"
        "One run is the study, every other run is a repeat of a trial. Filter with tags, such as "
        '`tags.status = "completed" and tags.quality = "publishable"`, `tags.simulated = "false"` or '
        f'`tags.engine = "torch"`. For charts that compare trials add `?compareRunsMode=CHART&viewStateShareKey='
        f"{VIEW_KEY}` to this page's address. MLflow orders by single figures; `wattune rank` uses intervals, bounds "
        "and feasibility."
    )
    # The UI's own format of a long state: a tag of an experiment holds 5000 characters.
    packed = base64.b64encode(zlib.compress(json.dumps(state).encode())).decode()
    return {VIEW_TAG: f"deflate;{packed}", NOTE_TAG: note}


def dimensions(document: Mapping[str, Any]) -> list[str]:
    """Returns the parameters that a study varies, in the search space's order."""
    space, workload, flags = (document.get(name) or {} for name in ("space", "workload", "flags"))
    plans = document.get("plans") or ()  # what one of several plans says, the others say otherwise
    spoken = {name for plan in plans for name in plan if len(plans) > 1}
    varied = {name for entry in (document, workload, space) for name, value in entry.items() if _is_varied(value)}
    varied |= spoken
    listed = [*_LISTS, *workload, *(name for name in AXES if name in space or name in spoken)]
    of_plans = dict.fromkeys(name for plan in plans for name in plan.get("flags", ()))
    own = [f"flags.{name}" for name in {**flags, **of_plans} if name in of_plans or _is_varied(flags[name])]
    return [*(name for name in listed if name in varied), *own]


def _is_varied(value: Any) -> bool:
    return isinstance(value, list) and len(value) > 1


def _chart(kind: str, **settings: Any) -> dict[str, Any]:
    name = "-".join([kind.lower(), *(str(value) for value in settings.values() if isinstance(value, str))])
    return {
        "type": kind,
        "uuid": f"wattune-{name}",
        "metricSectionId": "wattune",
        "deleted": False,
        "isGenerated": False,
        "runsCountToCompare": MOST_RUNS,
        **settings,
    }


def _axis(metric: str) -> dict[str, str]:
    return {"key": metric, "type": "METRIC"}
