"""Collectives for FSDP2: whose memory gradients lie in, and what waits for what."""

from typing import Any

import pytest
import torch

from wattune.engines.torch import fsdp_comm
from wattune.engines.torch.fsdp_comm import HoldCompute, ReduceScatter, SerialAllGather


class Stream:
    """A stream that notes which other one it waits for."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log

    def wait_stream(self, other: "Stream") -> None:
        self.log.append(f"{self.name} waits for {other.name}")

    def __enter__(self) -> None:
        self.log.append(f"on {self.name}")

    def __exit__(self, *_: object) -> None:
        self.log.append(f"off {self.name}")


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    events: list[str] = []
    streams = [Stream("compute", events), Stream("side", events)]
    # Made on the stream that computes, called on the one FSDP2 communicates on.
    current = iter([streams[0], *[streams[1]] * 9])
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda *_: next(current))
    for name in ("_all_gather", "_reduce_scatter"):
        monkeypatch.setattr(fsdp_comm, name, lambda *_, **__: events.append("communicates"))
    return events


def test_weights_are_gathered_between_computing(log: list[str]) -> None:
    gather: Any = SerialAllGather("cuda")
    gather(torch.empty(2), torch.empty(1), group=None)
    assert log == ["side waits for compute", "communicates", "compute waits for side"]


def test_gradients_are_reduced_before_anything_more_is_computed(log: list[str]) -> None:
    reduce: Any = ReduceScatter("cuda", holds_compute=True)
    reduce(torch.empty(1), torch.empty(2), group=None, op=None)
    assert log == ["communicates", "compute waits for side"]


def test_with_overlap_gradients_hold_up_nothing(log: list[str]) -> None:
    reduce: Any = ReduceScatter("cuda", holds_compute=False)
    reduce(torch.empty(1), torch.empty(2), group=None, op=None)
    assert log == ["communicates"]


@pytest.mark.parametrize(("stays", "expected"), [(True, ["on compute", "off compute"]), (False, [])])
def test_only_what_stays_as_the_gradient_lies_in_the_memory_of_compute(
    log: list[str], stays: bool, expected: list[str]
) -> None:
    reduce = ReduceScatter("cuda", holds_compute=False)
    reduce.stays = stays
    assert reduce.allocate([3], dtype=torch.float32, device=torch.device("cpu")).shape == (3,)
    assert log == expected


def test_copies_are_summed_before_anything_more_is_computed(log: list[str]) -> None:
    HoldCompute("cuda")(torch.empty(1))
    assert log == ["compute waits for side"]


def test_on_processors_there_are_no_streams_to_wait_for(log: list[str]) -> None:
    gather: Any = SerialAllGather("cpu")
    gather(torch.empty(2), torch.empty(1), group=None)
    assert log == ["communicates"]
    assert gather.allocate([2, 3], dtype=torch.float32, device=torch.device("cpu")).shape == (2, 3)
