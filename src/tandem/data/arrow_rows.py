"""A map-style dataset of Hugging Face `datasets`, read by ranges of its rows.

Its Arrow files are memory-mapped, and written in record batches of 1,000 rows. Without blocks, each sample
would be a random read of the disk.
"""

import logging
from collections.abc import Sequence
from typing import Any

from torch.utils.data import Dataset

from tandem.data.blocks import BLOCK_SAMPLES, range_sizes
from tandem.errors import ConfigError

log = logging.getLogger("tandem.run")


class ArrowRows(Dataset[Any]):
    """The samples of `rows`, in blocks of consecutive ones; see `BlockSource`."""

    def __init__(self, rows: Any) -> None:
        self.rows = rows

    def block_sizes(self) -> list[int]:
        """Return the sizes of ranges of rows."""
        return range_sizes(len(self.rows), BLOCK_SAMPLES)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        return self.rows[index]

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        samples: list[Any] = self.rows.__getitems__(list(indices))
        return samples

    def will_need(self, blocks: Sequence[int]) -> None:
        """Do nothing: the kernel reads a memory-mapped file ahead."""


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
