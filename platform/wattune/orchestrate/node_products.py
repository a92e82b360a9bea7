"""Product names of a node's GPUs, asked of the node itself: Ray's labels do not tell form factors of a GPU apart."""

import logging
from collections.abc import Sequence
from functools import cache
from typing import Any, Final

import ray

from wattune.errors import TelemetryError
from wattune.orchestrate.ask import ask_all, on_node
from wattune.telemetry.probe import nvidia_products

_log = logging.getLogger(__name__)

ASK_S: Final = 30.0
"""Longest time for the nodes' answers: each starts a process for it."""


def ask_products(node_ids: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Asks nodes, by Ray's ids, for the product names of their GPUs: the different ones of each.

    A node without NVIDIA's driver has none: Ray tells AMD products apart by their PCI ids. A node that does not answer
    is left out, and the log says so.
    """
    if not node_ids:
        return {}
    own_id = ray.get_runtime_context().get_node_id()
    found: dict[str, tuple[str, ...]] = {}
    asked: dict[str, Any] = {}
    for node_id in node_ids:
        if node_id == own_id:  # Ray would take seconds to start a process for it
            found[node_id] = own_products()
            continue
        asked[node_id] = on_node(products_here, node_id, max_retries=0).remote()
    answers, silent = ask_all(asked, ASK_S)
    if silent:
        _log.warning("node(s) %s did not say which GPUs they have; Ray's label is believed", ", ".join(silent))
    return found | answers


@cache
def own_products() -> tuple[str, ...]:
    """Returns `products_here` of the first call: a driver that nobody uses takes 1 to 2 s to answer."""
    return products_here()


def products_here() -> tuple[str, ...]:
    """Returns the different product names of this machine's NVIDIA GPUs; none where no driver answers."""
    try:
        return tuple(sorted(set(nvidia_products())))
    except TelemetryError:
        return ()
