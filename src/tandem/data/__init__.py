"""Data loading: from a global step to a batch on the device."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tandem.data.arrow_rows import arrow as arrow
    from tandem.data.mixture import mix as mix
    from tandem.data.parquet_files import parquet as parquet
    from tandem.data.tar_shards import tar_blocks as tar_blocks
    from tandem.data.token_files import tokens as tokens

_PUBLIC = {
    "arrow": "tandem.data.arrow_rows",
    "mix": "tandem.data.mixture",
    "parquet": "tandem.data.parquet_files",
    "tar_blocks": "tandem.data.tar_shards",
    "tokens": "tandem.data.token_files",
}


def __getattr__(name: str) -> Any:
    """Import a public name on first access, because all of them need torch."""
    from importlib import import_module

    if name not in _PUBLIC:
        raise AttributeError(f"module 'tandem.data' has no attribute {name!r}")
    return getattr(import_module(_PUBLIC[name]), name)
