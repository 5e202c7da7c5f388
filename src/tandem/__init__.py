"""tandem: multi-node PyTorch training that survives, and tells you what it is doing."""

TYPE_CHECKING = False  # not typing's: `python -m tandem` still looks in the current folder here

if TYPE_CHECKING:
    from typing import Any

    from tandem.errors import TandemError as TandemError
    from tandem.own_loop.run import Run as Run
    from tandem.own_loop.run import start as start

__version__ = "0.1.0"

_PUBLIC = {"start": "tandem.own_loop.run", "Run": "tandem.own_loop.run", "TandemError": "tandem.errors"}
__all__ = ["Run", "TandemError", "start"]


def __getattr__(name: str) -> "Any":
    """The public names, imported when they are asked for: most verbs need no torch."""
    if name not in _PUBLIC:
        raise AttributeError(f"module 'tandem' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_PUBLIC[name]), name)
