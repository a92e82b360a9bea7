"""Uses that hooks make of the libraries of measured programs. Each is a row of docs/dependencies.md.

Sources are read and not loaded: these libraries take seconds. `tests/e2e/test_own_code.py` runs them.
"""

import importlib.util
from pathlib import Path

import pytest


def source_of(package: str, file: str) -> str:
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        pytest.skip(f"{package} is not installed")
    return (Path(spec.origin).parent / file).read_text()


@pytest.mark.private_api("transformers.trainer.DEFAULT_CALLBACKS")
def test_each_trainer_copies_the_default_callbacks() -> None:
    text = source_of("transformers", "trainer.py")
    assert "\nDEFAULT_CALLBACKS = [DefaultFlowCallback]" in text
    assert "default_callbacks = DEFAULT_CALLBACKS + " in text
    assert text.count("self.training_step(model, inputs, num_items_in_batch)") == 1
    assert "def training_step(\n        self,\n        model: nn.Module,\n        inputs:" in text


@pytest.mark.private_api("lightning.pytorch.callbacks_factory")
@pytest.mark.parametrize(("package", "folder"), [("lightning", "pytorch/"), ("pytorch_lightning", "")])
def test_lightning_asks_entry_points_for_callbacks(package: str, folder: str) -> None:
    text = source_of(package, f"{folder}trainer/connectors/callback_connector.py")
    group = ".".join(filter(None, [package, folder.strip("/"), "callbacks_factory"]))
    assert f'_load_external_callbacks("{group}")' in text
