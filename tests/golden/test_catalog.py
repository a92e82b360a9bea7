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
    # Llama 3 report (arXiv 2407.21783), table 3: 405B; the released checkpoint has exactly:
    ("llama3_1_405b", "num_parameters"): (405_853_388_800, 0.0, 0.0, "parameters"),
    # The released checkpoint's main model, less 256 numbers a layer that balance its experts and are not trained.
    ("deepseek_v3", "num_parameters"): (671_026_419_200 - 58 * 256, 0.0, 0.0, "parameters"),
    # Active parameters of the models that are represented in part: within the deviation their sources state.
    ("deepseek_v3_like", "num_active_parameters"): (37e9, 0.08, 0.0, "parameters"),
    ("gpt_oss_20b_like", "num_active_parameters"): (3.61e9, 0.0, 0.12, "parameters"),
    ("gpt_oss_120b_like", "num_active_parameters"): (5.13e9, 0.0, 0.07, "parameters"),
}
UNITS = {"num_parameters": "parameters", "num_active_parameters": "parameters"}


@pytest.mark.parametrize(("name", "figure"), GOLDENS, ids=lambda text: text)
def test_a_model_has_its_published_parameters(name, figure):
    value, lower_frac, upper_frac, unit = GOLDENS[name, figure]
    assert UNITS[figure] == unit
    counted = getattr(MODELS[name], figure)
    low, high = value * (1 - lower_frac), value * (1 + upper_frac)
    assert low <= counted <= high, f"{name}.{figure}: {counted:,} {unit}, expected {low:,.0f} to {high:,.0f}"


GPT_OSS_HIDDEN = 2880


def gpt_oss_deviation(num_layers: int, num_experts: int) -> int:
    """Parameters of gpt-oss that its entry lacks, less those that stand in their place."""
    h = GPT_OSS_HIDDEN
    attention = h * 64 * 64 + 2 * h * 8 * 64 + 64 * 64 * h  # 64 heads and 8 of keys and values, 64 wide
    ours = 2 * h * h + 2 * h * 8 * 72
    biases = 64 * 64 + 2 * 8 * 64 + h + num_experts + num_experts * 3 * h  # q k v o, router, gate up down
    return num_layers * (attention - ours + biases + 64)  # one sink a head


def deepseek_v3_deviation() -> int:
    """Parameters of DeepSeek-V3 without multi-token prediction that its entry lacks, less those in their place."""
    h, heads, q_rank, kv_rank = 7168, 128, 1536, 512
    latent = h * q_rank + q_rank + q_rank * heads * 192 + h * (kv_rank + 64) + kv_rank + kv_rank * heads * 256
    latent += heads * 128 * h
    dense_layer = latent + 3 * h * 18432 + 2 * h
    of_expert_layer = latent - 4 * h * h + 3 * h * 2048 + 256  # a shared expert, a bias of the router for each expert
    return 3 * dense_layer + 58 * of_expert_layer


PUBLISHED = {
    # Sums of the tensors of the released checkpoints.
    "qwen2_5_7b_like": (7_615_616_512, 28 * (3584 + 2 * 512)),
    "qwen2_5_72b_like": (72_706_203_648, 80 * (8192 + 2 * 1024)),
    "qwen3_8b_like": (8_190_735_360, 36 * 2 * 128),
    "qwen3_14b_like": (14_768_307_200, 40 * 2 * 128),
    # gpt-oss model card, table 1: 20.91 B and 116.83 B.
    "gpt_oss_20b_like": (20_914_757_184, gpt_oss_deviation(24, 32)),
    "gpt_oss_120b_like": (116_829_156_672, gpt_oss_deviation(36, 128)),
    # 671 B in the report; without the layer that predicts a second token.
    "deepseek_v3_like": (671_026_419_200, deepseek_v3_deviation()),
}
"""Published parameters of models that are represented in part, and those that the entry lacks by its source's words."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_what_a_model_lacks_accounts_for_every_published_parameter(name):
    published, lacking = PUBLISHED[name]
    assert MODELS[name].num_parameters == published - lacking
    assert "Left out" in MODELS[name].source


def test_a_model_that_lacks_something_says_so_in_its_name():
    assert {name for name in MODELS if name.endswith("_like")} == set(PUBLISHED)


def test_every_model_has_a_golden():
    assert {name for name, _ in GOLDENS} | set(PUBLISHED) == set(MODELS)
