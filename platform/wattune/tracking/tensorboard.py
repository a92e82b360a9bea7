"""Writes a study for TensorBoard: a folder for every repeat of a trial, with its parameters, metrics and curves.

The writer is tensorboardX, which comes with Ray Tune. It needs no TensorBoard, which only shows the folder.
"""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from wattune.access import Access
from wattune.run import Run
from wattune.storage.files import named_path
from wattune.tracking.copies import WithReceipts
from wattune.tracking.run import Curves, run_points, shown_params, shown_tags
from wattune.trial import TrialSpec


class TensorBoardTracker(WithReceipts):
    """Sends one study to a folder that `tensorboard --logdir` shows."""

    def __init__(self, folder: str, study_name: str) -> None:
        """Names the folder of all studies, and a study; nothing is written before the first call."""
        self.folder = named_path(folder).absolute() / study_name
        access = Access(str(self.folder), "make it writable or give --tensorboard another folder")
        super().__init__(study_name, access, self.folder / "sent.json")

    def send_trial(self, name: str, spec: TrialSpec, result: Run, series: Curves) -> None:
        """Writes a trial's folder, in the place of one that is there.

        Metrics stand at step 0 and the time of the trial's end. Curves are named `trace/...`, a step a second.
        """
        from tensorboardX.summary import hparams, scalar, text

        begun = self._begin(name)
        with _events(begun) as file:
            for one in hparams(shown_params(spec), dict(result.metrics)):
                file.add_summary(one)
            for metric, value, wall_ms, step in run_points(result, series):
                file.add_summary(scalar(metric, value), step, wall_ms / 1000)
            file.add_summary(text("trial", _table({"label": spec.label, **shown_tags(spec, result)})), 0)
        self._put(begun, name)

    def send_study(self, facts: Mapping[str, str], document: Mapping[str, Any], ranking: Mapping[str, Any]) -> None:
        """Writes the study's goal and answer as text, in the place of what was there."""
        from tensorboardX.summary import text

        begun = self._begin("study")
        with _events(begun) as file:
            file.add_summary(text("answer", _table(facts)), 0)
            for name, data in (("space", document), ("ranking", ranking)):
                file.add_summary(text(name, f"```\n{json.dumps(data, indent=1)}\n```"), 0)
        self._put(begun, "study")

    def _begin(self, name: str) -> Path:
        """Returns an empty folder, which becomes one of this name once it is whole."""
        begun = self.folder / f".{name}.new"
        shutil.rmtree(begun, ignore_errors=True)
        begun.mkdir(parents=True)
        return begun

    def _put(self, begun: Path, name: str) -> None:
        shutil.rmtree(self.folder / name, ignore_errors=True)
        begun.replace(self.folder / name)


def _events(folder: Path) -> Any:
    from contextlib import closing

    from tensorboardX import FileWriter

    return closing(FileWriter(str(folder)))


def _table(facts: Mapping[str, str]) -> str:
    rows = [f"| {name} | {' '.join(text.split()).replace('|', '&#124;')} |" for name, text in facts.items()]
    return "\n".join(["| | |", "|---|---|", *rows])
