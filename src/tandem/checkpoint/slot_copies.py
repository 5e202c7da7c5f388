"""Copy slots of a snapshot region (`snapshot.py`) to another region, maybe on another node.

A slot is copied unchanged, with its skeleton. Its mark is written last, so a torn copy never counts. A region
with copies has two slots: the last whole copy, and the one that is being received.
"""

import mmap
import struct
from collections.abc import Iterator
from typing import NamedTuple

from tandem.checkpoint.node_memory import NodeMemory
from tandem.checkpoint.snapshot import (
    GEOMETRY,
    GEOMETRY_AT,
    HEADER_BYTES,
    MOST_SLOTS,
    OF,
    SLOT,
    skeleton_in,
    slot_start,
)


class SlotHead(NamedTuple):
    """The identity of a slot's contents, and the sizes of its parts in bytes; see `snapshot.py`."""

    fingerprint: int
    step: int
    generation: int
    data: int
    slot_bytes: int


HEAD = struct.Struct("<Qqqqq")
"""A `SlotHead` in bytes."""


class HeldSlot(NamedTuple):
    """A whole slot in a region: its rank and number of ranks, its step and its generation."""

    number: int
    rank: int
    ranks: int
    step: int
    generation: int


def head_of(region: NodeMemory, slot: int) -> SlotHead:
    """Return the head of a slot in a region; its step is 0 if the slot is incomplete."""
    memory = region.map(HEADER_BYTES)
    return SlotHead(*SLOT.unpack_from(memory, slot * SLOT.size), *GEOMETRY.unpack_from(memory, GEOMETRY_AT))


def held_slots(region: NodeMemory) -> Iterator[HeldSlot]:
    """Yield the whole slots of a region of one rank's own state, or of copies of such a region."""
    if region.size() <= HEADER_BYTES:
        return
    for number in range(MOST_SLOTS):
        head = head_of(region, number)
        if head.step > 0:
            rank, ranks = skeleton_in(region, number)[OF]
            yield HeldSlot(number, rank, ranks, head.step, head.generation)


def bytes_of(memory: mmap.mmap, slot: int, head: SlotHead) -> memoryview:
    """Return the bytes of a slot in a mapped region. They belong to `head` while `head_of` returns it."""
    begin = slot_start(slot, head.slot_bytes)
    return memoryview(memory)[begin : begin + head.slot_bytes]


class IncomingSlot:
    """A slot that is being received: fill `contents`, then call `finish`.

    `mapped`: the `memory` of an earlier one in the same region, which is reused if it is large enough. Raises
    OSError, ValueError or OverflowError if the region has no room for it.
    """

    def __init__(
        self, region: NodeMemory, slot: int, head: SlotHead, mapped: mmap.mmap | None = None
    ) -> None:
        if min(head.step, head.data) <= 0 or head.data > head.slot_bytes:
            raise ValueError(f"not a slot: {head}")
        self._slot = slot
        self._head = head
        end = slot_start(slot + 1, head.slot_bytes)
        if mapped is None or len(mapped) < end:
            mapped = region.map(max(region.size(), end))
        self.memory = memory = mapped
        geometry = head.data, head.slot_bytes
        if GEOMETRY.unpack_from(memory, GEOMETRY_AT) != geometry:
            # Slots of another size begin at other offsets.
            memory[:HEADER_BYTES] = bytes(HEADER_BYTES)
            GEOMETRY.pack_into(memory, GEOMETRY_AT, *geometry)
        SLOT.pack_into(memory, slot * SLOT.size, 0, 0, 0)
        self.contents = bytes_of(memory, slot, head)

    def finish(self) -> None:
        """Mark the slot as valid."""
        SLOT.pack_into(self.memory, self._slot * SLOT.size, *self._head[:3])
