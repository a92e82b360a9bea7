"""The GPU names that nodes report, and nodes that report nothing."""

import logging
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from wattune.errors import TelemetryError
from wattune.orchestrate import node_products
from wattune.orchestrate.node_products import ask_products, products_here

OWN = ray.NodeID.from_random().hex()


def test_equal_boards_are_one_product(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["NVIDIA H200", "NVIDIA H100 PCIe", "NVIDIA H200"]
    monkeypatch.setattr(node_products, "nvidia_products", lambda: names)
    assert products_here() == ("NVIDIA H100 PCIe", "NVIDIA H200")


def test_a_machine_without_the_driver_has_no_product(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> list[str]:
        raise TelemetryError("NVML: NVML Shared Library Not Found")

    monkeypatch.setattr(node_products, "nvidia_products", fail)
    assert products_here() == ()


def test_nobody_is_asked_where_no_node_has_gpus() -> None:
    assert ask_products([]) == {} and not ray.is_initialized()


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, object]]:
    """Answers by node id, in place of a cluster's: an error is raised where the answer is fetched."""
    answers: dict[str, object] = {}

    class Task:
        def options(self, *, scheduling_strategy: NodeAffinitySchedulingStrategy, **_more: object) -> SimpleNamespace:
            return SimpleNamespace(remote=lambda: scheduling_strategy.node_id)

    def get(asked: str) -> object:
        answer = answers[asked]
        if isinstance(answer, Exception):
            raise answer
        return answer

    def wait(asked: list[str], *, num_returns: int, timeout: float) -> tuple[list[str], list[str]]:
        assert num_returns == len(asked) and timeout == node_products.ASK_S
        return [one for one in asked if one in answers], [one for one in asked if one not in answers]

    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(get_node_id=lambda: OWN))
    monkeypatch.setattr(ray, "remote", lambda _function: Task())
    monkeypatch.setattr(ray, "wait", wait)
    monkeypatch.setattr(ray, "get", get)
    return answers


def test_a_node_that_does_not_answer_is_left_out_and_named(
    nodes: dict[str, object], caplog: pytest.LogCaptureFixture
) -> None:
    a, b, c, d = (ray.NodeID.from_random().hex() for _ in range(4))
    nodes |= {a: ("NVIDIA H200",), b: (), d: ray.exceptions.NodeDiedError("gone")}
    with caplog.at_level(logging.WARNING):
        assert ask_products([a, b, c, d]) == {a: ("NVIDIA H200",), b: ()}
    assert [record.args for record in caplog.records] == [(f"{c}, {d}",)]


def test_the_drivers_own_node_is_asked_without_ray(
    nodes: dict[str, object], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(node_products, "nvidia_products", lambda: ["NVIDIA H100 NVL"])
    assert ask_products([OWN]) == {OWN: ("NVIDIA H100 NVL",)}
    other = ray.NodeID.from_random().hex()
    nodes[other] = ("NVIDIA H200",)
    assert ask_products([OWN, other]) == {OWN: ("NVIDIA H100 NVL",), other: ("NVIDIA H200",)}
    assert caplog.records == []
