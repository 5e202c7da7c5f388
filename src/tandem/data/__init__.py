"""Data loading: from a global step to a batch on the device."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tandem.data.tar_shards import tar_blocks as tar_blocks
    from tandem.data.token_files import tokens as tokens

_MODULES = {"tar_blocks": "tar_shards", "tokens": "token_files"}


def __getattr__(name: str) -> Any:
    """Import `tar_blocks` and `tokens` on first access, because they need torch."""
    if name not in _MODULES:
        raise AttributeError(f"module 'tandem.data' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"tandem.data.{_MODULES[name]}"), name)
