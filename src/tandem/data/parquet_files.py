"""Parquet files as a dataset: a block is a row group, which is decoded once and kept while it is in use."""

import glob
import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.utils.data import Dataset

from tandem.data.blocks import Recent, patterns_of, read_ahead
from tandem.data.columns import KEPT_BLOCKS, Columns, borders_of, getter_of, rows_at
from tandem.errors import ConfigError
from tandem.process import memory_left

OPEN_FILES = 16


class RowGroup(NamedTuple):
    """`rows` rows of a file: row group `number`, stored in `size` bytes from byte `start` on."""

    path: Path
    number: int
    rows: int
    start: int
    size: int
    decoded: int
    """Bytes of its columns without compression; in memory they take at least as much."""


class ParquetRows(Dataset[dict[str, Any]]):
    """Rows of Parquet files as {column: value}, in the order of the files; see `BlockSource`.

    Numbers are Python numbers, and lists of numbers are NumPy arrays. Other values are those of pyarrow's
    `as_py`: bytes, text, dates, None.
    """

    def __init__(self, groups: Sequence[RowGroup], columns: Sequence[str]) -> None:
        self.groups = list(groups)
        self.columns = list(columns)
        self._borders = borders_of(self.block_sizes())
        self._decoded = Recent(KEPT_BLOCKS)
        self._forget()

    def _forget(self) -> None:
        self._process = os.getpid()
        self._files = Recent(OPEN_FILES)
        self._decoded = Recent(self._decoded.capacity)

    def block_sizes(self) -> list[int]:
        """Return the number of rows of each row group."""
        return [group.rows for group in self.groups]

    def __len__(self) -> int:
        return int(self._borders[-1])

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int] | torch.Tensor) -> list[dict[str, Any]]:
        # A reader that was forked must not share file positions with its parent.
        if self._process != os.getpid():
            self._forget()
        return rows_at(indices, self._borders, self._columns)

    def will_need(self, blocks: Sequence[int]) -> None:
        """Let the kernel read these row groups ahead."""
        groups = [self.groups[block] for block in blocks]
        read_ahead((group.path, group.start, group.size) for group in groups)

    def hold(self, blocks: int, processes: int) -> None:
        """Keep this number of row groups in each process. Raises ConfigError if memory is too small."""
        self._decoded.capacity = max(KEPT_BLOCKS, blocks)
        largest = sorted((group.decoded for group in self.groups), reverse=True)[:blocks]
        left = memory_left(Path("/"))
        if left is not None and sum(largest) * processes > left:
            in_workers = f" in each of {processes} loader processes" if processes > 1 else ""
            raise ConfigError(
                f"parquet(): a rank decodes {len(largest):,} row groups at a time{in_workers}, "
                f"{sum(largest) * processes / 2**30:.1f} GiB, and {left / 2**30:.1f} GiB of memory are left; "
                "write smaller row groups (row_group_size=...), or use fewer --workers or columns"
            )

    def _columns(self, block: int) -> Columns:
        return self._decoded.get(block, partial(self._decode, self.groups[block]))  # type: ignore[no-any-return]

    def _decode(self, group: RowGroup) -> Columns:
        # `will_need` reads ahead; to do it again for each row group takes longer than to decode a small one.
        file = self._files.get(group.path, lambda: _pyarrow().ParquetFile(group.path, pre_buffer=False))
        table = file.read_row_group(group.number, columns=self.columns, use_threads=False)
        if table.num_rows != group.rows:
            raise OSError(f"{group.path} has changed: row group {group.number} had {group.rows:,} rows")
        return [(name, getter_of(table.column(name), arrays=True)) for name in self.columns]


def parquet(
    files: str | os.PathLike[str] | Sequence[str | os.PathLike[str]], columns: Sequence[str] | None = None
) -> ParquetRows:
    """Return the rows of Parquet files as a dataset of {column: value}, ordered by row groups.

    Args: files: a path or pattern, such as "data/part-*.parquet", or several. The files are read in the order
    of their names. `columns`: only these columns; None: all.

    Raises ConfigError if pyarrow is missing or nothing matches, and for files with other columns or without
    rows.
    """
    module = _pyarrow()
    if columns is not None and (isinstance(columns, str) or not columns):
        raise ConfigError(
            f"parquet(): columns: invalid value {columns!r}; expected a list of names, such as "
            f"[{columns or 'label'!r}], or None for all columns"
        )
    patterns = patterns_of("parquet()", files)
    paths = list(dict.fromkeys(path for pattern in patterns for path in _matching(pattern)))
    groups: list[RowGroup] = []
    first: Any = None
    for path in paths:
        try:
            with module.ParquetFile(path) as file:
                schema = _chosen(path, file.schema_arrow, columns)
                groups += _groups_of(path, file.metadata, set(schema.names))
        except (OSError, ValueError) as error:  # pyarrow's ArrowInvalid is a ValueError
            text = " ".join(str(error).split())
            raise ConfigError(f"parquet(): {path}: expected a Parquet file; {text}") from error
        if first is None:
            first = schema
        if not schema.equals(first):
            raise ConfigError(
                f"parquet(): {path}: columns {_listed(schema)}; expected {_listed(first)}, as in {paths[0]}"
            )
    if not groups:
        raise ConfigError(f"parquet(): {', '.join(patterns)}: the files have no rows")
    return ParquetRows(groups, first.names)


def _pyarrow() -> Any:
    """Return pyarrow.parquet. Raises ConfigError if it is not installed."""
    try:
        from pyarrow import parquet as module
    except ImportError as error:
        raise ConfigError("parquet() needs pyarrow: pip install 'tandem-train[parquet]'") from error
    return module


def _matching(pattern: str) -> list[Path]:
    names = sorted(glob.glob(os.path.expanduser(pattern), recursive=True))
    paths = [Path(name) for name in names if os.path.isfile(name)]
    if not paths:
        raise ConfigError(f"parquet(): no file matches {pattern}")
    return paths


def _chosen(path: Path, schema: Any, columns: Sequence[str] | None) -> Any:
    """Return the schema of the chosen columns, without pandas' metadata. Raises ConfigError."""
    import pyarrow

    if absent := [name for name in columns or () if name not in schema.names]:
        raise ConfigError(f"parquet(): {path}: no column {', '.join(absent)}; columns: {_listed(schema)}")
    return pyarrow.schema([schema.field(name) for name in columns or schema.names])


def _groups_of(path: Path, metadata: Any, columns: set[str]) -> list[RowGroup]:
    groups = []
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        stored = [group.column(index) for index in range(group.num_columns)]
        # A nested column is stored as several, named NAME.list.element.
        stored = [column for column in stored if column.path_in_schema.partition(".")[0] in columns]
        starts = [column.dictionary_page_offset or column.data_page_offset for column in stored]
        ends = [start + column.total_compressed_size for start, column in zip(starts, stored, strict=True)]
        decoded = sum(column.total_uncompressed_size for column in stored)
        if group.num_rows:
            start = min(starts, default=0)
            size = max(ends, default=0) - start
            groups.append(RowGroup(path, number, group.num_rows, start, size, decoded))
    return groups


def _listed(schema: Any) -> str:
    return ", ".join(f"{field.name} ({field.type})" for field in schema)
