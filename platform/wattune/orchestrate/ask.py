"""Questions to many nodes or actors at once, with one deadline for all: silent ones cost one time-out together."""

from collections.abc import Mapping
from typing import Any, TypeVar

import ray
from ray.exceptions import GetTimeoutError, RayError

_Key = TypeVar("_Key")


def ask_all(asked: Mapping[_Key, Any], within_s: float) -> tuple[dict[_Key, Any], dict[_Key, RayError]]:
    """Waits for the answers to calls that are under way, at most so long for all of them.

    Returns the answers, and for the others what kept them: a `GetTimeoutError` for those that are silent. Both are in
    the order they were asked.
    """
    pending = list(asked.values())
    ready = set(ray.wait(pending, num_returns=len(pending), timeout=within_s)[0]) if pending else set()
    found: dict[_Key, Any] = {}
    failed: dict[_Key, RayError] = {}
    for key, one in asked.items():
        if one not in ready:
            failed[key] = GetTimeoutError(f"no answer within {within_s:.0f} s")
            continue
        try:
            found[key] = ray.get(one)
        except RayError as error:
            failed[key] = error
    return found, failed
