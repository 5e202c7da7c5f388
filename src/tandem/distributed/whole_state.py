"""Broadcast a state from rank 0, one tensor at a time, each into its final memory."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tandem.checkpoint.flatten import flatten, homes_by_index, unflatten
from tandem.checkpoint.plain import restored
from tandem.checkpoint.state import deserialize, has_form, serialize
from tandem.distributed.group import BROADCAST_CHUNK_BYTES, ProcessGroup

NO_ELEMENT = torch.empty(0)


def broadcast_state(
    world: ProcessGroup, state: dict[str, Any] | None, homes: Mapping[str, Tensor]
) -> dict[str, Any]:
    """Return rank 0's state on every rank; the other ranks pass None.

    A tensor of the state's "model" is received into the tensor of `homes` with the same name, dtype and
    shape; others into new host memory. No rank needs memory for two states.
    """
    skeleton, tensors = flatten(state or {})
    # torch.save writes the containers and empty tensors, so this part is small.
    bare = serialize(unflatten(skeleton, [NO_ELEMENT] * len(tensors))) if world.is_first else None
    skeleton, _ = flatten(deserialize(world.broadcast_bytes(bare)))
    received = world.broadcast_json(
        [[str(each.dtype).removeprefix("torch."), list(each.shape)] for each in tensors]
    )
    if not world.is_first:
        there = homes_by_index(skeleton, homes)
        forms = [(getattr(torch, dtype), torch.Size(shape)) for dtype, shape in received]
        tensors = [_memory(there.get(index), *form) for index, form in enumerate(forms)]
    for tensor in tensors:
        _broadcast_bytes_of(world, tensor)
    return restored(unflatten(skeleton, tensors))


def _memory(home: Tensor | None, dtype: torch.dtype, shape: torch.Size) -> Tensor:
    # The bytes are received through a flat view, which exists only for contiguous memory.
    if has_form(home, dtype, shape) and home.is_contiguous():
        return home
    return torch.empty(shape, dtype=dtype)


def _broadcast_bytes_of(world: ProcessGroup, tensor: Tensor) -> None:
    """Broadcast rank 0's values into a tensor; through the device in 64 MiB chunks if it is on the host."""
    raw = tensor.contiguous().reshape(-1).view(torch.uint8)
    for piece in torch.split(raw, BROADCAST_CHUNK_BYTES):
        there = piece.to(world.device)
        dist.broadcast(there, src=0)
        # On CPUs, to() returns the piece itself, which the broadcast has filled.
        if there is not piece and not world.is_first:
            piece.copy_(there)
