"""Trackers of a study beside MLflow, by the option that asks for each."""

from importlib.util import find_spec
from pathlib import Path

from wattune.access import refused
from wattune.errors import PlanError
from wattune.masking import without_secrets
from wattune.storage.files import named_path, nearest_existing
from wattune.tracking.copies import WithReceipts
from wattune.tracking.tensorboard import TensorBoardTracker
from wattune.tracking.tracker import Tracker
from wattune.tracking.weights_and_biases import WandbTracker, has_key, is_offline, server

StudyTracker = Tracker | WithReceipts
"""Sends one study to one store. A later call sends what an earlier one could not, and nothing twice."""


def trackers_of(study_name: str, storage: Path, wandb: str | None, tensorboard: str | None) -> dict[str, StudyTracker]:
    """Returns the trackers that are asked for, by option; nothing is written and nobody asked.

    `wandb` is a `PROJECT` or `ENTITY/PROJECT` of Weights & Biases, `tensorboard` a folder. Raises `PlanError`: a
    library is not installed, a name is none, or a folder cannot be written to.
    """
    problems, found = [], dict[str, StudyTracker]()
    if wandb is not None:
        if find_spec("wandb") is None:
            problems.append("--wandb: wandb is not installed; pip install 'wattune[wandb]', or leave --wandb out")
        if not all(wandb.split("/")) or wandb.count("/") > 1:
            problems.append(f'--wandb: got "{wandb}", allowed: PROJECT or ENTITY/PROJECT')
        found["wandb"] = WandbTracker(wandb, study_name, storage)
    if tensorboard is not None:
        if find_spec("tensorboardX") is None:
            problems.append("--tensorboard: tensorboardX is not installed; pip install tensorboardX")
        folder = named_path(tensorboard).absolute() / study_name
        if not tensorboard.strip():
            problems.append(f'--tensorboard: got "{tensorboard}", allowed: a folder')
        elif not nearest_existing(folder)[1]:
            problems.append(f"--tensorboard: {folder} cannot be written; give a folder that can")
        found["tensorboard"] = TensorBoardTracker(tensorboard, study_name)
    if problems:
        raise PlanError("\n".join(problems))
    return found


def out_of_reach(tracking_uri: str | None = None, wandb: str | None = None) -> list[str]:
    """Returns why the servers that results will be sent to cannot be reached now, a line each; none where they can.

    A study runs all the same, and `wattune sync` sends its results later.
    """
    found = {}
    if tracking_uri is not None and tracking_uri.startswith("http"):
        found[f"MLflow: {tracking_uri}"] = _unreached(tracking_uri)
    if wandb is not None and not is_offline():
        no_key = "there is no key: run `wandb login`, or set WANDB_API_KEY or WANDB_MODE=offline"
        found[f"Weights & Biases: {server()}"] = _unreached(server()) or ("" if has_key() else no_key)
    return [
        f"{without_secrets(place)}: {why}; results stay in the study folder, `wattune sync` sends them"
        for place, why in found.items()
        if why
    ]


def _unreached(address: str) -> str:
    why = refused(address)
    return why and f"cannot be reached ({why})"
