"""Tar shards as a dataset, read block by block: on this machine in place, elsewhere through a block cache."""

import math
import os
import tempfile
import time
import weakref
import zlib
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import accumulate
from pathlib import Path
from resource import RLIMIT_NOFILE, getrlimit
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, get_worker_info

from tandem.data.block_cache import BlockCache, most_bytes
from tandem.data.block_fetcher import BlockFetcher, SharedStatus
from tandem.data.blocks import Recent
from tandem.data.host_generators import unobserved
from tandem.data.ranges import is_remote
from tandem.data.tar_index import BlockTable, StoredBlock, read_index, samples_of
from tandem.errors import ConfigError
from tandem.telemetry import metrics
from tandem.telemetry.metrics import Sample
from tandem.text import SAMPLE_NOTE, add_note
from tandem.timeouts import BLOCK_DEADLINE_SECONDS, BLOCK_USED_SECONDS

CACHE_BYTES = 20 * 10**9
"""The most that a cache takes by default."""
MOST_TABLES = 1024
"""Blocks whose lists of files stay in memory, about 30 kB for 100 samples."""
MOST_IN_MEMORY = 2**27
"""Bytes of blocks that the processes of a rank keep in memory, so that a sample takes no read of a file. They
hold the blocks that are read at a time, 64 lanes of 5, if those are small: 100 samples of 4 kB."""
OPEN_BLOCKS = 320
"""How many blocks a rank reads from at a time if `hold` was not called: 64 lanes of 5."""
OPEN_SHARDS = 16
"""Shards on this machine that stay open; `hold` raises it up to a quarter of what the process may open."""
KEY = "__key__"
"""The name of a sample's key in its dict, as in WebDataset."""

Decode = Callable[[dict[str, Any]], Any]
_open: "weakref.WeakSet[TarBlocks]" = weakref.WeakSet()
"""The datasets of this process that have started a fetching process."""
_longest_wait = math.inf


def limit_waits(hang_seconds: float | None) -> None:
    """Limit the wait for a block to half of `hang_seconds` (None: no limit).

    The error then names the block and its problem; a hang report could not.
    """
    global _longest_wait
    _longest_wait = math.inf if hang_seconds is None else hang_seconds / 2


def open_caches() -> "list[TarBlocks]":
    """Return the datasets of this process that have started a fetching process."""
    return list(_open)


class _OpenFile:
    """A file that is closed as soon as nothing refers to it."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    def __del__(self) -> None:
        os.close(self.descriptor)


class _Reading:
    """A block that is read from.

    `table`: the files of its samples. `used`: when the time of use of its file was set. `data`: the block
    itself, while it is in memory. `left`: the number of samples that were not read yet.
    """

    __slots__ = ("data", "is_cached", "left", "path", "table", "used")

    def __init__(self, path: str, is_cached: bool) -> None:
        self.path = path
        self.is_cached = is_cached
        self.table = BlockTable()
        self.used = -math.inf
        self.data: bytes | None = None
        self.left = 0


class _InMemory:
    """The blocks whose bytes are kept in memory, up to `limit` bytes, until each sample has been read once.

    It is not pickled.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._size = 0
        self._blocks: dict[int, _Reading] = {}

    def __reduce__(self) -> tuple[type["_InMemory"], tuple[int]]:
        return _InMemory, (self.limit,)

    def add(self, number: int, reading: _Reading, data: bytes) -> None:
        """Keep the bytes of a block, in place of those that have been there longest."""
        if number in self._blocks:
            self._remove(number)
        reading.data = data
        reading.left = len(reading.table)
        self._blocks[number] = reading
        self._size += len(data)
        while self._size > self.limit:
            self._remove(next(iter(self._blocks)))

    def has_read(self, number: int, samples: int) -> None:
        """Count samples that were read from a block in memory."""
        reading = self._blocks[number]
        reading.left -= samples
        if reading.left <= 0:
            self._remove(number)

    def _remove(self, number: int) -> None:
        reading = self._blocks.pop(number)
        assert reading.data is not None
        self._size -= len(reading.data)
        reading.data = None


class TarBlocks(Dataset[Any]):
    """The samples of the tar shards in an index, in its order.

    A sample is what `decode` returns for a dict of the key (`__key__`) and {extension: bytes}; without
    `decode`, that dict.
    """

    def __init__(
        self,
        blocks: Sequence[StoredBlock],
        decode: Decode | None,
        cache_dir: Path,
        cache_bytes: int | None,
        deadline: float,
    ) -> None:
        self.blocks = blocks
        self.decode = decode
        self.cache_dir = cache_dir
        self._has_limit = cache_bytes is not None
        self.cache_bytes = most_bytes(cache_dir, CACHE_BYTES) if cache_bytes is None else cache_bytes
        self.deadline = deadline
        self._ends = list(accumulate(block.samples for block in blocks))
        self._open_blocks = OPEN_BLOCKS
        self._next: dict[int, None] = {}
        """The blocks that were announced last, in order."""
        self._reading = Recent(MOST_TABLES)
        self._in_memory = _InMemory(MOST_IN_MEMORY)
        self._shards = Recent(OPEN_SHARDS)
        self._fetcher: BlockFetcher | None = None

    def block_sizes(self) -> list[int]:
        """Return the number of samples of each block, in order."""
        return [block.samples for block in self.blocks]

    def will_need(self, blocks: Sequence[int]) -> None:
        """Read these blocks ahead, in this order, after those of the last call.

        Raises the error that has ended the fetching process, if there is one.
        """
        remote = [number for number in dict.fromkeys(blocks) if is_remote(self.blocks[number].address)]
        for number in remote:
            self._next.pop(number, None)
            self._next[number] = None
        # Those announced long ago have been read. Of what the cache cannot hold, the oldest goes first.
        size = sum(self.blocks[number].length for number in self._next)
        most = 2 * self._open_blocks + len(remote)
        while len(self._next) > most or (size > self.cache_bytes * 3 // 4 and len(self._next) > len(remote)):
            number = next(iter(self._next))
            size -= self.blocks[number].length
            del self._next[number]
        if self._next:
            self._started().read_next(tuple(self._next), self.blocks)

    def hold(self, blocks: int, processes: int) -> None:
        """Prepare for reads from `blocks` blocks at a time. Raises ConfigError if the cache is too small."""
        self._open_blocks = blocks
        self._reading.capacity = max(MOST_TABLES, 2 * blocks)
        self._in_memory.limit = MOST_IN_MEMORY // processes
        self._shards.capacity = max(OPEN_SHARDS, min(blocks, getrlimit(RLIMIT_NOFILE)[0] // 4))
        lengths = sorted((block.length for block in self.blocks if is_remote(block.address)), reverse=True)
        self.require(sum(lengths[:blocks]), f"because a rank reads from {blocks} blocks at a time")

    def require(self, needed: int, why: str) -> None:
        """Raise ConfigError if the cache may take fewer than `needed` bytes."""
        if needed <= self.cache_bytes:
            return
        if self._has_limit:
            raise ConfigError(
                f"tar_blocks(): cache_bytes: invalid value {self.cache_bytes:,}; expected at least "
                f"{needed:,}, {why}"
            )
        raise ConfigError(
            f"tar_blocks(): the cache in {self.cache_dir} may take three quarters of what is free there, "
            f"{self.cache_bytes:,} bytes; expected at least {needed:,}, {why}; use another cache_dir"
        )

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> Any:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int] | Tensor) -> list[Any]:
        chosen: list[int] = torch.as_tensor(indices).tolist()
        of_block: dict[int, list[tuple[int, int]]] = {}
        for position, index in enumerate(chosen):
            place = index + len(self) if index < 0 else index
            if not 0 <= place < len(self):
                raise IndexError(f"no sample {index}; there are {len(self)}")
            number = bisect_right(self._ends, place)
            first = self._ends[number] - self.blocks[number].samples
            of_block.setdefault(number, []).append((position, place - first))
        found: list[Any] = [None] * len(chosen)
        for number, wanted in of_block.items():
            samples = self._read(number, [sample for _, sample in wanted])
            for (position, _), sample in zip(wanted, samples, strict=True):
                found[position] = sample
        # In the order of the batch, because `decode` may draw random numbers.
        return found if self.decode is None else [_decoded(self.decode, sample) for sample in found]

    def __getstate__(self) -> Mapping[str, Any]:
        # Another process starts its own.
        return {**self.__dict__, "_fetcher": None, "_next": {}}

    def status(self) -> SharedStatus | None:
        """Return the counters of the fetching process; None if there is none yet."""
        return None if self._fetcher is None else self._fetcher.status

    def cached_bytes(self) -> int:
        """Return the bytes in the cache's folder, of all processes of the node; 0 if it is not in use."""
        return 0 if self._fetcher is None else self._fetcher.cache.used()

    def close(self) -> None:
        """End the fetching process."""
        if self._fetcher is not None:
            self._fetcher.close()
            self._fetcher = None

    def _started(self) -> BlockFetcher:
        if self._fetcher is None:
            cache = BlockCache(self.cache_dir, self.cache_bytes)
            self._fetcher = BlockFetcher(cache, min(self.deadline, _longest_wait))
            _open.add(self)
        return self._fetcher

    def _read(self, number: int, samples: Sequence[int]) -> list[dict[str, Any]]:
        """Return the samples with these numbers in a block, not decoded."""
        reading = self._reading.get(number, partial(self._checked, number))
        table = reading.table
        if reading.data is None:
            file, offset = self._opened(self.blocks[number], reading)
            found = [_sample_of_file(file.descriptor, offset, table, each) for each in samples]
        else:
            found = [_sample(reading.data, 0, table, each) for each in samples]
            self._in_memory.has_read(number, len(samples))
        if reading.is_cached and self._fetcher is not None:
            self._fetcher.status.needed(sum(map(table.size, samples)), _reader())
        return found

    def _checked(self, number: int) -> _Reading:
        """Begin to read from a block: check its CRC-32, and list its samples' files."""
        block = self.blocks[number]
        is_cached = is_remote(block.address)
        path = str(self._started().cache.path(block)) if is_cached else block.address
        reading = _Reading(path, is_cached)
        file, offset = self._opened(block, reading)
        raw = os.pread(file.descriptor, block.length, offset)
        if len(raw) != block.length or zlib.crc32(raw) != block.crc32:
            raise ConfigError(f"{block}: {self._what_differs(block)}")
        try:
            reading.table = unobserved(lambda: samples_of(raw))
        except ValueError as error:
            raise ConfigError(f"{block}: {error}; run `tandem index` again") from error
        if len(reading.table) != block.samples:
            raise ConfigError(
                f"{block}: expected {block.samples} samples, got {len(reading.table)}; "
                "run `tandem index` again"
            )
        self._in_memory.add(number, reading, raw)
        return reading

    def _what_differs(self, block: StoredBlock) -> str:
        """Return what is wrong with a block, and remove it from the cache."""
        if not is_remote(block.address):
            self._shards.forget(block.address)
            return "the file has changed since it was indexed; run `tandem index` again"
        cache = self._started().cache
        cache.discard(cache.path(block))
        return f"its file in the cache {self.cache_dir} was damaged, and is removed; start again"

    def _opened(self, block: StoredBlock, reading: _Reading) -> tuple[_OpenFile, int]:
        """Open the file with a block, and return it with the first byte of the block in it."""
        if reading.is_cached:
            return self._opened_in_cache(block, reading), 0
        path = reading.path
        try:
            return self._shards.get(path, partial(_open_file, path)), block.offset
        except FileNotFoundError:
            raise ConfigError(f"cannot read {path}: there is no such file") from None
        except OSError as error:
            raise ConfigError(f"cannot read {path}: {error.strerror or error}") from error

    def _opened_in_cache(self, block: StoredBlock, reading: _Reading) -> _OpenFile:
        fetcher = self._started()
        fetcher.status.raise_failure()
        while True:
            try:
                # Not kept open: a block that is evicted meanwhile would still take its space on the disk.
                file = _open_file(reading.path)
                break
            except FileNotFoundError:  # not there yet, or evicted
                fetcher.wait_for(block, _reader())
            except OSError as error:
                raise ConfigError(f"cannot read {reading.path}: {error.strerror or error}") from error
        # The least recently used is evicted first.
        if (now := time.monotonic()) - reading.used >= BLOCK_USED_SECONDS:
            reading.used = now
            os.utime(file.descriptor)
        return file


def _open_file(path: str | Path) -> _OpenFile:
    return _OpenFile(os.open(path, os.O_RDONLY | os.O_CLOEXEC))


def _decoded(decode: Decode, sample: dict[str, Any]) -> Any:
    key = sample[KEY]  # `decode` may change the dict
    try:
        return decode(sample)
    except Exception as error:
        add_note(error, f"{SAMPLE_NOTE} {key!r}")
        raise


def _reader() -> int:
    """Return this process's number among those that read for a rank: 0, or that of a loader process."""
    worker = get_worker_info()
    return 0 if worker is None else worker.id + 1


def _sample_of_file(descriptor: int, offset: int, table: BlockTable, number: int) -> dict[str, Any]:
    """Return a sample of the block at `offset` of a file, in one read: its files are next to each other."""
    files = table.files(number)
    start = table.offsets[files.start]
    end = table.offsets[files.stop - 1] + table.sizes[files.stop - 1]
    return _sample(os.pread(descriptor, end - start, offset + start), start, table, number)


def _sample(raw: bytes, start: int, table: BlockTable, number: int) -> dict[str, Any]:
    """Return the files of a sample by extension, from the bytes of its block from `start` on."""
    found: dict[str, Any] = {KEY: table.keys[number]}
    for file in table.files(number):
        begin = table.offsets[file] - start
        found[table.extensions[file]] = raw[begin : begin + table.sizes[file]]
    return found


def tar_blocks(
    index: str | os.PathLike[str],
    decode: Decode | None = None,
    *,
    cache_dir: str | os.PathLike[str] | None = None,
    cache_bytes: int | None = None,
    deadline: float = BLOCK_DEADLINE_SECONDS,
) -> TarBlocks:
    """Return the tar shards of an index as a dataset; `tandem index` writes the index.

    Args: decode: makes a sample of a dict of the key (`__key__`) and {extension: bytes}. cache_dir: the
    folder for blocks that are not on this machine, shared by all ranks of a node; by default in the folder
    for temporary files. cache_bytes: the most that it takes; None: 20 GB, or three quarters of the free space
    if that is less. deadline: seconds of failed attempts to read a block until the run ends.

    Raises ConfigError for an index that is missing or damaged, and for a cache that is too small.
    """
    blocks = read_index(Path(index))
    if deadline <= 0:
        raise ConfigError(f"tar_blocks(): deadline: invalid value {deadline}; expected seconds > 0")
    folder = Path(cache_dir) if cache_dir is not None else default_folder()
    found = TarBlocks(blocks, decode, folder.absolute(), cache_bytes, deadline)
    largest = max((block.length for block in blocks if is_remote(block.address)), default=0)
    found.require(2 * largest, "twice the largest block")
    return found


def default_folder() -> Path:
    """Return the folder for blocks if none is given: one for each user."""
    return Path(tempfile.gettempdir()) / f"tandem-blocks-{os.getuid()}"


class BlockMetrics:
    """The metrics of this rank's block caches: what has changed since the last log line.

    Reads the counters of all fetching processes that this rank has started.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._before: weakref.WeakKeyDictionary[SharedStatus, dict[str, float]] = weakref.WeakKeyDictionary()

    def __call__(self) -> list[Sample]:
        """Return the samples since the last call; empty if this rank reads from no cache."""
        new: dict[str, float] = {}
        ahead = 0
        sizes: dict[Path, int] = {}
        limits: dict[Path, int] = {}
        for dataset in open_caches():
            if (status := dataset.status()) is not None:
                for name, grown in self._grown(status).items():
                    new[name] = new.get(name, 0) + grown
                ahead += status.get("ahead")
                # Datasets may share a folder. Its size counts once, and the limit of the last one that makes
                # room.
                sizes[dataset.cache_dir] = dataset.cached_bytes()
                limits[dataset.cache_dir] = max(dataset.cache_bytes, limits.get(dataset.cache_dir, 0))
        if not sizes:
            return []
        return [
            *(metrics.BLOCK_REQUESTS.inc(new[name], outcome=name) for name in metrics.REQUEST_OUTCOMES),
            metrics.BLOCK_BYTES.inc(new["bytes"]),
            metrics.BLOCK_NEEDED_BYTES.inc(new["needed"]),
            metrics.BLOCK_CACHE_HITS.inc(new["hits"]),
            metrics.BLOCK_WAIT_SECONDS.inc(new["waited"]),
            metrics.BLOCKS_AHEAD.set(ahead, rank=self._rank),
            metrics.BLOCK_CACHE_BYTES.set(sum(sizes.values())),
            metrics.BLOCK_CACHE_LIMIT_BYTES.set(sum(limits.values())),
        ]

    def _grown(self, status: SharedStatus) -> dict[str, float]:
        """Return by how much the counters of a process have grown since the last call."""
        now: dict[str, float] = {
            "waited": status.waited_seconds(),
            "needed": status.needed_bytes(),
            **{name: status.get(name) for name in (*metrics.REQUEST_OUTCOMES, "bytes", "hits")},
        }
        before = self._before.get(status, {})
        self._before[status] = now
        return {name: value - before.get(name, 0) for name, value in now.items()}
