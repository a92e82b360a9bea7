"""The verdicts on the engine beside transformers: on losses of a GPU, on planted ones, and on what bf16 rounds."""

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn

SCRIPT = Path(__file__).parents[3] / "benchmarks" / "huggingface_parity.py"

Steps = list[tuple[float, float]]

FP32 = [10.0, 9.9, 9.8]
"""Losses of transformers in fp32 in the planted cases."""


@pytest.fixture(scope="module")
def parity() -> ModuleType:
    spec = importlib.util.spec_from_file_location("huggingface_parity", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def away(*ratios: float, norm: float = 0.0) -> Steps:
    """Steps whose losses are off those in fp32 by ratios, and whose last gradient norm is off by one."""
    norms = [1.0] * (len(FP32) - 1) + [1 + norm]
    return [(loss * (1 + ratio), last) for loss, ratio, last in zip(FP32, ratios, norms, strict=True)]


SAME = away(0, 0, 0)


@pytest.mark.parametrize(
    ("dtype", "engine", "peer", "control", "found"),
    [
        ("fp32", away(0, 1e-6, 9e-6), SAME, SAME, "met"),
        ("fp32", away(0, 2e-5, 0), SAME, away(0, 9e-6, 0), "bad"),
        ("fp32", away(0, 2e-5, 0), SAME, away(0, 0, 3e-5), "undecided"),
        ("fp32", away(2e-5, 0, 0), SAME, away(0, 0, 3e-5), "bad"),
        ("fp32", away(0, 0, 0, norm=2e-5), SAME, SAME, "bad"),
        ("fp32", away(0, 0, 0, norm=2e-5), SAME, away(0, 0, 0, norm=-3e-5), "undecided"),
        # A norm that decides nothing leaves a loss to decide.
        ("fp32", away(0, 2e-5, 0, norm=2e-5), SAME, away(0, 0, 0, norm=3e-5), "bad"),
        # Far from another program in bf16, and near to what both round.
        ("bf16", away(1e-4, 0, 0), away(3e-3, 0, 0), away(-3e-3, 0, 0), "met"),
        ("bf16", away(4e-3, 0, 0), away(3e-3, 0, 0), away(-1e-3, 0, 0), "bad"),
        ("bf16", away(-4e-3, 0, 0), SAME, SAME, "bad"),
        ("bf16", away(2.5e-3, 0, 0), away(3e-3, 0, 0), SAME, "undecided"),
        ("bf16", away(0, 0, 3e-3), away(0, 0, 1e-3), away(0, 0, -1e-3), "bad"),
    ],
)
def test_the_verdict(parity: ModuleType, dtype: str, engine: Steps, peer: Steps, control: Steps, found: str) -> None:
    assert parity.verdict(parity.Case.of(engine, peer, control, SAME), dtype) == found


RECORDED = {
    "llama": (
        "11.1621437 11.1941986 11.1691265 11.1953144 11.1802311",
        "11.1615553 11.1941309 11.1709385 11.1963911 11.1818705",
        "11.1614761 11.1943369 11.1712637 11.1967182 11.1812706",
        "11.1611748 11.1942196 11.1720238 11.1965046 11.1817055",
    ),
    "mixtral": (
        "11.2082491 11.2206936 11.1840973 11.1764698 11.1787739",
        "11.2071285 11.2094507 11.1824760 11.1774330 11.1783981",
        "11.2157946 11.2134581 11.1847754 11.1805677 11.1783876",
        "11.2138662 11.2253904 11.1715746 11.1580200 11.1778603",
    ),
    "gpt2": (
        "11.2046289 11.2278891 11.1467438 11.1424971 11.1014595",
        "11.2047148 11.2273579 11.1475449 11.1476908 11.1043882",
        "11.2048426 11.2274170 11.1472063 11.1475010 11.1041994",
        "11.2046547 11.2276697 11.1472740 11.1475239 11.1045227",
    ),
}
"""Losses of an H200 on 2026-11-23: transformers in fp32, then engine, transformers and control in bf16."""


@pytest.mark.parametrize("model", RECORDED)
def test_bf16_of_the_results_page_is_judged_as_it_says(parity: ModuleType, model: str) -> None:
    reference, engine, peer, control = ([(float(loss), 1.0) for loss in run.split()] for run in RECORDED[model])
    case = parity.Case.of(engine, peer, control, reference)
    assert parity.verdict(case, "bf16") == "met"
    table = (SCRIPT.parent / "results" / "huggingface_parity.csv").read_text()
    (row,) = [line for line in table.splitlines() if line.startswith(f"{model},bf16,")]
    assert row.endswith(",met")
    # The columns that losses alone decide.
    assert case.cells().split(",")[5:] == row.split(",")[7:13]


def test_weights_are_rounded_and_frequencies_are_not(parity: ModuleType) -> None:
    """`Module.to` rounds both, and the model then has other positions."""
    made = nn.Linear(2, 2)
    made.register_buffer("frequencies", torch.tensor([0.123456789]))
    parity.round_weights(made, torch.bfloat16)
    assert made.weight.dtype == made.bias.dtype == torch.bfloat16
    assert made.get_buffer("frequencies").dtype == torch.float32


@pytest.fixture
def one_attention() -> Iterator[None]:
    """Keeps torch's attention in blocks out: on some processors the two programs give it tensors that it sums apart."""
    before = torch.backends.cuda.flash_sdp_enabled()
    torch.backends.cuda.enable_flash_sdp(False)
    yield
    torch.backends.cuda.enable_flash_sdp(before)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="transformers is not installed")
@pytest.mark.usefixtures("one_attention")
def test_without_compiling_both_programs_round_a_llama_in_bf16_alike(
    parity: ModuleType, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With rounded frequencies its losses would be 4.9e-4 apart."""
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), "--quick", "--models", "llama", "--dtypes", "bf16"])
    monkeypatch.setattr(parity.weights, "INIT_STD", parity.weights.INIT_STD)  # the script's own goes with the test
    assert parity.main() == 0
    _, heading, row, *_ = capsys.readouterr().out.splitlines()
    found = dict(zip(heading.split(","), row.split(","), strict=True))
    assert float(found["loss_deviation_ratio"]) < 2e-5
    assert 1e-5 < float(found["engine_loss_from_fp32_ratio"]) < 1e-3
    assert found["verdict"] == "met"
