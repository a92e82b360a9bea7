"""Functions behind the command line and `import wattune`: plan a space, run a study, rank it, report it, send it on.

Each is loaded at its first use, with what it needs: a verb that reads does not wait for what only a run needs.
"""

from typing import TYPE_CHECKING, Final

from wattune.lazy_names import lazy_names

if TYPE_CHECKING:
    from wattune.api.decisions import frontier, suggest
    from wattune.api.estimates import beside_result, estimate, fit, forecast, stage_clocks
    from wattune.api.exports import export
    from wattune.api.placement import place, slot_map, verify
    from wattune.api.projections import project
    from wattune.api.reports import figures, report
    from wattune.api.results import analyze, compare, rank, send_recording, sync
    from wattune.api.runs import RETRIABLE, StudyOutcome, preview, run_study
    from wattune.api.spaces import Space, StudyPlan, catalog, plan, scale
    from wattune.api.studies import Study, Trial, find_recording, load_study
    from wattune.calibration.links import calibrate_links
    from wattune.calibration.run import calibrate
    from wattune.foreign.recording import import_logs
    from wattune.recording.recorder import record

_HOMES: Final = {
    "wattune.api.decisions": "frontier suggest",
    "wattune.api.estimates": "beside_result estimate fit forecast stage_clocks",
    "wattune.api.exports": "export",
    "wattune.api.placement": "place slot_map verify",
    "wattune.api.projections": "project",
    "wattune.api.reports": "figures report",
    "wattune.api.results": "analyze compare rank send_recording sync",
    "wattune.api.runs": "RETRIABLE StudyOutcome preview run_study",
    "wattune.api.spaces": "Space StudyPlan catalog plan scale",
    "wattune.api.studies": "Study Trial find_recording load_study",
    "wattune.calibration.links": "calibrate_links",
    "wattune.calibration.run": "calibrate",
    "wattune.foreign.recording": "import_logs",
    "wattune.recording.recorder": "record",
}

__getattr__, __dir__ = lazy_names(__name__, _HOMES)
