"""Functions behind the command line and `import wattune`: plan a space, run a study, rank it, report it, send it on."""

from wattune.api.estimates import estimate, fit
from wattune.api.recordings import analyze, calibrate, record, send_recording
from wattune.api.results import compare, figures, rank, rank_recordings, report, sync
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
    "calibrate",
    "catalog",
    "compare",
    "estimate",
    "figures",
    "find_recording",
    "fit",
    "load_study",
    "plan",
    "preview",
    "rank",
    "rank_recordings",
    "record",
    "report",
    "run_study",
    "send_recording",
    "sync",
]
