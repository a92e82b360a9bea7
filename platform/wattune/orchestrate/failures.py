"""Failures that are the cluster's and not the configuration's: their causes, and when a trial is tried again.

A trial that failed so is `infra_failed`. That says nothing about its plan: it is tried again, and until it has run it
is left out of rankings and of what a strategy learns.
"""

import errno
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from wattune.errors import NodeError
from wattune.run import Cause as Cause
from wattune.run import Run, RunStatus

MOST_TRIES: Final = 3
"""A trial that failed so often for one cause is not tried again by the same call; every later call tries it once."""

MOST_ALIKE: Final = 5
"""Failures in a row for the same reason, after which no more trials for the same workers start."""

MOST_SURROUNDED: Final = 2
"""Plans in a row that lack the same of their surroundings, while none has run: the next one would lack it too."""

CUT_OFF: Final = "the study's process ended while it ran"
"""Reason of trials that ran when the study's process was killed."""

RUNS_AGAIN: Final = "; the same command runs it again"
"""End of the reason of a trial whose call ended before it."""

_CUT_SHORT: Final = "the study was cut short: "

CAUSE_TAG: Final = "infra_cause"
"""Tag of a result with status `infra_failed`: one of `Cause`."""

NODES_TAG: Final = "infra_nodes"
"""Tag of such a result: names of the nodes at fault, joined by commas. Without it any of its nodes may be."""

_LONGEST_REASON: Final = 120
"""Characters of a reason that decide whether two are the same."""

_COUNTED: Final = (RunStatus.CRASHED, RunStatus.TIMED_OUT, RunStatus.INVALID, RunStatus.INFRA_FAILED)
"""Statuses that end a row of trials. Out of memory and a broken limit are findings about a plan, however many."""

_BY_WORDS: Final = (Cause.DEVICE, Cause.NETWORK, Cause.WORKER_KILLED)
"""Causes of which one device or program may have several: alike are those with the same words."""

_OF_THE_MACHINE: Final = frozenset(
    (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.ESTALE, errno.ENOMEM, errno.EMFILE, errno.ENFILE)
)
"""Errors of the operating system that no plan asks for: a full, broken or vanished disk, no memory, no files."""


@dataclass(frozen=True, slots=True)
class Failure:
    """A failure of the cluster."""

    cause: Cause
    reason: str
    nodes: tuple[str, ...] = ()
    """Names of the nodes at fault; empty if any of the trial's may be."""

    def of(self, result: Run) -> Run:
        """Returns a trial's result with this failure as its ending."""
        nodes = {NODES_TAG: ",".join(self.nodes)} if self.nodes else {}
        return replace(
            result,
            status=RunStatus.INFRA_FAILED,
            reason=self.reason,
            metrics={},
            quality="",
            quality_reasons=(),
            tags={**result.tags, CAUSE_TAG: str(self.cause), **nodes},
        )


def cut_short(cause: str) -> str:
    """Returns the reason of trials that ran when their call ended by itself."""
    return f"{_CUT_SHORT}{cause}{RUNS_AGAIN}"


def may_end_calls(result: Run) -> bool:
    """Returns true if a trial ran when its study's process or cluster ended: it may have ended them, and runs last."""
    return result.reason == CUT_OFF or result.reason.startswith(_CUT_SHORT)


def is_of_the_machine(error: BaseException) -> bool:
    """Returns whether an error is of the machine it was raised on: a library, memory, or a disk that is missing."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, NodeError | ImportError | MemoryError):
            return True
        if isinstance(seen, OSError) and seen.errno in _OF_THE_MACHINE:
            return True
        seen = seen.__cause__
    return False


def is_tried_again(result: Run, attempts: Sequence[Run]) -> bool:
    """Returns whether the call in which a trial failed tries it again: where another try may end otherwise."""
    if is_surrounded(result):
        return False
    same = [one for one in attempts if one.tags.get(CAUSE_TAG) == result.tags.get(CAUSE_TAG)]
    failed = [one for one in same if one.status is RunStatus.INFRA_FAILED]
    return result.status is RunStatus.INFRA_FAILED and len(failed) + 1 < MOST_TRIES


def failed_nodes(result: Run) -> frozenset[str]:
    """Returns the names of nodes that a next attempt of a trial avoids if it can."""
    names = result.tags.get(NODES_TAG) or result.tags.get("nodes", "")
    return frozenset(filter(None, names.split(","))) if result.status is RunStatus.INFRA_FAILED else frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class FailuresInARow:
    """Failures in a row of trials for the same workers, for the same reason.

    What the cluster failed side by side counts once.
    """

    reason: str | None = None
    """Their `likeness`; None while there is none."""
    count: int = 0
    trial_id: str = ""
    """The last of them."""
    end_ns: int = 0
    """Wall time at which the last one ended that was counted."""
    any_ran: bool = False
    """True once a trial for the workers completed."""

    def then(self, result: Run) -> "FailuresInARow":
        """Returns the row after another trial ended."""
        if result.status is RunStatus.COMPLETED:
            return FailuresInARow(any_ran=True)
        reason = likeness(result)
        if reason is None:  # neither such a failure nor a success
            return self
        again = reason == self.reason
        if again and result.trial_id == self.trial_id and is_surrounded(result):  # it says nothing of other plans
            return self
        # One death of a rack, or of the process that drives all trials, ends each that runs there.
        of_cluster = result.status is RunStatus.INFRA_FAILED and not is_surrounded(result)
        if again and of_cluster and result.start_wall_ns < self.end_ns:
            return self
        count = self.count + 1 if again else 1
        return replace(self, reason=reason, count=count, trial_id=result.trial_id, end_ns=result.end_wall_ns)

    def ends_study(self, result: Run) -> bool:
        """Returns whether no more trials for the workers start after the last one of the row."""
        return self.count >= (MOST_SURROUNDED if is_surrounded(result) and not self.any_ran else MOST_ALIKE)


def is_surrounded(result: Run) -> bool:
    """Returns whether a trial's command lacked what every plan of it needs."""
    return result.tags.get(CAUSE_TAG) == Cause.SURROUNDINGS


def likeness(result: Run) -> str | None:
    """Returns a text that is equal for failures of the same reason; None if the result ends no row of trials.

    Numbers, names with digits, paths and quoted texts are left out of a reason: they differ from trial to trial.
    """
    if result.status not in _COUNTED:
        return None
    cause = result.tags.get(CAUSE_TAG)
    if is_surrounded(result):  # another file or library is another reason
        return re.sub(r"\d+", "#", result.reason)
    if cause is not None and cause not in _BY_WORDS:
        return f"{result.status}: {cause}"
    plain = re.sub(r"'[^']*'|\"[^\"]*\"|\S*[\d/]\S*", "#", result.reason)
    return f"{result.status}: {' '.join(plain.lower().split())[:_LONGEST_REASON]}"
