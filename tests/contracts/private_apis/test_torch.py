"""Uses of torch that torch does not promise. Each is a row of docs/dependencies.md."""

import importlib.util
import inspect
from pathlib import Path
from typing import Any

import pytest
from installed import get, group_of_one, load, parameters, source, stub


@pytest.mark.private_api("torch.distributed.distributed_c10d._world")
def test_world() -> None:
    dist, world = load("torch.distributed"), get("torch.distributed.distributed_c10d._world")
    with group_of_one():
        extra = dist.new_group([0])
        assert list(world.pg_map) == list(world.pg_names) == [dist.group.WORLD, extra]
    assert not world.pg_map and not world.pg_names


@pytest.mark.private_api("torch.distributed.ProcessGroup._get_sequence_number_for_group")
def test_get_sequence_number_for_group() -> None:
    torch, dist = load("torch"), load("torch.distributed")
    with group_of_one():
        before = dist.group.WORLD._get_sequence_number_for_group()
        dist.all_reduce(torch.zeros(1))
        assert dist.group.WORLD._get_sequence_number_for_group() == before + 1


@pytest.mark.private_api("torch.distributed.ProcessGroup._set_group_desc")
def test_set_group_desc() -> None:
    dist = load("torch.distributed")
    with group_of_one():
        dist.group.WORLD._set_group_desc("mesh_tp")
        configs = dist.distributed_c10d._get_all_pg_configs()  # what a profile's trace says of its groups
        assert [config["pg_desc"] for config in configs] == ["mesh_tp"]


@pytest.mark.private_api("torch.distributed.ProcessGroup._get_backend")
def test_get_backend() -> None:
    torch, dist = load("torch"), load("torch.distributed")
    with group_of_one():
        assert isinstance(dist.group.WORLD._get_backend(torch.device("cpu")), dist.ProcessGroupGloo)
        with pytest.raises(RuntimeError):  # how a group that has nothing for a kind of device says so
            dist.group.WORLD._get_backend(torch.device("xpu"))


@pytest.mark.private_api("torch.distributed.ProcessGroupNCCL.abort")
def test_abort() -> None:
    assert stub("_C/_distributed_c10d.pyi", "ProcessGroupNCCL", "abort")  # builds without CUDA have no such class


@pytest.mark.private_api("torch.distributed.tensor.debug._clear_sharding_prop_cache")
def test_clear_sharding_prop_cache() -> None:
    get("torch.distributed.tensor.debug._clear_sharding_prop_cache")()


@pytest.mark.private_api("torch.distributed.device_mesh.DeviceMesh._pg_registry")
def test_pg_registry() -> None:
    with group_of_one():
        mesh = get("torch.distributed.device_mesh.init_device_mesh")("cpu", (1, 1), mesh_dim_names=("shard", "tp"))
        registry = mesh._pg_registry
        assert {id(group) for group in mesh.get_all_groups()} <= {id(group) for group in registry.values()}


@pytest.mark.private_api("torch mesh_tp")
def test_group_desc() -> None:
    from wattune.analysis.metrics.exposed_comm import role_of

    dist = load("torch.distributed")
    dist.init_process_group(
        "fake", store=get("torch.testing._internal.distributed.fake_pg.FakeStore")(), rank=0, world_size=4
    )
    try:
        mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tp"))
        names = {group.group_desc: group.group_name for group in mesh.get_all_groups()}
    finally:
        dist.destroy_process_group()
    assert set(names) == {"mesh_shard", "mesh_tp"} and len(set(names.values())) == 2
    assert [role_of("", "", name) for name in names] == ["dp", "tp"]


@pytest.mark.private_api("torch._C._cuda_clearCublasWorkspaces")
def test_cuda_clearcublasworkspaces() -> None:
    assert stub("_C/__init__.pyi", "", "_cuda_clearCublasWorkspaces")


@pytest.mark.private_api("torch._inductor.compile_fx.compile_fx")
def test_compile_fx() -> None:
    assert parameters(get("torch._inductor.compile_fx.compile_fx"))[:4] == [
        "model_",
        "example_inputs_",
        "inner_compile",
        "config_patches",
    ]
    config = load("torch._functorch.config")
    for name in ("force_non_lazy_backward_lowering", "autograd_cache_allow_custom_autograd_functions"):
        assert isinstance(getattr(config, name), bool)
    torch = load("torch")
    with get("torch._subclasses.fake_tensor.FakeTensorMode")():
        assert torch.empty(2**40).shape == (2**40,), "it has no data"
    marks = source("torch.distributed.fsdp._fully_shard._fully_shard.fully_shard")
    assert "_is_fsdp_managed_module = True" in marks and "_fsdp_use_orig_params = True" in marks
    assert get("torch.testing._internal.distributed.fake_pg.FakeStore")()


@pytest.mark.private_api("torch.distributed.pipelining.PipelineStage.forward_one_chunk")
def test_forward_one_chunk() -> None:
    torch, stages = load("torch"), load("torch.distributed.pipelining")
    stage, has_backward = stages.PipelineStage, inspect.getattr_static(stages.PipelineStage, "has_backward")
    assert isinstance(has_backward, property) and isinstance(inspect.getattr_static(stage, "is_last"), property)
    assert parameters(stage.forward_one_chunk)[:4] == ["self", "fwd_chunk_id", "args", "kwargs"]
    assert parameters(stage.backward_one_chunk) == ["self", "bwd_chunk_id", "loss", "full_backward", "last_backward"]
    assert parameters(stage.perform_reduce_grad) == ["self", "grad_scale_factor"]
    assert "isinstance(self.submod, FSDPModule)" in inspect.getsource(stage.perform_reduce_grad)

    class Fails(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            raise MemoryError("of the model")

    with group_of_one():
        x = torch.zeros(1)
        built = stage(Fails(), 0, 1, torch.device("cpu"), input_args=(x,), output_args=(x,))
        with pytest.raises(RuntimeError) as raised:
            built.forward_one_chunk(0, (x,))
    assert isinstance(raised.value.__cause__, MemoryError)


@pytest.mark.private_api("torch.distributed.fsdp.FSDPModule.set_custom_all_gather")
def test_set_custom_all_gather() -> None:
    api = load("torch.distributed.fsdp._fully_shard._fsdp_api")
    assert parameters(api.AllGather.__call__)[1:] == ["output_tensor", "input_tensor", "group", "async_op"]
    assert parameters(api.ReduceScatter.__call__)[1:] == ["output_tensor", "input_tensor", "group", "op", "async_op"]
    assert parameters(api.Comm.allocate)[1:] == ["size", "dtype", "device"]
    dist, module = load("torch.distributed"), get("torch.distributed.fsdp.FSDPModule")
    assert callable(module.set_custom_all_gather) and callable(module.set_custom_reduce_scatter)
    assert hasattr(dist, "all_gather_single") or hasattr(dist, "all_gather_into_tensor")
    assert hasattr(dist, "reduce_scatter_single") or hasattr(dist, "reduce_scatter_tensor")


@pytest.mark.private_api("torch.profiler.profile.export_chrome_trace")
def test_export_chrome_trace(tmp_path: Path) -> None:
    import json

    torch, dist = load("torch"), load("torch.distributed")
    with group_of_one(), torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        dist.all_reduce(torch.ones(8) @ torch.ones(8, 8))
    profiler.export_chrome_trace(str(tmp_path / "trace.json"))
    trace = json.loads((tmp_path / "trace.json").read_text())
    assert trace["baseTimeNanoseconds"] > 0
    events = {event["name"]: event for event in trace["traceEvents"] if event.get("ph") == "X"}
    assert {"c10d::allreduce_", "gloo:all_reduce"} <= events.keys()
    assert {"ts", "dur", "tid"} <= events["gloo:all_reduce"].keys()
    assert {event["cat"] for name, event in events.items() if name.startswith("aten::")} == {"cpu_op"}


@pytest.mark.private_api("torch.OutOfMemoryError")
def test_outofmemoryerror() -> None:
    from wattune.workers.engine import Ranks
    from wattune.workers.out_of_memory import is_out_of_memory, out_of_memory_of

    torch = load("torch")
    with pytest.raises(RuntimeError) as raised:
        torch.empty(2**50)
    assert is_out_of_memory(raised.value) and issubclass(torch.OutOfMemoryError, RuntimeError)
    ranks = Ranks(rank=0, world_size=1, local_rank=0, device="cpu")
    assert out_of_memory_of(raised.value, ranks).requested_bytes == 2**52


@pytest.mark.private_api("torch.optim.AdamW.param_groups")
def test_param_groups() -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    torch, called = load("torch"), set()

    class Listens(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            called.add(func.__name__.partition(".")[0])
            return func(*args, **(kwargs or {}))

    weight = torch.nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)
    optimizer = torch.optim.AdamW([weight])
    for group in optimizer.param_groups:
        group["fused"], group["foreach"] = True, False
    with Listens():
        optimizer.step()
    assert "_fused_adamw_" in called


@pytest.mark.private_api("torch.ops._c10d_functional")
def test_functional_collectives() -> None:
    with group_of_one():
        ops, group = load("torch").ops._c10d_functional, load("torch.distributed").group.WORLD.group_name
        ones = load("torch").ones(2)
        made = (
            ops.all_gather_into_tensor(ones, 1, group),
            ops.reduce_scatter_tensor(ones, "sum", 1, group),
            ops.all_reduce(ones, "max", group),
        )
        assert all(ops.wait_tensor(each).tolist() == [1.0, 1.0] for each in made)


@pytest.mark.private_api("torchao TORCHAO_FORCE_SKIP_LOADING_SO_FILES")
def test_force_skip_loading_so_files() -> None:
    found = importlib.util.find_spec("torchao")
    assert found is not None and found.origin is not None
    assert 'os.getenv("TORCHAO_FORCE_SKIP_LOADING_SO_FILES", "0") == "1"' in Path(found.origin).read_text()
