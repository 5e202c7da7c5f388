"""The newest whole snapshot in the regions of a node."""

from collections.abc import Sequence

from tandem.checkpoint.node_memory import NodeMemory
from tandem.checkpoint.snapshot import Snapshot, read_slot, whole_slots


def newest_snapshot(regions: Sequence[NodeMemory]) -> Snapshot | None:
    """The newest snapshot that all ranks of the node have finished, or None."""
    slots = whole_slots(regions)
    return read_slot(regions, max(slots), slots[max(slots)].number) if slots else None
