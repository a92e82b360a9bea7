"""Trials in study folders, as files, without running any."""

from pathlib import Path

import pyarrow as pa
from specs import trial_spec

from wattune.plans.axes import Plan
from wattune.run import Run, RunStatus
from wattune.schema import SPANS
from wattune.storage.study import StudyFolder, TrialFolder
from wattune.trial import TrialSpec

DOCUMENT = {"study": "mine", "objective": "maximize tokens_per_s", "constraints": []}
SPEC = trial_spec(on="1x2 h200_sxm", seq_len=64, batch=4, plan=Plan(tp=2))


def result_of(status: RunStatus = RunStatus.COMPLETED, repeat: int = 0, tokens_per_s: float = 1.0) -> Run:
    return Run(
        trial_id=SPEC.trial_id,
        repeat=repeat,
        status=status,
        reason="",
        metrics={"tokens_per_s": tokens_per_s},
        tags={},
        start_wall_ns=1,
        end_wall_ns=2,
    )


def write_trial(folder: TrialFolder, spec: TrialSpec, result: Run) -> TrialFolder:
    """Writes a trial as its run leaves it, and a file that a crash left."""
    folder.write_spec(spec)
    folder.write_spans(SPANS.empty_table())
    folder.write_telemetry("node0", {"slow": pa.table({"device": ["gpu0"], "energy_j": [1.0]})}, {"closed": True})
    folder.write_result(result)
    (folder.path / ".run.json.17").write_text("left by a crash")
    return folder


def measured(study: StudyFolder, result: Run) -> TrialFolder:
    """A trial of the study, as files."""
    return write_trial(study.trial(result.trial_id, result.repeat), SPEC, result)


def contents(folder: Path) -> dict[str, bytes]:
    """Returns the files below a folder with their content, without hidden ones."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files if not path.name.startswith(".")}
