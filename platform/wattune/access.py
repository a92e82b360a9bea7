"""Calls of a store elsewhere: each ends in time, and after a failure none is tried for a minute."""

import os
import socket
import time
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final, TypeVar
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from wattune.deadline import within
from wattune.errors import TrackingError, WattuneError
from wattune.masking import without_secrets, without_values

_T = TypeVar("_T")

RETRY_AFTER_S: Final = 60.0
"""Seconds without another attempt after a store could not be reached."""

ANSWER_WITHIN_S: Final = 60.0
"""Longest time of a call, besides the time for moving data. A library's own limit is for each part of an answer: a
server that sends a byte now and then keeps to it."""

SLOWEST_BYTES_PER_S: Final = 1_000_000
"""Slowest rate of a store that counts as alive."""

_CONNECT_WITHIN_S: Final = 5.0


class Access:
    """The way to one store, which remembers the last failure to reach it."""

    answer_s = ANSWER_WITHIN_S
    """Longest time of a call of this store."""

    def __init__(
        self,
        place: str,
        remedy: str,
        clock: Callable[[], float] = time.monotonic,
        options: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """Names a store and what to do where it cannot be reached.

        `clock` gives monotonic seconds. No message shows the secrets among `options`, nor those of the environment.
        """
        self._options = options
        self._place, self._remedy, self._clock = without_secrets(place), remedy, clock
        self._closed_until_s = 0.0
        self._cause = ""

    def do(self, action: str, operation: Callable[[], _T], *, moving_s: float = 0.0) -> _T:
        """Calls an operation in a thread of its own, and turns every error into a `TrackingError`.

        `moving_s` is the longest time that its data may take to move, besides the time of an answer. Raises
        `TrackingError`: with the action, the cause and the remedy. It is raised without an attempt if the store could
        not be reached within the last `RETRY_AFTER_S`.
        """
        if self._cause and self._clock() < self._closed_until_s:
            raise TrackingError(f"cannot {action}: {self._cause}; not tried again for {RETRY_AFTER_S:g} s")
        try:
            value = within(self.answer_s + moving_s, operation, name="request of a store")
        except WattuneError:
            raise
        except Exception as error:
            # Stores raise the errors of their libraries (requests, SQLAlchemy, boto3): no narrower class covers them
            # all. Our own work is done before a request, so all errors caught here are the store's.
            if (refused := self.refusal(action, error)) is not None:
                raise refused from error
            self._closed_until_s = self._clock() + RETRY_AFTER_S
            self._cause = f"{self._place} cannot be reached ({one_line(first_cause(error), self._options)})"
            raise TrackingError(
                f"cannot {action}: {self._cause}; results stay in the study folder, {self._remedy}, then run "
                "`wattune sync`"
            ) from error
        self._cause = ""
        return value

    def refusal(self, action: str, error: Exception) -> TrackingError | None:  # noqa: ARG002 - of stores that answer
        """Returns what to raise where a store answered and refused: then waiting does not help."""
        return None


def first_cause(error: BaseException) -> BaseException:
    """Returns the first error of a chain: `Connection refused` under three layers of retries."""
    while (cause := error.__cause__ or (None if error.__suppress_context__ else error.__context__)) is not None:
        error = cause
    return error


def one_line(error: BaseException, options: Mapping[str, str] = MappingProxyType({})) -> str:
    """Returns an error's message as one line without secrets, also those of the environment and among options."""
    return without_values(" ".join(str(error).split()), {**os.environ, **options})[:500] or type(error).__name__


def refused(address: str) -> str:
    """Returns why the server at a URL, or the proxy before it, takes no connection; empty where it does."""
    try:
        parts = urlsplit(address)
        proxy = "" if proxy_bypass(parts.hostname or "") else getproxies().get(parts.scheme, "")
        if proxy:
            parts = urlsplit(proxy if "//" in proxy else f"//{proxy}")
        place = parts.hostname or "", parts.port or {"https": 443}.get(parts.scheme, 80)
        # Not by the socket's own time-out: it is for each address of a name, and looking that up has none.
        within(_CONNECT_WITHIN_S, lambda: socket.create_connection(place).close(), name="connection")
    except (OSError, ValueError) as error:
        return one_line(error)
    return ""
