"""Functions behind the command line and `import wattune`: plan a space, run a study, rank it, report it, send it on."""

from wattune.api.decisions import frontier, suggest
from wattune.api.estimates import beside_result, estimate, fit
from wattune.api.exports import export
from wattune.api.recordings import analyze, calibrate, calibrate_links, record, send_recording
from wattune.api.reports import figures, report
from wattune.api.results import compare, rank, rank_recordings, sync
from wattune.api.runs import RETRIABLE, StudyOutcome, preview, run_study
from wattune.api.spaces import Space, StudyPlan, catalog, plan
from wattune.api.studies import Study, Trial, find_recording, load_study

__all__ = [
    "RETRIABLE",
    "Space",
    "Study",
    "StudyOutcome",
    "StudyPlan",
    "Trial",
    "analyze",
    "beside_result",
    "calibrate",
    "calibrate_links",
    "catalog",
    "compare",
    "estimate",
    "export",
    "figures",
    "find_recording",
    "fit",
    "frontier",
    "load_study",
    "plan",
    "preview",
    "rank",
    "rank_recordings",
    "record",
    "report",
    "run_study",
    "send_recording",
    "suggest",
    "sync",
]
