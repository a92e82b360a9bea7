"""Steps of a recorded command: read when it has ended, kept as spans of its devices and as facts of its manifest."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pyarrow as pa

from wattune.clock import ClockAnchor
from wattune.errors import SpaceError
from wattune.recording.window import with_window
from wattune.steps.source import NONE, parse_source
from wattune.telemetry.host import HOST
from wattune.workers.command.program_run import ProgramOutcome, ProgramRun

FOLDER: Final = "steps"
"""Folder of the recording that the command's processes write their steps to; gone once they are spans."""

MOST_PROBLEMS: Final = 20
"""Most problems that the manifest keeps."""


def told_steps(
    run: ProgramRun,
    facts: Mapping[str, Any],
    manifest: Mapping[str, Any],
    last_mono_ns: int | None = None,
    anchor: ClockAnchor | None = None,
) -> tuple[pa.Table | None, dict[str, Any]]:
    """Returns the spans of a recording's steps, None where its figures are of no steps, and the facts that follow.

    `last_mono_ns` is the time up to which the sensors were read, where the command's end was not seen: its steps may go
    on behind that, and do not count there. `anchor` is that of another machine or boot.
    """
    ran, asked = facts["window"], facts["steps_asked"]
    end_ns = int(ran.get("end_mono_ns") or last_mono_ns or ran["start_mono_ns"])
    steps = run.steps()
    if not ran.get("end_mono_ns"):
        steps = {rank: [step for step in each if step.end_mono_ns <= end_ns] for rank, each in steps.items()}
    ended = replace(run.outcome(steps), start_mono_ns=int(ran["start_mono_ns"]), end_mono_ns=end_ns)
    outcome = with_window(ended, str(asked.get("window")))
    devices = devices_of_ranks(outcome, manifest.get("devices", {}))
    problems = list(outcome.problems)
    unnamed = [name for rank, name in devices.items() if rank not in steps] if outcome.headers else []
    if unnamed and outcome.end_index is not None:
        problems.insert(
            0,
            f"power and energy are also of devices that no rank named ({', '.join(unnamed)}): idle ones and others' "
            "work count",
        )
    tokens = asked.get("tokens_per_step")
    if not isinstance(tokens, int | float):
        num_devices = max(len(manifest.get("devices", {}).keys() - {HOST}), 1) if outcome.per_device else 1
        tokens = outcome.tokens_per_step * num_devices or None
    found: dict[str, Any] = {
        "source": outcome.source,
        **({} if not outcome.confidence else {"confidence": outcome.confidence}),
        "num_steps": min((len(each) for each in steps.values()), default=0),
        "ranks": sorted(steps),
        **({} if tokens is None else {"tokens_per_step": float(tokens)}),
        **({} if not outcome.peaks else {"memory_peak_bytes": max(outcome.peaks.values())}),
        **({} if not problems else {"problems": problems[:MOST_PROBLEMS]}),
        **({} if not outcome.errors else {"errors": {str(rank): text for rank, text in outcome.errors.items()}}),
    }
    window = dict(zip(("start_mono_ns", "end_mono_ns"), outcome.window_mono_ns, strict=True))
    kept = {"window": window, "window_why": outcome.window_why, "command_window": ran, "steps": found}
    if outcome.end_index is None:
        return None, kept
    return outcome.spans(node=facts["node"], devices=devices, anchor=anchor or ClockAnchor.now()), kept


def steps_of_open(
    recording: Path, facts: Mapping[str, Any], manifest: Mapping[str, Any], last_mono_ns: int
) -> tuple[pa.Table | None, dict[str, Any]]:
    """Returns what `told_steps` does, of a recording that was killed or still records; nothing without steps.

    Of lines of output those count that the recorder heard.
    """
    asked = facts.get("steps_asked")
    if not (isinstance(asked, dict) and isinstance(facts.get("window"), dict) and (recording / FOLDER).is_dir()):
        return None, {}
    try:
        source = parse_source(str(asked.get("source")))
    except SpaceError:  # a manifest that somebody edited
        source = NONE
    run = ProgramRun(recording / FOLDER, source)
    run.hear_kept()
    return told_steps(run, facts, manifest, last_mono_ns)


def devices_of_ranks(outcome: ProgramOutcome, devices: Mapping[str, Mapping[str, Any]]) -> dict[int, str]:
    """Returns the device of every rank, and a number of its own for every device that no rank told.

    A recording is of all devices that were sampled: who uses one that no rank named is not known. So it has the steps
    too, and counts as in a recording without steps.
    """
    names = sorted((name for name in devices if name != HOST), key=lambda name: (len(name), name))
    if not names:
        return dict.fromkeys(outcome.steps, HOST)
    told = outcome.told_devices(uuids_of(devices))
    found: dict[int, str] = {}
    for rank in sorted(outcome.steps):
        place = outcome.headers.get(rank, {}).get("local_rank")
        found[rank] = told.get(rank) or names[(rank if place is None else int(place)) % len(names)]
    left = [name for name in names if name not in found.values()]
    return found | dict(enumerate(left, start=max(outcome.steps, default=-1) + 1))


def uuids_of(devices: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """Returns the names of devices by UUID, of those that have one."""
    return {str(facts["uuid"]): name for name, facts in devices.items() if facts.get("uuid")}
