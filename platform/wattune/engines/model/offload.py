"""Moves what layers keep for their backward pass to host memory and back, beside compute.

A layer's saved tensors are copied to pinned memory on a stream of their own while the next layer computes, and the
device's are freed once that layer is done. The backward pass of a layer starts the copies of the layer before it, so
that two layers' activations are on the device at a time, however many micro-batches are in flight. As torchtune's
`OffloadActivations` and Megatron's `cpu_offloading` do it; `torch.autograd.graph.save_on_cpu` would have the host wait
for every copy.

Nothing may change an activation in place: a copy may still be reading it.
"""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor

from wattune.engines.model.experts import Experts

LEAST_BYTES: Final = 1024
"""Smaller tensors stay: torchtune's `min_offload_size`."""


class _Kept:
    """One saved tensor: on the device, in host memory, or both."""

    __slots__ = ("__weakref__", "call", "device", "host")

    def __init__(self, call: "_Call", source: Tensor) -> None:
        self.call = call
        self.device: Tensor | None = source
        self.host = torch.empty_like(source, device="cpu", pin_memory=source.device.type != "cpu")


class _Call:
    """One layer of one micro-batch, between its forward and its backward pass."""

    def __init__(self, device: torch.device, side: "torch.cuda.Stream | None", previous: "_Call | None") -> None:
        self._device, self._side, self.previous = device, side, previous
        self._kept: list[weakref.ref[_Kept]] = []
        self._same: dict[tuple[Any, ...], tuple[_Kept, Tensor]] = {}
        """By place and form, while the layer runs. Holds tensors, so that none takes the place of another meanwhile."""
        self._copied: torch.cuda.Event | None = None
        self._fetched: torch.cuda.Event | None = None
        self._is_awaited = True

    def keep(self, tensor: Tensor) -> _Kept:
        """Starts the copy to host memory; views that are saved twice are copied once."""
        place = tensor.untyped_storage().data_ptr()
        key = (place, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype, type(tensor))
        if key not in self._same:
            # A copy keeps the strides of what has no gaps: compiled graphs rely on them.
            dense = tensor if torch.ops.aten.is_non_overlapping_and_dense(tensor) else tensor.contiguous()
            kept = _Kept(self, dense)
            with self._beside():
                kept.host.copy_(dense, non_blocking=True)
            self._same[key] = kept, tensor
            self._kept.append(weakref.ref(kept))
        return self._same[key][0]

    def end_forward(self) -> None:
        """Notes when its copies will be done."""
        self._same.clear()
        if self._side is not None:
            self._copied = self._side.record_event()

    def release(self) -> None:
        """Frees the device's tensors: what is computed from here on waits for the copies."""
        if self._copied is not None:
            torch.cuda.current_stream().wait_event(self._copied)
        for kept in self._alive():
            kept.device = None

    def fetch(self) -> None:
        """Starts the copies back of what is not on the device."""
        missing = [kept for kept in self._alive() if kept.device is None]
        for kept in missing:
            kept.device = torch.empty_like(kept.host, device=self._device)
        if not missing:
            return
        with self._beside():
            for kept in missing:
                assert kept.device is not None
                kept.device.copy_(kept.host, non_blocking=True)
                if self._side is not None:
                    kept.device.record_stream(self._side)
        if self._side is not None:
            self._fetched, self._is_awaited = self._side.record_event(), False

    def take(self, kept: _Kept) -> Tensor:
        """Returns a saved tensor to the backward pass, and starts to fetch the layer before."""
        if kept.device is None:
            self.fetch()
        if not self._is_awaited:
            assert self._fetched is not None
            torch.cuda.current_stream().wait_event(self._fetched)
            self._is_awaited = True
        previous, self.previous = self.previous, None
        if previous is not None:
            previous.fetch()
        assert kept.device is not None
        return kept.device

    @contextmanager
    def _beside(self) -> Iterator[None]:
        """Runs copies on the side stream, behind what was computed so far; on processors at once."""
        if self._side is None:
            yield
            return
        self._side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._side):
            yield

    def _alive(self) -> list[_Kept]:
        return [kept for kept in (ref() for ref in self._kept) if kept is not None]


class Offload:
    """Offloads the activations of the layers of one part of a model."""

    def __init__(self, device: torch.device, constant: tuple[Tensor, ...] = ()) -> None:
        """Takes the device that computes, and tensors that layers use and that are no activations."""
        self._device = device
        self._side = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._constant = {each.untyped_storage().data_ptr() for each in constant}
        self._resident: _Call | None = None
        """The call whose tensors are still on the device."""
        self._previous: _Call | None = None

    def begin(self) -> None:
        """Begins the forward pass of a micro-batch."""
        self._previous = None

    @contextmanager
    def layer(self, layer: nn.Module) -> Iterator[None]:
        """Offloads what is saved inside; without gradients nothing is."""
        if not torch.is_grad_enabled():
            yield
            return
        call, weights = _Call(self._device, self._side, self._previous), _Weights(layer)

        @torch.no_grad()
        def pack(tensor: Tensor) -> "Tensor | _Kept":
            if type(tensor) not in (Tensor, nn.Parameter) or tensor.nbytes < LEAST_BYTES or 0 in tensor.stride():
                return tensor
            place = _place(tensor)
            return tensor if place in self._constant or weights.lie_at(place) else call.keep(tensor)

        def unpack(saved: "Tensor | _Kept") -> Tensor:
            return saved.call.take(saved) if isinstance(saved, _Kept) else saved

        with saved_tensors_hooks(pack, unpack):
            yield
        call.end_forward()
        if self._resident is not None:
            self._resident.release()
        self._resident = self._previous = call


class _Weights:
    """Places of a layer's weights as it sees them: gathered, and in the type they are used in."""

    def __init__(self, layer: nn.Module) -> None:
        self._known: set[int] | None = None
        self._layer = layer

    def lie_at(self, place: int) -> bool:
        """Tells whether a weight begins there. Sharded experts are gathered later than the rest of their layer."""
        if self._known is None:
            self._known = {_place(each) for each in self._layer.parameters()}
        if place in self._known:
            return True
        experts = (each for part in self._layer.modules() if isinstance(part, Experts) for each in part.parameters())
        return any(place == _place(each) for each in experts)


def _place(tensor: Tensor) -> int:
    """The address of a tensor's memory, gradients being off; of a shard's, where a weight is not gathered yet."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.untyped_storage().data_ptr()
