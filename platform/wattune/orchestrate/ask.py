"""Questions to many nodes or actors at once, with one deadline for all: silent ones cost one time-out together."""

from collections.abc import Mapping
from typing import Any, TypeVar

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

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


def on_node(work: Any, node_id: str, **options: Any) -> Any:
    """Makes a function or class of Ray's that runs on one node or nowhere, and reserves nothing of it."""
    here = NodeAffinitySchedulingStrategy(node_id, soft=False)
    return ray.remote(work).options(num_cpus=0, scheduling_strategy=here, **options)
