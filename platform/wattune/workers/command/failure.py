"""Reasons of a command's failure: from what its processes told, from its output, and from its end."""

import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from wattune.run import RunStatus

INVALID_FLAG: Final = "invalid flag"
"""Beginning of the reason where a program does not take one of its arguments."""

_NO_MEMORY: Final = re.compile(
    r"(can't|cannot) allocate memory|out of memory|OutOfMemoryError|std::bad_alloc|^MemoryError\b"
    r"|STATUS_\w*ALLOC_FAILED|miopenStatusAllocFailed|failed to (cuda|hip) (host )?[cm]alloc",
    re.IGNORECASE,
)
"""Words of allocators, drivers and the libraries beside torch; as `wattune.workers.out_of_memory.is_out_of_memory`."""

_NO_FLAG: Final = tuple(
    re.compile(pattern)
    for pattern in (
        # argparse and what stands on it (torchrun's own arguments, transformers, Megatron's scripts).
        r"error: (?:argument \S+|unrecognized arguments|the following arguments are required|ambiguous option): .+",
        r"Some specified arguments are not used by the HfArgumentParser: .+",  # transformers/hf_argparser.py
        r"Unrecognized (?:options|arguments): .+",  # tyro, as torchtitan uses it
        r"(?:Error: )?No such option: .+",  # click and typer
        r"Invalid value for '?-.+",
        r"FATAL Flags parsing error: .+",  # absl
        r"Unknown command line flag .+",
        r"Key '\S+' is not in struct.*|Could not override '.+'",  # hydra
    )
)

_RANK: Final = re.compile(r"^\s*\[(?:rank|default)(\d{1,9})\]:\s?(?P<said>.*)")
"""Beginning of a line that torch's exception hook, or torchrun with --tee, marks with its rank."""

_ROOT: Final = re.compile(r"Root Cause \(first observed failure\)")
_ROOT_RANK: Final = re.compile(r"^\s*rank\s*:\s*(\d{1,9})\s")
_ROOT_CODE: Final = re.compile(r"^\s*exitcode\s*:\s*(-?\d{1,9})\s")
_RAISED: Final = re.compile(r"^(?:[A-Za-z_][\w.]*\.)?[A-Z]\w*(?:Error|Exception|Interrupt|Exit|Warning)\b.*")
"""The last line of a traceback."""

_OUTSIDE: Final = (-signal.SIGKILL, -signal.SIGTERM)
"""Endings by signals that others send: operators, schedulers, a node that goes down."""

_LAUNCHERS: Final = re.compile(r"ChildFailedError|torch\.distributed\.elastic|torch/distributed/(?:run|launch)")
"""Lines of torchrun about the failure of a rank: they are never its cause."""

_LONGEST: Final = 400
"""Characters of a line that a reason quotes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """Words of a command's processes about their failure (`wattune.steps.reader.StepReader`)."""

    errors: Mapping[int, str] = field(default_factory=dict)
    """Exceptions by rank."""
    out_of_memory: Sequence[int] = ()
    """Ranks whose memory ran out."""
    first_failed: int | None = None


def failure(
    exit_code: int | None, lines: Sequence[str], told: Told, *, num_oom_kills: int = 0
) -> tuple[RunStatus, str]:
    """Returns the status and the reason of a command that failed.

    Args:
        exit_code: Its exit code, negative for a signal; None where nobody saw its end.
        lines: Its output.
        told: What its processes told.
        num_oom_kills: Processes of the node that the kernel ended for want of memory while it ran.
    """
    end = ending(exit_code)
    rank, line = _cause(lines, told)
    if refused := next((found[0] for text in lines for one in _NO_FLAG if (found := one.search(text))), None):
        return RunStatus.CRASHED, f"{INVALID_FLAG}: {refused[:_LONGEST].strip()} ({end})"
    if told.out_of_memory:
        first = told.out_of_memory[0] if told.first_failed not in told.out_of_memory else told.first_failed
        return RunStatus.OUT_OF_MEMORY, f"rank {first}: {told.errors.get(first or 0, line)[:_LONGEST]}"
    starved = next((_RANK.sub(r"\g<said>", text) for text in lines if _NO_MEMORY.search(text)), "")
    if starved:
        of = "" if rank is None else f"rank {rank}: "
        return RunStatus.OUT_OF_MEMORY, f"{of}{starved.strip()[:_LONGEST]}"
    if num_oom_kills:
        killed = f"the kernel ended {num_oom_kills} process(es)"
        return RunStatus.OUT_OF_MEMORY, f"{end}; {killed}: the node's memory ran out"
    of = "" if rank is None else f"rank {rank}: "
    said = f": {of}{line[:_LONGEST]}" if line else ", without a word"
    return RunStatus.CRASHED, f"{end}{said}"


def killed_from_outside(exit_code: int | None, lines: Sequence[str], told: Told) -> str:
    """Returns who was ended by a signal that no program sends itself, in words; empty where nobody was.

    Args:
        exit_code: Exit code of the command; torchrun ends with 1 where a rank was killed, and reports that rank.
        lines: Its output.
        told: What its processes told. Other ranks raise when one is gone; only its own exception is a cause.
    """
    if exit_code in _OUTSIDE:
        return ending(exit_code)
    rank, code = _root_cause(lines)
    if code in _OUTSIDE and rank not in told.errors:
        return f"rank {rank}, {ending(code)}"
    return ""


def ending(exit_code: int | None) -> str:
    """Says how a command ended."""
    if exit_code is None:
        return "its end was not seen"
    if exit_code >= 0:
        return f"exit code {exit_code}"
    try:
        return f"ended by {signal.Signals(-exit_code).name}"
    except ValueError:
        return f"ended by signal {-exit_code}"


def _cause(lines: Sequence[str], told: Told) -> tuple[int | None, str]:
    """Returns the rank that failed first, None where nobody knows, and its words."""
    if told.first_failed is not None and told.first_failed in told.errors:
        return told.first_failed, told.errors[told.first_failed]
    rank, code = _root_cause(lines)
    own = [found["said"] for text in lines if (found := _RANK.match(text)) and rank in (None, int(found[1]))]
    raised = _last(own, _RAISED) or _last([text for text in lines if not _LAUNCHERS.search(text)], _RAISED)
    if raised:
        return rank, raised
    if code is not None:
        return rank, ending(code)
    return rank, next((text.strip() for text in reversed(lines) if text.strip()), "")


def _root_cause(lines: Sequence[str]) -> tuple[int | None, int | None]:
    """Reads torchrun's report: rank and exit code of the first failure."""
    start = next((index for index, text in enumerate(lines) if _ROOT.search(text)), None)
    if start is None:
        return None, None
    block = lines[start : start + 12]
    ranks = [found[1] for text in block if (found := _ROOT_RANK.match(text))]
    codes = [found[1] for text in block if (found := _ROOT_CODE.match(text))]
    return (int(ranks[0]) if ranks else None), (int(codes[0]) if codes else None)


def _last(lines: Sequence[str], pattern: re.Pattern[str]) -> str:
    return next((text.strip() for text in reversed(lines) if pattern.match(text.strip())), "")
