"""Steps of a training log with times, beside the logs of sensors: found by the patterns of `wattune record`."""

import re
from collections import Counter
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from wattune.clock import ClockAnchor
from wattune.errors import PlanError
from wattune.foreign.columns import named
from wattune.foreign.tables import plain_text, separated
from wattune.foreign.times import STAMP, monotonic_ns, wall_ns
from wattune.recording.steps import told_steps
from wattune.steps.source import AUTO, parse_source
from wattune.telemetry.host import HOST
from wattune.units import ns_to_s
from wattune.workers.command.program_run import ProgramRun

_FRONT: Final = 100
"""Characters of a line among which its time is."""

_STEP_WORDS: Final = ("step", "global_step", "iteration", "iter")


def steps_beside(
    path: Path, facts: dict[str, Any], devices: dict[str, list[str]], zone: str | None, *, has_date: bool
) -> tuple[pa.Table, dict[str, Any]]:
    """Returns the spans of a log's steps, for every device of every node, and the facts of the recording that follow.

    The log has lines with times, or is a CSV with the columns step and time, the end of the step. Of the recording's
    facts `window` (of the sensors), `steps_asked` and `node` are read; `zone` is that of times without one, and
    `has_date` says whether the sensors' times have a date. Raises `PlanError`: it has no times or no steps, or is of
    another time than the sensors.
    """
    where = path.name
    try:
        text = plain_text(path.read_bytes(), where)
    except OSError as error:
        raise PlanError(f"--steps: {path} cannot be read: {error.strerror}; give the training run's log") from error
    source, lines, stamps = AUTO, *_stamped(text)
    found = separated(text.split("\n"), [], where)
    words = {named(name)[0]: name for name in (found[0].column_names if found else ())}
    step = next((words[word] for word in _STEP_WORDS if word in words), None)
    time = next((name for word, name in words.items() if re.search(r"time|date|^ts$", word)), None)
    if found is not None and step is not None and time is not None:
        source = parse_source(r"pattern/s:^step (?P<step>\d+)$")
        lines = [f"step {number}" for number in pc.utf8_trim_whitespace(found[0][step]).to_pylist()]
        stamps = found[0][time].to_pylist()
    if len(stamps) < 2:
        raise PlanError(f"--steps: {where} has no times on its lines; log them, or give a CSV of step and time")
    ns, notes = wall_ns(pa.chunked_array([stamps], pa.string()), "", zone, f"--steps: {where}")
    dated, zoned = (not any(word in one for one in notes) for word in ("date", "no zone"))
    if dated != has_date:
        raise PlanError(f"--steps: {'the sensors' if dated else where} tell no date, so the two cannot be joined")
    mono_ns, _ = monotonic_ns(ns, has_date=dated, has_zone=zoned, where=f"--steps: {where}")
    run = ProgramRun(path.parent / ".no-step-files", source)
    for line, at in zip(lines, mono_ns.tolist(), strict=True):
        run.hear(line, at)
    # The devices of other nodes have the steps too: the ranks of a step wait for each other.
    every = devices | {facts["node"]: devices[facts["node"]] or [HOST]}
    names: dict[str, dict[str, Any]] = {f"{node}/{name}": {} for node, each in every.items() for name in each}
    anchor = ClockAnchor(mono_ns=0, wall_ns=0)
    spans, found_facts = told_steps(run, facts, {"devices": names}, anchor=anchor)
    if spans is None:
        raise PlanError(f"--steps: no steps were found in {where}; give a CSV of step and time")
    window, read = found_facts["window"], facts["window"]
    if window["start_mono_ns"] >= read["end_mono_ns"] or window["end_mono_ns"] <= read["start_mono_ns"]:
        apart_s = ns_to_s(window["start_mono_ns"] - read["start_mono_ns"])
        raise PlanError(
            f"--steps: the steps of {where} begin {apart_s:+.0f} s from the sensors and none is among them; give "
            "logs of one run, or --timezone where one of them is in local time"
        )
    apart = pc.extract_regex(spans["device"].cast(pa.string()), r"^(?P<node>[^/]*)/(?P<device>.*)$")
    for place, field in enumerate(spans.schema):
        if field.name in ("node", "device"):
            spans = spans.set_column(place, field, pc.struct_field(apart, field.name).cast(field.type))
    return spans, found_facts


def _stamped(text: str) -> tuple[list[str], list[str]]:
    """Returns the lines that have a time, and the times, those of the most common form."""
    found = [(line, match[0]) for line in text.split("\n") if (match := re.search(STAMP, line[:_FRONT]))]
    forms = [re.sub(r"\d+", "0", re.sub(r"[A-Za-z]+", "A", stamp)) for _, stamp in found]
    usual = Counter(forms).most_common(1)[0][0] if forms else ""
    kept = [pair for pair, form in zip(found, forms, strict=True) if form == usual]
    return [line for line, _ in kept], [stamp for _, stamp in kept]
