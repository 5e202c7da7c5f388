"""Broadcast a whole state, or only the tensors that rank 0 alone has (running statistics); write one for DCP.

See docs/architecture.md#snapshots-on-every-node.
"""

import math
import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tandem.checkpoint.plain import restored
from tandem.checkpoint.snapshot import Layout, form_of, typed
from tandem.checkpoint.state import (
    deserialize,
    destination_or_memory,
    destinations_by_index,
    flatten,
    serialize,
    unflatten,
)
from tandem.distributed.group import BROADCAST_CHUNK_BYTES, ProcessGroup
from tandem.torch_private import copy_all

NO_ELEMENT = torch.empty(0)
HEAD_BYTES = 64
SMALL_BYTES = 2**20
"""Values up to this size are sent at every snapshot; larger ones only as often as SHARE allows."""
SHARE = {"cpu": 0.03, "cuda": 0.01}
"""The share of the time that sending large values may take."""


def broadcast_state(
    world: ProcessGroup, state: dict[str, Any] | None, destinations: Mapping[str, Tensor], source: int = 0
) -> dict[str, Any]:
    """Return the state of rank `source` on every rank; the other ranks pass None.

    A tensor of the state's "model" is received into the tensor of `destinations` with the same name, dtype
    and shape; others into new host memory. No rank needs memory for two states.
    """
    skeleton, tensors = flatten(state or {})
    is_source = world.rank == source
    # torch.save writes the containers and empty tensors, so this part is small.
    bare = serialize(unflatten(skeleton, [NO_ELEMENT] * len(tensors))) if is_source else None
    skeleton, _ = flatten(deserialize(world.broadcast_bytes(bare, source)))
    received = world.broadcast_json([form_of(each) for each in tensors], source)
    if not is_source:
        there = destinations_by_index(skeleton, destinations)
        forms = [(getattr(torch, dtype), torch.Size(shape)) for dtype, shape in received]
        tensors = [destination_or_memory(there.get(index), *form) for index, form in enumerate(forms)]
    for tensor in tensors:
        _broadcast_bytes_of(world, tensor, source)
    return restored(unflatten(skeleton, tensors))


def _broadcast_bytes_of(world: ProcessGroup, tensor: Tensor, source: int) -> None:
    # The bytes are received through a flat view, which exists only for contiguous memory.
    """Broadcast a rank's values into a tensor; through the device in 64 MiB chunks if it is on the host."""
    raw = tensor.contiguous().reshape(-1).view(torch.uint8)
    for piece in torch.split(raw, BROADCAST_CHUNK_BYTES):
        there = piece.to(world.device)
        dist.broadcast(there, src=source)
        # On CPUs, to() returns the piece itself, which the broadcast has filled.
        if there is not piece and world.rank != source:
            piece.copy_(there)


def write_dcp(weights: Mapping[str, Tensor], path: Path) -> None:
    """Write weights with torch.distributed.checkpoint: any number of ranks can load the directory.

    Needs no process group.
    """
    from torch.distributed.checkpoint.state_dict_saver import save

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that this process has no process group
        save(dict(weights), checkpoint_id=path, no_dist=True)


class Rank0Values:
    """Broadcasts, all at once, the tensors for which only rank 0 has the correct values.

    The first 24 bytes tell all ranks how many bytes follow, a digest of the tensors' shapes and dtypes, and
    after how many snapshots rank 0 sends again. So a rank whose tensors differ still joins the broadcast.
    """

    def __init__(self, world: ProcessGroup) -> None:
        self._world = world
        self._forms: list[Any] | None = None
        self._layout = Layout.of([], (), 1)
        self._room = 0  # bytes that every rank expects after the head
        self._wait = self._waited = 1
        self._sent_at = 0.0
        self._cost: float | None = None

    def is_due(self) -> bool:
        """Return whether to send at this snapshot; the same on all ranks. Call it once per snapshot."""
        self._wait -= 1
        return self._wait <= 0

    def send(self, tensors: Sequence[Tensor]) -> list[Tensor] | None:
        """Return rank 0's values of `tensors`, or None if their forms differ there. All ranks call this."""
        began = time.monotonic()
        forms = [form_of(each) for each in tensors]
        if forms != self._forms:
            self._forms = forms
            self._layout = Layout.of(forms, (), 1)
        layout = self._layout
        raw, head = self._memory(self._room)
        if self._world.is_first:
            self._wait = self._next_wait(began)
            head.copy_(torch.tensor([layout.cuts[-1], layout.fingerprint >> 1, self._wait]))
            if layout.cuts[-1] <= self._room:
                self._fill(raw, tensors)
        dist.broadcast(raw, src=0)
        length, fingerprint, self._wait = map(int, head.tolist())
        if length > self._room:  # the first time, or rank 0's buffers have grown
            self._room = length
            raw, _ = self._memory(length)
            if self._world.is_first:
                self._fill(raw, tensors)
            dist.broadcast(raw, src=0)
        elif self._world.is_first:
            took = time.monotonic() - began
            self._cost = took if self._cost is None else min(took, 2 * self._cost)
        return self._views(raw) if fingerprint == layout.fingerprint >> 1 else None

    def _next_wait(self, now: float) -> int:
        """Return the number of snapshots until the next broadcast, so that broadcasts take at most SHARE."""
        interval = (now - self._sent_at) / self._waited
        self._sent_at = now
        self._waited = 1
        if self._cost is not None and self._layout.cuts[-1] > SMALL_BYTES:
            share = SHARE[self._world.device.type]
            self._waited = max(1, math.ceil(self._cost / (share * max(interval, 1e-6))))
        return self._waited

    def _memory(self, length: int) -> tuple[Tensor, Tensor]:
        raw = torch.empty(HEAD_BYTES + length, dtype=torch.uint8, device=self._world.device)
        return raw, raw[:24].view(torch.int64)

    def _fill(self, raw: Tensor, tensors: Sequence[Tensor]) -> None:
        copy_all(self._views(raw), list(tensors))

    def _views(self, raw: Tensor) -> list[Tensor]:
        return [
            typed(raw, HEAD_BYTES + offset, form[0], math.prod(form[1])).view(form[1])
            for form, offset in zip(self._layout.forms, self._layout.offsets, strict=True)
        ]
