"""Steps in outputs of other people's programs, each by name, and none where nothing trains; on a clock of their own."""

import runpy
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
import unseen_outputs
from program_outputs import NOTHING, TRAINS, Output, play, printed_again

from wattune.steps.lines import OutputLines
from wattune.steps.reader import StepReader
from wattune.steps.source import parse_source
from wattune.steps.table import tokens_per_step

EVERY = {**TRAINS, **unseen_outputs.TRAINS}
CASES = Path(__file__).parents[2] / "fixtures" / "cases" / "steps"


def told(written: Sequence[tuple[float, str]], source: str = "auto") -> StepReader:
    """Reads what was written at times in seconds."""
    reader, lines = StepReader(Path("/nowhere"), parse_source(source)), OutputLines(65536)
    for at_s, text in [*written, (written[-1][0] + 0.1, "")]:
        for line, mono_ns in lines.take(text.encode(), 10**9 + round(at_s * 1e9)):
            reader.feed(line, mono_ns)
    return reader


def heard(function: Callable[[Output], None]) -> StepReader:
    return told(play(function))


@pytest.mark.parametrize("function", EVERY, ids=lambda function: function.__name__)
def test_steps_of_a_program_that_trains(function: Callable[[Output], None]) -> None:
    number, step_s, per_s = EVERY[function]
    reader = heard(function)
    steps = reader.poll().get(0, ())
    assert abs(len(steps) - number) <= 2, (len(steps), reader.source, reader.problems)
    counted = steps[len(steps) // 5 :]
    mean_s = sum(step.duration_ns for step in counted) / len(counted) / 1e9
    assert mean_s == pytest.approx(step_s, rel=0.1), reader.source
    tokens = tokens_per_step({0: steps}, first_index=counted[0].index) or None
    assert tokens == (per_s and pytest.approx(per_s * mean_s, rel=0.05))


@pytest.mark.parametrize("function", (*NOTHING, *unseen_outputs.NOTHING), ids=lambda function: function.__name__)
def test_no_steps_of_a_program_that_trains_nothing(function: Callable[[Output], None]) -> None:
    reader = heard(function)
    assert reader.poll() == {} and (reader.source, reader.confidence) == ("none", ""), reader.source


def played_case(name: str, monkeypatch: pytest.MonkeyPatch, source: str) -> StepReader:
    """Runs a case as it is, on a clock of its own."""
    out = Output()
    stream = SimpleNamespace(write=lambda text: out.say(text, end=""), flush=lambda: None)
    monkeypatch.setattr(time, "sleep", lambda seconds: setattr(out, "now_s", out.now_s + seconds))
    monkeypatch.setattr(sys, "stdout", stream)
    monkeypatch.setattr(sys, "stderr", stream)
    try:
        runpy.run_path(str(CASES / name))
    finally:
        monkeypatch.undo()
    return told(out.written, source)


@pytest.mark.parametrize(
    ("name", "source", "number", "step_s"),
    [
        ("bars.py", "tqdm", 60, 0.2),
        ("labelled_ranks.py", "torchtitan", 60, 0.1),
        ("labelled_ranks.py", "auto", 60, 0.1),
        ("nemo_past_1000.py", "nemo", 50, 0.1),
        ("nemo_past_1000.py", "auto", 50, 0.1),
    ],
)
def test_case(name: str, source: str, number: int, step_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    reader = played_case(name, monkeypatch, source)
    steps = reader.poll()[0]
    assert abs(len(steps) - number) <= 2
    confidence = {"bars.py": "low", "labelled_ranks.py": "medium", "nemo_past_1000.py": "high"}
    assert reader.confidence == confidence[name]
    assert sum(step.duration_ns for step in steps) / len(steps) / 1e9 == pytest.approx(step_s, rel=0.02)


def test_case_bars_has_no_steps_for_sure_without_a_word_of_training(monkeypatch: pytest.MonkeyPatch) -> None:
    reader = played_case("bars.py", monkeypatch, "auto")
    assert reader.poll() == {} and "bar of 60 is refused: nothing says that it trains" in reader.problems[-1]


@pytest.mark.parametrize(
    ("words", "rest", "trains"),
    [
        ("Training", "it/s", True),
        ("Steps", "it/s, loss=2.1", True),
        ("Training", "B/s", False),
        ("Evaluating", "it/s, loss=2.1", False),
        ("Loading", "it/s, loss=2.1", False),
        ("Training data loading", "it/s", False),
        ("Training data loading", "it/s, loss=2.1", True),
    ],
)
def test_words_unit_and_loss_tell_the_bar_that_trains(words: str, rest: str, trains: bool) -> None:
    times = [f"{5 * n:3d}%|##| {n}/20 [00:{n:02}<00:{20 - n:02},  1.00{rest}]" for n in range(21)]
    reader = told([(float(n), f"\r{words}: {text}") for n, text in enumerate(times)])
    assert [len(steps) for steps in reader.poll().values()] == [20] * trains, reader.source


@pytest.mark.parametrize("source", ["torchtitan", "auto"])
def test_case_tokens_in_lines(source: str) -> None:
    line = (CASES / "tokens_in_lines.txt").read_text().splitlines()[-1]
    written = [(float(at), f"{line.replace('step: 10', f'step: {at}')}\n") for at in range(1, 21)]
    reader = told(written, source)
    (steps,) = reader.poll().values()
    assert reader.per_device and tokens_per_step({0: steps}) == pytest.approx(6150, rel=0.01)


def test_a_source_that_disagrees_with_the_clock_is_refused_with_the_reason() -> None:
    reader = heard(printed_again)
    assert reader.poll() == {}
    assert "pattern megatron is refused" in reader.problems[0] and "times the time that passed" in reader.problems[0]


def test_two_sources_that_agree_are_sure_and_two_that_do_not_are_said() -> None:
    def written(each: int) -> list[tuple[float, str]]:
        bars = [(0.1 * n, f"\rTraining: 10%|#   | {n}/100 [00:01<00:09, 10.0it/s, loss=2.1]") for n in range(101)]
        lines = [(n / 10 + 0.05, f"\nstep {n // each} loss 2.1\n") for n in range(4, 100, 4)]
        return sorted([*bars, *lines])

    alike, other = told(written(1)), told(written(4))
    assert (len(alike.poll()[0]), len(other.poll()[0])) == (100, 23)
    assert (alike.confidence, other.confidence) == ("high", "low")
    assert not alike.problems and "give --steps one" in other.problems[0]


@pytest.mark.parametrize(
    "line",
    [
        "x" * 4000 + " step", "step " + "x" * 4000, "loss 1 step " * 340, "1/" * 2000 + " step", "step " + "1" * 4000,
        "step " + "1," * 2000 + "x", "step 1 loss 1 " + "tokens per " * 370, "12it " * 800, "eval " * 800 + "step 1",
        "step " + "{" * 3000 + " 1/2 [00:01<", "step" + " " * 4000 + "loss", "iteration 1/ 1 |" * 250,
    ],
)  # fmt: skip
def test_no_line_takes_long(line: str) -> None:
    """A line that some rule looks through again from each of its characters would hold up the program that writes."""
    reader = StepReader(Path("/nowhere"), parse_source("auto"))

    def cpu_s() -> float:
        begun_s = time.process_time()
        reader.feed(line, 1)
        return time.process_time() - begun_s

    assert min(cpu_s() for _ in range(5)) < 0.02


PRESETS_OF = {
    **{name: (name,) for name in ("megatron", "torchtitan", "nanogpt", "deepspeed", "maxtext", "llamafactory")},
    "huggingface": ("hf_trainer", "hf_trainer_quoted", "hf_trainer_without_bar"),
    "lightning_bar": ("lightning", "lightning_endless"),
    "nemo": ("nemo_1", "nemo_2"),
    "tqdm": ("diffusers", "resumed", "epochs_and_steps", "checkpoints", "rounded", "torchtune", "keras"),
}


@pytest.mark.parametrize(("preset", "name"), [(preset, name) for preset, names in PRESETS_OF.items() for name in names])
def test_a_preset_reads_its_programs_lines(preset: str, name: str) -> None:
    (function,) = (each for each in TRAINS if each.__name__ == name)
    number, step_s, _ = TRAINS[function]
    reader = told(play(function), preset)
    (steps,) = reader.poll().values()
    assert abs(len(steps) - number) <= 2
    assert sum(step.duration_ns for step in steps[number // 5 :]) / 1e9 == pytest.approx(
        len(steps[number // 5 :]) * step_s, rel=0.1
    )


@pytest.mark.parametrize("number", [".", "1.2.3", "...", "9" * 350, "1:" * 300 + "1", "1e400", "nan", "٣"])
def test_no_number_of_a_line_ends_the_hearing(number: str) -> None:
    """An error of the thread that hears would end the run."""
    lines = (
        f"{{'loss': {number}, 'throughput': {number}, 'epoch': '{number}'}}",
        f"{{'eval_loss': 1, 'eval_runtime': {number}}}",
        f"{{'train_runtime': {number}, 'train_steps_per_second': {number}, 'epoch': {number}}}",
        f"Training:  12%|#2        | {number}/20 [{number}<01:48,  {number}it/s, loss=2.1]",
        f"step {number} loss {number} tokens/s {number} total tokens: {number}",
        f"iter {number}: loss 3.1, time {number}ms",
    )
    told([(float(at), f"{line}\n") for at, line in enumerate(lines * 3)]).poll()


def test_told_times_of_another_unit_are_refused_with_the_reason() -> None:
    lines = [(float(at), f"completed step: {at}, seconds: 0.001, TFLOP/s/device: 1, loss: 2.1\n") for at in range(40)]
    reader = told(lines)
    assert reader.poll() == {} and "in another unit" in reader.problems[0], reader.source


def test_a_number_that_an_own_pattern_needs_is_no_label() -> None:
    (steps,) = (
        told([(float(at), f"{at}: loss 2.1\n") for at in range(1, 21)], r"pattern:(?P<step>\d+): loss").poll().values()
    )
    assert len(steps) == 19
