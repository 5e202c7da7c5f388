"""tandem: multi-node PyTorch training that survives failures."""

# Not typing's: under `python -m tandem`, an import here would still search the current directory.
TYPE_CHECKING = False

if TYPE_CHECKING:
    from typing import Any

    from tandem.custom_loop.run import Run as Run
    from tandem.custom_loop.run import start as start
    from tandem.data.datasets import Datasets as Datasets
    from tandem.errors import TandemError as TandemError
    from tandem.launch.from_python import launch as launch
    from tandem.tasks.base import Task as Task

__version__ = "0.1.0"  # the only place; the build reads it

_PUBLIC = {
    "Datasets": "tandem.data.datasets",
    "Run": "tandem.custom_loop.run",
    "Task": "tandem.tasks.base",
    "TandemError": "tandem.errors",
    "start": "tandem.custom_loop.run",
}
__all__ = ["Datasets", "Run", "TandemError", "Task", "launch", "start"]


def __getattr__(name: str) -> "Any":
    """Import a public name on first access, because most verbs need no torch."""
    from importlib import import_module

    if name in ("data", "launch"):  # packages: `tandem.data.tokens`; `tandem.launch` itself can be called
        return import_module(f"tandem.{name}")
    if name not in _PUBLIC:
        raise AttributeError(f"module 'tandem' has no attribute {name!r}")
    return getattr(import_module(_PUBLIC[name]), name)
