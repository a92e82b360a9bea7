"""Padding: by the engine's rule where a degree does not divide the vocabulary, and nowhere else."""

from dataclasses import replace

import pytest
from specs import trial_spec

from wattune.catalog.models import MODELS
from wattune.plans.axes import Plan
from wattune.plans.parallel import padded_vocab_size, padding_of
from wattune.plans.rules import violations

GPT, LLAMA = MODELS["gpt3_175b"], MODELS["llama3_70b"]


@pytest.mark.parametrize(
    ("tp", "rows"),
    [(1, 50257), (2, 50432), (4, 50688), (8, 51200)],  # 51,200 is GPT-3's in Narayanan et al. 2021 and in MLPerf's code
)
@pytest.mark.parametrize("engine", ["torch", "megatron"])
def test_the_published_vocabulary_of_gpt3(engine: str, tp: int, rows: int) -> None:
    assert padded_vocab_size(GPT, engine, tp) == rows


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_a_vocabulary_that_the_degree_divides_stays(tp: int) -> None:
    assert padded_vocab_size(LLAMA, "megatron", tp) == LLAMA.vocab_size


def test_deepspeed_leaves_the_vocabulary_whole() -> None:
    assert padded_vocab_size(GPT, "deepspeed", 8) == GPT.vocab_size


def test_published_plans_of_gpt3_are_not_refused_and_keep_the_models_own_count() -> None:
    spec = trial_spec(GPT, on="8x8 h100_sxm", engine="megatron", seq_len=2048, batch=64, tp=8, pp=8)
    assert list(violations(spec)) == []
    assert padding_of(spec) == 943
    assert padding_of(replace(spec, plan=Plan(pp=8))) == 0
