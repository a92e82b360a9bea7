"""View of a study while it runs: live on a terminal, plain lines elsewhere. Nothing is measured here."""

import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Final

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from wattune.objective import Question
from wattune.orchestrate.events import Event, Placement, Preview, RaceStep, RowStopped, TrialEvent, TrialProgress
from wattune.run import RunStatus
from wattune.search.names import namer
from wattune.terminal.preview import basis_of, device_hours, duration, preview_lines
from wattune.terminal.tally import Tally, key_of
from wattune.trial import TrialSpec
from wattune.view.answer import answer_lines
from wattune.view.table import between, worded

ASK_EVERY_S: Final = 1.0
"""Seconds between two requests for the workers' progress while a live view is shown."""

TELL_EVERY_S: Final = 60.0
"""Seconds between two lines of progress in a log, such as that of a Ray job; a trial may take many minutes."""

MOST_LANES: Final = 12
"""Most running trials that are shown one by one."""

MOST_SKIPPED: Final = 5
"""Most trials done before that are named one by one."""

_BAR_WIDTH: Final = 28
_LEAST_BAR: Final = 6
_HEAD_WIDTH: Final = 68
"""Most columns of the text beside the bar."""

_NAME_WIDTHS: Final = (44, 24)
"""Columns for a trial's name in its line, and on a narrow terminal."""

_SAID_WITHIN_S: Final = 2.0
"""Longest a view waits at its end for the answer to a Ctrl-C to be printed."""

_INDENT: Final = " " * 9
"""Before a line that goes on with the one above it."""

_NARROW: Final = 120
"""Columns below which a terminal is narrow."""


class StudyProgress:
    """A live view of a study on a terminal, and a line for each trial that ended on any output."""

    def __init__(
        self,
        console: Console,
        question: Question,
        *,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """Shows nothing before `__enter__`.

        The question's metric is that of the best trial; margins of its bounds are shown.
        """
        self._console, self._clock_s = console, clock_s
        self._tally = Tally(question)
        self._progress: dict[tuple[str, int], TrialProgress | None] = {}
        self._preview: Preview | None = None
        self._plan = namer(())
        self._lock = threading.RLock()  # a Ctrl-C may come while it is held, and `stopping` draws the view
        self._is_stopping = False
        self._begun_s = clock_s()
        self._state = "starting"
        self._over = threading.Event()
        self._live: Live | None = None
        # Handlers of signals put lines here: the screen's locks may wait for the very thread that a handler interrupts.
        self._heard: queue.SimpleQueue[Text | None] = queue.SimpleQueue()
        self._saying = threading.Thread(target=self._say, daemon=True, name="stopping")
        self._is_shown = False
        self._asking = threading.Thread(target=self._ask, daemon=True, name="progress")
        if console.is_terminal:
            self._live = Live(get_renderable=self.view, console=console, refresh_per_second=2, transient=True)

    def __enter__(self) -> "StudyProgress":
        self._begun_s = self._clock_s()
        self._saying.start()
        self._is_shown = True
        if self._live is not None:
            self._live.start()
        self._asking.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._is_shown = False
        try:
            self._heard.put(None)
            self._saying.join(_SAID_WITHIN_S)
        finally:  # a second Ctrl-C still gets its cursor back
            if self._live is not None:
                self._live.stop()

    def __call__(self, event: Event) -> None:
        """Shows one event; this is the listener of `wattune.api.run_study`."""
        with self._lock:
            self._tally.add(event, self._clock_s())
            lines = self._lines(event)
        for line in lines:
            self._print(line)

    def stopping(self, text: str) -> None:
        """Says that the study was told to stop; safe in a signal's handler."""
        self._is_stopping = True
        line = Text(text, style="yellow")
        if self._is_shown:
            self._heard.put(line)
        else:
            self._print(line)

    def _say(self) -> None:
        """Prints what a signal's handler heard, until the view ends."""
        while (line := self._heard.get()) is not None:
            self._print(line)

    def _print(self, line: Text) -> None:
        """Prints a permanent line: wrapped between words on a terminal, unwrapped in a file."""
        self._console.print(line, highlight=False, soft_wrap=not self._console.is_terminal)

    def _name(self, event: TrialEvent) -> str:
        narrow = self._console.is_terminal and self._console.width < _NARROW
        return f"{described(event, self._plan):<{_NAME_WIDTHS[narrow]}}"

    def view(self) -> Group:
        """Returns the current live view."""
        with self._lock:
            tally, now_s = self._tally, self._clock_s()
            parts: list[Table | Text] = [self._head(now_s)]
            if tally.running:
                parts.append(self._running_table(now_s))
            if tally.failed:
                kinds = ", ".join(f"{count} {status}" for status, count in tally.failed.most_common())
                parts.append(Text(f"failed   {kinds}", style="red"))
            parts += self._waits(now_s)
            parts += [Text(f"stopped  {one}", style="red") for one in tally.stopped]
            if tally.race is not None:
                parts.append(Text(str(tally.race), style="magenta"))
            if tally.done > tally.failed.total() - tally.failed[RunStatus.INFRA_FAILED] and (
                ranking := tally.ranking(patient=True)
            ):
                first, *others = answer_lines(ranking, is_running=True)
                parts += [Text(first, style="bold"), *map(Text, others)]
        return Group(*parts)

    def _head(self, now_s: float) -> Table:
        tally = self._tally
        grid = Table.grid(padding=(0, 2))
        left_s = tally.left_s(now_s)
        room = self._console.width - _HEAD_WIDTH
        bar = ProgressBar(total=max(1, tally.total), completed=tally.done, width=max(_LEAST_BAR, min(_BAR_WIDTH, room)))
        skipped = f" ({tally.skipped} before)" if tally.skipped else ""
        grid.add_row(
            Text(f"{tally.done}/{tally.total_text} trials{skipped}" if tally.total else self._state),
            bar,
            Text(f"{duration(now_s - self._begun_s)} elapsed", style="dim"),
            Text("stopping", style="yellow")
            if self._is_stopping
            else Text("" if left_s is None else f"about {duration(left_s)} left", style="dim"),
        )
        return grid

    def _waits(self, now_s: float) -> list[Text]:
        tally = self._tally
        took = duration(now_s - tally.waits_since_s)
        return [Text(f"waits for {tally.waits_for}, {took}", style="yellow")] if tally.waits_for else []

    def _running_table(self, now_s: float) -> Table:
        grid = Table.grid(padding=(0, 2))
        running = list(self._tally.running.values())
        rows = [
            (
                Text(described(start, self._plan)),
                Text(", ".join(start.nodes), style="dim"),
                Text(_part(self._progress.get(key_of(start)))),
                Text(_predicted(start), style="magenta"),
                Text(duration(now_s - since_s), style="dim"),
            )
            for start, since_s in running[:MOST_LANES]
        ]
        widest = [max(row[place].cell_len for row in rows) for place in range(5)]
        narrow = len("running") + sum(widest) + 2 * len(widest) > self._console.width
        for name, nodes, part, predicted, took in rows:
            if narrow:  # the name has a line of its own
                grid.add_row(Text("running", style="green"), name)
                grid.add_row("", Text("  ").join(text for text in (part, predicted, took, nodes) if text))
            else:
                grid.add_row(Text("running", style="green"), name, nodes, part, predicted, took)
        if len(running) > MOST_LANES:
            grid.add_row("", Text(f"... and {len(running) - MOST_LANES} more", style="dim"))
        return grid

    def _lines(self, event: Event) -> list[Text]:
        if isinstance(event, Preview):
            self._preview, self._plan = event, namer(event.workloads)
            return preview_lines(event)
        if isinstance(event, Placement):
            self._state = "running"
            if event.waits_for:
                return [Text(f"waits for {event.waits_for}", style="yellow")]
            lanes = f"{event.num_at_once} at once on {', '.join(event.lanes)}"
            waiting = [Text(f"waits for nodes: {one}", style="yellow") for one in event.missing]
            return [Text(f"{lanes}; {self._duration_of(event)}", style="dim"), *waiting]
        if isinstance(event, RowStopped):
            return [Text(str(event), style="red")]
        if isinstance(event, RaceStep):
            return [Text(str(event), style="magenta")]
        if event.kind == "started":
            return []
        if event.kind == "skipped":
            return self._skipped_lines(event)
        return [self._trial_line(event)]

    def _duration_of(self, placement: Placement) -> str:
        if placement.cut_short:
            most = f"at most {duration(placement.wall_s)} and {device_hours(placement.device_s)}"
            return f"{most} (--max-hours or --deadline)"
        how = "about" if self._preview is None else basis_of(self._preview)[0]
        return f"{how} {duration(placement.wall_s)}"

    def _skipped_lines(self, event: TrialEvent) -> list[Text]:
        if self._tally.skipped <= MOST_SKIPPED:
            return [self._trial_line(event)]
        if self._tally.skipped > MOST_SKIPPED + 1 or self._preview is None:
            return []
        return [Text(f"... and {self._preview.num_done - MOST_SKIPPED} more done before", style="dim")]

    def _trial_line(self, event: TrialEvent) -> Text:
        assert event.result is not None, "only a started trial has no result"
        result, elapsed_s = event.result, self._clock_s() - self._begun_s
        done = f"{self._tally.done:>{len(str(self._tally.total))}}"
        line = Text(f"[{done}/{self._tally.total_text}] {elapsed_s:5.0f} s  ", style="dim")
        line.append(f"{self._name(event)} ", style="default")
        if event.kind == "skipped":
            line.append("done before  ")
        if result.status is not RunStatus.COMPLETED:
            again = "; tried again" if event.again else ""
            return line.append(f"{result.status}: {result.reason}{again}", style="red")
        metric = self._tally.question.objective.metric
        value = result.metrics.get(metric)
        figures = [Text(f"{metric} {'not measured' if value is None else worded(metric, value)}", style="cyan")]
        if event.predicted is not None:
            figures.append(Text(_predicted(event), style="magenta"))
        power_w = result.metrics.get("node_device_power_peak_1s_w")
        if power_w is not None:
            figures.append(Text(f"1 s node peak {worded('peak_w', power_w)}", style="dim"))
        took = f"took {worded('time_s', result.took_s)}"
        if len(event.nodes) and self._tally.lanes > 1:
            took += f" on {', '.join(event.nodes)}"
        return self._with_figures(line, [*figures, Text(took, style="dim")])

    def _with_figures(self, line: Text, figures: Sequence[Text]) -> Text:
        """Appends figures to a line; where they do not fit they begin on the next one, and none is broken."""
        gap = "  "
        whole = line.copy().append_text(Text(gap).join(figures))
        if not self._console.is_terminal or whole.cell_len <= self._console.width:
            return whole
        line.rstrip()
        used = self._console.width  # the first figure begins a line
        for figure in figures:
            breaks = used + len(gap) + figure.cell_len > self._console.width
            line.append(f"\n{_INDENT}" if breaks else gap).append_text(figure)
            used = figure.cell_len + (len(_INDENT) if breaks else used + len(gap))
        return line

    def _ask(self) -> None:
        """Asks workers for their progress. They may answer slowly, so this runs in a thread of its own."""
        while not self._over.wait(ASK_EVERY_S if self._live is not None else TELL_EVERY_S):
            with self._lock:
                running = list(self._tally.running.values())[:MOST_LANES]
            self._progress = {
                key_of(start): start.progress()
                for start, _ in running
                if start.progress is not None and not self._over.is_set()
            }
            if self._live is None:
                self._tell(running)

    def _tell(self, running: Sequence[tuple[TrialEvent, float]]) -> None:
        """Prints a line for each trial that still runs, for outputs without a live view."""
        with self._lock:
            now_s, tally = self._clock_s(), self._tally
            lines = [
                Text(
                    f"[{tally.done}/{tally.total_text}] {now_s - self._begun_s:5.0f} s  {self._name(start)} "
                    f"runs for {duration(now_s - since_s)}  {_part(self._progress.get(key_of(start)))}".rstrip(),
                    style="dim",
                )
                for start, since_s in running
                if key_of(start) in tally.running
            ] + self._waits(now_s)
        for line in lines:
            self._print(line)


def described(event: TrialEvent, plan: Callable[[TrialSpec], str]) -> str:
    """Returns the short name of a trial, as `plan` names its plan, with the role or number of this repeat."""
    numbered = f" #{event.repeat}" if event.repeat else ""
    apart = {
        "burst": " burst",
        "reference": " reference trial",
        "finalist": " finalist",
        "race": f" race #{event.repeat}",
    }
    return f"{event.spec.model.name} {plan(event.spec)}{apart.get(event.role, numbered)}"


def _predicted(event: TrialEvent) -> str:
    """Describes the prediction that a trial was proposed by; empty where there is none."""
    found = event.predicted
    if found is None:
        return ""
    return f"predicted {between(found.metric, found.value, found.low, found.high)}"


def _part(progress: TrialProgress | None) -> str:
    if progress is None:
        return ""
    if not progress.done and not progress.total:
        return progress.part
    of = "" if progress.total is None else f"/{progress.total}"
    return f"{progress.part} {progress.done}{of}"
