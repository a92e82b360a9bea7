"""The torch engine's prediction against torch's own account of FSDP2 under fake tensors, on a processor."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from specs import trial_spec
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.testing._internal.distributed.fake_pg import FakeStore

from wattune.catalog.models import model
from wattune.cost.batch import batches
from wattune.cost.defaults import H200
from wattune.cost.memory.predict import predict
from wattune.engines.model.decoder import Decoder, Rotation
from wattune.engines.torch import parallel
from wattune.engines.torch.fsdp_comm import ReduceScatter
from wattune.engines.torch.mesh import Meshes
from wattune.engines.torch.optimizer import ShardedAdamW
from wattune.plans.axes import Plan
from wattune.trial import TrialSpec

RANKS = 4
REAL = replace(model("llama3_8b"), num_layers=4, vocab_size=32_000)
SMALL = replace(REAL, hidden_size=512, ffn_hidden_size=1792, num_heads=8, num_kv_heads=2, vocab_size=4000)


def tracked(spec: TrialSpec) -> dict[str, int]:
    """Bytes by torch's names at the peak of the second step, of rank 0."""
    plan, of = spec.plan, spec.model
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    try:
        meshes = Meshes.create(plan, world_size=RANKS, rank=0, device_type="cpu", has_experts=False)
        with FakeTensorMode():
            rotation = Rotation.table(of, spec.workload.seq_len, torch.device("cpu"), torch.bfloat16)
            decoder = Decoder(
                of, range(of.num_layers), rotation=rotation, recompute=plan.recompute, experts=meshes.expert_shard(plan)
            )
            assert decoder.head is not None
            decoder.head.loss_chunks = plan.loss_chunks
            for part in (decoder.embedding, *decoder.layers.values(), decoder.head, decoder):
                assert part is not None
                parallel._shard(part, plan, meshes, ReduceScatter("cpu", holds_compute=False))
            optimizer = ShardedAdamW(decoder.parameters())
            tokens = torch.zeros((plan.micro_batch_size, spec.workload.seq_len), dtype=torch.int64)
            tracker = FSDPMemTracker(decoder, optimizer._adamw)
            tracker.track_inputs((tokens,))
            with tracker:
                for step in range(2):
                    _step(decoder, optimizer, tokens, plan, spec.workload.global_batch_size // RANKS)
                    if step == 0:
                        tracker.reset_mod_stats()
            peak = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]
    finally:
        dist.destroy_process_group()
    return {getattr(kind, "name", str(kind)): size for kind, size in peak.items()}


def _step(decoder: Decoder, optimizer: ShardedAdamW, tokens: torch.Tensor, plan: Plan, micro_batches: int) -> None:
    """One step as `wattune.engines.torch.pipeline` runs it without stages."""
    root = parallel.fsdp_modules(decoder).__next__()
    for index in range(micro_batches):
        last = index == micro_batches - 1
        root.set_requires_gradient_sync(plan.sharding in ("zero2", "zero3") or last)
        root.set_requires_all_reduce(last)
        root.set_is_last_backward(last)
        root.set_reshard_after_backward(plan.sharding == "zero3" or last)
        decoder(tokens, tokens).backward()
    for shard in optimizer._shards:
        shard.piece.grad = shard.whole.grad.to_local()  # type: ignore[union-attr]
    assert optimizer._adamw is not None
    optimizer._adamw.step()
    for shard in optimizer._shards:
        shard.whole.grad = shard.piece.grad = None


@pytest.mark.slow
@pytest.mark.parametrize("of", [SMALL, REAL], ids=["small", "real"])
@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize(
    ("sharding", "copies"), [("none", 1), ("zero1", 1), ("zero2", 1), ("zero3", 1), ("zero2", 2), ("zero3", 2)]
)
def test_predicted_bytes_are_those_that_torch_counts(of, sharding: str, copies: int, recompute: str) -> None:  # type: ignore[no-untyped-def]
    spec = trial_spec(
        of,
        on=f"1x{RANKS} cpu",
        seq_len=of.hidden_size,
        batch=8,
        sharding=sharding,
        dp_replicate=copies,
        recompute=recompute,
        overlap="grad",
    )
    counted = tracked(spec)
    ((_, batch),) = batches([spec])
    parts = {name: values[0] for name, values in predict(batch, H200).parts_bytes.items()}
    assert parts["weights"] == pytest.approx(counted["SHARDED_PARAM"], rel=1e-3)
    assert parts["optimizer"] == pytest.approx(counted["OPT"], rel=1e-3)
    if sharding != "zero3":
        assert parts["gathered"] == pytest.approx(counted["UNSHARDED_PARAM"], rel=1e-3)
    # At the head the tracker counts 8 bytes a logit more than an eager loss took on H200 (`EAGER_LOGIT_BYTES`). With
    # full recomputation a layer holds as much as the head.
    held = 8 * of.hidden_size * of.vocab_size if recompute == "none" else 0
    total = sum(parts.values()) - parts["allocator"]
    assert total == pytest.approx(counted["Total"] - held, rel=0.06)


@pytest.mark.slow
@pytest.mark.parametrize("sharding", ["zero1", "zero3"])
@pytest.mark.parametrize("chunks", [4, 16])
def test_a_loss_in_parts_holds_the_logits_of_one_part(sharding: str, chunks: int) -> None:
    """A vocabulary of 128,256 tokens, of which the logits are most of the memory that is held."""
    of = replace(SMALL, vocab_size=128_256)
    totals = {}
    for parts in (1, chunks):
        spec = trial_spec(of, on=f"1x{RANKS} cpu", seq_len=2048, batch=8, sharding=sharding, loss_chunks=parts)
        counted = tracked(spec)
        ((_, batch),) = batches([spec])
        found = {name: values[0] for name, values in predict(batch, H200).parts_bytes.items()}
        totals[parts] = sum(found.values()) - found["allocator"], counted["Total"]
    for predicted, counted_bytes in totals.values():
        assert predicted == pytest.approx(counted_bytes, rel=0.04)
    assert totals[chunks][1] < 0.6 * totals[1][1]
