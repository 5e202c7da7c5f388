"""Blocks of tar shards: ranges of whole samples, which an index lists once; and the samples inside a block.

The shards are those of WebDataset: files KEY.EXTENSION, and the files with one key in a row are a sample.
"""

import io
import json
import os
import struct
import tarfile
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from tandem.data.ranges import RangeReader, check_address, is_remote, redacted_url
from tandem.errors import ConfigError
from tandem.paths import check_replaceable

BLOCK_BYTES = 1_000_000
BLOCK_SAMPLES = 100
"""A block ends at the sample with which it reaches one of both."""
SHARDS_AT_ONCE = 4
PART = 8 * 2**20
"""Bytes of a request of `tandem index`."""
PROGRESS_SECONDS = 5.0
"""At most how often `tandem index` says how far it has got."""
HEADER = 512
_FIELDS = struct.Struct("100s 24x 12s 20x B 100x 6s 82x B 166x")
"""Name, size in octal digits, kind, magic number and first byte of the prefix of a header."""
PREFIX = 345
PREFIX_END = 500
FIELDS = ("address", "offset", "length", "count", "crc32")


class StoredBlock(NamedTuple):
    """`samples` in `length` bytes from `offset` on, with their CRC-32; `address`: a path or URL."""

    address: str
    offset: int
    length: int
    samples: int
    crc32: int

    def __str__(self) -> str:
        return f"{redacted_url(self.address)}, bytes {self.offset} to {self.offset + self.length - 1}"


class Member(NamedTuple):
    """A file of a tar archive: its data, and the first byte of its header."""

    name: str
    start: int
    offset: int
    size: int


class BlockTable:
    """The files of the samples of a block: their extensions, first bytes and sizes, all in one order.

    These are flat lists. With an object for each file, garbage collections took most of the time of a reader.
    """

    __slots__ = ("_ends", "_prefix", "_start", "extensions", "keys", "offsets", "sizes")

    def __init__(self) -> None:
        self._prefix = "\0"
        """What all names of the last sample start with: its key and a dot. At first, no name does."""
        self._start = 0
        """The index of its first file."""
        self.keys: list[str] = []
        self.extensions: list[str] = []
        self.offsets: list[int] = []
        self.sizes: list[int] = []
        self._ends: list[int] = []

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self.keys)

    def add(self, name: str, offset: int, size: int) -> None:
        """Add a file, to the last sample if it has the same key. Raises ValueError."""
        known = len(self._prefix)
        # Most files have the key of the one before, so their names need not be split.
        if name.startswith(self._prefix) and len(name) > known and name.find("/", known) < 0:
            extension = name[known:]
            if extension in self.extensions[self._start :]:
                raise ValueError(f"the file {name!r} occurs twice")
            self._ends[-1] += 1
        else:
            key, extension = _split(name)
            self._prefix = key + "."
            self._start = len(self.sizes)
            self.keys.append(key)
            self._ends.append(self._start + 1)
        self.extensions.append(extension)
        self.offsets.append(offset)
        self.sizes.append(size)

    def files(self, sample: int) -> range:
        """Return the indices of a sample's files."""
        return range(self._ends[sample - 1] if sample else 0, self._ends[sample])

    def size(self, sample: int) -> int:
        """Return the bytes of a sample's files, without the headers between them."""
        files = self.files(sample)
        return sum(self.sizes[files.start : files.stop])


def samples_of(raw: bytes) -> BlockTable:
    """Return the samples of a block. Raises ValueError for bytes that are no tar archive.

    Plain headers are read without tarfile, in a tenth of the time.
    """
    table = BlockTable()
    position = 0
    last = len(raw) - HEADER
    sizes: dict[bytes, int] = {}  # by their octal digits: many files of a block have the same size
    while position <= last and raw[position]:
        name, octal, kind, magic, prefix = _FIELDS.unpack_from(raw, position)
        if kind not in b"0\0" or octal[0] >= 128:
            return _samples_by_tarfile(raw)
        size = sizes.get(octal)
        if size is None:
            size = sizes[octal] = int(octal.rstrip(b" \0") or b"0", 8)
        name = name.rstrip(b"\0")
        # GNU's format has other fields in the place of the prefix.
        if prefix and magic == b"ustar\0":
            name = raw[position + PREFIX : position + PREFIX_END].rstrip(b"\0") + b"/" + name
        position += HEADER
        table.add(name.decode("utf-8", "surrogateescape"), position, size)
        position += -(-size // HEADER) * HEADER
    return table


def _samples_by_tarfile(raw: bytes) -> BlockTable:
    table = BlockTable()
    for member in _members_by_tarfile(io.BytesIO(raw)):
        table.add(member.name, member.offset, member.size)
    return table


def _split(name: str) -> tuple[str, str]:
    """Return the key and the extension of a file: all before and after the first dot of its last part."""
    dot = name.find(".", name.rfind("/") + 1)
    if dot < 1 or name[dot - 1] == "/" or dot == len(name) - 1:
        raise ValueError(f"the file {name!r} has no name of the form KEY.EXTENSION")
    return name[:dot], name[dot + 1 :]


def _grouped(members: Iterator[Member]) -> Iterator[tuple[str, list[tuple[str, Member]]]]:
    """Yield (key, [(extension, member)]) for members of one key in a row."""
    key = ""
    files: dict[str, Member] = {}
    for member in members:
        own, extension = _split(member.name)
        if own != key and files:
            yield key, list(files.items())
            files = {}
        key = own
        if extension in files:
            raise ValueError(f"the file {member.name!r} occurs twice")
        files[extension] = member
    if files:
        yield key, list(files.items())


def _members_by_tarfile(file: io.BufferedIOBase) -> Iterator[Member]:
    try:
        with tarfile.open(fileobj=file, mode="r:") as archive:
            for member in archive:
                if member.isdir():
                    continue
                if not member.isreg() or member.issparse():
                    raise ValueError(f"{member.name!r} is neither a regular file nor a directory")
                yield Member(member.name, member.offset, member.offset_data, member.size)
                archive.members.clear()  # type: ignore[attr-defined]  # it would keep every header of the shard
    except tarfile.TarError as error:
        raise ValueError(str(error)) from error


# The index: one line of JSON for each block.


def index_shards(
    shards: Sequence[str],
    output: Path,
    block_bytes: int = BLOCK_BYTES,
    progress: Callable[[int], None] = lambda read: None,
) -> list[StoredBlock]:
    """Read every shard once, and write the index of their blocks, complete or not at all.

    `progress` is called with the number of shards read, at most every PROGRESS_SECONDS.

    Paths below the folder of `output` are written relative to it, so that both can be moved together.

    Raises ConfigError for a shard that is missing or no tar archive, and DataUnavailableError for a server
    that does not answer.
    """
    for shard in shards:
        if is_remote(shard):
            check_address(shard)
    reader = RangeReader()
    folder = output.absolute().parent
    with ThreadPoolExecutor(SHARDS_AT_ONCE) as pool:
        indexed = pool.map(lambda shard: _indexed(shard, folder, block_bytes, reader), shards)
        found = []
        said = time.monotonic()
        for blocks_of_shard in indexed:
            found.append(blocks_of_shard)
            if time.monotonic() - said > PROGRESS_SECONDS:
                said = time.monotonic()
                progress(len(found))
    blocks = [block for of_shard in found for block in of_shard]
    lines = "".join(json.dumps(dict(zip(FIELDS, block, strict=True))) + "\n" for block in blocks)
    part = output.with_name(f".{output.name}.part")
    try:
        check_replaceable(output)
        part.write_text(lines, encoding="utf-8")
        os.replace(part, output)
    except OSError as error:
        raise ConfigError(f"cannot write {output}: {error.strerror or error}") from error
    return blocks


def _indexed(shard: str, folder: Path, block_bytes: int, reader: RangeReader) -> list[StoredBlock]:
    if not is_remote(shard):
        path = Path(shard).absolute()
        inside = path.is_relative_to(folder)
        address = str(path.relative_to(folder)) if inside else str(path)
        return _blocks_of(path, shard, address, block_bytes)
    with tempfile.NamedTemporaryFile(prefix="tandem-index-") as copy:
        size = reader.size(shard)
        for offset in range(0, size, PART):
            copy.write(reader.read(shard, offset, min(PART, size - offset)))
        copy.flush()
        return _blocks_of(Path(copy.name), shard, shard, block_bytes)


def _blocks_of(path: Path, shard: str, address: str, block_bytes: int) -> list[StoredBlock]:
    """Return the blocks of a local shard; messages name it as it was typed."""
    blocks = []
    keys: set[str] = set()
    try:
        with path.open("rb") as file:
            samples = _grouped(_members_by_tarfile(file))
            with path.open("rb") as data:
                for start, end, count in _cut(samples, keys, block_bytes):
                    data.seek(start)
                    raw = data.read(end - start)
                    if len(raw) < end - start:
                        raise ValueError("the archive is cut off")
                    blocks.append(StoredBlock(address, start, end - start, count, zlib.crc32(raw)))
    except OSError as error:
        raise ConfigError(f"cannot read {redacted_url(shard)}: {error.strerror or error}") from error
    except ValueError as error:
        raise ConfigError(
            f"{redacted_url(shard)}: expected an uncompressed tar archive of files KEY.EXTENSION: {error}"
        ) from error
    if not blocks:
        raise ConfigError(f"{redacted_url(shard)}: expected a tar archive with samples; it has no files")
    return blocks


def _cut(
    samples: Iterator[tuple[str, list[tuple[str, Member]]]], keys: set[str], block_bytes: int
) -> Iterator[tuple[int, int, int]]:
    """Yield (first byte, end, number of samples) of each block; `keys` collects the keys of the shard."""
    start: int | None = None
    end = 0
    count = 0
    for key, files in samples:
        if key in keys:
            raise ValueError(f"the files of sample {key!r} are not next to each other")
        keys.add(key)
        if start is None:
            start = files[0][1].start
        last = files[-1][1]
        end = last.offset + -(-last.size // HEADER) * HEADER
        count += 1
        if end - start >= block_bytes or count >= BLOCK_SAMPLES:
            yield start, end, count
            start = None
            count = 0
    if start is not None:
        yield start, end, count


def read_index(path: Path) -> list[StoredBlock]:
    """Return the blocks of an index; relative paths are below its folder. Raises ConfigError."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"cannot read the index {path}: {reason}; `tandem index` writes it") from error
    folder = path.absolute().parent
    blocks = []
    addresses: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), 1):
        block = _read_line(line)
        if block is None:
            raise ConfigError(
                f"{path}, line {number}: expected a block with {', '.join(FIELDS)}; run `tandem index` again"
            )
        if block.address not in addresses:
            addresses[block.address] = _resolved(block.address, folder)
        blocks.append(block._replace(address=addresses[block.address]))
    if not blocks or not text.endswith("\n"):
        what = "has no blocks" if not blocks else "is cut off"
        raise ConfigError(f"the index {path} {what}; run `tandem index` again")
    return blocks


def _resolved(address: str, folder: Path) -> str:
    if is_remote(address):
        check_address(address)
        return address
    return str(folder / address)


def _read_line(line: str) -> StoredBlock | None:
    try:
        values = json.loads(line)
        block = StoredBlock(*(values[name] for name in FIELDS))
    except (ValueError, TypeError, KeyError):
        return None
    numbers = block[1:]
    if not isinstance(block.address, str) or not all(type(number) is int for number in numbers):
        return None
    return block if min(block.offset, block.length - 1, block.samples - 1, block.crc32) >= 0 else None
