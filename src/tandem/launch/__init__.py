"""Supervise this node's ranks. Calling the package, `tandem.launch(function)`, runs a job."""

import sys
from types import ModuleType
from typing import Any, cast


class _Callable(ModuleType):
    """Module type that makes the package itself callable.

    Importing any module of the package binds `tandem.launch` to the package, which would replace a function
    of that name.
    """

    def __call__(self, function: Any, /, *arguments: Any, **settings: Any) -> Any:
        from tandem.launch.from_python import launch

        return cast(Any, launch)(function, *arguments, **settings)


sys.modules[__name__].__class__ = _Callable
