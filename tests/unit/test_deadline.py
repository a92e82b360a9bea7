"""A call that must come back does."""

import threading
import time

import pytest

from wattune.deadline import within


def test_it_returns_and_raises_what_the_operation_does() -> None:
    assert within(10, lambda: 7, name="seven") == 7
    with pytest.raises(KeyError, match="gone"):
        within(10, lambda: {}["gone"], name="error")


def test_what_is_late_is_left_behind() -> None:
    release, ended = threading.Event(), threading.Event()

    def wait() -> None:
        release.wait(30)
        ended.set()

    begun_s = time.monotonic()
    with pytest.raises(TimeoutError, match="no answer within 0 s"):
        within(0.05, wait, name="late")
    assert time.monotonic() - begun_s < 10
    release.set()
    assert ended.wait(10)  # it was not ended, only not waited for
