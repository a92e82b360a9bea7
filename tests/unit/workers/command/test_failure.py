"""The reason of a command's failure: its rank, its words, its kind."""

import pytest

from wattune.run import RunStatus
from wattune.workers.command.failure import INVALID_FLAG, Told, ending, failure, killed_from_outside

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
        assert failure(1, said, Told())[0] is RunStatus.CRASHED


def test_torchrun_names_the_rank_that_failed_first():
    status, reason = failure(1, TORCHRUN, Told())
    assert (status, reason) == (RunStatus.CRASHED, "exit code 1: rank 1: ValueError: of rank 1")


def test_a_rank_that_a_signal_ended_is_named_with_it():
    lines = [line.replace("exitcode  : 1", "exitcode  : -11") for line in TORCHRUN if not line.startswith("[rank")]
    assert failure(1, lines, Told())[1] == "exit code 1: rank 1: ended by SIGSEGV"


def test_a_rank_that_somebody_killed_is_told_from_one_that_failed():
    killed = [line.replace("exitcode  : 1", "exitcode  : -9") for line in TORCHRUN]
    aborted = [line.replace("exitcode  : 1", "exitcode  : -6") for line in TORCHRUN]
    assert killed_from_outside(1, killed, Told()) == "rank 1, ended by SIGKILL"
    assert killed_from_outside(-15, [], Told()) == "ended by SIGTERM"
    for code, lines in ((1, TORCHRUN), (1, aborted), (-6, []), (None, [])):
        assert killed_from_outside(code, lines, Told()) == ""
    peer = Told(errors={0: "RuntimeError: Connection closed by peer"}, first_failed=0)
    assert killed_from_outside(1, killed, peer) == "rank 1, ended by SIGKILL"
    raised = Told(errors={1: "ValueError: of rank 1"}, first_failed=1)
    assert killed_from_outside(1, killed, raised) == ""  # its launcher ended what was left of it


def test_what_a_process_told_itself_is_believed_first():
    told = Told(errors={3: "KeyError: 'layers' at model.py:7", 0: "RuntimeError: peer"}, first_failed=3)
    assert failure(1, TORCHRUN, told) == (RunStatus.CRASHED, "exit code 1: rank 3: KeyError: 'layers' at model.py:7")


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
    status, reason = failure(2, ["usage: train.py [-h]", line], Told())
    assert status is RunStatus.CRASHED
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
    assert failure(1, ["step 1", line], Told())[0] is RunStatus.OUT_OF_MEMORY


def test_memory_that_the_kernel_or_a_process_says_ran_out_counts():
    assert failure(-9, [], Told(), num_oom_kills=1)[0] is RunStatus.OUT_OF_MEMORY
    told = Told(errors={1: "OutOfMemoryError: 20 GiB"}, out_of_memory=(1,), first_failed=1)
    assert failure(1, [], told) == (RunStatus.OUT_OF_MEMORY, "rank 1: OutOfMemoryError: 20 GiB")


def test_words_of_memory_in_a_run_that_had_other_trouble_do_not_decide_flags():
    lines = ["error: argument --oom: invalid choice: 'out of memory'"]
    assert failure(2, lines, Told())[1].startswith(INVALID_FLAG)


def test_endings_have_names():
    assert [ending(code) for code in (3, -15, -64, None)] == [
        "exit code 3",
        "ended by SIGTERM",
        "ended by SIGRTMAX",
        "its end was not seen",
    ]
    assert failure(4, ["", "  "], Told())[1] == "exit code 4, without a word"
    assert failure(4, ["last words"], Told())[1] == "exit code 4: last words"
