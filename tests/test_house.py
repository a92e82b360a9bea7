"""The house: which files stand where, what they may load, and that the standard library is not shadowed."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "platform" / "wattune"

ROOMS = {
    ".": "__main__ api calibration cli clock doctor errors inspection objective schema spread trial units upload",
    "analysis": "align breakdown decompose detail energy examine excursion grid intake kernels outlier phases power "
    "quality readings saturation series speed steady steps summary thermal throttle use",
    "catalog": "hardware models",
    "cost": "flops",
    "orchestrate": "agenda assignment cluster events hygiene judge lane lane_group lane_keeper lane_worker lanes "
    "ledger limits orphans run_study run_trial schedule telemetry_actor trial_telemetry",
    "plan": "axes engines parallel placement rules",
    "ranking": "comparison evidence judgement order sources table",
    "record": "command recorder recording sensors",
    "report": "charts figure markup page traces write",
    "search": "grammar problems prune space strategy",
    "storage": "files measured parquet remote study",
    "telemetry": "activity amd_smi amd_smi_device amd_smi_library backend calibrate device_model facts host lease "
    "manifest nvml nvml_device nvml_fields nvml_gpm nvml_ring pacing replay sampler sampling simulated store stream",
    "terminal": "progress ranking recording tables",
    "tracking": "ledger run store tracker view",
    "workers": "deepspeed_ambient deepspeed_config deepspeed_engine deepspeed_model deepspeed_norm deepspeed_pipeline "
    "engine groups kernels leftovers loads loop megatron_config megatron_engine megatron_layers megatron_lora "
    "megatron_marks megatron_runtime megatron_weights phases torch_compiler torch_data torch_device "
    "torch_engine torch_experts torch_lora torch_mesh torch_model torch_optimizer torch_parallel "
    "torch_pipeline torch_recorder torch_serial torch_weights watch",
}
"""Every module of the package. A new file is a decision: it is listed here, or the test fails."""

LONGEST_FILE_LINES = 500

PURE = (
    "units errors clock schema spread objective trial storage catalog plan cost analysis search ranking telemetry "
    "record terminal.recording"
)
VENDORS = ("ray", "torch", "mlflow", "plotly", "pynvml", "amdsmi", "optuna", "deepspeed", "megatron")


@pytest.mark.parametrize("room", ROOMS)
def test_every_room_holds_exactly_its_files(room: str) -> None:
    expected = {"__init__", *ROOMS[room].split()}
    assert {path.stem for path in (PACKAGE / room).glob("*.py")} == expected


def test_there_are_no_other_rooms() -> None:
    rooms = {path.parent.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py")}
    assert rooms == set(ROOMS)


def test_no_file_is_two_things() -> None:
    lengths = {path.relative_to(ROOT).as_posix(): len(path.read_text().splitlines()) for path in PACKAGE.rglob("*.py")}
    assert {path: lines for path, lines in lengths.items() if lines > LONGEST_FILE_LINES} == {}


def test_the_standard_library_platform_is_not_shadowed() -> None:
    assert not (ROOT / "platform" / "__init__.py").exists()
    code = "import platform, uuid, sys; print(platform.__file__)"
    seen = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True, timeout=30
    ).stdout.strip()
    assert not Path(seen).is_relative_to(ROOT / "platform"), seen


@pytest.mark.parametrize("name", PURE.split())
def test_pure_rooms_load_no_vendor_library(name: str) -> None:
    folder = PACKAGE / name
    inside = [f"wattune.{name}.{path.stem}" for path in folder.glob("[!_]*.py")]
    modules = inside if folder.is_dir() else [f"wattune.{name}"]
    code = f"import importlib, sys\nfor name in {modules!r}: importlib.import_module(name)\n"
    code += f"print([name for name in {VENDORS!r} if name in sys.modules])"
    seen = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert seen.stdout.strip() == "[]"


def test_a_command_that_only_reads_waits_for_no_heavy_library() -> None:
    heavy = ("ray", "torch", "mlflow", "pandas", "plotly", "optuna")
    code = f"import sys, wattune.cli\nprint([name for name in {heavy!r} if name in sys.modules])"
    seen = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert seen.stdout.strip() == "[]"


def test_name_to_class_tables_name_classes_that_exist_and_stay_in_their_room() -> None:
    from wattune.telemetry.backend import BACKENDS
    from wattune.workers.engine import ENGINES

    for table, room in ((ENGINES, "wattune.workers."), (BACKENDS, "wattune.telemetry.")):
        for target in table.values():
            module_name, _, class_name = target.partition(":")
            assert module_name.startswith(room)
            spec = importlib.util.find_spec(module_name)
            assert spec is not None and spec.origin is not None
            assert f"class {class_name}" in Path(spec.origin).read_text()
