"""Data loading: from a global step to a batch on the device."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tandem.data.token_files import tokens as tokens


def __getattr__(name: str) -> Any:
    """Import `tokens` on first access, because it needs torch."""
    if name != "tokens":
        raise AttributeError(f"module 'tandem.data' has no attribute {name!r}")
    from tandem.data.token_files import tokens

    return tokens
