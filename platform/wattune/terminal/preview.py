"""A preview of a study in words: what a call would do, how long it takes, and what comes first."""

import math
from collections import Counter

from rich.text import Text

from wattune.orchestrate.events import Preview
from wattune.search.names import namer


def preview_lines(preview: Preview) -> list[Text]:
    """Says what a call is going to do: changes of the space, trials, times, the first ones, and what will fail."""
    extra = [f"{preview.num_references} reference trial(s)"] if preview.num_references else []
    extra += [f"at most {preview.num_race} repeat(s) of the race"] if preview.num_race else []
    extra += [f"{preview.num_finalists} finalist(s)"] if preview.num_finalists else []
    extra += [f"{preview.num_again} begun before"] if preview.num_again else []
    among = f", {', '.join(extra)} among them" if extra else ""
    how, basis = basis_of(preview)
    whole = f"{how} {device_hours(preview.device_s)} ({basis})"
    lines = [Text(f"not read and not run: {reason}", style="yellow") for reason in preview.unreadable.values()]
    lines += [Text(f"space {preview.space_number}: {one}", style="cyan") for one in preview.changes]
    if preview.num_drawn < preview.num_kept:
        lines.append(Text(f"{preview.num_drawn} of {preview.num_kept} kept are tried (search.num_trials)"))
    lines.append(Text(f"{preview.num_left} trial(s) to run{among}: {whole}"))
    bounds = []
    if preview.num_now < preview.num_left:
        now = f"at most {preview.num_now} of them, {how} {device_hours(preview.device_now_s)}"
        bounds.append(f"{now if preview.num_now else 'none of them'} (--max-trials or --gpu-hours)")
    if preview.most_s < math.inf:
        bounds.append(f"at most {duration(preview.most_s)} on the clock (--max-hours or --deadline)")
    if bounds:
        lines.append(Text(f"this call: {'; '.join(bounds)}"))
    if preview.first and preview.num_now:
        lines.append(Text(f"first: {_named(preview)}", style="dim"))
    if preview.num_timeouts:
        several = preview.num_timeouts > preview.num_left  # of those that a strategy may choose
        late = f"{preview.num_timeouts} {f'of the {preview.num_kept} kept' if several else 'trial(s)'}"
        lines.append(
            Text(
                f"{late} are expected to reach measure.timeout_s and be ended there: "
                f"their steps take up to {duration(preview.longest_s)}; raise it, or lower measure.min_steps",
                style="yellow",
            )
        )
    if preview.num_done:
        kinds = ", ".join(f"{count} {status}" for status, count in preview.done.items())
        lines.append(Text(f"{preview.num_done} skipped, done before: {kinds}", style="dim"))
    return lines


def basis_of(preview: Preview) -> tuple[str, str]:
    """Returns how sure the times of a preview are, and what they come from."""
    if preview.measured:
        return "about", "by the trials that finished"
    if preview.estimated:
        return "about", "by estimated step times, and starts as earlier trials took"
    return "at least", "measured steps alone; build and warm-up on top"


def _named(preview: Preview) -> str:
    """Names the trials that start first, each with its role and time; equal ones once."""
    counted = Counter(("reference trial " if one.role == "reference" else "", one.spec) for one in preview.first)
    sure = preview.measured or preview.estimated
    times_s = {one.spec: one.expected_s for one in preview.first}
    several = len({spec.model for _, spec in counted}) > 1
    plan = namer((*preview.workloads, *(spec.workload for _, spec in counted)))
    names = []
    for (role, spec), count in counted.items():
        model = f"{spec.model.name} " if several else ""
        took = f" (about {duration(times_s[spec])}{' each' if count > 1 else ''})" if sure else ""
        names.append(f"{role}{model}{plan(spec)}{f' {count} times' if count > 1 else ''}{took}")
    return ", then ".join(names)


def device_hours(device_s: float) -> str:
    """Formats device-seconds: `3.18 device-hours`."""
    return f"{device_s / 3600:.3g} device-hours"


def duration(seconds: float) -> str:
    """Formats a duration: `45 s`, `12:05 min`, `3:20 h`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60}:{whole % 60:02d} min"
    return f"{whole // 3600}:{whole % 3600 // 60:02d} h"
