"""`init`, `schema`, `metrics` and `catalog` as used by a person: what is written plans, nothing is overwritten."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer

from wattune import doctor
from wattune.cli import author
from wattune.metrics import METRICS
from wattune.search.reference import reference_page, schema_text

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(autouse=True)
def in_a_folder_without_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(doctor, "nvidia_products", list)


def test_init_without_a_person_takes_defaults_and_what_it_writes_plans(wattune: Run) -> None:
    code, out, err = wattune("init")
    assert (code, err) == (0, "") and "next: wattune plan space.yaml" in out
    assert Path("space.schema.json").read_text() == schema_text()
    assert "device: cpu" in Path("space.yaml").read_text() and "study: space" in Path("space.yaml").read_text()
    assert wattune("plan", "space.yaml")[0] == 0


def test_init_takes_flags_and_this_machines_gpus(wattune: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "nvidia_products", lambda: ["NVIDIA H200"] * 8)
    bound = "node_device_power_peak_1s_w <= 5000"
    assert wattune("init", "my space.yaml", "--model", "mixtral_8x7b", "--bound", bound, "--engine", "megatron")[0] == 0
    text = Path("my space.yaml").read_text()
    assert "{device: h200_sxm, num_nodes: 1, devices_per_node: 8}" in text
    assert "engine: megatron" in text and bound in text and "study: my_space" in text
    assert wattune("plan", "my space.yaml")[0] == 0


def test_nothing_is_overwritten(wattune: Run) -> None:
    Path("space.yaml").write_text("mine")
    Path("space.schema.json").write_text("mine too")
    code, out, err = wattune("init")
    assert (code, out) == (2, "") and "space.yaml: exists and is kept" in err
    assert wattune("init", "other.yaml")[0] == 0
    assert Path("space.yaml").read_text() == "mine" and Path("space.schema.json").read_text() == "mine too"


@pytest.mark.parametrize(
    ("arguments", "words", "exit_code"),
    [
        (["--model", "llama4"], 'unknown model "llama4"', 2),
        (["--model", "nowhere/config.json"], "nowhere/config.json: no such file", 2),
        (["--cluster", "four GPUs"], "does not name a cluster", 2),
        (["--engine", "pytorch"], 'unknown engine "pytorch"', 2),
        (["--bound", "node_device_power_peak_1s_w <= 2.6"], "for 2.6 kW write 2600", 2),
        (["--objective", "fast"], '"fast" is not an objective', 2),
        (["--study", "../x"], "cannot be a folder", 2),
        (["--example", "cpu_smok"], 'unknown example "cpu_smok"; did you mean "cpu_smoke"', 2),
        (["--engine", "megatron", "--cluster", "1x2 cpu"], "does not run on cpu", 3),
        (["--model", "llama3_70b", "--cluster", "1x1 h100_sxm"], "not one layer of llama3_70b fits", 2),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_a_wrong_answer_is_one_message_and_no_file(
    wattune: Run, arguments: list[str], words: str, exit_code: int
) -> None:
    code, out, err = wattune("init", *(["--cluster", "1x4 h200_sxm"] if "--bound" in arguments else []), *arguments)
    assert code == exit_code and out == "" and words in err and "Traceback" not in err
    assert list(Path().iterdir()) == []


def test_a_person_is_asked_until_the_answer_is_right(wattune: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter(["llama4", "llama3_8b", "1x4 h200", "1x4 h200_sxm", "torch", "power <= 2600", ""])
    asked: list[str] = []

    def prompt(question: str, **_: Any) -> str:
        asked.append(question)
        return next(answers)

    monkeypatch.setattr(typer, "prompt", prompt)
    monkeypatch.setattr(author, "_person_is_there", lambda: True)
    code, _, err = wattune("init")
    assert code == 0 and len(asked) == 7
    assert 'unknown model "llama4"' in err and 'did you mean "h200_sxm"' in err and 'unknown metric "power"' in err
    assert "llama3_8b" in Path("space.yaml").read_text()


def test_a_model_of_a_file_is_named_after_its_folder_and_found_again(wattune: Run) -> None:
    Path("my_model").mkdir()
    config = {"model_type": "gemma3", "text_config": {"num_hidden_layers": 4}, "vision_config": {"hidden_size": 8}}
    Path("my_model/config.json").write_text(json.dumps(config))
    arguments = ["init", "--model", "my_model/config.json", "--cluster", "1x4 h200_sxm"]
    code, _, err = wattune(*arguments)
    assert code == 2 and 'add "leave_out: [vision_config]", or --leave-out vision_config' in err
    assert wattune(*arguments, "--leave-out", "vision_config")[0] == 0
    assert (
        "{name: my_model, from_config: my_model/config.json, leave_out: [vision_config]}"
        in Path("space.yaml").read_text()
    )
    assert wattune("plan", "space.yaml")[0] == 0


def test_an_example_is_written_under_its_name_and_plans(wattune: Run) -> None:
    assert wattune("init", "--example", "moe_ep_cpu")[0] == 0
    assert Path("moe_ep_cpu.yaml").read_text().startswith("# yaml-language-server: $schema=space.schema.json\n")
    assert wattune("plan", "moe_ep_cpu.yaml")[0] == 0
    assert wattune("init", "--example", "moe_ep_cpu", "--model", "llama3_8b")[0] == 2


def test_schema_prints_what_ships(wattune: Run) -> None:
    assert wattune("schema") == (0, schema_text(), "")
    assert wattune("schema", "--page") == (0, reference_page(), "")


def test_metrics_lists_all_and_finds_words(wattune: Run) -> None:
    everything = json.loads(wattune("metrics", "--json")[1])["metrics"]
    assert [one["name"] for one in everything] == list(METRICS)
    found = json.loads(wattune("metrics", "--search", "node power 1 s", "--json")[1])["metrics"]
    assert {"node_device_power_peak_1s_w", "node_power_peak_1s_w"} <= {one["name"] for one in found}
    assert len(found) < len(everything) // 2
    code, out, _ = wattune("metrics", "--search", "temperature")
    assert code == 0 and "device_temp_max_c" in out and "tokens_per_s" not in out
    assert wattune("metrics", "--search", "unicorns")[0] == 2


def test_catalog_finds_devices_and_models(wattune: Run) -> None:
    found = json.loads(wattune("catalog", "--search", "h100", "--json")[1])
    assert {one["name"] for one in found["devices"]} == {"h100_sxm", "h100_pcie", "h100_nvl"}
    code, out, _ = wattune("catalog", "--search", "qwen3")
    assert code == 0 and "qwen3_8b_like" in out and "llama3_8b" not in out


CONFIGS = {path.stem: path for path in sorted((Path(__file__).parents[1] / "golden" / "model_configs").glob("*.json"))}


@pytest.mark.parametrize("name", ["llama_3_1_405b", "deepseek_v3", "gpt_oss_20b", "nemotron_h_8b", "gemma_3_27b"])
def test_a_space_of_a_config_json_plans_without_an_edit(wattune: Run, name: str) -> None:
    Path(name).mkdir()
    Path(f"{name}/config.json").write_text(CONFIGS[name].read_text())
    vision = ["--leave-out", "vision_config"] if name == "gemma_3_27b" else []
    code, _, error = wattune("init", "--from", f"{name}/config.json", "--cluster", "1x8 h200_sxm", *vision)
    assert code == 0, error
    code, out, error = wattune("plan", "space.yaml", "--json")
    assert code == 0 and json.loads(out)["kept"], error
