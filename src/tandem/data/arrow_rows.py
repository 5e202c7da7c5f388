"""A map-style dataset of Hugging Face `datasets`, read by ranges of its rows.

Its Arrow files are memory-mapped, and written in record batches of 1,000 rows. Without blocks, each sample
would be a random read of the disk.
"""

import logging
from collections.abc import Sequence
from functools import partial
from typing import Any

from torch.utils.data import Dataset

from tandem.data.blocks import BLOCK_SAMPLES, Recent, range_sizes
from tandem.data.columns import KEPT_BLOCKS, Columns, borders_of, getter_of, rows_at
from tandem.errors import ConfigError

log = logging.getLogger("tandem.run")


class ArrowRows(Dataset[Any]):
    """The samples of `rows`, in blocks of consecutive ones; see `BlockSource`."""

    def __init__(self, rows: Any) -> None:
        self.rows = rows
        self._format = getattr(rows, "format", None)
        self._stored: Any = None
        self._viewed = Recent(KEPT_BLOCKS)
        if _is_plain(rows):
            self._stored = rows.with_format("arrow", rows.format["columns"])
            self._borders = borders_of([len(batch) for batch in rows.data.to_batches()])

    def __getstate__(self) -> tuple[Any, int]:
        return self.rows, self._viewed.capacity

    def __setstate__(self, state: tuple[Any, int]) -> None:
        rows, capacity = state
        ArrowRows.__init__(self, rows)
        self._viewed.capacity = capacity

    def block_sizes(self) -> list[int]:
        """Return the sizes of ranges of rows."""
        return range_sizes(len(self.rows), BLOCK_SAMPLES)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        return self.rows[index]

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        # A dataset slices its table once for each sample that has no neighbor in the batch.
        if self._stored is not None and self.rows.format == self._format:
            return rows_at(indices, self._borders, self._columns)
        samples: list[Any] = self.rows.__getitems__(list(indices))
        return samples

    def hold(self, blocks: int, processes: int) -> None:
        """Keep views of the record batches of these blocks in each process; the files are memory-mapped."""
        if self._stored is not None:
            # A block begins and ends inside of record batches.
            of_block = 2 + len(self._borders) * BLOCK_SAMPLES // len(self)
            self._viewed.capacity = max(KEPT_BLOCKS, blocks * of_block)

    def will_need(self, blocks: Sequence[int]) -> None:
        """Do nothing: the kernel reads a memory-mapped file ahead."""

    def _columns(self, batch: int) -> Columns:
        return self._viewed.get(batch, partial(self._view, batch))  # type: ignore[no-any-return]

    def _view(self, batch: int) -> Columns:
        """Return the columns of a record batch."""
        table = self._stored[int(self._borders[batch]) : int(self._borders[batch + 1])]
        return [(name, getter_of(table.column(name), arrays=False)) for name in table.column_names]


def _is_plain(rows: Any) -> bool:
    """Return True for a dataset whose samples are the values that pyarrow has stored, in this order."""
    form = getattr(rows, "format", None)
    features = getattr(rows, "features", None)
    if not isinstance(form, dict) or not isinstance(features, dict):
        return False
    if getattr(rows, "_indices", None) is not None or form["type"] is not None or form["output_all_columns"]:
        return False
    return all(map(_is_value, features.values()))


def _is_value(feature: Any) -> bool:
    """Return True for numbers, text, bytes and lists of them; an image, for example, is decoded."""
    if (inner := getattr(feature, "feature", None)) is not None:
        return _is_value(inner)
    # The values of float16 depend on the release of pyarrow.
    return type(feature).__name__ in ("Value", "ClassLabel") and feature.dtype != "float16"


def arrow(dataset: Any) -> ArrowRows:
    """Return a dataset of Hugging Face `datasets`, to be ordered by blocks of 1,000 rows.

    Its format counts, such as `dataset.with_format("torch")`. Raises ConfigError for a dataset of several
    splits or in streaming mode.
    """
    name = type(dataset).__name__
    if isinstance(dataset, dict):
        raise ConfigError(f"arrow(): got a {name} with {', '.join(map(str, dataset))}; pass one of them")
    if not all(hasattr(dataset, method) for method in ("__len__", "__getitems__")):
        raise ConfigError(
            f"arrow(): got a {name}; expected a datasets.Dataset, which load_dataset(..., split=...) returns "
            "without streaming=True"
        )
    if len(dataset) == 0:
        raise ConfigError("arrow(): the dataset has no rows")
    if getattr(dataset, "_indices", None) is not None:
        log.warning(
            "arrow(): shuffle() or select() put the rows in another order than they are stored; for reads of "
            "neighboring rows, pass the dataset without them, or dataset.flatten_indices()"
        )
    return ArrowRows(dataset)
