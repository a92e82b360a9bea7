"""The model of a node's manifest."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wattune.errors import TelemetryError
from wattune.storage.manifests import checked_manifest


@pytest.mark.parametrize(
    ("manifest", "words"),
    [
        ([], "allowed: an object"),
        ({"devices": []}, r"devices: got \[\], allowed: an object"),
        ({"devices": {"gpu0": 3}}, "devices.gpu0: got 3, allowed: an object"),
        ({"devices": {"gpu0": {"power_limit_w": "700"}}}, 'devices.gpu0.power_limit_w: got "700", allowed: a number'),
        ({"sampler_start_s": [1]}, r"node0: sampler_start_s: got \[1\], allowed: a number, or null"),
        ({"clock": 1, "tiers": 2}, "tiers: got 2, allowed: an object; clock: got 1"),
    ],
)
def test_every_part_of_a_manifest_that_is_of_another_kind_is_named(manifest: Any, words: str) -> None:
    with pytest.raises(TelemetryError, match=words):
        checked_manifest(manifest, "node0")


@pytest.mark.parametrize("limit_w", [-1, 10_001, 1e308, float("inf"), 10**400])
def test_a_limit_that_no_device_has_is_named(limit_w: float) -> None:
    with pytest.raises(TelemetryError, match=r"gpu0\.power_limit_w: got .*, allowed: (0 to 10000|a number, or null)"):
        checked_manifest({"devices": {"gpu0": {"power_limit_w": limit_w}}}, "node0")


@given(limit_w=st.none() | st.integers(0, 10_000) | st.floats(0, 10_000), name=st.text(max_size=5))
def test_a_manifest_of_the_right_kinds_is_as_it_was(limit_w: float | None, name: str) -> None:
    manifest = {"devices": {name: {"power_limit_w": limit_w, "name": name}}, "clock": {}, "tiers": {"ring": {}}}
    assert checked_manifest(manifest, "node0") == manifest
