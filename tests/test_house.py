"""The house: which files stand where, what they may load, and that the standard library is not shadowed."""

import ast
import importlib.util
import json
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "platform" / "wattune"

ROOMS = {
    ".": "__main__ clock deadline doctor errors fidelity field_types forced_exit inspection intervals masking "
    "metric_meanings objective private_folder schema spans trial units upload version",
    "analysis": "detail examine quality summary",
    "analysis/metrics": "energy excursion experts exposed_comm outlier phases power saturation speed step_breakdown "
    "thermal throttle utilization waterfall",
    "analysis/signals": "align energy_grid readings schema_check series steady_state steps",
    "api": "decisions estimates exports recordings reports results runs spaces studies",
    "calibration": "fit links run",
    "catalog": "hardware huggingface models",
    "cli": "author decide export machine results shell study",
    "cost": "batch clock coefficients defaults estimate flops power sweep tables temperature",
    "cost/memory": "activations deepspeed_engine defaults megatron_engine moments predict shapes torch_engine",
    "cost/step_time": "facts links matmul pipeline predict replica traffic work",
    "engines": "libraries registry",
    "engines/deepspeed": "config context engine grad_norm model pipeline",
    "engines/megatron": "config context cudnn engine layers lora routing timers weights",
    "engines/model": "compiler decoder experts hyperparameters lora offload routing tokens weights",
    "engines/torch": "blocking_comm engine float8 mesh optimizer parallel pipeline",
    "fitting": "device estimate_and_result interval least_squares links memory power step_time store temperature",
    "orchestrate": "cluster command_result cooldown events failures lost_cluster node_products power_limit ray_folder "
    "ray_searcher ray_settings run_study run_trial telemetry_actor trial_result trial_telemetry",
    "orchestrate/lanes": "actor client command_worker lane messages placement_groups worker worker_group",
    "orchestrate/scheduling": "backfill budget controller durations early_stop graphs ladder nodes outlook "
    "proposals race references run_order study_run trial_queue waiting",
    "plans": "axes effective engines parallel placement program rules schedule vocabulary",
    "ranking": "assessment best bounds common_steps comparison conditions difference evidence frontier order racing "
    "recordings scatter sources spreads suggestions table work",
    "recording": "command recorder recording sensors steps window",
    "recording/serving": "families follower server",
    "report": "charts coverage figure frontier labels markup page pareto predictions race sections spaces "
    "step_throughput traces write",
    "search": "cluster_entry command_entry draft examples fields forecast grammar model_entry names plausible problems "
    "prune reference search_entry space strategy",
    "search/strategies": "acquisition features gaussian_process listed model_guided optuna_samplers prediction "
    "protocol snapping surrogate",
    "simulation": "activity device_model sensors",
    "steps": "files launch pattern reader source steady table",
    "steps/inject": "sitecustomize",
    "steps/process": "events huggingface importing install lightning optimizer writer",
    "storage": "digests documents files lock manifests measured parquet remote space_changes spaces study trial_files "
    "trial_tables values versions",
    "telemetry": "backend host probe registry replay",
    "telemetry/amd_smi": "backend device library",
    "telemetry/files": "coverage manifest pacing segments stream",
    "telemetry/nvml": "backend device fields gpm ring",
    "telemetry/sampler": "lease loop process",
    "terminal": "decisions estimate_and_result forecast links preview progress ranking recording tables tally",
    "tracking": "artifacts locations picture reader run store tracker view",
    "workers/command": "environment failure launcher measuring output process supervisor",
    "workers": "calibration_load device early_stop engine last_words link_load loop memory_check out_of_memory outcome "
    "phases process_groups profiler provenance recorder watchdog",
}
"""Every module of the package. A new file is a decision: it is listed here, or the test fails."""

WITHOUT_TWIN = {
    "__main__": "two calls; tests/e2e/test_wheel.py runs it",
    "api/recordings": "passes on to record and inspection, which have theirs; tests/e2e/test_record.py uses it",
    "cli/export": "the verbs are one surface: tests/unit/test_cli*.py",
    "cli/decide": "the verbs are one surface: tests/unit/test_cli*.py",
    "cli/author": "the verbs are one surface: tests/unit/test_cli*.py",
    "cli/machine": "the verbs are one surface: tests/unit/test_cli*.py",
    "cli/results": "the verbs are one surface: tests/unit/test_cli*.py",
    "cli/shell": "the verbs are one surface: tests/unit/test_cli*.py",
    "cli/study": "the verbs are one surface: tests/unit/test_cli*.py",
    "cost/coefficients": "fields without code; what reads them is tested",
    "cost/memory/defaults": "fields and one choice: test_predict",
    "cost/memory/deepspeed_engine": "its moments are one peak with the others': test_predict holds it to trials",
    "cost/memory/megatron_engine": "its moments are one peak with the others': test_predict holds it to trials",
    "cost/memory/torch_engine": "its moments are one peak with the others': test_predict, test_fsdp_tracker",
    "cost/memory/moments": "one sum: test_predict",
    "cost/step_time/facts": "fields without code; test_work, test_traffic and test_predict read them",
    "engines/deepspeed/context": "undoes process-wide state: the contract runs trial after trial in one process",
    "engines/deepspeed/grad_norm": "needs several ranks: the contract compares norms on every plan",
    "engines/deepspeed/model": "its parts are tested by test_engine, its plans by the contract",
    "engines/deepspeed/pipeline": "needs several ranks: the contract compares losses and spans",
    "engines/megatron/context": "needs process groups and the shim: tests/contracts/test_megatron.py",
    "engines/megatron/engine": "needs process groups and the shim: tests/contracts/test_megatron.py",
    "engines/megatron/lora": "needs process groups and the shim: tests/contracts/test_megatron.py",
    "engines/megatron/routing": "needs process groups and the shim: tests/contracts/test_megatron.py",
    "engines/model/hyperparameters": "constants: the engines' tests of their configuration assert them",
    "engines/torch/mesh": "needs several ranks: the contract runs every plan",
    "engines/torch/parallel": "needs several ranks: the contract runs every plan",
    "engines/torch/pipeline": "needs several ranks: the contract runs every plan",
    "orchestrate/scheduling/outlook": "what a queue previews: test_trial_queue, test_durations",
    "orchestrate/scheduling/study_run": "fields and two names: test_trial_queue, test_controller",
    "version": "one function: tests/e2e/test_wheel.py reads it",
}
"""Modules without a unit test of their own name, each with what tests it instead."""

LONGEST_FILE_LINES = 500

PURE = (
    "units errors clock field_types schema metric_meanings intervals objective trial fidelity storage steps "
    "steps.process spans catalog plans cost cost.memory cost.step_time fitting analysis analysis.metrics "
    "analysis.signals search search.strategies ranking telemetry telemetry.files telemetry.sampler telemetry.nvml "
    "telemetry.amd_smi simulation recording recording.serving workers.command terminal.recording"
)
VENDORS = ("ray", "torch", "mlflow", "plotly", "pynvml", "amdsmi", "optuna", "deepspeed", "megatron", "torchao")


@pytest.mark.parametrize("room", ROOMS)
def test_every_room_holds_exactly_its_files(room: str) -> None:
    expected = {"__init__", *ROOMS[room].split()}
    assert {path.stem for path in (PACKAGE / room).glob("*.py")} == expected


def test_there_are_no_other_rooms() -> None:
    rooms = {path.parent.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py")}
    assert rooms == set(ROOMS)


def test_every_module_has_the_unit_test_of_its_name_or_a_reason() -> None:
    """`wattune/a/b.py` is tested by `tests/unit/a/test_b.py`."""
    modules = {path.relative_to(PACKAGE).with_suffix("") for path in PACKAGE.rglob("*.py") if path.stem != "__init__"}
    unit = ROOT / "tests" / "unit"
    missing = {str(module) for module in modules if not (unit / module.parent / f"test_{module.name}.py").exists()}
    assert missing == set(WITHOUT_TWIN)


def test_no_file_is_two_things() -> None:
    lengths = {path.relative_to(ROOT).as_posix(): len(path.read_text().splitlines()) for path in PACKAGE.rglob("*.py")}
    assert {path: lines for path, lines in lengths.items() if lines > LONGEST_FILE_LINES} == {}


UNSAFE_MODULES = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "pty"}
UNSAFE_CALLS = {
    "eval", "exec", "os.system", "os.popen", "subprocess.getoutput", "subprocess.getstatusoutput", "yaml.load",
    "yaml.unsafe_load", "yaml.full_load", "yaml.load_all", "torch.load", "pd.read_pickle", "pandas.read_pickle",
}  # fmt: skip
UNSAFE_OPTIONS = {"shell", "allow_pickle"}


def unsafe(source: str) -> list[str]:
    """Lists what runs data as a program: pickles, evaluation, shells, YAML's objects."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [one.name for one in node.names if one.name.split(".")[0] in UNSAFE_MODULES]
        elif isinstance(node, ast.ImportFrom):
            found += [node.module] if (node.module or "").split(".")[0] in UNSAFE_MODULES else []
        elif isinstance(node, ast.Call):
            called = ast.unparse(node.func) if isinstance(node.func, ast.Name | ast.Attribute) else ""
            found += [called] if called in UNSAFE_CALLS else []
            options = [one for one in node.keywords if one.arg in UNSAFE_OPTIONS]
            found += [
                str(one.arg) for one in options if not (isinstance(one.value, ast.Constant) and not one.value.value)
            ]
    return found


def test_nothing_of_ours_unpickles_evaluates_or_asks_a_shell() -> None:
    found = {path.relative_to(ROOT).as_posix(): unsafe(path.read_text()) for path in PACKAGE.rglob("*.py")}
    assert {path: names for path, names in found.items() if names} == {}
    written = (
        "import pickle\nfrom shelve import open\neval(a)\nrun(b, shell=c)\nyaml.load(d)\nnp.load(e, allow_pickle=True)"
    )
    assert len(unsafe(written)) == 6
    assert unsafe("run(b, shell=False)\nyaml.safe_load(d)\nmodel.eval()") == []


def test_the_standard_library_platform_is_not_shadowed() -> None:
    assert not (ROOT / "platform" / "__init__.py").exists()
    code = "import platform, uuid, sys; print(platform.__file__)"
    seen = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True, timeout=30
    ).stdout.strip()
    assert not Path(seen).is_relative_to(ROOT / "platform"), seen


@cache
def vendors_of_pure_rooms() -> dict[str, list[str]]:
    """Returns the vendor libraries that each pure room loads beyond those of the rooms before it."""
    rooms = {}
    for name in PURE.split():
        folder = PACKAGE / name
        inside = [f"wattune.{name}.{path.stem}" for path in folder.glob("[!_]*.py")]
        rooms[name] = inside if folder.is_dir() else [f"wattune.{name}"]
    code = (
        "import importlib, json, sys\nfound, before = {}, set()\n"
        f"for room, modules in {rooms!r}.items():\n"
        "    for name in modules: importlib.import_module(name)\n"
        f"    loaded = {{name for name in {VENDORS!r} if name in sys.modules}}\n"
        "    found[room], before = sorted(loaded - before), before | loaded\n"
        "print(json.dumps(found))"
    )
    seen = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=100)
    found: dict[str, list[str]] = json.loads(seen.stdout)
    return found


@pytest.mark.parametrize("name", PURE.split())
def test_pure_rooms_load_no_vendor_library(name: str) -> None:
    assert vendors_of_pure_rooms()[name] == []


def test_a_command_that_only_reads_waits_for_no_heavy_library() -> None:
    heavy = ("ray", "torch", "mlflow", "pandas", "plotly", "optuna")
    code = f"import sys, wattune.cli\nprint([name for name in {heavy!r} if name in sys.modules])"
    seen = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert seen.stdout.strip() == "[]"


def test_name_to_class_tables_name_classes_that_exist_and_stay_in_their_room() -> None:
    from wattune.engines.registry import ENGINES
    from wattune.telemetry.registry import BACKENDS

    for table, room in ((ENGINES, "wattune.engines."), (BACKENDS, "wattune.telemetry.")):
        for target in table.values():
            module_name, _, class_name = target.partition(":")
            assert module_name.startswith(room)
            spec = importlib.util.find_spec(module_name)
            assert spec is not None and spec.origin is not None
            assert f"class {class_name}" in Path(spec.origin).read_text()
