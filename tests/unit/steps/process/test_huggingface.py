"""The callback of Hugging Face's Trainer, on a Trainer of the same shape: steps, tokens and interruptions."""

from types import SimpleNamespace
from typing import Any

import pytest

from wattune.steps.process import huggingface
from wattune.steps.process.huggingface import TrainerSteps, attach, tokens_of


class Written:
    def __init__(self, _source: str = "") -> None:
        self.steps: list[tuple[int, int, int | None]] = []
        written.append(self)

    def step(self, start_ns: int, end_ns: int, tokens: int | None) -> None:
        self.steps.append((start_ns, end_ns, tokens))


written: list[Written] = []


class Ids:
    def __init__(self, count: int) -> None:
        self.count = count

    def numel(self) -> int:
        return self.count


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A module of the form of `transformers.trainer`, attached to."""
    monkeypatch.setattr(huggingface, "StepWriter", Written)

    class Trainer:
        def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> str:
            return f"{model} {num_items_in_batch}"

    class TrainerCallback:
        pass

    found = SimpleNamespace(Trainer=Trainer, TrainerCallback=TrainerCallback, DEFAULT_CALLBACKS=[object])
    attach(found)  # type: ignore[arg-type]
    return found


def test_a_step_is_all_its_micro_batches(library: Any) -> None:
    callback, trainer = library.DEFAULT_CALLBACKS[-1](), library.Trainer()
    assert isinstance(callback, library.TrainerCallback) and library.DEFAULT_CALLBACKS[0] is object
    for _ in range(3):
        callback.on_step_begin(None, None, None, model=1)
        for _ in range(2):
            assert trainer.training_step("m", {"input_ids": Ids(64)}, num_items_in_batch=5) == "m 5"
        callback.on_step_end(None, None, None)
    steps = written[-1].steps
    assert [tokens for _, _, tokens in steps] == [128] * 3
    assert [start for start, _, _ in steps[1:]] == [end for _, end, _ in steps[:-1]]


def test_an_evaluation_between_two_steps_belongs_to_none(library: Any) -> None:
    callback = library.DEFAULT_CALLBACKS[-1]()
    callback.on_step_begin(None, None, None)
    callback.on_step_end(None, None, None)
    callback.on_evaluate(None, None, None, metrics={})
    callback.on_step_end(None, None, None)  # no beginning: no step
    callback.on_step_begin(None, None, None)
    callback.on_step_end(None, None, None)
    (_, first_end, _), (second_start, _, tokens) = written[-1].steps
    assert second_start > first_end and tokens is None


@pytest.mark.parametrize(
    ("degrees", "tokens"),
    [
        ({"tp_size": 2}, 32),
        ({"cp_size": 4}, 16),
        ({"tp_size": 2, "cp_size": 2}, 16),
        # The data loader of sequence parallelism gives each rank its own part of the sequence.
        ({"sp_size": 4}, 64),
        ({"dp_replicate_size": 2, "dp_shard_size": 2}, 64),
    ],
)
def test_ranks_that_are_given_the_same_tokens_share_them(library: Any, degrees: dict[str, int], tokens: int) -> None:
    trainer, callback = library.Trainer(), library.DEFAULT_CALLBACKS[-1]()
    sizes = {"tp_size": 1, "cp_size": 1, "sp_size": 1} | degrees  # as accelerate's `ParallelismConfig`
    sizes["non_data_parallel_size"] = sizes["tp_size"] * sizes["cp_size"] * sizes["sp_size"]
    trainer.accelerator = SimpleNamespace(parallelism_config=SimpleNamespace(**sizes))
    callback.on_step_begin(None, None, None)
    trainer.training_step("m", {"input_ids": Ids(64)})
    callback.on_step_end(None, None, None)
    assert written[-1].steps[-1][2] == tokens


@pytest.mark.parametrize("inputs", [{"input_ids": object()}, {"pixels": 1}, None, 7])
def test_inputs_of_another_form_train_as_ever(library: Any, inputs: Any) -> None:
    assert library.Trainer().training_step("m", inputs) == "m None"


def test_an_error_of_the_training_is_the_programs() -> None:
    class Trainer:
        def training_step(self, model: Any, inputs: Any) -> None:
            raise RuntimeError("out of memory")

    huggingface._count_tokens(Trainer, TrainerSteps(Written()))  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="out of memory"):
        Trainer().training_step(None, {})


def test_another_transformers_is_left_alone() -> None:
    attach(SimpleNamespace(Trainer=object))  # type: ignore[arg-type]


def test_tokens_are_read_from_shapes() -> None:
    assert tokens_of({"input_ids": Ids(12)}, "input_ids") == 12 and tokens_of({}, "input_ids") == 0
    assert tokens_of([1], "input_ids") == 0
