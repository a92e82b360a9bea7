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

_CLOCK: Final = (
    r"(?P<h>\d{1,2}):(?P<min>\d{2})(?::(?P<sec>\d{2})(?:[.,:](?P<part>\d{1,9}))?)?\s*(?P<half>[AaPp]\.?[Mm]\.?)?"
)
_WEEKDAY: Final = r"(?:[A-Z][a-z]{2},? )?"
_MONTH: Final = r"(?P<month>[A-Z][a-z]{2})"
_ZONE: Final = r"\s*(?P<zone>Z|UTC|GMT|[A-Z]{3,4}|[+-]\d{2}:?\d{2})?"
_FORMS: Final = (
    rf"^(?P<y>\d{{4}})[-/.]?(?P<mon>\d{{2}})[-/.]?(?P<d>\d{{2}})[T ,_]+{_CLOCK}{_ZONE}$",
    rf"^(?P<mon>\d{{1,2}})(?P<sep>[-/.])(?P<d>\d{{1,2}})[-/.](?P<y>\d{{4}})[T ,-]+{_CLOCK}{_ZONE}$",
    rf"^{_WEEKDAY}{_MONTH} +(?P<d>\d{{1,2}}) +{_CLOCK}(?: (?P<zone>[A-Z]{{3,4}}))? (?P<y>\d{{4}})$",
    rf"^{_WEEKDAY}(?P<d>\d{{1,2}}) {_MONTH} (?P<y>\d{{4}}) {_CLOCK}{_ZONE}$",
    rf"^{_MONTH} +(?P<d>\d{{1,2}}) {_CLOCK}$",
    rf"^{_CLOCK}$",
)
"""Dates as tools write them: ISO 8601 and nvidia-smi, month or day first, ctime, RFC 2822, syslog, and a time alone."""

_HMS: Final = r"\d{1,2}:\d{2}:\d{2}(?:[.,]\d+)?(?: ?[AP]M)?"
STAMP: Final = (
    rf"(?:\d{{10}}(?:\.\d+)?|\d{{13}}|\d{{4}}[-/]?\d{{2}}[-/]?\d{{2}}[T ]+{_HMS}(?: ?(?:Z|UTC|[+-]\d{{2}}:?\d{{2}}))?"
    rf"|(?:[A-Z][a-z]{{2}},? )?[A-Z][a-z]{{2}} +\d{{1,2}} +{_HMS}(?: [A-Z]{{3,4}})?(?: \d{{4}})?|{_HMS})"
)
"""A time that a shell wrote on a line, in any of these forms."""

_MONTHS: Final = ["Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"]
_HOURS: Final = {
    "Z": 0, "UTC": 0, "GMT": 0, "WET": 0, "BST": 1, "CET": 1, "CEST": 2, "EET": 2, "EEST": 3, "JST": 9, "KST": 9,
    "EST": -5, "EDT": -4, "CST": -6, "CDT": -5, "MST": -7, "MDT": -6, "PST": -8, "PDT": -7,
}  # fmt: skip
_HOUR_NS: Final = 3600 * NS_PER_S
_DAY_NS: Final = 24 * _HOUR_NS

NOT_A_TIME: Final = np.iinfo(np.int64).min
"""Stands for a text that is no time."""


def wall_ns(texts: pa.ChunkedArray, unit: str, zone: str | None, where: str) -> tuple[Ints, list[str]]:
    """Reads times as nanoseconds of the wall clock since 1970, and says what the texts do not.

    Numbers are of the unit that their column names, else seconds, milliseconds, microseconds or nanoseconds by their
    size. Small ones count from the start of the log. `zone` is that of dates without one.

    Raises:
        PlanError: More than a hundredth of the texts are no times, or the zone is unknown.
    """
    texts = pc.utf8_trim_whitespace(texts.cast(pa.string()).fill_null("")).combine_chunks()
    numeric = pc.match_substring_regex(texts, r"^\d+(\.\d*)?([eE]\+?\d+)?$")
    if pc.sum(numeric).as_py() * 2 > len(texts):
        return _epochs(texts, numeric, unit)
    for form in _FORMS:
        found = pc.extract_regex(texts, form)
        if found.null_count * 100 <= len(texts) or found.null_count <= 1 < len(texts):
            return _dates(found, zone, where)
    first = next((text for text in texts.to_pylist() if not re.fullmatch(_FORMS[0], text)), "")
    raise PlanError(
        f'{where}: got "{first[:60]}", allowed: one kind of time, such as 2026/01/02 10:00:00.101 or an epoch'
    )


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


def _ints(column: pa.Array) -> Ints:
    result: Ints = pc.if_else(pc.equal(column, ""), "0", column).fill_null("0").cast(pa.int64()).to_numpy()
    return result


def _dates(found: pa.StructArray, zone: str | None, where: str) -> tuple[Ints, list[str]]:
    part: dict[str, Any] = {field.name: found.field(field.name) for field in found.type}
    notes, good = [], np.asarray(found.is_valid())
    hour = _ints(part["h"])
    half = pc.utf8_lower(part["half"].fill_null(""))
    hour = np.where(
        np.asarray(pc.starts_with(half, "p")),
        hour % 12 + 12,
        np.where(np.asarray(pc.starts_with(half, "a")), hour % 12, hour),
    )
    ns = ((hour * 60 + _ints(part["min"])) * 60 + _ints(part["sec"])) * NS_PER_S
    ns += _ints(pc.utf8_slice_codeunits(pc.utf8_rpad(part["part"].fill_null(""), 9, "0"), 0, 9))
    if "d" in part:
        day = _ints(part["d"])
        if "month" in part:
            month = np.asarray(pc.index_in(part["month"], pa.array(_MONTHS)).fill_null(0)).astype(np.int64) + 1
        else:
            month = _ints(part["mon"])
        year = _ints(part["y"]) if "y" in part else np.full(len(ns), 1970)
        days = _days(year, month, day)
        if "sep" in part:  # 02.01.2026 and 1/2/2026: the order by which the log is the shorter one, a dot's day first
            other, dotted = _days(year, day, month), part["sep"][0].as_py() == "."
            spans = [np.ptp(one[good & (one >= 0)]) if (good & (one >= 0)).any() else np.inf for one in (days, other)]
            wrong = [int((one[good] < 0).sum()) for one in (days, other)]
            days = other if (wrong[1], spans[1], not dotted) < (wrong[0], spans[0], dotted) else days
        good = good & (days >= 0)
        ns += days * _DAY_NS
    if "y" not in part:
        notes.append(
            "its times have no date: it begins on 1 January 1970" if "d" not in part else "its times have no year"
        )
    named = part["zone"].fill_null("") if "zone" in part else pa.array([""] * len(ns))
    offsets = {name: _offset_ns(name) for name in pc.unique(named).to_pylist()}
    if not any(name in ("", *()) or offset is None for name, offset in offsets.items()):
        shift = {name: offset or 0 for name, offset in offsets.items()}
        ns = ns - np.array([shift[name] for name in named.to_pylist()], np.int64)
    elif zone is not None:
        ns = _in_zone(ns, zone, where)
    elif "y" in part:
        notes.append("its times name no zone: they are taken as UTC; --timezone names another")
    ns[~good] = NOT_A_TIME
    return ns, notes


def _days(year: Ints, month: Ints, day: Ints) -> Ints:
    """Returns days since 1970; -1 for a date that cannot be."""
    can = (month >= 1) & (month <= 12) & (day >= 1) & (day <= 31) & (year >= 1970)
    months = np.where(can, (year - 1970) * 12 + month - 1, 0).astype("datetime64[M]")
    result: Ints = np.where(can, months.astype("datetime64[D]").astype(np.int64) + day - 1, -1)
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
    then lies between the two.

    Returns:
        The times, and the steps as a node's manifest has them (`wattune.telemetry.files.manifest.ClockWatch`).

    Raises:
        PlanError: It falls by more than two hours: the log is of two runs.
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
