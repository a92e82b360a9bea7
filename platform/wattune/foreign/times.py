"""Times of other tools: epochs and dates as nanoseconds of the wall clock, and a clock that never runs back."""

import re
from typing import Any, Final
from zoneinfo import ZoneInfoNotFoundError

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from wattune.arrays import Ints
from wattune.errors import PlanError
from wattune.units import NS_PER_S, ns_to_s

_PARTS: Final = (
    r"^(?P<date>.*?)[T ,_-]*(?P<minute>\d{1,2}:\d{2})(?::(?P<second>\d{2})(?:[.,:](?P<part>\d{1,9}))?)?"
    r"\s*(?P<half>(?i:[ap]\.?m\.?))?\s*(?P<zone>Z|[A-Z]{3,4}|[+-]\d{2}:?\d{2})?\s*(?P<year>\d{4})?$"
)
_FORMS: Final = (
    "%Y %m %d", "%m %d %Y", "%d %m %Y", "%Y %a %b %d", "%Y %b %d", "%a %d %b %Y", "%d %b %Y", "%a %b %d", "%b %d", "",
)  # fmt: skip
"""Dates as tools write them, for strptime, with a space for what is between their parts and the year of ctime in front.

ISO 8601 and nvidia-smi, month or day first, ctime, RFC 2822, syslog, and a time alone.
"""

_HMS: Final = r"\d{1,2}:\d{2}:\d{2}(?:[.,]\d+)?(?: ?[AP]M)?"
STAMP: Final = (
    rf"(?:\d{{10}}(?:\.\d+)?|\d{{13}}|\d{{4}}[-/]?\d{{2}}[-/]?\d{{2}}[T ]+{_HMS}(?: ?(?:Z|UTC|[+-]\d{{2}}:?\d{{2}}))?"
    rf"|(?:[A-Z][a-z]{{2}},? )?[A-Z][a-z]{{2}} +\d{{1,2}} +{_HMS}(?: [A-Z]{{3,4}})?(?: \d{{4}})?|{_HMS})"
)
"""A time that a shell wrote on a line, in any of these forms."""

_HOURS: Final = {
    "Z": 0, "UTC": 0, "GMT": 0, "WET": 0, "BST": 1, "CET": 1, "CEST": 2, "EET": 2, "EEST": 3, "JST": 9, "KST": 9,
    "EST": -5, "EDT": -4, "CST": -6, "CDT": -5, "MST": -7, "MDT": -6, "PST": -8, "PDT": -7,
}  # fmt: skip
_HOUR_NS: Final = 3600 * NS_PER_S
_DAY_NS: Final = 24 * _HOUR_NS
_YEARS_70_S: Final = 25_567 * 86_400
"""From 1900, the year that strptime takes where there is none, to 1970."""

_LAST_S: Final = 2**33
"""The year 2242: nanoseconds of later ones are soon more than 64 bits."""

NOT_A_TIME: Final = np.iinfo(np.int64).min
"""Stands for a text that is no time."""


def wall_ns(texts: pa.ChunkedArray, unit: str, zone: str | None, where: str) -> tuple[Ints, list[str]]:
    """Reads times as nanoseconds of the wall clock since 1970, and says what the texts do not.

    Numbers are of the unit that their column names, else seconds, milliseconds, microseconds or nanoseconds by their
    size. Small ones count from the start of the log. `zone` is that of dates without one. Raises `PlanError` where more
    than a hundredth of the texts are no times, or the zone is unknown.
    """
    texts = pc.utf8_trim_whitespace(texts.cast(pa.string()).fill_null("")).combine_chunks()
    numeric = pc.match_substring_regex(texts, r"^\d+(\.\d*)?([eE]\+?\d+)?$")
    if pc.sum(numeric).as_py() * 2 > len(texts):
        return _epochs(texts, numeric, unit)
    return _dates(texts, zone, where)


def _epochs(texts: pa.Array, numeric: pa.Array, unit: str) -> tuple[Ints, list[str]]:
    digits = pc.if_else(numeric, texts, None)
    number = digits.cast(pa.float64())
    median = float(np.nanmedian(number.to_numpy(zero_copy_only=False)))
    scale = {"s": NS_PER_S, "seconds": NS_PER_S, "ms": 10**6, "us": 10**3, "ns": 1}.get(unit)
    if scale is None:
        scale = NS_PER_S if median < 1e11 else 10**6 if median < 1e14 else 10**3 if median < 1e17 else 1
    whole = pc.all(pc.match_substring_regex(digits, r"^\d{1,18}$")).as_py()
    if whole:
        ns = digits.cast(pa.int64()).fill_null(0).to_numpy(zero_copy_only=False) * scale
    else:
        ns = np.round(np.clip(np.nan_to_num(number.to_numpy(zero_copy_only=False)) * scale, 0, 2**62)).astype(np.int64)
    ns[~np.asarray(numeric)] = NOT_A_TIME
    return ns, ["times count from the start of the log: its date is not known"] if median * scale < 1e17 else []


def _dates(texts: pa.Array, zone: str | None, where: str) -> tuple[Ints, list[str]]:
    found = pc.extract_regex(texts, _PARTS)
    part: dict[str, Any] = {field.name: found.field(field.name).fill_null("") for field in found.type}
    date = pc.replace_substring_regex(part["date"], r"(\d)[-/.,T_ ]+|,", r"\1 ")
    second = pc.replace_substring_regex(part["second"], "^$", "00")
    clock = pc.binary_join_element_wise(part["minute"], second, ":")
    whole = pc.utf8_trim_whitespace(pc.binary_join_element_wise(part["year"], date, clock, " "))
    read = {form: _seconds(whole, form) for form in _FORMS}
    dotted = pc.any(pc.match_substring(part["date"], ".")).as_py()

    def worth(form: str) -> tuple[int, int, bool]:  # of 02.01.2026 and 1/2/2026 the order with the shorter log
        at = read[form]
        return int((at < 0).sum()), int(np.ptp(at[at >= 0])) if (at >= 0).any() else 0, form.startswith("%d") != dotted

    form = min(_FORMS, key=worth)
    bad = np.flatnonzero(read[form] < 0)
    if len(bad) > max(len(texts) // 100, len(texts) > 1):
        raise PlanError(
            f'{where}: got "{texts[bad[0]].as_py()[:60]}", allowed: one kind of time, such as 2026/01/02 10:00:00.101 '
            "or an epoch"
        )
    good, hour, half = read[form] >= 0, read[form] // 3600 % 24, pc.utf8_lower(part["half"])
    for letter, noon in (("a", 0), ("p", 12)):
        hour = np.where(np.asarray(pc.starts_with(half, letter)), hour % 12 + noon, hour)
    ns = (read[form] + (hour - read[form] // 3600 % 24) * 3600) * NS_PER_S
    ns += pc.utf8_rpad(part["part"], 9, "0").cast(pa.int64()).to_numpy()
    notes = (
        []
        if "%Y" in form
        else ["its times have no year" if form else "its times have no date: it begins on 1 January 1970"]
    )
    zones = part["zone"].filter(pa.array(good)).dictionary_encode()
    offsets = [_offset_ns(name) for name in zones.dictionary.to_pylist()]
    if None not in offsets:
        ns[good] -= np.array(offsets, np.int64)[zones.indices.to_numpy()]
    elif zone is not None:
        ns = _in_zone(ns, zone, where)
    elif "%Y" in form:
        notes.append("its times name no zone: they are taken as UTC; --timezone names another")
    ns[~good] = NOT_A_TIME
    return ns, notes


def _seconds(texts: pa.Array, form: str) -> Ints:
    """Returns seconds since 1970, or, where there is no year, since its beginning; -1 for what is not of the form."""
    at = (
        pc.strptime(texts, f"{form} %H:%M:%S", "s", error_is_null=True)
        .cast(pa.int64())
        .fill_null(_LAST_S + 1)
        .to_numpy()
    )
    at = at if "%Y" in form else at + np.where(at > 0, 0, _YEARS_70_S)
    result: Ints = np.where((at >= 0) & (at <= _LAST_S), at, -1)
    return result


def _offset_ns(name: str) -> int | None:
    if re.fullmatch(r"[+-]\d{2}:?\d{2}", name):
        sign = -1 if name[0] == "-" else 1
        return sign * (int(name[1:3]) * 60 + int(name[-2:])) * 60 * NS_PER_S
    return None if name not in _HOURS else int(_HOURS[name] * _HOUR_NS)


def _in_zone(ns: Ints, zone: str, where: str) -> Ints:
    try:
        local = pa.array(ns).cast(pa.timestamp("ns"))
        return np.array(pc.assume_timezone(local, zone, ambiguous="earliest", nonexistent="latest").cast(pa.int64()))
    except (pa.ArrowException, ZoneInfoNotFoundError) as error:
        raise PlanError(f"{where}: --timezone: got {zone}, allowed: a name such as Europe/Berlin ({error})") from error


def monotonic_ns(ns: Ints, *, has_date: bool, has_zone: bool, where: str) -> tuple[Ints, list[dict[str, int]]]:
    """Makes times of one device, in the order they were logged, a clock that never runs back.

    A time without a date that falls by more than half a day is after midnight. One that falls otherwise is after a step
    of the clock, such as the end of summer time; so is one, without a zone, that is an hour later. The usual interval
    then lies between the two. Returns the times, and the steps as a node's manifest has them
    (`wattune.telemetry.files.manifest.ClockWatch`). Raises `PlanError` where it falls by more than two hours: the log
    is of two runs.
    """
    change = np.diff(ns)
    if not has_date:
        ns = ns + np.concatenate([[0], np.cumsum(change < -_DAY_NS // 2)]) * _DAY_NS
        change = np.diff(ns)
    usual = int(np.median(change[change > 0])) if np.any(change > 0) else 0
    stepped = change < -(usual // 2)
    if stepped.any() and int(change.min()) < -2 * _HOUR_NS:
        at = int(change.argmin()) + 1
        raise PlanError(
            f"{where}: time runs back by {ns_to_s(-int(change.min())):.0f} s at reading {at + 1}; give one file a run"
        )
    if not has_zone and usual < _HOUR_NS // 10:
        stepped |= np.abs(change - _HOUR_NS) <= 2 * usual + NS_PER_S
    each = np.where(stepped, change - usual, 0)
    result = ns - np.concatenate([[0], np.cumsum(each)])
    return result, [{"mono_ns": int(result[at + 1]), "step_ns": int(each[at])} for at in np.flatnonzero(stepped)]
