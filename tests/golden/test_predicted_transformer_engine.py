"""Peaks of memory of Megatron with TransformerEngine on one H200, of the table its formula was read from and others."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from specs import trial_spec
from stored_tables import estimates_of

from wattune.catalog.models import model
from wattune.cost.defaults import default_coefficients
from wattune.cost.estimate import estimate
from wattune.workload import Routing

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
TABLE = BENCHMARKS / "data" / "dense_gpt_1b_h200.parquet"
PAGE = (BENCHMARKS / "results" / "megatron_layers.md").read_text()

WIDTHS: dict[str, Any] = {"hidden_size": 4096, "num_heads": 32, "vocab_size": 32_000}
MODELS = {
    "Llama": replace(model("llama3_8b"), **({"num_layers": 4} | WIDTHS)),
    "GPT": replace(
        model("gpt3_175b"), ffn_hidden_size=16_384, num_kv_heads=32, max_positions=4096, num_layers=4, **WIDTHS
    ),
    "Mixtral": replace(model("mixtral_8x7b"), **({"num_layers": 1} | WIDTHS)),
}


def test_peaks_of_the_table_are_known_to_a_hundredth() -> None:
    rows = [row for row in pq.read_table(TABLE).to_pylist() if row["engine"] == "megatron"]
    columns = estimates_of(rows)
    measured = np.array([row["memory_peak_bytes"] for row in rows])
    assert len(rows) >= 24 and {row["dtype"] for row in rows} == {"bf16", "fp8"}
    assert measured / columns["memory_peak_bytes"].value == pytest.approx(1, abs=0.01)


def peak_bytes(name: str, engine: str, *, transformer_engine: bool, **axes: Any) -> float:
    """Predicts the peak of a case of `benchmarks/results/megatron_layers.md`."""
    spec = trial_spec(
        MODELS[name],
        on="1x1 h200_sxm",
        transformer_engine=transformer_engine,
        engine=engine,
        batch=4,
        routing=Routing(by="balanced") if name == "Mixtral" else None,
        **({"micro_batch_size": 2, "dtype": "bf16"} | axes),
    )
    return float(estimate([spec], default_coefficients).columns["memory_peak_bytes"].value[0])


def measured(case: str, column: int, *, fp8: bool = False) -> float:
    """Reads a ratio of the page."""
    part = PAGE.partition("In FP8, Transf")[2 if fp8 else 0]
    (line,) = [line for line in part.splitlines() if line.startswith(f"| {case} |")]
    return float(line.split("|")[column].split()[0])


@pytest.mark.parametrize(
    ("case", "axes"),
    [
        ("Llama", {}),
        ("GPT", {}),
        ("Mixtral", {}),
        ("Llama, `recompute: full`", {"recompute": "full"}),
        ("Llama, `recompute: selective`", {"recompute": "selective"}),
    ],
)
def test_peaks_over_local_layers_of_models_that_nothing_was_read_from(case: str, axes: dict[str, Any]) -> None:
    name = case.split(",")[0]
    engine, local = (peak_bytes(name, "megatron", transformer_engine=has, **axes) for has in (True, False))
    assert engine / local == pytest.approx(measured(case, 4), abs=0.015)


@pytest.mark.parametrize("case", ["Llama", "GPT", "Llama, `recompute: full`"])
def test_peaks_in_fp8_over_the_torch_engine(case: str) -> None:
    axes = {"dtype": "fp8"} | ({"recompute": "full"} if "full" in case else {})
    name = case.split(",")[0]
    ratio = peak_bytes(name, "megatron", transformer_engine=True, **axes) / peak_bytes(
        name, "torch", transformer_engine=False, **axes
    )
    assert ratio == pytest.approx(measured(case, 4, fp8=True), abs=0.015)
