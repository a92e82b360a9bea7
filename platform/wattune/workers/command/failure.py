"""The judgement of a failed command: by its last exception, signal or exit code, not by words before it.

A rank's own exception counts before its launcher's. Of several ranks the first that failed counts, and before those
that only say that another has gone.
"""

import re
import signal
from collections.abc import Mapping, Sequence
from typing import Final

from wattune.steps.lines import plain
from wattune.workers.command.causes import (
    HOST_MEMORY,
    KILLED,
    NETWORK,
    PLAN,
    SURROUNDINGS,
    Kind,
    kind_of,
)
from wattune.workers.command.printed import NO_FLAG, Words, last_line, printed_words

INVALID_FLAG: Final = "invalid flag"
"""Beginning of the reason where a program does not take one of its arguments."""

_ROOT: Final = re.compile(
    r"Root Cause \(first observed failure\)(?:.*\n){1,10}?\s*rank *: *(\d{1,9}) .*\n\s*exitcode *: *(-?\d{1,9})\s"
)
"""torchrun's report, torch/distributed/elastic/multiprocessing/errors/__init__.py, _FAILURE_FORMAT_TEMPLATE."""

_SIGNALLED: Final = re.compile(
    r"return code = -(?P<code>\d{1,2})\b|(?<!closing )[Ss]ignals?[ .:]+SIG(?P<name>[A-Z]+)"
    r"|exited on signal (?P<on>\d{1,2})"
    r"|(?:task \d+|: line \d+:\s+\d+|^\d*)\s*:? (?P<word>Killed|Terminated|Segmentation fault|Bus error|Aborted)\b"
    r"|^(?P<alone>Killed)$"
)
"""The signal that ended a rank, as DeepSpeed, Python, MPI, Slurm and shells write it."""

_WORDS: Final = {"Killed": 9, "Terminated": 15, "Segmentation fault": 11, "Bus error": 7, "Aborted": 6}

_LACKS: Final = {
    signal.SIGBUS: "shared memory (/dev/shm) is too small",
    signal.SIGILL: "this processor lacks an instruction",
}
"""Signals of what every plan would meet, and what that is."""

_OUTSIDE: Final = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""Signals that others send: operators, schedulers, a node that goes down."""

_LONGEST: Final = 400
"""Characters of a line that a reason quotes."""


def failure(
    exit_code: int | None,
    lines: Sequence[str],
    told: Mapping[int, str],
    *,
    num_oom_kills: int = 0,
    starved: bool = False,
) -> tuple[Kind, str]:
    """Returns the kind of end of a command that failed, and the reason with its evidence.

    The exit code is negative for a signal, None where nobody saw the end; `told` has the exceptions that ended ranks,
    the first one first. Memory: so many processes were killed for want of it while the command ran, and the node was
    `starved` where next to none was left at some time.
    """
    own = [Words(rank, text, kind_of(text)) for rank, text in told.items()]
    printed = printed_words(lines, may_go_on=_signal_of(exit_code) in (None, signal.SIGABRT, *_OUTSIDE))
    first = next((one for one in own if one.kind is not NETWORK), None)
    if first is not None and first.kind is PLAN:  # only its traceback says of what it is the consequence
        same = [one for one in printed if one.kind is not PLAN and _message(one.text) in first.text]
        first = next((one for one in same if one.rank in (None, first.rank)), first)
    reported = _ROOT.search("\n".join(lines))
    root, code = (int(reported[1]), int(reported[2])) if reported else (None, None)
    number = -code if code is not None and code < 0 else _signal_of(exit_code)
    if number in _OUTSIDE and (first is None or (root is not None and root not in told)):
        words = (KILLED, HOST_MEMORY) if number == signal.SIGKILL else (KILLED,)
        first = next((one for one in printed if one.kind in words), None)
        if first is None:
            return _of_signal(number, root, exit_code, num_oom_kills, starved)
    first = first or _first([one for one in printed if one.kind is not NETWORK], root)
    if first is None:
        number = number or _reported(lines) or (signal.SIGKILL if num_oom_kills else None)
        if number is not None and not (number == signal.SIGABRT and (own or printed)):
            return _of_signal(number, root, exit_code, num_oom_kills, starved)
    first = first or next(iter(own or printed), None) or last_line(lines)
    if first is None:
        kind = SURROUNDINGS if exit_code in (126, 127) else PLAN
        return kind, f"{kind.words}{ending(exit_code)}, without a word"
    said = first.text[:_LONGEST].strip()
    if refused := NO_FLAG.search(said):
        return PLAN, f"{INVALID_FLAG}: {refused[0]} ({ending(exit_code)})"
    rank = root if first.rank is None else first.rank
    return first.kind, f"{first.kind.words}{ending(exit_code)}: {'' if rank is None else f'rank {rank}: '}{said}"


def ending(exit_code: int | None) -> str:
    """Says how a command ended."""
    if exit_code is None:
        return "its end was not seen"
    number = _signal_of(exit_code)
    if number is None:
        return f"exit code {exit_code}"
    try:
        name = signal.Signals(number).name
    except ValueError:
        name = f"signal {number}"
    return f"ended by {name}" if exit_code < 0 else f"exit code {exit_code}, as {name} gives it"


def _signal_of(exit_code: int | None) -> int | None:
    """Returns the signal that ended a process: shells and containers add 128 to its number."""
    if exit_code is None or 0 <= exit_code <= 128:
        return None
    number = -exit_code if exit_code < 0 else exit_code - 128
    return number if exit_code < 0 or number in (*_OUTSIDE, *_WORDS.values(), signal.SIGILL, signal.SIGFPE) else None


def _of_signal(
    number: int, rank: int | None, exit_code: int | None, num_oom_kills: int, starved: bool
) -> tuple[Kind, str]:
    """Judges a signal that ended the command, or one of its ranks, and about which nobody has a word."""
    who = ending(-number) if rank is None else f"rank {rank}, {ending(-number)}"
    if number == signal.SIGKILL and (num_oom_kills or starved):
        why = f"the kernel ended {num_oom_kills} process(es) for memory" if num_oom_kills else "the node had none left"
        return HOST_MEMORY, f"{HOST_MEMORY.words}{who}; {why}"
    if number in _OUTSIDE:
        return KILLED, f"{KILLED.words}{who}"
    if number in _LACKS:
        return SURROUNDINGS, f"{SURROUNDINGS.words}{who}: {_LACKS[signal.Signals(number)]}"
    return PLAN, f"{ending(exit_code)}: {who}" if exit_code != -number else f"{who}, without a word"


def _message(text: str) -> str:
    return text.partition(" (after ")[0].partition(": ")[2][:60]


def _first(words: Sequence[Words], root: int | None) -> Words | None:
    """Returns the last words of the rank that failed first: torchrun's first, else the first that has any."""
    return next((one for one in words if one.rank is not None and one.rank == root), None) or next(iter(words), None)


def _reported(lines: Sequence[str]) -> int | None:
    """Returns the signal that a launcher or a shell says has ended a process."""
    for line in reversed(lines):
        if found := _SIGNALLED.search(plain(line).strip()):
            if found["name"]:
                return int(getattr(signal, f"SIG{found['name']}", 0)) or None
            word = found["word"] or found["alone"]
            return _WORDS[word] if word else int(found["code"] or found["on"])
    return None
