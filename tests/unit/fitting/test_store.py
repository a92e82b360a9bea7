"""Stored fits come back as they were, and damaged ones are refused with what to do."""

import json

import pytest
from known_fit import stored_fit

from wattune.catalog.hardware import DEVICES
from wattune.cost.defaults import default_coefficients
from wattune.errors import PlanError
from wattune.fitting.store import HoldOut, fit_path, missing_data, read_fit, write_fit

DEFAULT = default_coefficients(DEVICES["h200_sxm"])
FIT = stored_fit(
    device_uuids=("GPU-1",),
    studies=("a", "b"),
    memory=DEFAULT.memory,
    step_time=DEFAULT.step_time,
    power=DEFAULT.power,
    hold_out={"step_time_s": HoldOut(median_frac=0.03, p95_frac=0.1, num_configurations=10)},
    sharpen=("more",),
)


def test_a_fit_comes_back_whole(tmp_path) -> None:
    path = write_fit(tmp_path, FIT)
    assert path == tmp_path / "fits" / "h200_sxm.json"
    assert read_fit(tmp_path, "h200_sxm") == FIT
    assert read_fit(tmp_path, "b200_sxm") is None
    assert FIT.label == "2026-11-22, 12 trials"


@pytest.mark.parametrize("damage", [{"device": 3}, {"surplus": 1}, {"power": {"idle_w": "x"}}])
def test_a_damaged_fit_names_the_file_and_the_remedy(tmp_path, damage) -> None:
    write_fit(tmp_path, FIT)
    path = fit_path(tmp_path, "h200_sxm")
    path.write_text(json.dumps(json.loads(path.read_text()) | damage))
    with pytest.raises(PlanError, match=r"h200_sxm\.json: .*fit anew with `wattune fit`, or remove the file"):
        read_fit(tmp_path, "h200_sxm")


def test_missing_data_is_what_the_trials_never_varied() -> None:
    one = {
        "tp": 2,
        "pp": 1,
        "ep": 1,
        "vpp": 1,
        "sharding": "none",
        "recompute": "none",
        "overlap": "none",
        "engine": "a",
    }
    other = one | {"sharding": "zero1", "engine": "b"}
    wishes = missing_data([one, other], longest_s=10.0)
    text = "\n".join(wishes)
    assert "pp above 1" in text and "tp above 1" not in text
    assert "another recompute than none" in text and "another engine" not in text
    assert "at least 180 s" in text and "at least 180 s" not in "\n".join(missing_data([one, other], longest_s=200.0))
