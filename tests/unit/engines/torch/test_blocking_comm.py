"""Collectives that hold up compute: each waits for what was computed, and what follows waits for it."""

from typing import Any

import pytest
import torch

from wattune.engines.torch import blocking_comm
from wattune.engines.torch.blocking_comm import HoldCompute, SerialAllGather, SerialReduceScatter


class Stream:
    """A stream that notes which other one it waits for."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log

    def wait_stream(self, other: "Stream") -> None:
        self.log.append(f"{self.name} waits for {other.name}")


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    events: list[str] = []
    streams = [Stream("compute", events), Stream("side", events)]
    # Made on the stream that computes, called on the one FSDP2 communicates on.
    current = iter([streams[0], *[streams[1]] * 9])
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda *_: next(current))
    for name in ("_all_gather", "_reduce_scatter"):
        monkeypatch.setattr(blocking_comm, name, lambda *_, **__: events.append("communicates"))
    return events


def test_weights_are_gathered_between_computing(log: list[str]) -> None:
    gather: Any = SerialAllGather("cuda")
    gather(torch.empty(2), torch.empty(1), group=None)
    assert log == ["side waits for compute", "communicates", "compute waits for side"]


def test_gradients_are_reduced_before_anything_more_is_computed(log: list[str]) -> None:
    reduce: Any = SerialReduceScatter("cuda")
    reduce(torch.empty(1), torch.empty(2), group=None, op=None)
    assert log == ["communicates", "compute waits for side"]


def test_copies_are_summed_before_anything_more_is_computed(log: list[str]) -> None:
    HoldCompute("cuda")(torch.empty(1))
    assert log == ["compute waits for side"]


def test_on_processors_there_are_no_streams_to_wait_for(log: list[str]) -> None:
    gather: Any = SerialAllGather("cpu")
    gather(torch.empty(2), torch.empty(1), group=None)
    assert log == ["communicates"]
    assert gather.allocate([2, 3], dtype=torch.float32, device=torch.device("cpu")).shape == (2, 3)
