"""The last words in a command's output: exceptions and fatal errors after which it did not go on."""

import re
from bisect import bisect
from collections.abc import Sequence
from itertools import takewhile
from typing import Final, NamedTuple

from wattune.steps.lines import label_of, plain
from wattune.workers.command.causes import DEVICE, NETWORK, PLAN, Kind, kind_of

NO_FLAG: Final = re.compile(
    # argparse and what stands on it (torchrun's own arguments, transformers, Megatron's scripts).
    r"error: (?:argument \S+|unrecognized arguments|the following arguments are required|ambiguous option): .+"
    r"|Some specified arguments are not used by the HfArgumentParser: .+"  # transformers/hf_argparser.py
    r"|Unrecognized (?:options|arguments): .+"  # tyro, as torchtitan uses it
    r"|(?:Error: )?No such option: .+"  # click and typer
    r"|Invalid value for '?-.+"
    r"|FATAL Flags parsing error: .+"  # absl
    r"|Unknown command line flag .+"
    r"|Key '\S+' is not in struct.*|Could not override '.+'"  # hydra
)

_RANK: Final = re.compile(r"(?:\[(?:rank|default)[: ]*|^\s*(?=\d+: )|,(?=\d+\]\s?<std))(\d{1,9})")
"""The rank among the labels that a launcher puts before a line; others are numbers of processes or containers."""

_HOST: Final = re.compile(r"[A-Za-z][\w.-]*?(\d{1,9}):(?= )")

_TRACEBACK: Final = "Traceback (most recent call last)"
_RAISED: Final = re.compile(
    r"(?:[A-Za-z_]\w*\.)*_?[A-Z]\w*(?:Error|Exception|Interrupt|Exit|Failed|Expired|Exhausted|Resources)(?:\([\w.]+\))?(?::|$)"
)
_ENDS_TRACEBACK: Final = re.compile(r"[A-Za-z_][\w.]*(?:\([\w.]+\))?(?:: |:?$)")
_FATAL: Final = re.compile(
    r"(?P<said>Fatal Python error: .+|terminate called .*bad_alloc.*|(?:Memory access fault|HW Exception) by GPU.+"
    r"|.*aborting with error : .+|.*ProcessGroup\w+\.cpp.*(?:terminated with exception|Watchdog caught).+"
    r"|slurmstepd: error: .*(?:DUE TO|[Kk]ill).*|srun: error: .*(?:Out Of Memory|Killed|[Nn]ode failure).*"
    r"|F\d{4} .+|\S+ \S+ F \S+:\d+\] .+|(?:CUDA|HIP|NCCL)\s?[Ee]rror.*|(?:ERROR: )?Unexpected bus error.+"
    r"|(?:\S*sh|env|python[\d.]*|\w+run): .*(?:command not found|No such file|[Pp]ermission denied).*)"
    r"|\s*what\(\):\s*(?P<what>.+)"
)
"""Last lines of what is no Python exception: libraries, drivers, schedulers, shells."""

_LAUNCHERS: Final = re.compile(
    r"ChildFailedError|CalledProcessError: Command|Process(?:Raised|Exited)Exception|Exception: process \d+ terminated"
    r"|SimplifiedTraceback|^SystemExit"
)
"""Last lines of launchers about the failure of a rank: they are never its cause."""

_KERNEL: Final = re.compile(r"\bNVRM: .+")
"""The driver's lines in the kernel's log, which jobs print beside their own."""

_ON_DEVICE: Final = re.compile(r"CUDA|NCCL|cu(?:da|BLAS|DNN)\w*[ :]")
"""Exceptions whose cause may be the device, though they do not say so."""

_ASIDE: Final = re.compile(r"Exception ignored in|Error in atexit|Exception in thread")
"""Before a traceback that ends no process."""

_CAUSED: Final = "The above exception was the direct cause"
_DURING: Final = "During handling of the above exception"
_TRIED: Final = re.compile(r"(?:\w+\.)*(?:ModuleNotFound|Import|FileNotFound)Error")
"""Exceptions of what programs can do without: where another exception follows, that one counts."""

_NOISE: Final = re.compile(
    r"\W*$|wandb:|srun:|slurmstepd:|make|Killing|.*(?:NCCL (?:INFO|WARN)|[Ww]arning|WARN|SIGTERM|leaked|elastic"
    r"|core dumped|exits with|kernel errors|TORCH_|CUDA_|https?:|terminate called"
    r"|frame #|most recent call|exitcode)|.*(?:\[W|W\d{4})"
)
"""Lines that may follow the last words of a program."""

_PROGRESS: Final = re.compile(r"\b(?:step|iter(?:ation)?|epoch)s?\b\W{0,4}\d|\d+/\d+ \[", re.IGNORECASE)

_MOST_STEPS: Final = 2
_MOST_LINES: Final = 12
"""Steps, and other lines, that others may still write after the exception that ended a program. After more of them it
went on: the exception was caught."""

_MOST_SAID: Final = 200
"""Characters of an exception that are quoted with the kernel's line about its device."""

_ADVISES: Final = re.compile(
    r"\W*(?:note|tip|hint|warn\w*|info|debug)\b|\b(?:if you|try|consider|avoid|retry\w*|fall\w* back|ignor\w+)\b",
    re.IGNORECASE,
)


class Words(NamedTuple):
    """Last words of a rank; None is the program as a whole."""

    rank: int | None
    text: str
    kind: Kind


class _Stream:
    """Output of one rank, or of the program as a whole, so far."""

    def __init__(self) -> None:
        self._within = ""
        """The kind of traceback that the next line may go on with; empty outside of them."""
        self._before = ""
        self._chained, self._last = PLAN, Words(None, "", PLAN)
        self.others: list[int] = []
        """Lines of its ordinary work."""

    def said(self, text: str, *, indented: bool) -> str:
        """Takes a line, and returns the last words in it; empty where there are none."""
        before, self._before = self._before, text
        if _TRACEBACK in text:
            self._within = "aside" if _ASIDE.search(before) else "own"
            return ""
        if self._within:
            if self.is_within(text, indented=indented):
                return ""
            ended, self._within = self._within, ""
            return text if ended == "own" and (_ENDS_TRACEBACK.match(text) or _RAISED.match(text)) else ""
        if _CAUSED in text or (_DURING in text and not _TRIED.match(self._last.text)):
            self._chained = self._last.kind
        if fatal := _FATAL.match(text):
            return str(fatal["said"] or fatal["what"])
        return text if _RAISED.match(text) or NO_FLAG.search(text) else ""

    def is_within(self, text: str, *, indented: bool) -> bool:
        """Tells whether a line is one of the frames of a traceback."""
        return bool(self._within) and (indented or not text or text[0] in "│╭╰|")

    def judged(self, rank: int | None, text: str) -> Words:
        """Returns last words with their kind, or that of the exception that they are the consequence of."""
        kind = PLAN if NO_FLAG.search(text) else kind_of(text)
        if kind is PLAN and self._chained not in (PLAN, NETWORK):
            kind, text = self._chained, f"{text} (after {self._last.text})"
        self._chained, self._last = PLAN, Words(rank, text, kind)
        return self._last


def _label_of(line: str) -> tuple[tuple[int, ...], int]:
    """Returns the numbers before a line and its beginning, as `label_of`; a host's name counts too, as of pdsh."""
    host = _HOST.match(line)
    if host is None:
        return label_of(line)
    labels, at = label_of(line[host.end() :])
    return (int(host[1]), *labels), host.end() + at


def printed_words(output: Sequence[str], *, may_go_on: bool = True) -> list[Words]:
    """Returns the last words of each rank in the order of the output; where none is named, of the program.

    Without `may_go_on` they are the very end: a signal ended it, which no exception does, so earlier ones were caught.
    """
    most_steps, most_lines = (_MOST_STEPS, _MOST_LINES) if may_go_on else (0, 0)
    lines = [plain(line) for line in output]
    streams: dict[tuple[int, ...], _Stream] = {}
    found: list[tuple[int, tuple[int, ...], Words]] = []
    steps: list[int] = []
    broken: list[tuple[int, str]] = []
    for index, line in enumerate(lines):
        if (kernel := _KERNEL.search(line)) and kind_of(kernel[0]) is DEVICE:
            broken.append((index, kernel[0]))
            continue
        labels, at = _label_of(line)
        text, indented = line[at:], line[:at].endswith(("  ", "\t")) or (at > 0 and line[:at].isspace())
        stream = streams.setdefault(labels, _Stream())
        said = stream.said(text, indented=indented)
        if said and not _LAUNCHERS.search(said):
            if "CCL" in said or said.endswith(":"):  # its reason stands in the lines below
                said = " ".join([said, *(below[_label_of(below)[1] :] for below in lines[index + 1 : index + 4])])
            rank = next((int(one) for one in _RANK.findall(line[:at]) if one), None)
            found.append((index, labels, stream.judged(rank, said)))
        elif _PROGRESS.search(text):
            steps.append(index)
        elif not (indented or stream.is_within(text, indented=indented) or _NOISE.match(text)):
            stream.others.append(index)
    last: dict[tuple[int, ...], tuple[int, Words]] = {}
    for index, labels, words in found:
        went_on = len(steps) - bisect(steps, index) > most_steps
        others = streams[labels].others
        if went_on or len(others) - bisect(others, index) > most_lines:
            continue
        if words.kind is NETWORK and labels in last and last[labels][1].kind is not NETWORK:
            continue  # one stream of several ranks: this one says that another has gone
        last[labels] = index, words
    for labels, (index, words) in last.items():
        after = next((text for at, text in broken if at > index), "")
        if after and words.kind in (PLAN, NETWORK) and _ON_DEVICE.search(words.text):
            last[labels] = index, Words(words.rank, f"{words.text[:_MOST_SAID]} (after {after})", DEVICE)
    return [words for _, words in sorted(last.values(), key=lambda one: one[0])]


def last_line(output: Sequence[str]) -> Words | None:
    """Returns the last line that names a cause, of those at the end that are no advice; else the last line."""
    lines = [text for text in (plain(line).strip() for line in reversed(output)) if text]
    last = [text for text in lines if not _NOISE.match(text)][:_MOST_LINES]
    after = list(takewhile(lambda text: not _PROGRESS.search(text), last))
    named = [text for text in after if kind_of(text) is not PLAN and not _ADVISES.search(text)]
    text = next(iter((*named, *last, *lines)), "")
    return Words(None, text, kind_of(text) if named else PLAN) if text else None
