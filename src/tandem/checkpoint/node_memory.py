"""Node memory that outlives ranks: anonymous, owned by the agent, shared with each rank that it starts.

It has no name in any file system. Nothing is left behind when the agent dies, and the size of /dev/shm (64 MB
in a container by default) does not limit it.
"""

import ctypes
import errno
import mmap
import os
from multiprocessing import reduction
from typing import Any

POPULATE_WRITE = 23
"""MADV_POPULATE_WRITE, which exists since Linux 5.14."""
_libc = ctypes.CDLL(None, use_errno=True)


class NodeMemory:
    """One memory region; pickling it for a new process passes the file descriptor."""

    def __init__(self, descriptor: int | None = None) -> None:
        self._descriptor = os.memfd_create("tandem") if descriptor is None else descriptor

    def __reduce__(self) -> tuple[Any, ...]:
        return _from_parent, (reduction.DupFd(self._descriptor),)

    def size(self) -> int:
        return os.fstat(self._descriptor).st_size

    def present(self) -> int:
        """Return how many bytes occupy memory; a region that has only been extended occupies none."""
        # Linux counts st_blocks in units of 512 bytes, whatever the block size is.
        return os.fstat(self._descriptor).st_blocks * 512

    def map(self, size: int) -> mmap.mmap:
        """Map the first `size` bytes, extending the region if necessary, and populate the pages.

        Writes then cause no page faults. Raises OSError if the memory is not available.
        """
        # A region never shrinks: access to a mapping beyond the end of its file is a SIGBUS.
        if self.size() < size:
            os.ftruncate(self._descriptor, size)
        memory = mmap.mmap(self._descriptor, size, flags=mmap.MAP_SHARED)
        _populate(memory)
        return memory


def _from_parent(duplicate: Any) -> NodeMemory:
    return NodeMemory(duplicate.detach())


def _populate(memory: mmap.mmap) -> None:
    """Populate all pages without blocking other threads.

    MAP_POPULATE would hold Python's lock for up to a second per GiB and block the heartbeat thread; ctypes
    releases the lock. An older kernel does not have this call (EINVAL), so the first write to each page
    faults there.
    """
    buffer = (ctypes.c_char * len(memory)).from_buffer(memory)
    address = ctypes.c_void_p(ctypes.addressof(buffer))
    size = ctypes.c_size_t(len(memory))
    # EFAULT means that an access would cause a SIGBUS (see madvise(2)).
    if _libc.madvise(address, size, POPULATE_WRITE) and ctypes.get_errno() in (errno.ENOMEM, errno.EFAULT):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
