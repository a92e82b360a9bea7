"""Errors of Ray in a line: who ended and why, and the cause inside what Ray wraps."""

from typing import Final

from ray.exceptions import (
    ActorUnavailableError,
    NodeDiedError,
    OutOfMemoryError,
    RayActorError,
    RayTaskError,
    WorkerCrashedError,
)

from wattune.errors import WattuneError

KEEPER_ENDED: Final = "the process that holds the lanes ended"
KEEPER_REMEDY: Final = (
    "Ray starts it again, and the trial is tried again; if it repeats, look for what kills it on the study's node, "
    "such as a lack of memory (`dmesg`)"
)


def death(error: BaseException) -> str:
    """Returns Ray's words about a process that ended; empty if the error is of another kind, such as one it raised."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, ActorUnavailableError | RayTaskError):  # it may come back; it raised an error
            return ""
        if isinstance(seen, RayActorError | WorkerCrashedError | NodeDiedError | OutOfMemoryError):
            return ray_words(seen)
        # Ray Train wraps what it found when it asked a worker.
        seen = getattr(seen, "health_check_failure", None) or seen.__cause__
    return ""


def ray_words(error: BaseException) -> str:
    """Returns Ray's words about a process that ended, in one line."""
    return " ".join(str(error).split()) or type(error).__name__


def ended_with_keeper(error: BaseException) -> bool:
    """Returns whether an actor ended because the process that holds the lanes, which owns it, did."""
    return isinstance(error, RayActorError) and "owner has died" in str(error)


def cause(error: BaseException) -> str:
    """Finds the one line of a Ray error that says what happened.

    It is the message of the innermost cause, or that of wattune's own error around it.
    """
    workers = getattr(error, "worker_failures", None)
    if workers:
        number, first = min(workers.items())
        return f"worker {number} of the group: {cause(first)}"
    # Ray wraps the error an actor raised and keeps it in `cause`. A wrapped error of wattune is a `WattuneError` too.
    while isinstance(error, RayTaskError) or not isinstance(error, WattuneError):
        inner = getattr(error, "cause", None) or error.__cause__
        if inner is None:
            break
        error = inner
    text = " ".join(str(error).split()) or "no message"
    return text if isinstance(error, WattuneError) else f"{type(error).__name__}: {text}"
