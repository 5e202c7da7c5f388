"""Keep a copy of each rank's shards on a neighbor: find the newest state, send it, and make the next copies.

See docs/architecture.md#a-copy-on-the-next-node.
"""

import logging
import os
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from tandem.checkpoint.node_memory import NodeMemory
from tandem.checkpoint.slot_copies import HEAD, IncomingSlot, SlotHead, bytes_of, head_of, held_slots
from tandem.checkpoint.snapshot import MOST_SLOTS, Snapshots
from tandem.distributed.group import BROADCAST_CHUNK_BYTES, ProcessGroup
from tandem.distributed.neighbor_link import Address, CopyReceiver, CopySender, OutgoingCopy, own_address
from tandem.distributed.position import Connection, Grant
from tandem.timeouts import COPY_STUCK_SECONDS

log = logging.getLogger("tandem.run")

OWN, COPY = range(2)


class Piece(NamedTuple):
    """A whole slot in a rank's node memory: in its own region, or in the one for its neighbor's copies."""

    region: int
    slot: int
    rank: int
    step: int
    generation: int

    @property
    def state(self) -> tuple[int, int]:
        """The identity of the state that it belongs to."""
        return self.step, self.generation


def pieces_here(world: ProcessGroup, grant: Grant) -> list[Piece]:
    """Return the pieces in this rank's regions that belong to a state of this many ranks."""
    local_rank = world.position.local_rank
    kinds = {OWN: grant.own_memories(local_rank), COPY: grant.copy_memories(local_rank)}
    return [
        Piece(kind, held.number, held.rank, held.step, held.generation)
        for kind, regions in kinds.items()
        for region in regions
        for held in held_slots(region)
        if held.ranks == world.size
    ]


class SlotsToKeep(NamedTuple):
    """The slots to keep until newer ones are complete, in a rank's own region and in the one for copies."""

    own: int | None = None
    copy: int | None = None


class ShardMap:
    """Each rank's pieces and their slots, by rank; the same on all ranks.

    `nodes`: the node of each rank.
    """

    def __init__(self, there: Sequence[Sequence[Sequence[int]]], nodes: Sequence[int]) -> None:
        self._there = [[Piece(*each) for each in pieces] for pieces in there]
        self._nodes = nodes

    def newest(self) -> tuple[int, int] | None:
        """Return (step, 0) of the newest state that has each rank's shard on some node, or None."""
        whole = self._whole()
        return (max(whole)[0], 0) if whole else None

    def state_at(self, step: int) -> tuple[int, int]:
        """Return (step, generation) of the state that `newest` has found at `step`."""
        return max(state for state in self._whole() if state[0] == step)

    def _whole(self) -> set[tuple[int, int]]:
        states = {piece.state for pieces in self._there for piece in pieces}
        everyone = set(range(len(self._there)))
        return {state for state in states if {piece.rank for _, piece in self._of(state)} == everyone}

    def _of(self, state: tuple[int, int]) -> Iterator[tuple[int, Piece]]:
        """Yield (rank that has it, piece) of a state."""
        for holder, pieces in enumerate(self._there):
            yield from ((holder, piece) for piece in pieces if piece.state == state)

    def own_slot(self, rank: int, state: tuple[int, int]) -> int | None:
        """Return the slot of a rank's own region that has its shard, or None."""
        mine = (piece for piece in self._there[rank] if piece.state == state)
        return next((each.slot for each in mine if (each.region, each.rank) == (OWN, rank)), None)

    def missing(self, state: tuple[int, int]) -> list[tuple[int, int, Piece]]:
        """Return (source, destination, piece) for each rank that does not have its own shard of a state."""
        found = []
        for rank in range(len(self._there)):
            if self.own_slot(rank, state) is None:
                # Every rank makes the same choice, because all have the same map.
                holder, piece = min((at, piece) for at, piece in self._of(state) if piece.rank == rank)
                found.append((holder, rank, piece))
        return found

    def sources(self, state: tuple[int, int]) -> list[int]:
        """Return the nodes that send pieces of a state, in order."""
        return sorted({self._nodes[source] for source, _, _ in self.missing(state)})

    def held(self, rank: int, state: tuple[int, int]) -> SlotsToKeep:
        """Return the slots of the state that has the most copies on other nodes.

        `state` is the one that all ranks load, so all have it afterwards; an older one counts if all have it.
        """
        everywhere = set.intersection(
            *({piece.state for piece in pieces if (piece.region, piece.rank) == (OWN, at)}
              for at, pieces in enumerate(self._there))
        )  # fmt: skip
        older = {each for each in everywhere if each[0] < state[0]}
        safest = max(older | {state}, key=lambda each: (self._copies(each), each))
        copies = (piece.slot for piece in self._there[rank] if piece.state == safest and piece.region == COPY)
        return SlotsToKeep(self.own_slot(rank, safest), next(copies, None))

    def _copies(self, state: tuple[int, int]) -> int:
        return len({piece.rank for _, piece in self._of(state) if piece.region == COPY})


def listed_nodes(nodes: Sequence[int]) -> str:
    """Return the nodes as text."""
    return f"node{'s' if len(nodes) > 1 else ''} {', '.join(map(str, nodes))}"


def deliver(
    world: ProcessGroup, grant: Grant, where: ShardMap, state: tuple[int, int], kept: int | None
) -> int:
    """Send each rank its missing shard of a state; return the slot where this rank has its own.

    All ranks call this. `kept`: the slot of this rank's own region that must not be overwritten.
    """
    local_rank = world.position.local_rank
    regions = grant.private_memories(local_rank)  # in the order of OWN and COPY
    slot = where.own_slot(world.rank, state)
    missing = where.missing(state)
    # Ranks may have changed places, so a rank may receive its shard into the slot of one that it must send.
    gives = any(source == world.rank and piece.region == OWN for source, _, piece in missing)
    target = NodeMemory() if gives else regions[OWN]
    received = None
    # The order is the same on all ranks, so that no two wait for each other.
    for source, destination, piece in missing:
        if source == destination == world.rank:
            received = _copied(regions[piece.region], piece.slot, target, kept)
        elif world.rank == source:
            _send(world, regions[piece.region], piece.slot, destination)
        elif world.rank == destination:
            received = _receive(world, target, source, kept)
    if received is not None:
        slot = _copied(target, received, regions[OWN], kept) if gives else received
    assert slot is not None
    return slot


def _free_slot(kept: int | None) -> int:
    return next(slot for slot in range(MOST_SLOTS) if slot != kept)


def _copied(source: NodeMemory, slot: int, target: NodeMemory, kept: int | None) -> int:
    """Copy a slot to another region, and return its slot there."""
    head = head_of(source, slot)
    free = _free_slot(kept)
    incoming = IncomingSlot(target, free, head)
    incoming.contents[:] = bytes_of(source.map(source.size()), slot, head)
    incoming.finish()
    return free


def _send(world: ProcessGroup, region: NodeMemory, slot: int, destination: int) -> None:
    head = head_of(region, slot)
    contents = bytes_of(region.map(region.size()), slot, head)
    # Send it in pieces, because on GPUs each piece is first copied to the device.
    pieces = torch.split(_bytes_in(contents), BROADCAST_CHUNK_BYTES)
    for piece in (_bytes_in(bytearray(HEAD.pack(*head))), *pieces):
        dist.send(piece.to(world.device), dst=destination)


def _receive(world: ProcessGroup, region: NodeMemory, source: int, kept: int | None) -> int:
    raw = bytearray(HEAD.size)
    _receive_into(world, _bytes_in(raw), source)
    slot = _free_slot(kept)
    incoming = IncomingSlot(region, slot, SlotHead(*HEAD.unpack(raw)))
    for piece in torch.split(_bytes_in(incoming.contents), BROADCAST_CHUNK_BYTES):
        _receive_into(world, piece, source)
    incoming.finish()
    return slot


def _receive_into(world: ProcessGroup, target: Tensor, source: int) -> None:
    there = target.to(world.device)  # on CPUs, the same tensor
    dist.recv(there, src=source)
    if there is not target:
        target.copy_(there)


def _bytes_in(memory: bytearray | memoryview) -> Tensor:
    """Return the same memory as a uint8 tensor [N]."""
    return torch.frombuffer(memory, dtype=torch.uint8)


class NeighborCopies:
    """This rank's part of the ring: it sends its slots to the next node, and keeps the previous node's.

    `held`: the slot of this rank's own region whose state has the most copies so far.
    """

    def __init__(self, receiver: CopyReceiver, sender: CopySender, held: int | None) -> None:
        self._receiver = receiver
        self._sender = sender
        self._held: tuple[int, ...] = () if held is None else (held,)

    @classmethod
    def open(
        cls, world: ProcessGroup, connection: Connection, grant: Grant, held: SlotsToKeep
    ) -> "NeighborCopies | None":
        """Connect the ranks; None, with a line on rank 0, if one of them cannot. All ranks call this."""
        position = world.position
        receiver, problem = _open_receiver(world, connection, grant, held.copy)
        address = Address("", 0, "") if receiver is None else receiver.address
        told = world.gather_json([position.node_rank, position.local_rank, *address])
        target = neighbor_of(world.rank, [(node, local) for node, local, *_ in told])
        sender = None
        if target is None:
            problem = "the nodes have different numbers of ranks"
        elif told[target][3]:
            sender = CopySender(Address(*told[target][2:]), world.device.type, position.local_world_size)
            try:
                sender.open()
            except OSError as error:
                problem = f"node {position.node_rank} cannot reach node {told[target][0]}: {error}"
        problems = [each for each in world.gather_json(problem) if each]
        # Either all ranks connect or none: if one rank's copy is missing, the others' copies are useless.
        if receiver is not None and sender is not None and not problems:
            return cls(receiver, sender, held.own)
        for end in (receiver, sender):
            if end is not None:
                end.close()
        if world.is_first:
            log.warning("no node keeps copies of its neighbor's shards: %s", problems[0])
        return None

    @property
    def is_busy(self) -> bool:
        """Whether this rank's last copy is not yet complete on the next node."""
        return self._sender.is_busy

    @property
    def held(self) -> frozenset[int]:
        """The slot of this rank's last copy, or the one with which it began."""
        return frozenset(self._held)

    def begin(self, snapshots: Snapshots) -> None:
        """Prepare for a snapshot that is to be copied, now that all ranks have completed the last copy."""
        snapshots.held = self.held

    def send(self, snapshots: Snapshots) -> None:
        """Begin to copy the slot written last. Until the next `begin`, it and the one before are held."""
        # With two slots, both would be held, and the next snapshot would have no place.
        if snapshots.slots < MOST_SLOTS:
            self._sender.veto()
            return
        slot, region = snapshots.slot, snapshots.region
        head = head_of(region, slot)
        self._held = (slot,)
        snapshots.held |= self.held
        self._sender.send(
            OutgoingCopy(head, bytes_of(snapshots.memory, slot, head), lambda: head_of(region, slot) == head)
        )

    def release_if_stuck(self, snapshots: Snapshots) -> None:
        """Release the held slot once this rank's copy has been complete for COPY_STUCK_SECONDS.

        Another rank is then stuck.
        """
        if time.monotonic() - self._sender.busy_until > COPY_STUCK_SECONDS:
            self._held = ()
            snapshots.held = self.held

    def veto(self) -> None:
        """Keep all ranks from beginning a copy."""
        self._sender.veto()

    def close(self) -> None:
        """End both threads."""
        self._sender.close()
        self._receiver.close()


def _open_receiver(
    world: ProcessGroup, connection: Connection, grant: Grant, kept: int | None
) -> tuple[CopyReceiver | None, str]:
    """Return (the receiver of copies on this rank or None, why there is none)."""
    # Copies use the interface that the user has chosen for gradients.
    interface = os.environ.get("GLOO_SOCKET_IFNAME") or os.environ.get("NCCL_SOCKET_IFNAME") or ""
    store = connection.store[0] if connection.store else None
    (region,) = grant.copy_memories(world.position.local_rank)
    try:
        return CopyReceiver(region, kept, own_address(interface, store)), ""
    except OSError as error:
        return None, f"node {world.position.node_rank} cannot receive copies: {error}"


def neighbor_of(rank: int, places: Sequence[tuple[int, int]]) -> int | None:
    """Return the rank with the same local rank on the next node; None if a node has other local ranks.

    `places`: (node, local rank) of each rank.
    """
    nodes = sorted({node for node, _ in places})
    locals_of = [sorted(local for at, local in places if at == node) for node in nodes]
    if any(each != locals_of[0] for each in locals_of):
        return None
    node, local = places[rank]
    return places.index((nodes[(nodes.index(node) + 1) % len(nodes)], local))
