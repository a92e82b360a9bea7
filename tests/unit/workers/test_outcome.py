"""Outcomes of ranks are plain data, which processes without torch can read."""

import pickle
import subprocess
import sys

from wattune.run import RunStatus
from wattune.workers.outcome import OutOfMemory, RankOutcome

GIB = 2**30


def test_where_memory_ran_out_is_said_with_what_is_known() -> None:
    memory = {"allocated_bytes": GIB, "reserved_bytes": 2 * GIB, "reserved_peak_bytes": 3 * GIB, "total_bytes": 4 * GIB}
    known = OutOfMemory(rank=3, phase="forward", message="no more", requested_bytes=5 * GIB, **memory)
    assert str(known) == (
        "rank 3 in forward, 5,368,709,120 bytes asked for, 1,073,741,824 allocated, 2,147,483,648 reserved of "
        "4,294,967,296: no more"
    )
    assert str(OutOfMemory(rank=0, phase="build", message="no more")) == "rank 0 in build: no more"


def test_memory_that_is_free_in_pieces_too_small_is_a_failure_of_its_own_name() -> None:
    """Memory that the allocator keeps for later counts as free; a device that is full has none."""

    def failed(allocated_bytes: int, requested_bytes: int | None) -> OutOfMemory:
        full = {"reserved_bytes": 80 * GIB, "reserved_peak_bytes": 80 * GIB, "total_bytes": 80 * GIB}
        asked = {"allocated_bytes": allocated_bytes, "requested_bytes": requested_bytes}
        return OutOfMemory(rank=0, phase="forward", message="no", **asked, **full)

    fragmented = failed(63 * GIB, 3 * GIB)
    assert fragmented.is_fragmentation and str(fragmented).startswith("fragmentation, rank 0 in forward, 3,221,225,472")
    assert not failed(78 * GIB, 3 * GIB).is_fragmentation
    assert not failed(63 * GIB, None).is_fragmentation
    assert not OutOfMemory(rank=0, phase="build", message="no", requested_bytes=1).is_fragmentation


def test_an_outcome_is_read_and_a_study_is_run_by_processes_without_torch() -> None:
    """Torch takes the study's own process, and Tune's for each lane, two seconds and 200 MB.

    Likewise those of the actor that holds lanes, of Train's controller, and of a command's worker.
    """
    sent = pickle.dumps(RankOutcome(rank=1, status=RunStatus.COMPLETED, losses=(1.5,)))
    code = (
        "import pickle, sys\n"
        f"print(pickle.loads({sent!r}).losses)\n"
        "import wattune.orchestrate.run_study, wattune.orchestrate.lanes.command_worker\n"
        "from ray.train import ScalingConfig\n"
        "from wattune.orchestrate.lanes.train_runs import _of_commands, _of_ranks\n"
        "for trainer in (_of_commands, lambda: _of_ranks(None, None, ())):\n"
        "    run = trainer()(train_loop_config={}, scaling_config=ScalingConfig(num_workers=2))\n"
        "    run._get_train_func(), run._create_default_callbacks()\n"
        "print('torch' in sys.modules)"
    )
    seen = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=100)
    assert seen.stdout.split("\n")[:2] == ["(1.5,)", "False"]
