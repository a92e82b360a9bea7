"""The reason of a command's failure: its rank, its words, its kind."""

import pytest

from wattune.run import RunStatus
from wattune.workers.command.causes import HOST_MEMORY, KILLED, PLAN, SURROUNDINGS
from wattune.workers.command.failure import INVALID_FLAG, ending, failure

TORCHRUN = """
[rank1]: Traceback (most recent call last):
[rank1]:   File "/w/train.py", line 4, in <module>
[rank1]:     raise ValueError("of rank 1")
[rank1]: ValueError: of rank 1
[rank0]: Traceback (most recent call last):
[rank0]: torch.distributed.DistBackendError: NCCL error: remote process exited
E0101 00:00:00.000000 1 torch/distributed/elastic/multiprocessing/api.py:882] failed (exitcode: 1) local_rank: 1
Traceback (most recent call last):
  File "/v/bin/torchrun", line 8, in <module>
    raise ChildFailedError(
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============================================================
train.py FAILED
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2026-01-01_00:00:00
  host      : vm
  rank      : 1 (local_rank: 1)
  exitcode  : 1 (pid: 77)
  error_file: <N/A>
============================================================
""".splitlines()


def test_a_rank_of_thousands_of_digits_is_none():
    lines = [line.replace("rank      : 1 ", f"rank      : {'1' * 5000} ") for line in TORCHRUN]
    lines = [line.replace("exitcode  : 1 ", f"exitcode  : {'1' * 5000} ") for line in lines]
    for said in (lines, [f"[rank{'1' * 5000}]: ValueError: x", *lines]):
        assert failure(1, said, {})[0].status is RunStatus.CRASHED


def test_torchrun_names_the_rank_that_failed_first():
    assert failure(1, TORCHRUN, {}) == (PLAN, "exit code 1: rank 1: ValueError: of rank 1")


def test_a_rank_that_a_signal_ended_is_named_with_it():
    lines = [line.replace("exitcode  : 1", "exitcode  : -11") for line in TORCHRUN if not line.startswith("[rank")]
    assert failure(1, lines, {}) == (PLAN, "exit code 1: rank 1, ended by SIGSEGV")


def test_a_rank_that_somebody_killed_is_told_from_one_that_failed():
    killed = [line.replace("exitcode  : 1", "exitcode  : -9") for line in TORCHRUN]
    aborted = [line.replace("exitcode  : 1", "exitcode  : -6") for line in TORCHRUN]
    assert failure(1, killed, {}) == (KILLED, "killed from outside: rank 1, ended by SIGKILL")
    assert failure(-15, [], {}) == (KILLED, "killed from outside: ended by SIGTERM")
    for code, lines in ((1, TORCHRUN), (1, aborted), (-6, []), (None, [])):
        assert failure(code, lines, {})[0] is PLAN
    peer = {0: "RuntimeError: Connection closed by peer"}
    assert failure(1, killed, peer) == (KILLED, "killed from outside: rank 1, ended by SIGKILL")
    raised = {1: "ValueError: of rank 1"}
    assert failure(1, killed, raised)[0] is PLAN  # its launcher ended what was left of it


def test_what_a_process_told_itself_is_believed_first():
    told = {3: "KeyError: 'layers' at model.py:7", 0: "RuntimeError: peer"}
    assert failure(1, TORCHRUN, told) == (PLAN, "exit code 1: rank 3: KeyError: 'layers' at model.py:7")


@pytest.mark.parametrize(
    "line",
    [
        "train.py: error: unrecognized arguments: --tensor-parallel 2",
        "train.py: error: argument --lr: invalid float value: 'fast'",
        "train.py: error: the following arguments are required: --data",
        "ValueError: Some specified arguments are not used by the HfArgumentParser: ['--bath', '2']",
        "Error: No such option: --bath",
        "[rank0]: Unrecognized options: --model.flavour",
    ],
)
def test_an_argument_that_a_program_does_not_take_is_told_from_other_failures(line):
    kind, reason = failure(2, ["usage: train.py [-h]", line], {})
    assert kind is PLAN
    assert reason.startswith(f"{INVALID_FLAG}: ") and reason.endswith("(exit code 2)")


@pytest.mark.parametrize(
    "line",
    [
        "[rank2]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
        "RuntimeError: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "OSError: [Errno 12] Cannot allocate memory",
        "MemoryError",
        "terminate called after throwing an instance of 'std::bad_alloc'",
        "RuntimeError: [enforce fail at alloc_cpu.cpp:118] . DefaultCPUAllocator: can't allocate memory",
    ],
)
def test_memory_that_ran_out_is_a_status_of_its_own(line):
    assert failure(1, ["step 1", line], {})[0].status is RunStatus.OUT_OF_MEMORY


def test_memory_that_the_kernel_or_a_process_says_ran_out_counts():
    killed = "the host's memory ran out: ended by SIGKILL; the kernel ended 1 process(es) for memory"
    assert failure(-9, [], {}, num_oom_kills=1) == (HOST_MEMORY, killed)
    assert failure(-9, [], {}, starved=True)[0] is HOST_MEMORY
    told = {1: "OutOfMemoryError: 20 GiB"}
    kind, reason = failure(1, [], told)
    assert (kind.status, reason) == (RunStatus.OUT_OF_MEMORY, "exit code 1: rank 1: OutOfMemoryError: 20 GiB")


def test_processes_of_others_that_the_kernel_ended_do_not_count():
    assert failure(1, ["ValueError: of mine"], {}, num_oom_kills=1)[0] is PLAN
    assert failure(-15, [], {}, num_oom_kills=1)[0] is KILLED
    told = {0: "AssertionError: set recompute, or you run out of memory"}
    assert failure(1, [], told)[0] is PLAN


def test_an_exception_is_judged_by_the_one_it_was_raised_for():
    said = "RuntimeError: the run failed"
    caused = "The above exception was the direct cause of the following exception:"
    during = "During handling of the above exception, another exception occurred:"
    full, absent = "OSError: [Errno 28] No space left on device", "ModuleNotFoundError: No module named 'apex'"
    for first, link, kind in ((full, caused, SURROUNDINGS), (full, during, SURROUNDINGS), (absent, during, PLAN)):
        traceback = ["Traceback (most recent call last):", "  File"]
        printed = [*traceback, first, "", link, "", *traceback, said]
        found, reason = failure(1, printed, {0: f"{said} (in f, a.py:1)"})
        assert found is kind and said in reason and (first in reason) == (kind is SURROUNDINGS)


def test_words_of_memory_in_a_run_that_had_other_trouble_do_not_decide_flags():
    lines = ["error: argument --oom: invalid choice: 'out of memory'"]
    assert failure(2, lines, {})[1].startswith(INVALID_FLAG)


def test_endings_have_names():
    assert [ending(code) for code in (3, 137, -15, -64, None)] == [
        "exit code 3",
        "exit code 137, as SIGKILL gives it",
        "ended by SIGTERM",
        "ended by SIGRTMAX",
        "its end was not seen",
    ]
    assert failure(4, ["", "  "], {})[1] == "exit code 4, without a word"
    assert failure(4, ["last words"], {})[1] == "exit code 4: last words"
    refused = "srun: error: Unable to allocate resources: Invalid account"
    assert failure(1, [refused], {})[1] == f"exit code 1: {refused}", "what may follow last words, where there are none"


def test_what_ended_no_process_is_no_reason():
    frames = ["Traceback (most recent call last):", '  File "a.py", line 3, in run']
    thread = ["Exception in thread Thread-3 (heartbeat):", *frames, "OSError: [Errno 28] No space left on device"]
    rank = ["[rank0]: Traceback (most recent call last):", "[rank0]: AssertionError: loss"]
    assert failure(1, [*thread, *rank], {}) == (PLAN, "exit code 1: rank 0: AssertionError: loss")
    advice = "tip: where there is No space left on device, clean the cache"
    assert failure(1, ["giving up", advice], {})[0] is PLAN
    watchdog = "[rank1]:[E ProcessGroupNCCL.cpp:1897] Process group watchdog thread terminated with exception: "
    assert failure(-6, [f"{watchdog}CUDA error: an illegal memory access was encountered"], {})[0] is PLAN
