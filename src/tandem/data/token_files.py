"""Token files as a dataset: windows of tokens, memory-mapped, so they may be larger than the memory.

Formats: raw tokens without a header (.bin of nanoGPT), .bin with .idx (Megatron), and .npy.
"""

import glob
import logging
import os
import struct
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from tandem.data.blocks import BLOCK_SAMPLES, patterns_of, range_sizes, read_ahead
from tandem.data.token_packing import Packing, packed
from tandem.errors import ConfigError

log = logging.getLogger("tandem.run")

RAW = ("uint16", "uint32")
"""The types of tokens in a .bin file without an index."""
MAGIC = b"MMIDIDX\0\0"
HEADER = struct.Struct("<9sQBQQ")
"""Of an .idx file: magic, version, type, number of sequences, number of documents. Then, for each sequence,
its length (int32) and its first byte (int64)."""
TYPES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}
"""The types of an .idx file; 6 and 7 are floating-point numbers."""


class TokenFile(NamedTuple):
    """`length` tokens of the NumPy type `dtype`, from byte `offset` of a file on."""

    path: Path
    dtype: str
    offset: int
    length: int


class TokenWindows(Dataset[tuple[Tensor, ...]]):
    """Samples (inputs, targets), int64 [length] each: tokens in a row, and the same one token further.

    A file is cut into windows from its start, across document ends; tokens at its end that fill no window are
    left out. `__getitems__` returns a finished batch, int64 [B, length] each.
    """

    def __init__(self, files: Sequence[TokenFile], length: int) -> None:
        self.length = length
        self.files = [file for file in files if file.length > length]
        self._ends = list(accumulate((file.length - 1) // length for file in self.files))
        self.left_out = sum(file.length for file in files) - len(self) * length
        """Tokens that are in no window: up to `length` at the end of each file."""
        self._maps: dict[int, NDArray[Any]] = {}

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        return tuple(part[0] for part in self.__getitems__([index]))

    def __getitems__(self, indices: Sequence[int] | Tensor) -> tuple[Tensor, ...]:
        chosen: list[int] = torch.as_tensor(indices).tolist()
        windows = numpy.empty((len(chosen), self.length + 1), dtype=numpy.int64)
        for row, index in enumerate(chosen):
            windows[row] = self._window(index)
        both = torch.from_numpy(windows)
        return both[:, :-1].contiguous(), both[:, 1:].contiguous()

    def __getstate__(self) -> Mapping[str, Any]:
        # Pickling a map would copy the whole file.
        return {**self.__dict__, "_maps": {}}

    def _window(self, index: int) -> NDArray[Any]:
        number, window = self._place(index)
        start = window * self.length
        return self._mapped(number)[start : start + self.length + 1]

    def _place(self, index: int) -> tuple[int, int]:
        """Return (number of the file, number of the window in it)."""
        place = index + len(self) if index < 0 else index
        if not 0 <= place < len(self):
            raise IndexError(f"no window {index}; there are {len(self)}")
        number = bisect_right(self._ends, place)
        return number, place - (self._ends[number - 1] if number else 0)

    def _mapped(self, number: int) -> NDArray[Any]:
        """Return the tokens of a file."""
        if number not in self._maps:
            path, dtype, offset, size = self.files[number]
            mapped = numpy.memmap(path, dtype, mode="r", offset=offset, shape=(size,))
            self._maps[number] = mapped.view(numpy.ndarray)  # a slice of a memmap takes ten times as long
        return self._maps[number]


MANY_WINDOWS = 4_000_000
"""Larger files are ordered by blocks. In smaller ones, random reads of the page cache are cheap."""


class TokenBlocks(TokenWindows):
    """Windows that are read by ranges of a file, of `block_samples` each; see `BlockSource`."""

    def __init__(self, files: Sequence[TokenFile], length: int, block_samples: int) -> None:
        super().__init__(files, length)
        self._block_samples = block_samples
        of_files = [range_sizes((file.length - 1) // length, block_samples) for file in self.files]
        self._sizes = [size for sizes in of_files for size in sizes]
        self._block_ends = list(accumulate(len(sizes) for sizes in of_files))
        """The number of blocks up to the end of each file."""

    def block_sizes(self) -> list[int]:
        """Return the number of windows of each block."""
        return self._sizes

    def will_need(self, blocks: Sequence[int]) -> None:
        """Let the kernel read these blocks ahead."""
        read_ahead(self._bytes_of(block) for block in blocks)

    def _bytes_of(self, block: int) -> tuple[Path, int, int]:
        number = bisect_right(self._block_ends, block)
        file = self.files[number]
        first = block - (self._block_ends[number - 1] if number else 0)
        window = self.length * numpy.dtype(file.dtype).itemsize
        return file.path, file.offset + first * self._block_samples * window, self._sizes[block] * window


PACKED_SAMPLES = 256
"""Samples within which documents are packed. More would cut fewer documents, but take longer."""
PACKED_TOKENS = 2**22
FEWEST_PACKED = 16
"""Long samples are packed in blocks of PACKED_TOKENS, read at once, but at least of FEWEST_PACKED samples."""
PACKINGS = 8
"""Number of blocks whose packings are kept, unless `hold` sets another. A document needs about 10 bytes."""
IGNORED = -100
"""The target after the end of a document. torch's cross_entropy ignores it."""


class PackedTokens(TokenBlocks):
    """Samples (inputs, targets, documents), int64 [length] each: documents that fill a row exactly.

    A document ends with the token `end_of_document`. Each block of a file is packed separately (`packed`), so
    its ends cut documents, and no table of all documents is needed. A target is the next token of the same
    document, even where the document is cut, and IGNORED after its end. `documents` numbers the documents of
    a sample from 0. Each token is an input of one sample, except for `left_out`.
    """

    def __init__(self, files: Sequence[TokenFile], length: int, end_of_document: int) -> None:
        super().__init__(files, length, max(FEWEST_PACKED, min(PACKED_SAMPLES, PACKED_TOKENS // length)))
        self.end_of_document = end_of_document
        self._packings: OrderedDict[tuple[int, int], Packing] = OrderedDict()
        """By file and block, the last used at the end; evicted ones are computed again when needed."""
        self._capacity = PACKINGS

    def hold(self, blocks: int, processes: int) -> None:
        """Keep the packings of this many blocks, from which a rank reads at a time."""
        self._capacity = max(PACKINGS, blocks)

    def __getitems__(self, indices: Sequence[int] | Tensor) -> tuple[Tensor, ...]:
        chosen: list[int] = torch.as_tensor(indices).tolist()
        made = numpy.empty((3, len(chosen), self.length), dtype=numpy.int64)
        for row, index in enumerate(chosen):
            self._fill(made[:, row], index)
        inputs, targets, documents = torch.from_numpy(made).unbind()
        targets.masked_fill_(inputs == self.end_of_document, IGNORED)
        return inputs, targets, documents

    def __getstate__(self) -> Mapping[str, Any]:
        return {**super().__getstate__(), "_packings": OrderedDict()}

    def _fill(self, sample: NDArray[numpy.int64], index: int) -> None:
        """Write inputs, targets (also after the end of a document) and documents, [3, length]."""
        number, window = self._place(index)
        block, row = divmod(window, self._block_samples)
        packing = self._packing(number, block)
        pieces = slice(packing.rows[row], packing.rows[row + 1])
        lengths = packing.lengths[pieces].astype(numpy.int64)
        starts = packing.starts[pieces] + numpy.int64(block * self._block_samples * self.length)
        places = numpy.arange(self.length) + numpy.repeat(starts - lengths.cumsum() + lengths, lengths)
        mapped = self._mapped(number)
        sample[0] = mapped[places]
        sample[1] = mapped[places + 1]
        sample[2] = numpy.repeat(numpy.arange(len(lengths)), lengths)

    def _packing(self, number: int, block: int) -> Packing:
        key = (number, block)
        if key in self._packings:
            self._packings.move_to_end(key)
            return self._packings[key]
        first = block * self._block_samples
        windows = min(self._block_samples, (self.files[number].length - 1) // self.length - first)
        stored = self._mapped(number)[first * self.length : (first + windows) * self.length]
        made = packed(stored, self.end_of_document, self.length)
        if len(self._packings) >= self._capacity:
            self._packings.popitem(last=False)
        self._packings[key] = made
        return made


def tokens(
    files: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    length: int,
    dtype: str = "uint16",
    *,
    end_of_document: int | None = None,
) -> TokenWindows:
    """Return the token files as a dataset of windows of `length` tokens, (inputs, targets) of int64.

    Args: files: a path or pattern, such as "data/train-*.bin", or several. The files are read in the order of
    their names. `dtype`: "uint16" or "uint32", for .bin files without an .idx next to them.
    More than MANY_WINDOWS windows are ordered by blocks of 1,000.

    `end_of_document`: the token that ends each document. Samples are then (inputs, targets, documents), with
    whole documents as far as possible, ordered by blocks of PACKED_SAMPLES; see `PackedTokens`.

    Raises ConfigError if nothing matches, for a file of the wrong size, type or format, and if the first file
    has no such token among its first SEARCHED_TOKENS.
    """
    if not isinstance(length, int | numpy.integer) or length < 1:
        raise ConfigError(f"tokens(): length: invalid value {length!r}; expected an integer >= 1")
    if dtype not in RAW:
        raise ConfigError(f"tokens(): dtype: invalid value {dtype!r}; expected one of {', '.join(RAW)}")
    patterns = patterns_of("tokens()", files)
    paths = dict.fromkeys(path for pattern in patterns for path in _matching(pattern))
    found = [_opened(path, dtype) for path in paths]
    windows = TokenWindows(found, length)
    if not len(windows):
        longest = max((file.length for file in found), default=0)
        raise ConfigError(
            f"tokens(): {', '.join(patterns)}: the longest file has {longest:,} tokens; "
            f"expected at least {length + 1:,}, for one window of length {length:,} and its targets"
        )
    if end_of_document is not None:
        _check_end(windows.files, end_of_document)
        return PackedTokens(found, length, end_of_document)
    return TokenBlocks(found, length, BLOCK_SAMPLES) if len(windows) > MANY_WINDOWS else windows


SEARCHED_TOKENS = 2**24
"""A longer first document means that `end_of_document` is wrong."""
CHUNK_TOKENS = 2**16


def _check_end(files: Sequence[TokenFile], end_of_document: int) -> None:
    """Raise ConfigError unless all files can have this token, and the first one has it near its start.

    A later file may be the rest of a long document, so it only causes a warning.
    """
    what = f"tokens(): end_of_document: invalid value {end_of_document!r}; expected"
    if isinstance(end_of_document, bool) or not isinstance(end_of_document, int):
        raise ConfigError(f"{what} the number of a token")
    for file in files:
        most = int(numpy.iinfo(file.dtype).max)
        if not 0 <= end_of_document <= most:
            raise ConfigError(f"{what} 0 to {most:,}, a token of {file.path}")
    without = next((file for file in files if not _has(file, end_of_document)), None)
    if without is None:
        return
    among = f"among the first {min(without.length, SEARCHED_TOKENS):,} tokens of {without.path}"
    if without == files[0]:
        raise ConfigError(f"{what} the token that ends each document, but it is not {among}")
    log.warning(
        f"tokens(): end_of_document: {end_of_document} is not {among}, which are packed as one document; "
        "was this file written by another tokenizer?"
    )


def _has(file: TokenFile, token: int) -> bool:
    """Return whether a token is near the start of a file; reads no more of it than needed."""
    count = min(file.length, SEARCHED_TOKENS)
    stored = numpy.memmap(file.path, file.dtype, mode="r", offset=file.offset, shape=(count,))
    chunks = (stored[start : start + CHUNK_TOKENS] for start in range(0, count, CHUNK_TOKENS))
    return any((chunk == token).any() for chunk in chunks)


def _matching(pattern: str) -> list[Path]:
    """Return the token files that match a pattern; an .idx file means its .bin."""
    names = sorted(glob.glob(os.path.expanduser(pattern), recursive=True))
    paths = [Path(name) for name in names if os.path.isfile(name)]
    if not paths:
        raise ConfigError(f"tokens(): no file matches {pattern}; expected .bin or .npy files")
    return sorted({path.with_suffix(".bin") if path.suffix == ".idx" else path for path in paths})


def _opened(path: Path, dtype: str) -> TokenFile:
    try:
        if path.suffix == ".npy":
            return _array(path)
        if path.suffix != ".bin":
            raise ConfigError(
                f"tokens(): {path}: unknown file type; expected a name that ends in .bin or .npy"
            )
        index = path.with_suffix(".idx")
        return _indexed(path, index) if index.exists() else _raw(path, dtype)
    except OSError as error:
        where = error.filename or path
        raise ConfigError(f"tokens(): cannot read {where}: {error.strerror or error}") from error


def _raw(path: Path, dtype: str) -> TokenFile:
    size = path.stat().st_size
    width = numpy.dtype(dtype).itemsize
    if size % width:
        raise _wrong(path, f"a multiple of {width} bytes, for tokens of {dtype}", f"{size:,} bytes")
    return TokenFile(path, f"<u{width}", 0, size // width)


def _indexed(path: Path, index: Path) -> TokenFile:
    """Return a file of Megatron. Its sequences follow each other, so the last one's end is the file's."""
    size = path.stat().st_size
    size_of_index = index.stat().st_size
    with index.open("rb") as file:
        start = file.read(HEADER.size)
        if len(start) < HEADER.size or not start.startswith(MAGIC):
            raise _wrong(
                index, "an index of Megatron (MMIDIDX)", f"the bytes {start[:9].hex(' ') or '(empty)'}"
            )
        _, version, code, sequences, documents = HEADER.unpack(start)
        if version != 1 or code not in TYPES:
            raise _wrong(index, "version 1 and a type of integers", f"version {version}, type {code}")
        expected = HEADER.size + 12 * sequences + 8 * documents
        if size_of_index < expected:
            raise _wrong(index, f"{expected:,} bytes for {sequences:,} sequences", f"{size_of_index:,} bytes")
        end = 0
        kind = numpy.dtype(TYPES[code]).newbyteorder("<")
        if sequences:
            file.seek(HEADER.size + 4 * (sequences - 1))
            (last,) = struct.unpack("<i", file.read(4))
            file.seek(HEADER.size + 12 * sequences - 8)
            (begin,) = struct.unpack("<q", file.read(8))
            end = begin + last * kind.itemsize
    if end != size:
        raise _wrong(path, f"{end:,} bytes, the end of the last sequence in {index.name}", f"{size:,} bytes")
    return TokenFile(path, kind.str, 0, size // kind.itemsize)


def _array(path: Path) -> TokenFile:
    try:
        array = numpy.load(path, mmap_mode="r")
    except (ValueError, EOFError) as error:
        raise _wrong(path, "an array of NumPy", "another format") from error
    if not isinstance(array, numpy.memmap) or array.ndim != 1 or array.dtype.kind not in "iu":
        is_array = isinstance(array, numpy.ndarray)
        got = f"{array.dtype}, shape {array.shape}" if is_array else "an archive"
        raise _wrong(path, "integers in one dimension", got)
    return TokenFile(path, array.dtype.str, int(array.offset), len(array))


def _wrong(path: Path, expected: str, got: str) -> ConfigError:
    return ConfigError(f"tokens(): {path}: expected {expected}, got {got}")
