"""Pack the documents of a block of tokens into rows of one length, so that few documents are cut.

A block has as many tokens as its rows have room for, so rows have no padding and no token is left out. The
result depends only on the block. The first part is best-fit-decreasing bin packing, as in "Fewer Truncations
Improve Language Modeling" (Ding et al., 2024).
"""

from bisect import bisect_left, insort
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy
from numpy.typing import NDArray

Numbers = NDArray[numpy.int64]


class Packing(NamedTuple):
    """Which pieces of a block are in which row; int32 arrays, because many blocks are in use at a time.

    Row r has the pieces from `rows[r]` to before `rows[r + 1]`, in the order of the block.
    """

    starts: NDArray[numpy.int32]
    """First token of each piece in the block."""
    lengths: NDArray[numpy.int32]
    rows: NDArray[numpy.int32]


def pieces_of(block: NDArray[Any], end_of_document: int, length: int) -> tuple[Numbers, Numbers]:
    """Return (first token, number of tokens) of the documents in a block.

    A document ends with its token `end_of_document`, or with the block. A document of more than `length`
    tokens is cut into pieces of `length` and a rest.
    """
    ends = numpy.flatnonzero(block == end_of_document) + 1
    if not len(ends) or ends[-1] < len(block):
        ends = numpy.append(ends, len(block))
    starts = numpy.concatenate([[0], ends[:-1]])
    counts = -(-(ends - starts) // length)
    first = numpy.repeat(counts.cumsum() - counts, counts)
    begins = numpy.repeat(starts, counts) + (numpy.arange(len(first)) - first) * length
    return begins, numpy.minimum(length, numpy.repeat(ends, counts) - begins)


class _Rooms:
    """The rows with room. Each is one number, room * rows + row, because many are compared."""

    def __init__(self, rows: int, length: int) -> None:
        self._rows = rows
        self._free = [length * rows + row for row in range(rows)]

    def place(self, lengths: Sequence[int]) -> list[int]:
        """Give each length, one after another, the row with the least room for it; -1 where there is none."""
        free = self._free
        rows = self._rows
        found = []
        for length in lengths:
            at = bisect_left(free, length * rows)
            if at == len(free):
                found.append(-1)
                continue
            room, row = divmod(free.pop(at), rows)
            if room > length:
                insort(free, (room - length) * rows + row)
            found.append(row)
        return found

    def cut(self, length: int) -> list[tuple[int, int]]:
        """Divide a length that fits nowhere over the largest rooms, until its rest fits; (row, part)."""
        parts = []
        while (row := self.place([length])[0]) < 0:
            room, fullest = divmod(self._free.pop(), self._rows)
            parts.append((fullest, room))
            length -= room
        return [*parts, (row, length)]


def packed(block: NDArray[Any], end_of_document: int, length: int) -> Packing:
    """Pack a block of R * `length` tokens into R rows, each of exactly `length` tokens.

    Longer documents come first, each into the row where it leaves the least room. Documents that fit nowhere
    are cut.
    """
    starts, lengths = pieces_of(block, end_of_document, length)
    rooms = _Rooms(len(block) // length, length)
    by_length = (-lengths).argsort(kind="stable")
    starts = starts[by_length]
    lengths = lengths[by_length]
    rows = numpy.array(rooms.place(lengths.tolist()))
    fits = rows >= 0
    table = [numpy.stack([rows[fits], starts[fits], lengths[fits]])]
    for start, size in zip(starts[~fits].tolist(), lengths[~fits].tolist(), strict=True):
        of_row, parts = zip(*rooms.cut(size), strict=True)
        begins = start + numpy.cumsum((0, *parts[:-1]))
        table.append(numpy.stack([of_row, begins, parts]))
    return _sorted(numpy.concatenate(table, axis=1), len(block) // length)


def _sorted(table: Numbers, rows: int) -> Packing:
    """Return pieces [3, N] of (row, first token, number of tokens) by rows."""
    table = table[:, numpy.lexsort((table[1], table[0]))]
    borders = numpy.searchsorted(table[0], numpy.arange(rows + 1))
    return Packing(*(numbers.astype(numpy.int32) for numbers in (table[1], table[2], borders)))
