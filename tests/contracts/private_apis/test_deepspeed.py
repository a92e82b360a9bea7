"""Uses of DeepSpeed that DeepSpeed does not promise. Each is a row of docs/dependencies.md."""

import inspect

import pytest
from installed import get, load, parameters, source


@pytest.mark.private_api("deepspeed.utils.groups._release_process_group_references")
def test_release_process_group_references() -> None:
    release = get("deepspeed.utils.groups._release_process_group_references")
    assert inspect.signature(release).parameters["group"].default is None


@pytest.mark.private_api("deepspeed.runtime.zero.partitioned_param_coordinator.PartitionedParameterCoordinator")
def test_partitionedparametercoordinator() -> None:
    methods = vars(get("deepspeed.runtime.zero.partitioned_param_coordinator.PartitionedParameterCoordinator")).values()
    cells = [cell.cell_contents for method in methods for cell in getattr(method, "__closure__", None) or ()]
    assert [cell.__name__ for cell in cells if hasattr(cell, "cache_clear")] == ["__params_to_release"]


@pytest.mark.private_api("deepspeed.accelerator.real_accelerator.set_accelerator")
def test_set_accelerator() -> None:
    assert len(parameters(get("deepspeed.accelerator.real_accelerator.set_accelerator"))) == 1
    assert get("deepspeed.accelerator.cpu_accelerator.CPU_Accelerator")().device_name() == "cpu"
    assert callable(get("deepspeed.accelerator.cuda_accelerator.CUDA_Accelerator"))


@pytest.mark.private_api("deepspeed.pipe.LayerSpec.build")
def test_build() -> None:
    nn, layer = load("torch").nn, get("deepspeed.pipe.LayerSpec")
    spec = layer(nn.Linear, 2, 3)
    assert (spec.typename, spec.module_args) == (nn.Linear, (2, 3)) and parameters(spec.build) == ["log"]
    assert parameters(get("deepspeed.pipe.TiedLayerSpec"))[:2] == ["key", "typename"]
    assert "layer.forward_fn" in source("deepspeed.pipe.PipelineModule._build")


@pytest.mark.private_api("deepspeed.runtime.pipe.engine.PipelineEngine._INSTRUCTION_MAP")
def test_instruction_map() -> None:
    engine, schedule = get("deepspeed.runtime.pipe.engine.PipelineEngine"), load("deepspeed.runtime.pipe.schedule")
    steps = {schedule.ForwardPass, schedule.BackwardPass, schedule.ReduceGrads, schedule.OptimizerStep}
    assert steps <= engine._INSTRUCTION_MAP.keys()
    assert "MethodType(self._INSTRUCTION_MAP[type(cmd)], self)" in inspect.getsource(engine._exec_schedule)
    assert "self._aggregate_total_loss()" in inspect.getsource(engine.train_batch)
    text = inspect.getsource(engine)
    assert "self.total_loss = None" in text and "'labels'" in text
    assert {"reduce_output", "bcast_loss"} <= set(parameters(engine.eval_batch))


@pytest.mark.private_api("deepspeed expert_parallel")
def test_expert_parallel() -> None:
    from wattune.engines.deepspeed.config import COLUMNS
    from wattune.engines.deepspeed.config import ROWS as BY_ROWS

    said = {"enabled": True, "autoep_size": 2, "moe_layer_pattern": "a", "router_pattern": "b", "expert_pattern": "c"}
    said |= {"expert_w1": "d", "expert_w2": "e", "expert_w3": "f", "top_k": 2, "score_func": "softmax"}
    said |= {"score_apply": "post", "route_norm": True, "use_grouped_mm": False}
    parsed = get("deepspeed.module_inject.auto_ep_config.parse_autoep_config")(said)
    assert {name: getattr(parsed, name) for name in said} == said
    specs = [{"patterns": [COLUMNS], "partition_type": "column"}, {"patterns": [BY_ROWS], "partition_type": "row"}]
    auto = get("deepspeed.module_inject.autotp_config.AutoTPConfig").from_dict(
        {"use_default_specs": False, "layer_specs": specs}
    )
    assert [each.partition_type.value for each in auto.layer_specs] == ["column", "row"]
    assert auto.use_default_specs is False
