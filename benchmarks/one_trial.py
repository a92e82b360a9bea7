"""One trial on lanes, without a study: runs it and waits for its result."""

import time
from collections.abc import Callable

import ray
from ray.exceptions import RayActorError

from wattune.orchestrate.attempt import Attempt
from wattune.orchestrate.cluster import Cluster
from wattune.orchestrate.failures import Cause, Failure
from wattune.orchestrate.lanes.actor import DONE_METRIC
from wattune.orchestrate.lanes.client import Lanes
from wattune.orchestrate.lanes.ray_errors import KEEPER_ENDED, KEEPER_REMEDY, ray_words
from wattune.orchestrate.run_trial import conclude
from wattune.run import Run, RunStatus
from wattune.storage.study import TrialFolder


def run_trial(attempt: Attempt, cluster: Cluster, lanes: Lanes, free: Callable[[], None] = lambda: None) -> Run:
    """Runs one repeat of one trial on the first nodes that fit it; returns the result it left in the study folder.

    `free` is called where its nodes are free. Whatever fails becomes the trial's status.
    """
    folder = TrialFolder(attempt.folder)
    try:
        is_done = ray.get(lanes.drive(attempt, cluster))[DONE_METRIC]
        free()
        if not is_done:
            ray.get(lanes.concluded(attempt))
    except RayActorError as error:
        lost = Failure(Cause.HEAD, f"{KEEPER_ENDED} ({ray_words(error)}); {KEEPER_REMEDY}")
        now_ns, status = time.time_ns(), RunStatus.CRASHED
        result = Run(
            trial_id=attempt.trial_id, repeat=attempt.repeat, status=status, start_wall_ns=now_ns, end_wall_ns=now_ns
        )
        conclude(folder, lost.of(result))
    found = folder.result()
    assert found is not None, "whatever ends a trial leaves a result"
    return found
