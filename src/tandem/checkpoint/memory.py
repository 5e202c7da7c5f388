"""Memory of a node that outlives its ranks: anonymous, owned by the agent, handed to every rank it starts.

It has no name in any file system: nothing is left behind when the agent dies, and the size of /dev/shm,
64 MB in a container by default, is no limit.
"""

import mmap
import os
from multiprocessing import reduction
from typing import Any


class NodeMemory:
    """One region; pickling it for a new process hands over the file descriptor."""

    def __init__(self, descriptor: int | None = None) -> None:
        self._descriptor = os.memfd_create("tandem") if descriptor is None else descriptor

    def __reduce__(self) -> tuple[Any, ...]:
        return _from_parent, (reduction.DupFd(self._descriptor),)

    def size(self) -> int:
        """Bytes."""
        return os.fstat(self._descriptor).st_size

    def map(self, size: int) -> mmap.mmap:
        """The first `size` bytes, grown to that where smaller, and present: writing takes no page fault.

        Raises OSError when the memory is not there.
        """
        if self.size() < size:
            os.ftruncate(self._descriptor, size)
        return mmap.mmap(self._descriptor, size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)


def _from_parent(duplicate: Any) -> NodeMemory:
    return NodeMemory(duplicate.detach())
