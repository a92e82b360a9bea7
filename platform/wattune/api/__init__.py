"""Functions behind the command line and `import wattune`: plan a space, run a study, rank it, report it, send it on.

Each is loaded at its first use, with what it needs: a verb that reads does not wait for what only a run needs.
"""

from typing import TYPE_CHECKING, Final

from wattune.lazy_names import lazy_names

if TYPE_CHECKING:
    from wattune.api.decisions import frontier as frontier
    from wattune.api.decisions import suggest as suggest
    from wattune.api.estimates import beside_result as beside_result
    from wattune.api.estimates import estimate as estimate
    from wattune.api.estimates import fit as fit
    from wattune.api.estimates import forecast as forecast
    from wattune.api.estimates import stage_clocks as stage_clocks
    from wattune.api.exports import export as export
    from wattune.api.placement import place as place
    from wattune.api.placement import slot_map as slot_map
    from wattune.api.placement import verify as verify
    from wattune.api.projections import project as project
    from wattune.api.recordings import analyze as analyze
    from wattune.api.recordings import send_recording as send_recording
    from wattune.api.reports import figures as figures
    from wattune.api.reports import report as report
    from wattune.api.results import compare as compare
    from wattune.api.results import rank as rank
    from wattune.api.results import sync as sync
    from wattune.api.runs import RETRIABLE as RETRIABLE
    from wattune.api.runs import StudyOutcome as StudyOutcome
    from wattune.api.runs import preview as preview
    from wattune.api.runs import run_study as run_study
    from wattune.api.spaces import Space as Space
    from wattune.api.spaces import StudyPlan as StudyPlan
    from wattune.api.spaces import catalog as catalog
    from wattune.api.spaces import plan as plan
    from wattune.api.spaces import scale as scale
    from wattune.api.studies import Study as Study
    from wattune.api.studies import Trial as Trial
    from wattune.api.studies import find_recording as find_recording
    from wattune.api.studies import load_study as load_study
    from wattune.calibration.links import calibrate_links as calibrate_links
    from wattune.calibration.run import calibrate as calibrate
    from wattune.foreign.recording import import_logs as import_logs
    from wattune.recording.recorder import record as record

_HOMES: Final = {
    "wattune.api.decisions": "frontier suggest",
    "wattune.api.estimates": "beside_result estimate fit forecast stage_clocks",
    "wattune.api.exports": "export",
    "wattune.api.placement": "place slot_map verify",
    "wattune.api.projections": "project",
    "wattune.api.recordings": "analyze send_recording",
    "wattune.api.reports": "figures report",
    "wattune.api.results": "compare rank sync",
    "wattune.api.runs": "RETRIABLE StudyOutcome preview run_study",
    "wattune.api.spaces": "Space StudyPlan catalog plan scale",
    "wattune.api.studies": "Study Trial find_recording load_study",
    "wattune.calibration.links": "calibrate_links",
    "wattune.calibration.run": "calibrate",
    "wattune.foreign.recording": "import_logs",
    "wattune.recording.recorder": "record",
}

__getattr__, __dir__ = lazy_names(__name__, _HOMES)
