"""Lines of a program's output: when each arrived, which rank wrote it, and the numbers as programs round them."""

import math
import re
from typing import Final

LONGEST_LINE: Final = 4096
"""Characters of a line that are searched, so that no pattern takes long on a line without end."""

_ESCAPES: Final = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b\][^\x07]*\x07")
"""Colours and moves of terminals, which programs also write into pipes."""

_ENDS: Final = re.compile(rb"(?<=[\r\n])")

NUMBER: Final = r"[0-9]+(?:[,_][0-9]+)*(?:\.[0-9]*)?(?:[eE][+-]?[0-9]+)?[kKMG]?(?![A-Za-z])"
"""A number as programs print it: `12`, `1,000`, `99.00`, `1e+3`, `1.2k`."""

_PARTS: Final = re.compile(r"([0-9]+(?:[,_][0-9]+)*(?:\.([0-9]*))?)(?:[eE]([+-]?[0-9]+))?([kKMG]?)")

_SCALES: Final = {"": 0, "k": 3, "K": 3, "M": 6, "G": 9}

LEAST_DIGITS: Final = 3
"""Digits that a rounded number stands for at least: tqdm's `format_num` writes three and drops zeros at their end."""

_CLOCK: Final = re.compile(r"\[?\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d[\d.,]*(?:Z|[+-]\d\d:?\d\d)?\]?\s+")
"""A date and time, as `kubectl logs --timestamps` and loggers put before a line."""

_LABELS: Final = tuple(
    re.compile(text)
    for text in (
        # torchrun --tee, by the role and the local rank: torch/distributed/elastic/multiprocessing/tail_log.py.
        r"\[(?:rank|default|trainer|worker)[: ]*(\d{1,9})\]:?",
        # mpirun --tag-output of Open MPI 4 and 5, with the host before the job's number in the latter.
        r"\[(?:[\w.-]+@)?\d+,(\d{1,9})\]\s?<std(?:out|err)>:",
        # Ray, python/ray/_private/worker.py, print_worker_logs: "(RayTrainWorker pid=123, ip=10.0.0.1)".
        r"\((?:\w[\w. ]* )?pid=(\d{1,9})(?:, ip=[^)]*)?\)",
        # docker compose: "trainer-1  | ", kubectl logs --prefix: "[pod/train-0/main] ", pdsh: "worker-1: ".
        r"[a-z][\w.-]*?[-_](\d{1,9})\s*\|(?= )",
        r"\[pod/[\w.-]*?-(\d{1,9})(?:/[\w.-]+)?\]",
        r"[a-z][\w.]*-(\d{1,9}):(?= )",
        # srun --label: " 0: "; mpiexec -l of MPICH: "[0] ".
        r"(\d{1,6}): ?(?=\D)",
        r"\[(\d{1,6})\] (?=\D)",
    )
)


class OutputLines:
    """Lines of one stream of output, each with the arrival of its last character.

    A carriage return ends a line too: progress bars write no other end, and each of their lines has a time of its own.
    It stays at the line's end, so that who shows lines knows that the next one overwrites it.
    """

    def __init__(self, longest_bytes: int) -> None:
        """Has read nothing yet; a line of more than `longest_bytes` is given in parts."""
        self._longest, self._rest, self._rest_ns = longest_bytes, b"", 0

    def take(self, data: bytes, mono_ns: int) -> list[tuple[str, int]]:
        """Takes what was read, with its arrival on the monotonic clock; nothing at the end of the stream.

        Returns the lines that are complete. At the end of the stream that is what is left, too.
        """
        before, before_ns = len(self._rest), self._rest_ns
        *whole, rest = _ENDS.split(self._rest + data)
        if rest and (not data or len(rest) > self._longest):
            whole, rest = [*whole, rest], b""
        # The end of a bar's line is the beginning of its next one: the line itself was there before.
        arrived_ns = [
            before_ns if at == 0 and len(line) <= before + 1 and before else mono_ns for at, line in enumerate(whole)
        ]
        self._rest = rest
        if len(rest) > before or whole:
            self._rest_ns = mono_ns
        return [
            (line.removesuffix(b"\n").decode(errors="replace"), at_ns)
            for line, at_ns in zip(whole, arrived_ns, strict=True)
        ]


def plain(line: str) -> str:
    """Returns the part of a line that is searched, without colours."""
    return _ESCAPES.sub("", line[:LONGEST_LINE])


def label_of(line: str) -> tuple[tuple[int, ...], int]:
    """Returns the numbers that launchers put before a plain line, and where the line itself begins.

    Several may: `trainer-1  | [rank0]: step 1` has the numbers 1 and 0.
    """
    numbers: list[int] = []
    at = len(line) - len(line.lstrip())
    while found := next(filter(None, (each.match(line, at) for each in (_CLOCK, *_LABELS))), None):
        numbers += [int(found[1])] if found.re.groups else []
        at = len(line) - len(line[found.end() :].lstrip())
    return tuple(numbers), at


def number_in(text: str) -> tuple[float, float] | None:
    """Reads a number as programs print it: its value, and how far the true one may be off; None if it is not one.

    Digits that are cut off make a number rounded where it has an exponent or a letter for thousands.
    """
    found = _PARTS.fullmatch(text.strip())
    if found is None:
        return None
    places = int(found[3] or 0) + _SCALES[found[4]]
    value = float(f"{found[1].replace(',', '')}e{places}")
    if not math.isfinite(value):
        return None
    if not found[3] and not found[4]:
        return value, 0.0
    digits = len(re.sub(r"\D", "", found[1]).lstrip("0"))
    shown = len(found[2] or "")
    last = places - shown - (max(LEAST_DIGITS - digits, 0) if found[3] else 0)
    return value, float(f"0.5e{last}")


_SECOND: Final = r"s(?:ec(?:onds?)?)?"
_DEVICE: Final = r"(?:gpu|device|chip|rank|core|accelerator)s?"
_RATE: Final = re.compile(
    rf"(?i)(?<![a-z])(?P<name>tok(?:en)?s?[ _]?(?:/|per)[ _]?(?:{_DEVICE}[ _]?(?:/|per)[ _]?)?{_SECOND}"
    rf"(?:[ _]?(?:/|per)[ _]?{_DEVICE})?|(?:tps|wps|tgs)(?:[ _]?(?:/|per)[ _]?{_DEVICE})?)(?![a-z_/])"
)
_AFTER: Final = re.compile(rf"['\")\] ]*(?:\(\w+\))?\s*(?P<told>[:=])?\s*['\"]?(?P<number>{NUMBER})")
_BEFORE: Final = re.compile(rf"(?<![0-9.,])(?P<number>{NUMBER}) ?$")
_TOTAL: Final = re.compile(
    rf"(?i)(?:consumed|total|trained|seen|input)[ _]tokens(?:[ _]seen)?['\"]?\s*[:=]?\s*({NUMBER})"
)


def token_rate_in(line: str) -> tuple[float, bool] | None:
    """Finds the tokens a second that a line tells: the number, and whether it is that of one device."""
    for found in _RATE.finditer(line):
        after, before = _AFTER.match(line, found.end()), _BEFORE.search(line, 0, found.start())
        told = after if after and (after["told"] or not before) else before
        if told and (number := number_in(told["number"])):
            name = found["name"].lower()
            return number[0], name == "tgs" or re.search(_DEVICE, name) is not None
    return None


def total_tokens_in(line: str) -> float | None:
    """Finds the tokens that a line tells of all steps so far."""
    found = _TOTAL.search(line)
    number = number_in(found[1]) if found else None
    return number[0] if number else None
