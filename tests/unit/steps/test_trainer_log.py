"""Losses that Hugging Face's Trainer printed by epoch, with evaluations between them and its speed at the end."""

import pytest

from wattune.steps.output import TrainerLog
from wattune.units import s_to_ns

BEGUN_NS = s_to_ns(1000)


def test_an_evaluation_between_epochs_is_of_no_step() -> None:
    """Two epochs of ten steps of a second; the first one's evaluation takes four of the second's time."""
    log = TrainerLog()
    for line, at_s in (
        ("{'loss': 2.0, 'epoch': 1.0}", 10),
        ("{'eval_loss': 2.1, 'eval_runtime': 4.0, 'epoch': 1.0}", 14),
        ("{'loss': 1.5, 'epoch': 2.0}", 24),
        ("{'train_runtime': 24.0, 'train_steps_per_second': 0.8333, 'train_loss': 1.7, 'epoch': 2.0}", 24),
    ):
        log.feed(line, BEGUN_NS + s_to_ns(at_s))
    found = log.steps()
    assert found is not None and len(found.steps) == 20
    assert [step.duration_ns / 1e9 for step in found.steps] == pytest.approx([1.0] * 20)
