"""Snapshots: the state of a recent step, in node memory that outlives the ranks of the node.

Every node keeps them, so that the loss of a node costs no more; docs/architecture.md#snapshots-on-every-node
describes which one is used. State that is equal on all ranks is divided among the ranks of a node. Running
statistics are rank 0's, which it has sent to all ranks. Each rank writes its part into its own region,
alternating between two slots:

    bytes 0..71    for slots 0, 1 and 2: fingerprint of the layout, step (0: being written), number of the
                   generation that wrote it; 8 bytes each
    bytes 72..87   offset of the tensors in a slot, size of a slot; 8 bytes each
    from byte 128  slot 0: length of the skeleton (8 bytes), skeleton, this rank's part of the tensors
    then           slot 1: the same; slot 2, too, if another node keeps copies (`slot_copies.py`)

A rank marks a slot as being written, writes it, and marks it with the step. The ranks step together: when one
of them writes a snapshot, all have written the previous one. So one slot is always complete, as long as all
ranks write to the same slot. Restarted ranks therefore get the number of the complete slot. They cannot
derive it from the marks of a killed rank, whose last write may be incomplete.

Nodes may have different snapshots of the same step if one node was away while the others returned to a
checkpoint. Two snapshots are the same only if their step, their generation and their skeleton are equal.
"""

import errno
import hashlib
import logging
import marshal
import mmap
import struct
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tandem.checkpoint.node_memory import NodeMemory
from tandem.checkpoint.pinned import ALIGNMENT, Pinned, streams_of
from tandem.checkpoint.plain import restored
from tandem.checkpoint.state import destination_or_memory, destinations_by_index, flatten, unflatten
from tandem.process import memory_left
from tandem.torch_private import copy_all

log = logging.getLogger("tandem.run")

SLOT = struct.Struct("<Qqq")  # fingerprint, step, generation
GEOMETRY = struct.Struct("<qq")  # offset of the tensors in a slot, bytes of a slot
MOST_SLOTS = 3
COPIED_SLOTS = MOST_SLOTS + 2
"""Slots in a node's memory for each rank, if the node also keeps copies of another node's rank."""
GEOMETRY_AT = MOST_SLOTS * SLOT.size
LENGTH = struct.Struct("<q")
HEADER_BYTES = 128
SKELETON_SLACK = 2  # the skeleton's numbers may need more bytes later
PER_RANK = "per_rank"
OF = "of"
"""Keys of a state: per-rank values; in a snapshot of those, [rank, world size]."""

NO_DESTINATIONS: Mapping[str, Tensor] = {}

TensorForm = tuple[str, tuple[int, ...]]
"""(dtype such as "float32", shape)."""


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True)
class Layout:
    """The positions of the tensors: one after another, aligned, and cut into one part per rank."""

    forms: tuple[TensorForm, ...]
    order: tuple[int, ...]  # of the tensors in memory; those that only rank 0 has right come first
    offsets: tuple[int, ...]  # one per tensor
    cuts: tuple[int, ...]  # one per rank, and the end
    fingerprint: int

    @classmethod
    def of(cls, forms: Sequence[TensorForm], own: Collection[int], ranks: int) -> "Layout":
        """Compute the layout. `own`: the tensors that rank 0 writes, regardless of the sizes of the parts."""
        order = sorted(range(len(forms)), key=lambda index: index not in own)
        offsets = [0] * len(forms)
        end = 0
        own_end = 0
        for index in order:
            offsets[index] = end
            end += _aligned(_bytes(forms[index]))
            own_end = end if index in own else own_end
        cuts = [0, *(max(own_end, _aligned(end * rank // ranks)) for rank in range(1, ranks)), end]
        text = repr((list(forms), order, cuts)).encode()
        fingerprint = int.from_bytes(hashlib.sha256(text).digest()[:8], "little")
        return cls(tuple(forms), tuple(order), tuple(offsets), tuple(cuts), fingerprint)

    def part(self, rank: int) -> list[tuple[int, int, int, int]]:
        """Return (tensor, first element, elements, byte offset in the part) of what `rank` writes."""
        low = self.cuts[rank]
        high = self.cuts[rank + 1]
        found = []
        for index in self.order:
            begin = self.offsets[index]
            width = _width(self.forms[index])
            first = max(low - begin, 0) // width
            last = min(high - begin, _bytes(self.forms[index])) // width
            if last > first:
                found.append((index, first, last - first, begin + first * width - low))
        return found


def _width(form: TensorForm) -> int:
    return getattr(torch, form[0]).itemsize  # type: ignore[no-any-return]


def _bytes(form: TensorForm) -> int:
    count = _width(form)
    for length in form[1]:
        count *= length
    return count


def form_of(tensor: Tensor) -> TensorForm:
    return str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)


class Snapshots:
    """One rank's part of the node's snapshots. Call `take` after a step, on all ranks of the node.

    `kept` is the slot with the state that the ranks started with; it is overwritten last. None means that the
    regions contain nothing worth keeping. It must be the same on all ranks of the node. `generation`: the
    number of this generation of ranks. `nodes_here`: nodes that share this machine. `copies`: this rank's
    region for copies of another node's slots. With copies, there is a third slot if the node has enough
    memory, and the slots in `held` must not be overwritten.
    """

    def __init__(
        self,
        regions: Sequence[NodeMemory],
        local_rank: int,
        kept: int | None,
        generation: int = 0,
        nodes_here: int = 1,
        copies: NodeMemory | None = None,
        held: Collection[int] = (),
    ) -> None:
        self.held = frozenset(held)
        self.slots = 2 if copies is None else MOST_SLOTS
        self._copies = copies
        self._regions = regions
        self._generation = generation
        self._nodes_here = nodes_here
        self.region = regions[local_rank]  # which this rank writes to
        self._rank = local_rank
        self._ranks = len(regions)
        self._layout: Layout | None = None
        self._memory: mmap.mmap | None = None
        self._part: list[tuple[int, int, int, int]] = []
        self._targets: list[list[Tensor]] = []
        self._capacity = self._slot_bytes = 0
        self.slot = 1 if kept is None else kept  # the slot written last
        self._is_kept = kept is not None
        self._pinned = Pinned()

    @property
    def memory(self) -> mmap.mmap:
        """That region, mapped; only after the first `take`."""
        assert self._memory is not None
        return self._memory

    @property
    def is_laid_out(self) -> bool:
        """True if the next `take` only copies. The first one allocates memory, which can take seconds."""
        return self._layout is not None

    @property
    def part_bytes(self) -> int:
        """The size of this rank's part, which `take` copies; 0 before the first one."""
        layout = self._layout
        return 0 if layout is None else layout.cuts[self._rank + 1] - layout.cuts[self._rank]

    def take(self, step: int, state: Mapping[str, Any], own: Collection[int]) -> bool:
        """Copy this rank's part of `state` as of `step` (1 or more); return whether it did nothing else.

        False: it allocated memory first, so its duration says nothing about the next one. `own`: indices, in
        order of appearance, of the tensors for which rank 0 has the correct values. Raises ConfigError for a
        state that cannot be saved, and OSError if memory is short.
        """
        return self.take_flat(step, *flatten(state), own)

    def take_flat(
        self, step: int, skeleton: dict[Any, Any], tensors: Sequence[Tensor], own: Collection[int]
    ) -> bool:
        """Copy this rank's part of a state that `flatten` has split; see `take`."""
        forms = [form_of(tensor) for tensor in tensors]
        text = marshal.dumps((skeleton, forms, sorted(own))) if self._rank == 0 else b""
        known = self._layout
        fits = known is not None and list(known.forms) == forms and len(text) <= self._capacity
        if not fits:
            self._lay_out(forms, own, len(text))
        memory = self._memory
        layout = self._layout
        assert memory is not None and layout is not None
        self.slot = self._next()
        SLOT.pack_into(memory, self.slot * SLOT.size, layout.fingerprint, 0, 0)
        start = slot_start(self.slot, self._slot_bytes)
        LENGTH.pack_into(memory, start, len(text))
        memory[start + LENGTH.size : start + LENGTH.size + len(text)] = text
        sources = [tensors[index].reshape(-1)[first : first + count] for index, first, count, _ in self._part]
        self._copy(sources)
        SLOT.pack_into(memory, self.slot * SLOT.size, layout.fingerprint, step, self._generation)
        self._is_kept = True
        return fits

    def _next(self) -> int:
        """Return the slot to overwrite; if it is the newest one, a held slot is the next newest."""
        free = [slot for slot in range(self.slots) if slot not in self.held]
        return next((slot for slot in free if slot != self.slot), self.slot)

    def _copy(self, sources: list[Tensor]) -> None:
        """Copy into the slot.

        From a GPU, copy asynchronously into pinned memory and wait once for all tensors.
        """
        on_gpu = any(source.is_cuda for source in sources)
        if on_gpu:
            assert self._memory is not None
            self._pinned.hold(torch.frombuffer(self._memory, dtype=torch.uint8))
        copy_all(self._targets[self.slot], sources, non_blocking=on_gpu)
        # The mark that follows must not be visible before the data.
        for stream in streams_of(sources):
            stream.synchronize()

    def _lay_out(self, forms: Sequence[TensorForm], own: Collection[int], text_bytes: int) -> None:
        """Place the slots in the region; a restarted rank reuses those of its predecessor."""
        layout = Layout.of(forms, own, self._ranks)
        # The region may be mapped again below, and memory must not be unmapped while it is pinned.
        self._pinned.release()
        self._choose_slots(layout.cuts[-1])
        data = _aligned(LENGTH.size + text_bytes * SKELETON_SLACK)
        slot_bytes = data + layout.cuts[self._rank + 1] - layout.cuts[self._rank]
        head = self.region.map(HEADER_BYTES)
        # If any slot had another layout, its tensors would be read from wrong offsets.
        if _fingerprints(head) <= {0, layout.fingerprint} and _has_room(head, text_bytes):
            data, slot_bytes = GEOMETRY.unpack_from(head, GEOMETRY_AT)
        else:
            head[:] = bytes(HEADER_BYTES)
            GEOMETRY.pack_into(head, GEOMETRY_AT, data, slot_bytes)
            self.held = frozenset()
        memory = self.region.map(max(self.region.size(), slot_start(self.slots, slot_bytes)))
        for slot in range(MOST_SLOTS):  # marks of an older generation must not be combined with new ones
            if slot not in self.held and (slot != self.slot or not self._is_kept):
                SLOT.pack_into(memory, slot * SLOT.size, 0, 0, 0)
        self._layout, self._part, self._memory = layout, layout.part(self._rank), memory
        self._capacity = data - LENGTH.size
        self._slot_bytes = slot_bytes
        raw = torch.frombuffer(memory, dtype=torch.uint8)
        self._targets = [
            [
                typed(raw, slot_start(slot, slot_bytes) + data + offset, forms[index][0], count)
                for index, _, count, offset in self._part
            ]
            for slot in range(self.slots)
        ]

    def _choose_slots(self, state_bytes: int) -> None:
        """Choose three slots if memory allows, else two without copies. Raise OSError if two do not fit."""
        if self._copies is not None:
            try:
                self._check_room(state_bytes, COPIED_SLOTS, [*self._regions, self._copies])
                return
            except OSError as error:
                log.warning("no node keeps copies of its neighbor's shards: %s", error)
            self._copies = None
            self.slots = 2
            self.held = frozenset()
        self._check_room(state_bytes, 2, self._regions)

    def _check_room(self, state_bytes: int, slots: int, regions: Sequence[NodeMemory]) -> None:
        """Raise OSError if the node has too little memory for the slots and for the copy that a save makes.

        The check covers all ranks of this machine together, because they allocate at the same time.
        """
        # Regions of an earlier generation occupy their memory already.
        missing = slots * state_bytes - sum(region.present() for region in regions)
        missing *= self._nodes_here
        left = memory_left(Path("/"))
        if left is not None and missing > 0 and missing + state_bytes > left:
            wanted = slots * state_bytes * self._nodes_here
            gib = [f"{each / 2**30:.2f}" for each in (wanted, state_bytes, left)]
            raise OSError(
                errno.ENOMEM,
                f"they need {gib[0]} GiB of this node's memory and a save needs {gib[1]}, but only {gib[2]} "
                "are left (see the container's limit); add memory, or use --snapshot-every never",
            )


def slot_start(slot: int, slot_bytes: int) -> int:
    """Return where a slot begins in a region."""
    return HEADER_BYTES + slot * slot_bytes


def _fingerprints(memory: mmap.mmap) -> set[int]:
    return {SLOT.unpack_from(memory, slot * SLOT.size)[0] for slot in range(MOST_SLOTS)}


def _has_room(memory: mmap.mmap, text_bytes: int) -> bool:
    data, slot_bytes = GEOMETRY.unpack_from(memory, GEOMETRY_AT)
    return bool(data >= LENGTH.size + text_bytes and slot_bytes > 0)


def typed(raw: Tensor, offset: int, dtype: str, count: int) -> Tensor:
    """Return a view of `count` elements that begin at byte `offset` of a tensor of bytes."""
    kind: torch.dtype = getattr(torch, dtype)
    return raw[offset : offset + count * kind.itemsize].view(kind)


class Snapshot(NamedTuple):
    """A state as of `step`, and its slot."""

    step: int
    state: dict[str, Any]
    slot: int


class Slot(NamedTuple):
    """A slot with a whole snapshot, and the generation that wrote it."""

    number: int
    generation: int


def whole_slots(regions: Sequence[NodeMemory]) -> dict[int, Slot]:
    """Return {step: its slot} of the snapshots (at most three) that all of the node's ranks have finished."""
    if not regions or any(region.size() <= HEADER_BYTES for region in regions):
        return {}
    heads = [region.map(HEADER_BYTES) for region in regions]
    marks = [{SLOT.unpack_from(head, slot * SLOT.size) for head in heads} for slot in range(MOST_SLOTS)]
    # The marks of all ranks must be equal: the same layout and the same step.
    found = dict[int, Slot]()
    for number, mark in enumerate(marks):
        _, step, generation = max(mark)
        if len(mark) == 1 and step > 0:
            found[step] = Slot(number, generation)
    return found


def newest_step(shared: Sequence[NodeMemory], own: Sequence[NodeMemory]) -> int | None:
    """Return the step of the newest whole snapshot in a node's regions, or None. Ranks may write meanwhile.

    `own`: regions of values that only one rank has; all that were written must have the step.
    """
    parts = [whole_slots([region]).keys() for region in own if region.size() > HEADER_BYTES]
    common = set(parts[0]).intersection(*parts[1:]) if parts else set[int]()
    return max({*whole_slots(shared), *common}, default=None)


def forget_after(region: NodeMemory, step: int) -> None:
    """Invalidate snapshots of steps after `step`, from which the run does not continue."""
    if region.size() > HEADER_BYTES:
        head = region.map(HEADER_BYTES)
        for slot in range(MOST_SLOTS):
            if SLOT.unpack_from(head, slot * SLOT.size)[1] > step:
                SLOT.pack_into(head, slot * SLOT.size, 0, 0, 0)


def read_slot(
    regions: Sequence[NodeMemory], step: int, slot: int, destinations: Mapping[str, Tensor] = NO_DESTINATIONS
) -> Snapshot:
    """Return the snapshot of `step` in `slot`, which all ranks of the node have finished.

    The tensors are copies, because the regions may be overwritten. Call this while no rank writes.
    A tensor of the state's "model" is copied into the tensor of `destinations` with the same name, dtype and
    shape.
    """
    memories = [region.map(region.size()) for region in regions]
    geometries = [GEOMETRY.unpack_from(memory, GEOMETRY_AT) for memory in memories]
    starts = [slot_start(slot, slot_bytes) for _, slot_bytes in geometries]
    skeleton, forms, own = _header(memories[0], starts[0])
    there = destinations_by_index(skeleton, destinations)
    tensors = [
        destination_or_memory(there.get(index), getattr(torch, dtype), torch.Size(shape))
        for index, (dtype, shape) in enumerate(forms)
    ]
    layout = Layout.of(forms, own, len(regions))
    for rank, memory in enumerate(memories):
        raw = torch.frombuffer(memory, dtype=torch.uint8)
        for index, first, count, offset in layout.part(rank):
            source = typed(raw, starts[rank] + geometries[rank][0] + offset, forms[index][0], count)
            tensors[index].view(-1)[first : first + count].copy_(source)
    return Snapshot(step, restored(unflatten(skeleton, tensors)), slot)


def skeleton_in(region: NodeMemory, slot: int) -> dict[Any, Any]:
    """Return the skeleton of the snapshot in `slot`, without tensors, from a node's first region."""
    skeleton: dict[Any, Any] = _header_in(region, slot)[0]
    return skeleton


def skeleton_digest(region: NodeMemory, slot: int) -> str:
    """Return a digest of everything but the values of tensors, from a node's first region."""
    text = repr(_header_in(region, slot))
    return hashlib.sha256(text.encode(errors="backslashreplace")).hexdigest()[:16]


def _header_in(region: NodeMemory, slot: int) -> Any:
    memory = region.map(region.size())
    _, slot_bytes = GEOMETRY.unpack_from(memory, GEOMETRY_AT)
    return _header(memory, slot_start(slot, slot_bytes))


def _header(memory: mmap.mmap, start: int) -> Any:
    """Return (skeleton, tensor forms, indices of rank 0's tensors) of the slot that begins at `start`."""
    (length,) = LENGTH.unpack_from(memory, start)
    return marshal.loads(memory[start + LENGTH.size : start + LENGTH.size + length])
