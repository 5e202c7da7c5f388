"""The process that fetches blocks for one rank, and the rank's end of it.

`tar_blocks` starts it in each rank that reads from object stores. The rank and its loader processes write
lines to its standard input: the blocks that are read next, and the blocks that a reader waits for. Readers
find the blocks as files of the cache. Its counters and its last error are in shared memory, and its standard
output closes when it ends. The process imports no torch and ends with its rank.
"""

import json
import mmap
import os
import select
import struct
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Literal
from zlib import crc32

from tandem.data.block_cache import BlockCache, name_of
from tandem.data.ranges import GAVE_UP, RETRIED, RangeReader
from tandem.data.tar_index import StoredBlock
from tandem.errors import (
    FAILED,
    MISCONFIGURED,
    PEER_LOST,
    ConfigError,
    DataUnavailableError,
    TandemError,
    text_of,
)
from tandem.process import name_process
from tandem.signals import ignore_stop_signals
from tandem.timeouts import (
    BLOCK_AGAIN_SECONDS,
    BLOCK_PARENT_SECONDS,
    BLOCK_POLL_SECONDS,
    BLOCK_ROOM_SECONDS,
)

THREADS = 32
"""Concurrent requests. With 30 ms per request and blocks of 1 MB, they fetch 1 GB/s."""
WRONG_ANSWERS = 3
"""Total number of requests for a block whose CRC-32 is wrong."""
PIPE_BUF = select.PIPE_BUF
"""Writes up to this size to a pipe are never mixed with those of other processes."""

PACKAGES = Path(__file__).resolve().parents[2]
# The current folder is not searched, because a user's file there may have the name of a Python module.
_PROGRAM = """
import sys
packages, *arguments = sys.argv[1:]
if packages not in sys.path:
    sys.path.insert(0, packages)
from tandem.data.block_fetcher import main
main(arguments)
"""

Order = Literal["next", "more", "need"]
"""The request in a line: replace the list of blocks to read next, add to it, or fetch blocks that a reader
waits for."""


# State that the processes of a rank share.

OK = "ok"
DAMAGED = "damaged"
OUTCOMES = (OK, RETRIED, GAVE_UP, DAMAGED)
"""The outcomes of a request: it succeeded; it was repeated; it failed for good; the CRC-32 was wrong."""
_COUNTERS = (*OUTCOMES, "bytes", "hits", "ahead")
READERS = 64
"""Each reader has two counters, because two processes cannot safely add to the same one."""
_NUMBER = struct.Struct("q")
_WAITED = len(_COUNTERS)
_NEEDED = _WAITED + READERS
_ERROR = struct.Struct("HH")
_ERROR_START = (_NEEDED + READERS) * _NUMBER.size
_SIZE = 2 * mmap.PAGESIZE


class SharedStatus:
    """Counters of a fetching process, and the error that ended its work, in anonymous memory.

    Counters: OUTCOMES count requests, and `bytes` arrived in complete answers. `hits` are blocks that were in
    the cache when first listed, and `ahead` are those that are listed and in the cache now.
    """

    def __init__(self, descriptor: int | None = None) -> None:
        self.descriptor = os.memfd_create("tandem-blocks") if descriptor is None else descriptor
        os.ftruncate(self.descriptor, _SIZE)
        self._memory = mmap.mmap(self.descriptor, _SIZE)

    def get(self, name: str) -> int:
        return self._get(_COUNTERS.index(name))

    def set(self, name: str, value: int) -> None:
        self._set(_COUNTERS.index(name), value)

    def add(self, name: str, value: int = 1) -> None:
        """Increase a counter of the fetching process, whose threads take turns."""
        self.set(name, self.get(name) + value)

    def waited(self, seconds: float, reader: int) -> None:
        """Add to the time that the reader with this number has waited for blocks."""
        place = _WAITED + reader % READERS
        self._set(place, self._get(place) + int(seconds * 1e9))

    def waited_seconds(self) -> float:
        """Return the time that all readers have waited."""
        return sum(map(self._get, range(_WAITED, _NEEDED))) / 1e9

    def needed(self, size: int, reader: int) -> None:
        """Add to the bytes of samples that the reader with this number has read."""
        place = _NEEDED + reader % READERS
        self._set(place, self._get(place) + size)

    def needed_bytes(self) -> int:
        """Return the bytes of samples that all readers have read."""
        return sum(map(self._get, range(_NEEDED, _NEEDED + READERS)))

    def fail(self, code: int, text: str) -> None:
        """Store the error that ended the work; the first one counts."""
        if self._memory[_ERROR_START + 1] or self._memory[_ERROR_START]:
            return
        # Write the marker last, because readers may look at any time.
        raw = text.encode(errors="replace")[: mmap.PAGESIZE]
        start = _ERROR_START + _ERROR.size
        self._memory[start : start + len(raw)] = raw
        self._memory[_ERROR_START:start] = _ERROR.pack(code, len(raw))

    def raise_failure(self) -> None:
        """Raise the error that ended the work, if any."""
        if not self._memory[_ERROR_START] and not self._memory[_ERROR_START + 1]:
            return
        code, length = _ERROR.unpack_from(self._memory, _ERROR_START)
        start = _ERROR_START + _ERROR.size
        text = self._memory[start : start + length].decode(errors="replace")
        raise {PEER_LOST: DataUnavailableError, MISCONFIGURED: ConfigError}.get(code, TandemError)(text)

    def _get(self, place: int) -> int:
        return int(_NUMBER.unpack_from(self._memory, place * _NUMBER.size)[0])

    def _set(self, place: int, value: int) -> None:
        _NUMBER.pack_into(self._memory, place * _NUMBER.size, value)


# The rank's side.


class BlockFetcher:
    """A fetching process for `cache`, started by this process; its forks may use it, too.

    A block that cannot be read for `deadline` seconds is an error.
    """

    def __init__(self, cache: BlockCache, deadline: float) -> None:
        self.cache = cache
        self._deadline = deadline
        self.status = SharedStatus()
        self._listed: tuple[int, ...] = ()
        command = [sys.executable, "-P", "-c", _PROGRAM]
        given = (PACKAGES, cache.folder, cache.limit, deadline, self.status.descriptor, os.getpid())
        self._process = subprocess.Popen(
            [*command, *map(str, given)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=[self.status.descriptor],
            bufsize=0,
        )

    @property
    def pid(self) -> int:
        """The ID of the fetching process."""
        return self._process.pid

    def read_next(self, blocks: tuple[int, ...], stored: Sequence[StoredBlock]) -> None:
        """Set the blocks that are read next, by their numbers in `stored`; replaces the last list."""
        self.status.raise_failure()
        if blocks != self._listed:
            self._listed = blocks
            self._send("next", (stored[number] for number in blocks))

    def wait_for(self, block: StoredBlock, reader: int = 0) -> Path:
        """Return the file of a block once it is in the cache.

        `reader`: a number of this process among those that read from the cache. Raises the errors of
        `RangeReader.read`, and DataUnavailableError if the fetching process is gone or does not answer.
        """
        self.status.raise_failure()
        path = self.cache.path(block)
        if not path.exists():
            began = time.monotonic()
            try:
                self._wait(block, path, began)
            finally:
                self.status.waited(time.monotonic() - began, reader)
        return path

    def close(self) -> None:
        """End the process."""
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()
        self._process.kill()
        self._process.wait()

    def _wait(self, block: StoredBlock, path: Path, began: float) -> None:
        asked = -BLOCK_AGAIN_SECONDS
        pause = 0.0005
        while not path.exists():
            self.status.raise_failure()
            waited = time.monotonic() - began
            if waited - asked >= BLOCK_AGAIN_SECONDS:
                asked = waited
                self._send("need", [block])
                if self._has_ended():
                    self.status.raise_failure()
                    raise DataUnavailableError(
                        f"the process that fetches blocks has ended; {block} is missing"
                    )
            # Another process of the node may first use up its own deadline for this block.
            if waited > 2 * self._deadline + BLOCK_AGAIN_SECONDS:
                raise DataUnavailableError(f"{block}: not in the cache after {waited:.0f} s")
            time.sleep(pause)
            pause = min(1.5 * pause, BLOCK_POLL_SECONDS)

    def _has_ended(self) -> bool:
        """Return True if the process is gone; its forks cannot wait for it."""
        ends = select.poll()
        assert self._process.stdout is not None
        ends.register(self._process.stdout, select.POLLHUP)
        return bool(ends.poll(0))

    def _send(self, order: Order, blocks: Iterable[StoredBlock]) -> None:
        assert self._process.stdin is not None
        try:
            for line in _lines(order, blocks):
                os.write(self._process.stdin.fileno(), line)
        except BrokenPipeError:
            self.status.raise_failure()
            raise DataUnavailableError("the process that fetches blocks has ended") from None


def _lines(order: Order, blocks: Iterable[StoredBlock]) -> Iterator[bytes]:
    """Return lines of at most PIPE_BUF bytes; an order without blocks is also a line."""
    parts: list[bytes] = []
    size = 0
    for block in blocks:
        part = json.dumps(block).encode()
        if size + len(part) + 32 > PIPE_BUF and parts:
            yield _line(order, parts)
            order = "more" if order == "next" else order
            parts = []
            size = 0
        parts.append(part)
        size += len(part) + 2
    yield _line(order, parts)


def _line(order: Order, parts: list[bytes]) -> bytes:
    return f'["{order}", ['.encode() + b", ".join(parts) + b"]]\n"


# The fetching process.


class _Work:
    """The blocks that the threads of this process fetch, and their order."""

    def __init__(self, cache: BlockCache, status: SharedStatus, deadline: float) -> None:
        self._cache = cache
        self._status = status
        self._reader = RangeReader(deadline, self._count)
        self._changed = threading.Condition()
        self._needed: deque[StoredBlock] = deque()
        self._next: dict[str, StoredBlock] = {}
        self._missing: dict[str, StoredBlock] = {}
        """Those of `_next` that are not in the cache yet."""
        self._busy: set[str] = set()
        self._failed = False
        self._full_until = 0.0
        """While the cache is full, only one thread at a time looks for room, because it lists the folder."""

    def handle(self, order: Order, blocks: list[StoredBlock]) -> None:
        """Carry out one order from the pipe."""
        with self._changed:
            if order == "need":
                self._needed.extend(blocks)
            else:
                self._list(blocks, replace=order == "next")
            self._changed.notify_all()

    def _list(self, blocks: list[StoredBlock], replace: bool) -> None:
        named = {name_of(block): block for block in blocks}
        if replace:
            for name in self._next.keys() - named.keys():
                self._cache.release(self._next.pop(name))
                self._missing.pop(name, None)
        for name, block in named.items():
            if name in self._next:
                continue
            self._next[name] = block
            # Protect blocks first, so that those already in the cache stay.
            self._cache.keep(block)
            if self._cache.path(block).exists():
                self._status.add("hits")
            else:
                self._missing[name] = block
        self._show()

    def run(self) -> None:
        """Fetch blocks until one fails for good."""
        while True:
            block, urgent = self._choose()
            try:
                has_room = self._fetch(block, urgent)
            except TandemError as error:
                self._fail(error.exit_code, str(error))
            except Exception as error:
                self._fail(FAILED, f"cannot fetch {block}: {type(error).__name__}: {text_of(error)}")
            else:
                self._done(block, has_room)

    def _choose(self) -> tuple[StoredBlock, bool]:
        with self._changed:
            while True:
                chosen = None if self._failed else self._first()
                if chosen is not None:
                    self._busy.add(name_of(chosen[0]))
                    return chosen
                is_full = self._full_until > 0 and not self._failed
                self._changed.wait(BLOCK_ROOM_SECONDS if is_full else None)

    def _first(self) -> tuple[StoredBlock, bool] | None:
        """Return the block to fetch first, and whether a reader waits for it; None if there is none."""
        while self._needed:
            block = self._needed.popleft()
            if name_of(block) not in self._busy:
                return block, True
        now = time.monotonic()
        if now < self._full_until:
            return None
        name = next((name for name in self._missing if name not in self._busy), None)
        if name is None:
            return None
        if self._full_until:
            self._full_until = now + BLOCK_ROOM_SECONDS
        return self._missing[name], False

    def _fetch(self, block: StoredBlock, urgent: bool) -> bool:
        """Put a block into the cache unless it is there already; return False if there is no room now."""
        cache = self._cache
        with cache.writing(block):
            path = cache.path(block)
            if path.exists():
                return True
            part = cache.reserve(block, urgent)
            if part is None:
                return False
            try:
                data = self._read(block)
                with part.open("r+b") as file:
                    file.write(data)
                cache.commit(part, block)
            except BaseException:
                cache.discard(part)
                raise
        return True

    def _read(self, block: StoredBlock) -> memoryview:
        got = []
        for _ in range(WRONG_ANSWERS):
            data = self._reader.read(block.address, block.offset, block.length)
            got.append(crc32(data))
            is_right = got[-1] == block.crc32
            self._count(OK if is_right else DAMAGED, len(data))
            if is_right:
                return data
        raise ConfigError(
            f"{block}: wrong CRC-32 in {WRONG_ANSWERS} answers ({', '.join(f'{each:08x}' for each in got)}); "
            f"expected {block.crc32:08x}; if the file has changed, run `tandem index` again"
        )

    def _done(self, block: StoredBlock, has_room: bool) -> None:
        with self._changed:
            self._busy.discard(name_of(block))
            if has_room:
                self._missing.pop(name_of(block), None)
                self._full_until = 0.0
            else:
                # A reader that still waits asks again.
                self._full_until = time.monotonic() + BLOCK_ROOM_SECONDS
            self._show()
            self._changed.notify()

    def _show(self) -> None:
        self._status.set("ahead", len(self._next) - len(self._missing))

    def _fail(self, code: int, text: str) -> None:
        with self._changed:
            self._status.fail(code, text)
            self._failed = True

    def _count(self, outcome: str, size: int = 0) -> None:
        with self._changed:
            self._status.add(outcome)
            self._status.add("bytes", size)


def main(arguments: list[str]) -> None:
    """Fetch for the rank that started this process, until it ends."""
    # A rank that was asked to stop needs blocks until all ranks have agreed on the step.
    ignore_stop_signals()
    name_process("tandem-blocks")
    folder, limit, deadline, descriptor, rank = arguments
    status = SharedStatus(int(descriptor))
    try:
        work = _Work(BlockCache(Path(folder), int(limit)), status, float(deadline))
    except TandemError as error:
        status.fail(error.exit_code, str(error))
        return
    for number in range(THREADS):
        threading.Thread(target=work.run, name=f"block-{number}", daemon=True).start()
    for line in _received(sys.stdin.fileno(), int(rank)):
        order, blocks = json.loads(line)
        work.handle(order, [StoredBlock(*block) for block in blocks])


def _received(pipe: int, rank: int) -> Iterator[bytes]:
    """Yield lines until the rank, whose forks have the pipe as well, or all of them have ended."""
    rest = b""
    while os.getppid() == rank:
        if select.select([pipe], [], [], BLOCK_PARENT_SECONDS)[0]:
            read = os.read(pipe, 2**16)
            if not read:
                return
            *lines, rest = (rest + read).split(b"\n")
            yield from lines
