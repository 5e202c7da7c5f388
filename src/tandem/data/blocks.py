"""Data in blocks: a class that reads samples of many stored blocks, such as shards, row groups or ranges.

A block is a range of samples that is cheap to read together. The order of an epoch keeps a block's samples
close together (`block_order.py`), so a rank reads few blocks at a time.

A source may also have `hold(blocks, processes)`. It is called once, before training, with the number of
blocks that a rank reads at a time, and the number of processes that read them. It may reserve memory or disk,
and raises ConfigError if there is too little.
"""

import os
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from tandem.errors import ConfigError


@runtime_checkable
class BlockSource(Protocol):
    """A map-style dataset whose samples are stored in blocks; indices count over all blocks, end to end."""

    def block_sizes(self) -> Sequence[int]:
        """Return the number of samples of each block, in order; every size is at least 1."""
        ...

    def __len__(self) -> int:
        """Return the sum of `block_sizes()`."""
        ...

    def __getitems__(self, indices: list[int]) -> list[Any]:
        """Return the samples with these indices, in this order."""
        ...

    def will_need(self, blocks: Sequence[int]) -> None:
        """Expect reads from these blocks soon, in this order; may start to fetch them, or do nothing."""
        ...


BLOCK_SAMPLES = 1000
"""Samples of a block, for data in which any range can be read."""
ADVISED_BYTES = 2**28
"""Limit for a request to the kernel, so that the request itself is fast."""


class Recent:
    """The `capacity` values that were used last, created on first use. They are not pickled."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._values: OrderedDict[Hashable, Any] = OrderedDict()

    def __reduce__(self) -> tuple[type["Recent"], tuple[int]]:
        return Recent, (self.capacity,)

    def get(self, key: Hashable, create: Callable[[], Any]) -> Any:
        """Return the value of `key`."""
        if key in self._values:
            self._values.move_to_end(key)
            return self._values[key]
        while len(self._values) >= self.capacity:
            self._values.popitem(last=False)
        value = self._values[key] = create()
        return value

    def forget(self, key: Hashable) -> None:
        """Remove the value of `key`, if it is there."""
        self._values.pop(key, None)


def patterns_of(reader: str, files: str | os.PathLike[str] | Sequence[str | os.PathLike[str]]) -> list[str]:
    """Return paths or patterns as a list. Raises ConfigError, which begins with `reader`, for none."""
    patterns = [files] if isinstance(files, str | os.PathLike) else files
    if not patterns:
        raise ConfigError(f"{reader}: files: got an empty list; expected a path or pattern, or several")
    return [os.fspath(pattern) for pattern in patterns]


def range_sizes(samples: int, block_samples: int) -> list[int]:
    """Return the sizes of blocks of `block_samples`; the last one has the rest."""
    full, rest = divmod(samples, block_samples)
    return [block_samples] * full + ([rest] if rest else [])


def read_ahead(parts: Iterable[tuple[Path, int, int]]) -> None:
    """Ask the kernel to read (file, first byte, bytes) into its cache, up to ADVISED_BYTES; do not wait."""
    left = ADVISED_BYTES
    for path, start, size in parts:
        if left <= 0:
            return
        left -= size
        # A file that cannot be read is reported when its samples are read.
        with suppress(OSError), path.open("rb") as file:
            os.posix_fadvise(file.fileno(), start, size, os.POSIX_FADV_WILLNEED)
