"""Names of published tables: what they mean, and what the catalog does not have."""

import pytest

from wattune.catalog.hardware import DEVICES
from wattune.catalog.models import MODELS
from wattune.catalog.published_names import named


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("Llama3.1-405B", "llama3_1_405b"), ("Llama 3 70B", "llama3_70b"), ("LLAMA3_8B", "llama3_8b"),
        ("DeepSeekV3", "deepseek_v3"), ("DeepSeek V3 671B", "deepseek_v3"), ("GPT3-175B", "gpt3_175b"),
        ("GPT-OSS 20B", "gpt_oss_20b_like"), ("Llama2-70B", None), ("Nemotron-H-56B", None), ("", None),
        ("H100-80GB-700W", "h100_sxm"), ("A100-80GB", "a100_sxm_80gb"), ("a100_40gb", "a100_sxm_40gb"),
        ("DGX-GB300", "gb300"), ("B200", "b200_sxm"), ("H100 NVL", "h100_nvl"), ("A100", None), ("MI355X", None),
    ],
)  # fmt: skip
def test_a_name_of_a_table_is_one_of_the_catalog(text: str, name: str | None) -> None:
    assert named(text, (*MODELS, *DEVICES)) == name


def test_each_name_of_the_catalog_means_itself() -> None:
    for names in (MODELS, DEVICES):
        assert [one for one in names if named(one, names) != one] == []
