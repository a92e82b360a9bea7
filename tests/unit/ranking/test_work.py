"""Work: what a figure is of, and which figures compare between trials of different work."""

from dataclasses import replace

import pytest
from made_trials import trial

from wattune.catalog.models import model
from wattune.ranking.work import compares, depends_on_work, work_of
from wattune.workload import UNKNOWN_WORKLOAD

ONE, _ = trial(1)
LONG = replace(ONE, workload=replace(ONE.workload, seq_len=8192))
LARGE = replace(ONE, workload=replace(ONE.workload, global_batch_size=32))


@pytest.mark.parametrize(
    ("metric", "other", "expected"),
    [
        ("tokens_per_s", LONG, False),
        ("tokens_per_s", LARGE, True),
        ("step_time_s", LARGE, False),
        ("energy_per_token_j", replace(ONE, model=model("llama3_70b")), False),
        ("mfu_frac", LONG, True),
        ("node_device_power_peak_1s_w", LONG, True),
    ],
)
def test_speed_and_energy_compare_within_the_same_work(metric, other, expected) -> None:
    assert compares(ONE, other, metric) is expected
    assert compares(ONE, trial(2)[0], metric)


def test_work_is_said_in_words() -> None:
    assert work_of(ONE, "tokens_per_s").startswith("llama3_8b (32 layers, ")
    assert work_of(ONE, "tokens_per_s").endswith("pretrain at 4096 tokens")
    assert work_of(ONE, "step_time_s").endswith("65,536 of them a step")
    assert work_of(replace(ONE, workload=UNKNOWN_WORKLOAD), "tokens_per_s").endswith("parameters)")
    assert depends_on_work("tokens_per_s") and not depends_on_work("mfu_frac")
