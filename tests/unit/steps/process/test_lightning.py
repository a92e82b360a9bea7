"""The callback of Lightning's Trainer: one step for each change of its global step."""

from types import SimpleNamespace
from typing import Any

import pytest

from wattune.steps.process import lightning
from wattune.steps.process.huggingface import tokens_of
from wattune.steps.process.lightning import ENTRY_POINTS


class Ids:
    def numel(self) -> int:
        return 64


BATCH = {"input_ids": Ids()}


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[int | None]:
    """Tokens of the steps that are written."""
    found: list[int | None] = []
    monkeypatch.setattr(
        lightning._STEPS, "_writer", SimpleNamespace(step=lambda _start, _end, tokens: found.append(tokens))
    )
    return found


def callback() -> Any:
    return lightning.telling(object, lightning._STEPS)()


def test_validation_and_checkpoints_belong_to_no_step(steps: list[int | None]) -> None:
    one, trainer = callback(), SimpleNamespace(global_step=5)
    one.on_train_start(trainer, None)
    one.on_train_batch_start(trainer, None, BATCH, 0)
    one.on_validation_start(trainer, None)
    trainer.global_step = 6
    one.on_train_batch_end(trainer, None, None, BATCH, 0)
    assert steps == []


@pytest.mark.parametrize(("validated_after", "tokens"), [(None, [256] * 3), (5, [256, 256])])
def test_accumulated_batches_make_one_step_and_one_with_a_validation_between_them_none(
    steps: list[int | None], validated_after: int | None, tokens: list[int]
) -> None:
    """`val_check_interval` counts batches: it need not be a multiple of `accumulate_grad_batches`."""
    one, trainer = callback(), SimpleNamespace(global_step=0)
    one.on_train_start(trainer, None)
    for index in range(12):
        one.on_train_batch_start(trainer, None, BATCH, index)
        trainer.global_step = (index + 1) // 4
        one.on_train_batch_end(trainer, None, None, BATCH, index)
        if index == validated_after:
            one.on_validation_start(trainer, None)
    assert steps == tokens, "no step of two batches, as long as half a one"


@pytest.mark.parametrize(("replicas", "tokens"), [(8, 64), (4, 32), (1, 8), (0, 64)])
def test_ranks_that_are_given_the_same_batch_share_its_tokens(
    steps: list[int | None], replicas: int, tokens: int
) -> None:
    """As `ModelParallelStrategy`, whose samplers are those of its data parallel mesh."""
    strategy = SimpleNamespace(distributed_sampler_kwargs={"num_replicas": replicas, "rank": 0})
    one, trainer = callback(), SimpleNamespace(global_step=0, world_size=8, strategy=strategy)
    one.on_train_start(trainer, None)
    one.on_train_batch_start(trainer, None, BATCH, 0)
    trainer.global_step = 1
    one.on_train_batch_end(trainer, None, None, BATCH, 0)
    assert steps == [tokens]


def test_batches_and_trainers_of_another_form_break_nothing(steps: list[int | None]) -> None:
    one = callback()
    one.on_train_start(object(), None)
    one.on_train_batch_start(object(), None, {"input_ids": 7}, 0)
    one.on_train_batch_end(object(), None, None, None, 0)
    one.on_save_checkpoint(None, None, {})
    names = "input_ids", "tokens"
    assert steps == [] and tokens_of([Ids()], *names) == 0 and tokens_of({"tokens": Ids()}, *names) == 64


def test_the_entry_points_name_functions_that_exist() -> None:
    named = [line.partition(":")[2] for line in ENTRY_POINTS.splitlines() if ":" in line]
    assert len(named) == 2 and all(callable(getattr(lightning, name)) for name in named)


def test_without_lightning_there_is_no_callback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.import_module", lambda name: (_ for _ in ()).throw(ImportError(name)))
    assert lightning.of_lightning() == [] and lightning.of_pytorch_lightning() == []
