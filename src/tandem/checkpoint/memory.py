"""Memory of a node that outlives its ranks: anonymous, owned by the agent, handed to every rank it starts.

It has no name in any file system: nothing is left behind when the agent dies, and the size of /dev/shm,
64 MB in a container by default, is no limit.
"""

import ctypes
import errno
import mmap
import os
from multiprocessing import reduction
from typing import Any

POPULATE_WRITE = 23
"""MADV_POPULATE_WRITE of Linux 5.14."""
_libc = ctypes.CDLL(None, use_errno=True)


class NodeMemory:
    """One region; pickling it for a new process hands over the file descriptor."""

    def __init__(self, descriptor: int | None = None) -> None:
        self._descriptor = os.memfd_create("tandem") if descriptor is None else descriptor

    def __reduce__(self) -> tuple[Any, ...]:
        return _from_parent, (reduction.DupFd(self._descriptor),)

    def size(self) -> int:
        """Bytes."""
        return os.fstat(self._descriptor).st_size

    def present(self) -> int:
        """Bytes of it that take up memory; a region that has only grown so far takes up none."""
        return os.fstat(self._descriptor).st_blocks * 512

    def map(self, size: int) -> mmap.mmap:
        """The first `size` bytes, grown to that where smaller, and present: writing takes no page fault.

        Raises OSError when the memory is not there.
        """
        if self.size() < size:
            os.ftruncate(self._descriptor, size)
        memory = mmap.mmap(self._descriptor, size, flags=mmap.MAP_SHARED)
        _populate(memory)
        return memory


def _from_parent(duplicate: Any) -> NodeMemory:
    return NodeMemory(duplicate.detach())


def _populate(memory: mmap.mmap) -> None:
    """Have all of it present; the thread that says where this rank is goes on meanwhile.

    MAP_POPULATE would hold Python's lock for it, up to a second for each GiB, and ctypes gives it up. An
    older kernel does not know the call: there the first write of each page takes its fault.
    """
    place = (ctypes.c_char * len(memory)).from_buffer(memory)
    address, size = ctypes.c_void_p(ctypes.addressof(place)), ctypes.c_size_t(len(memory))
    if _libc.madvise(address, size, POPULATE_WRITE) and ctypes.get_errno() in (errno.ENOMEM, errno.EFAULT):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
