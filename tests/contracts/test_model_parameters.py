"""Parameters of published models, counted from `config.json` alone, are those that transformers allocates.

The configurations in `tests/golden/model_configs` have the shapes of the released models. transformers builds each on
the meta device, where nothing is allocated; its classes are the truth, its defaults too.
"""

import dataclasses
import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from wattune.catalog.huggingface import MODEL_TYPES, read_config
from wattune.catalog.models import ModelSpec
from wattune.errors import PlanError

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="transformers is not installed"
)

FOLDER = Path(__file__).parents[1] / "golden" / "model_configs"
CONFIGS = {path.stem: path for path in sorted(FOLDER.glob("*.json"))}
DEFAULTS = json.loads(
    (Path(__file__).parents[2] / "platform" / "wattune" / "catalog" / "model_types.json").read_text(encoding="utf-8")
)


def allocated(config: dict[str, Any]) -> int:
    """Counts the parameters of transformers' causal model of a `config.json`; of its text part where it has one."""
    import torch
    import transformers

    own = {key: value for key, value in config.items() if key not in ("model_type", "auto_map", "quantization_config")}
    made: Any = transformers.AutoConfig.for_model(config["model_type"], **own)
    with torch.device("meta"):
        model: Any = transformers.AutoModelForCausalLM.from_config(made.get_text_config())
    return sum(one.numel() for one in model.parameters())


def read(tmp_path: Path, config: dict[str, Any]) -> ModelSpec:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    return read_config(path, "own", ["vision_config"] if "vision_config" in config else [])


@pytest.mark.parametrize("name", CONFIGS)
def test_a_published_model_has_the_parameters_of_transformers(tmp_path: Path, name: str) -> None:
    config = json.loads(CONFIGS[name].read_text(encoding="utf-8"))
    assert read(tmp_path, config).num_parameters == allocated(config)


@pytest.mark.parametrize("kind", DEFAULTS)
def test_a_file_that_names_its_type_alone_is_the_types_default_model(tmp_path: Path, kind: str) -> None:
    # transformers has no default number of experts of a token, and one number of heads that divides nothing.
    refused = {"deepseek_v2": "num_experts_per_tok: missing", "glm4_moe": "num_attention_heads: 96 does not divide"}
    if kind in refused:
        with pytest.raises(PlanError, match=refused[kind]):
            read(tmp_path, {"model_type": kind})
        return
    assert read(tmp_path, {"model_type": kind}).num_parameters == allocated({"model_type": kind})


@pytest.mark.parametrize("kind", DEFAULTS)
def test_defaults_are_those_of_transformers(kind: str) -> None:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    theirs = {each.name: each.default for each in dataclasses.fields(CONFIG_MAPPING[kind])}
    ours = {key: value for key, value in DEFAULTS[kind]["defaults"].items() if key != "rope_theta"}
    assert ours == {key: theirs[key] for key in ours}


def test_every_type_is_tested() -> None:
    kinds = {json.loads(path.read_text(encoding="utf-8"))["model_type"] for path in CONFIGS.values()}
    assert set(MODEL_TYPES) == {*DEFAULTS, "gemma3"}
    assert set(MODEL_TYPES) - kinds == {"seed_oss"}
    assert len(CONFIGS) >= 24


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
def test_a_key_that_is_left_out_has_its_types_default(tmp_path: Path, name: str) -> None:
    """Of a slice of two layers, one key at a time; transformers refuses what does not fit together, as we do."""
    from huggingface_hub.errors import StrictDataclassError

    config = json.loads(CONFIGS[name].read_text(encoding="utf-8"))
    text = config.get("text_config", config)
    layers = next(key for key in ("n_layer", "num_hidden_layers") if key in text)
    small = {key: value for key, value in text.items() if key not in ("layer_types", "hybrid_override_pattern")}
    small[layers] = 4
    for key in sorted(set(small) & set(DEFAULTS[text["model_type"]]["defaults"]) - {layers}):
        fewer = {name: value for name, value in small.items() if name != key}
        try:
            theirs = allocated(fewer)
        except (ValueError, TypeError, ZeroDivisionError, AssertionError, StrictDataclassError):
            continue
        try:
            ours = read(tmp_path, fewer).num_parameters
        except PlanError as error:  # heads of no whole width, which transformers rounds down
            assert "does not divide" in str(error) or key == "num_experts_per_tok", error
            continue
        assert ours == theirs, key
