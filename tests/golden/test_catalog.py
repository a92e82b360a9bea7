"""Parameter counts computed from the catalog against the published ones.

A golden is (value, lower_frac, upper_frac, unit): how far below and above the value the figure may be. Exact counts
are those of the released checkpoints; rounded ones carry the rounding of the paper.
"""

import pytest

from wattune.catalog.models import MODELS

GOLDENS = {
    # Brown et al. 2020 (arXiv 2005.14165), table 2.1, rounds to 175.0 B and does not say what it counts.
    ("gpt3_175b", "num_parameters"): (174.6e9, 1e-3, 1e-3, "parameters"),
    ("llama3_70b", "num_parameters"): (70_553_706_496, 0.0, 0.0, "parameters"),
    ("llama3_8b", "num_parameters"): (8_030_261_248, 0.0, 0.0, "parameters"),
    ("mixtral_8x7b", "num_parameters"): (46_702_792_704, 0.0, 0.0, "parameters"),
    # Jiang et al. 2024 (arXiv 2401.04088): 13 B active, 12.9 B in the release notes.
    ("mixtral_8x7b", "num_active_parameters"): (12.9e9, 4e-3, 4e-3, "parameters"),
    # With the 32,768 tokens of v0.3.
    ("mixtral_8x22b", "num_parameters"): (140_630_071_296, 0.0, 0.0, "parameters"),
    ("mixtral_8x22b", "num_active_parameters"): (39e9, 5e-3, 5e-3, "parameters"),
}
UNITS = {"num_parameters": "parameters", "num_active_parameters": "parameters"}


@pytest.mark.parametrize(("name", "figure"), GOLDENS, ids=lambda text: text)
def test_a_model_has_its_published_parameters(name, figure):
    value, lower_frac, upper_frac, unit = GOLDENS[name, figure]
    assert UNITS[figure] == unit
    counted = getattr(MODELS[name], figure)
    low, high = value * (1 - lower_frac), value * (1 + upper_frac)
    assert low <= counted <= high, f"{name}.{figure}: {counted:,} {unit}, expected {low:,.0f} to {high:,.0f}"


def test_every_model_has_a_golden():
    assert {name for name, _ in GOLDENS} == set(MODELS)
