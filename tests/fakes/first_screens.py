"""Reports of every kind of answer, and the parts that the first screen of each has."""

import tarfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import yaml
from made_report import DOCUMENT, POWER, trial
from small_study import make_study
from specs import store_run
from stored_tables import DATA, results_of

from wattune.api.reports import report
from wattune.ranking.sources import Source, rank_sources
from wattune.report.page import render_report
from wattune.run import Recorded, Run, RunStatus
from wattune.storage.study import StudyFolder
from wattune.trial import TrialSpec

DEMO = Path(__file__).parents[1] / "golden" / "demo" / "study.tar.xz"
TABLES = ("moe_ep_h200x2", "moe_ep_h200x4", "dense_llama_h200x2", "dense_llama_1b_h200", "dense_gpt_1b_h200")


def written(storage: Path, document: dict[str, Any], pairs: Iterable[tuple[TrialSpec, Run]]) -> str:
    """The report of a study of these results, whose telemetry is gone."""
    study = StudyFolder.create(storage, document.get("study", "own"), document)
    for spec, run in pairs:
        store_run(study, spec, replace(run, end_wall_ns=run.start_wall_ns + 20_000_000_000))
    return report(study).read_text()


def of_table(table: str) -> Callable[[Path], str]:
    """The report of a stored study by the question that it asked."""
    space = yaml.safe_load((DATA / f"{table}.yaml").read_text())
    return lambda storage: written(storage, space, results_of(table))


def made(*pairs: tuple[TrialSpec, Run]) -> Callable[[Path], str]:
    """The report of made-up trials under a bound on power."""
    asked = {**DOCUMENT, "objective": "maximize tokens_per_s", "constraints": [f"{POWER} <= 2750"]}
    return lambda storage: written(storage, asked, pairs)


def command_without_steps(storage: Path) -> str:
    """The report of a study of a user's program of which no step was seen."""
    steps = ("step_time_s", "tokens_per_s", "energy_per_token_j", "energy_per_step_j")
    asked = {"objective": "minimize node_device_power_mean_w", "constraints": ["memory_peak_bytes <= 130e9"]}
    return written(storage, asked, results_of("own_torchtitan_h200", without=steps))


def demo(storage: Path) -> str:
    """The report of the tutorial's study, whose sensors are simulated."""
    with tarfile.open(DEMO) as stored:
        stored.extractall(storage, filter="data")
    return report(StudyFolder(storage / "cpu_smoke")).read_text()


def recordings(_storage: Path) -> str:
    """A page of recordings, which have no plan and no study."""
    runs = [
        Run(
            trial_id=name,
            repeat=0,
            status=RunStatus.COMPLETED,
            metrics={"total_energy_j": energy_j, "window_s": 10.0, POWER: 2500.0},
            quality="publishable",
            tags={"simulated": "false"},
            recorded=Recorded(place=f"/s/{name}", command=("python", "train.py", "--lr", name), exit_code=0),
        )
        for name, energy_j in (("first", 1500.0), ("second", 1000.0))
    ]
    return render_report("recordings", {}, rank_sources([Source.of_recordings(runs)]), [])


FIRST_SCREENS: Final[dict[str, tuple[Callable[[Path], str], Sequence[str]]]] = {
    **{table: (of_table(table), (".figure", ".next", ".picture", ".meters")) for table in TABLES},
    "with its telemetry": (lambda storage: report(make_study(storage)).read_text(), (".figure", ".picture", ".meters")),
    "simulated": (demo, (".banner", ".figure", ".picture", ".meters")),
    "tie": (made(trial(1, 40_000.0), trial(2, 40_010.0)), (".figure", ".next", ".picture", ".meters")),
    "undecided": (made(trial(1, 40_000.0, 2745.0)), (".figure", ".next", ".picture", ".meters")),
    "nothing feasible": (made(trial(1, 40_000.0, 3500.0)), (".picture",)),
    "one trial": (made(trial(1, 40_000.0)), (".figure", ".picture", ".meters")),
    "command without steps": (command_without_steps, (".figure", ".next", ".picture", ".meters")),
    "recordings": (recordings, (".figure", ".picture")),
    "nothing measured": (made(), ()),
}
"""A function that writes the page, and the parts that it has, by the kind of answer."""
