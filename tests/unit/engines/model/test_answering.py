"""An engine's answers: none before `build`, afterwards those of what `build` has made."""

from types import SimpleNamespace

import pytest

from wattune.engines.model.answering import Answering
from wattune.workers.engine import StepSpans

STEP = StepSpans(spans=(), loss=2.5, grad_norm=1.0)


class _Engine(Answering):
    """An engine's addition to `Answering`: something built."""

    def build(self) -> None:
        recorder = SimpleNamespace(memory_peak_bytes=lambda: 4096)
        self._running = SimpleNamespace(step=lambda: STEP, recorder=recorder, facts={"compiler": "eager"})


def test_before_build_there_is_nothing_to_step_or_measure_and_no_choice_was_made() -> None:
    engine = _Engine()
    for question in (engine.step, engine.memory_peak_bytes):
        with pytest.raises(AssertionError, match="build comes first"):
            question()
    assert engine.facts() == {}


def test_after_build_what_runs_answers_and_other_engines_are_as_before() -> None:
    engine, other = _Engine(), _Engine()
    engine.build()
    assert engine.step() is STEP
    assert (engine.memory_peak_bytes(), engine.facts()) == (4096, {"compiler": "eager"})
    assert other.facts() == {}
