"""Uses of wandb and tensorboardX that they do not promise. Each is a row of docs/dependencies.md."""

import pytest
from installed import load, parameters


@pytest.mark.private_api("wandb.Settings.x_disable_meta")
def test_settings() -> None:
    known = load("wandb").Settings.model_fields.keys()
    assert {"x_disable_meta", "x_disable_stats"} <= known


@pytest.mark.private_api("tensorboardX.summary.hparams")
def test_hparams() -> None:
    summary = load("tensorboardX.summary")
    assert parameters(summary.hparams) == ["hparam_dict", "metric_dict"]
    assert len(summary.hparams({"tp": 2.0, "sharding": "zero1"}, {"tokens_per_s": 1.0})) == 3
