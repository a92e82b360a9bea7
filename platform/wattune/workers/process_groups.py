"""Process groups of a worker that runs one trial after another.

A group is made for a trial and kept for the next ones of the same meeting: to make NCCL's communicators and to end them
takes one to two seconds of a trial (two H200, `benchmarks/results/study_economics.md`).
"""

import gc
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Final

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import PrefixStore, Store

MEET_S: Final = 180.0
"""Longest a rank may take to reach the store of its lane."""

_stores: list[Store] = []
"""The store of this process's lane, once it is open."""

_met: list[str] = []
"""The meeting whose default group this process is in."""
_kept: dict[tuple[tuple[int, ...], int], dist.ProcessGroup] = {}
"""Groups beside the default one, by their ranks and their number among those of the same ranks."""


def open_store(address: str, port: int, *, holds: bool, num_ranks: int) -> None:
    """Opens the store of a lane, which one of its workers `holds` for all. Nobody waits for the others here."""
    limit = timedelta(seconds=MEET_S)
    store = dist.TCPStore(address, port, num_ranks, is_master=holds, timeout=limit, wait_for_workers=False)  # type: ignore[attr-defined]
    _stores[:] = [store]


def take_store() -> Store:
    """Returns the store that the ranks of this lane meet in: no trial needs another port."""
    return _stores[0]


def join_groups(store: Store, name: str, *, rank: int, world_size: int, device: str, timeout_s: float) -> None:
    """Makes the default group of a trial; every rank calls it, and drives a torch device.

    The ranks meet in the store. Under the name of the meeting that they are in they stay together, with the groups that
    `group_of` made. No two meetings of one store may share a name. A collective may wait `timeout_s`.
    """
    if dist.is_initialized():
        if _met == [name]:
            return
        leave_groups()
    _met[:] = [name]
    dist.init_process_group(
        "nccl" if torch.device(device).type == "cuda" else "gloo",
        store=PrefixStore(name, store),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=timeout_s),
    )


def group_of(ranks: Sequence[int], number: int, role: str) -> dist.ProcessGroup:
    """Returns the group of some ranks of this meeting, this one among them; each of these calls it at the same time.

    A trial that needs several groups of the same ranks numbers them from 0. Profiles call it by its `role`.
    """
    key = (tuple(ranks), number)
    if _kept.get(key) not in distributed_c10d._world.pg_map:  # also where somebody else has ended it
        # Its name follows from the ranks and from how many groups there are, so that another process calls it alike:
        # compiled graphs are kept by the names of their groups.
        _kept[key] = dist.new_group(list(ranks), use_local_synchronization=True)
    _kept[key]._set_group_desc(role)
    return _kept[key]


def live_groups() -> list[dist.ProcessGroup]:
    """Every process group of this rank but the default one, in the order they were made."""
    return [group for group in distributed_c10d._world.pg_map if group is not dist.group.WORLD]


def meet(device: str) -> None:
    """Returns when every rank of the default group has come here, each with the torch device that it drives."""
    # torch takes the thread's current device otherwise, the first one of every rank that has claimed none yet.
    own = torch.device(device)
    dist.barrier(device_ids=[own.index] if own.type == "cuda" else None)


def abort_groups() -> None:
    """Frees ranks that wait in a collective of this one, on GPUs; may be called from any thread, and more than once.

    Gloo has no such call: there `leave_groups` on the rank that failed closes the connections others wait on.
    """
    # Copied at once: the rank may be making groups meanwhile.
    groups = list(distributed_c10d._world.pg_names)
    backends = [backend for group in groups if (backend := _nccl(group)) is not None]
    if not backends:
        return
    # All at the same time: the memory of an idle communicator is freed when the device is, and the device waits for the
    # kernel of the one that hangs. One by one, also between ncclGroupStart and ncclGroupEnd as torch does it, the first
    # abort never returned (two H200s, torch 2.11: benchmarks/results/trial_overhead.md).
    with ThreadPoolExecutor(len(backends)) as pool:
        list(pool.map(lambda backend: backend.abort(), backends))


def _nccl(group: dist.ProcessGroup) -> "dist.ProcessGroupNCCL | None":
    if not torch.cuda.is_available() or not dist.is_nccl_available():
        return None
    try:
        backend = group._get_backend(torch.device("cuda"))
    except RuntimeError:  # a group without GPUs
        return None
    return backend if isinstance(backend, dist.ProcessGroupNCCL) else None


def begun() -> str:
    """Says how many collectives this rank has begun in each group: ranks that wait for each other may differ by one."""
    groups = list(distributed_c10d._world.pg_names.items())  # another thread may be making some
    numbers = [(name, one._get_sequence_number_for_group()) for one, name in groups]  # type: ignore[attr-defined]
    return "".join(f"\ngroup {name}: {count} collectives begun" for name, count in numbers)


def leave_groups() -> int:
    """Ends every group, also where there is none; returns how many an engine has made by itself and not ended."""
    left = 0
    if dist.is_initialized():
        left = len(distributed_c10d._world.pg_map) - 1 - len(_kept)
        _kept.clear()
        dist.destroy_process_group()
    _let_go_of_groups()
    return left


def _let_go_of_groups() -> None:
    """Drops references that keep ended groups alive: a group's threads and connections end with the last one.

    DTensor remembers its decisions by mesh, and a mesh holds its groups (torch 2.13): without this every trial would
    leave a dozen threads and more open files, and on gloo ranks that wait for this one would not be freed.
    """
    if "torch.distributed.tensor" in sys.modules:
        from torch.distributed.tensor import debug

        getattr(debug, "_clear_sharding_prop_cache", lambda: None)()
    gc.collect()
    for found in gc.get_objects():
        if type(found) is DeviceMesh:
            getattr(found, "_pg_registry", {}).clear()
