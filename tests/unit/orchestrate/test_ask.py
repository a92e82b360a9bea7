"""Questions to many nodes at once: one deadline for all, and every silent one named. No Ray is started."""

import pytest
import ray
from ray.exceptions import GetTimeoutError, NodeDiedError

from wattune.orchestrate.ask import ask_all


def test_silent_and_dead_ones_cost_one_wait_and_no_other_its_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []

    def wait(pending: list[int], *, num_returns: int, timeout: float) -> tuple[list[int], list[int]]:
        assert num_returns == len(pending)
        waits.append(timeout)
        return [one for one in pending if one % 13], [one for one in pending if not one % 13]

    def get(one: int) -> int:
        if one == 7:
            raise NodeDiedError("gone")
        return one * one

    monkeypatch.setattr(ray, "wait", wait)
    monkeypatch.setattr(ray, "get", get)
    found, failed = ask_all({f"n{index}": index for index in range(128)}, 60.0)
    silent = [name for name, error in failed.items() if isinstance(error, GetTimeoutError)]
    assert waits == [60.0] and silent == [f"n{index}" for index in range(0, 128, 13)] and len(silent) == 10
    assert set(failed) - set(silent) == {"n7"} and isinstance(failed["n7"], NodeDiedError)
    assert found == {f"n{index}": index * index for index in range(128) if index % 13 and index != 7}
    assert ask_all({}, 60.0) == ({}, {}) and len(waits) == 1
